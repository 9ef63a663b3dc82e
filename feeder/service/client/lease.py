"""One lease as its consumer sees it: the batches that came, and what the server is told of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import ref

from feeder.devices.layout import credit_for, layout
from feeder.errors import ProtocolError
from feeder.service.client.data_path import DataPath
from feeder.service.client.remote import RemotePosition, columns_of, identity_of
from feeder.service.faults import point
from feeder.service.protocol import messages as say
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.chunks import Columns

_TELL_S = 0.5
"""The server is told at least so often: it shows each trainer's waits, and between two messages it
takes a consumer that has used all it was sent for one that waits."""


class ClientLease:
    """One lease: a server's promise to send one queue's batches to this consumer.

    Owned by the I/O thread. The user's thread reads `opened`, `data_path`, `base`, `lends`,
    `columns` and `credit`, which do not change once batches have come, and calls `count_bytes`.
    `base` is the number of batches that the consumer had received before this lease: sequence
    numbers of a lease begin at 0, so that batches of an older lease cannot pass for its own.
    """

    def __init__(
        self,
        opened: say.Opened,
        data_path: DataPath,
        base: int,
        send: Callable[[say.Message], None],
        report: Callable[[], say.Report],
    ) -> None:
        self.opened = opened
        self.identity = identity_of(opened)
        self.data_path = data_path
        self.lends = data_path.lends
        """Whether batches are the server's own slots, and not copies of them."""
        self.base = base
        self._send = send
        self._report = report
        self._expected = 0
        self._has_begun = False
        # Not 0: that nothing of earlier leases is pending is news, also before the first batch.
        self._last_told = -1
        self._names: tuple[str, ...] = ()
        self._axes: tuple[int, ...] = ()
        self._row_bytes = 0
        self._is_uniform = True
        self.columns: Columns | None = None
        """The columns, once the server has declared them or where the resumed position has them."""
        self.credit = max(1, opened.credit)
        """Batches that may be on their way."""
        self.renew_at = time.monotonic() + min(_TELL_S, opened.lease_s / 3)
        """When the server must be told again that this consumer is alive (monotonic clock)."""

    @property
    def tell_every(self) -> int:
        """After how many batches, at the latest, the server is told that they were used.

        A quarter of the credit: each message wakes both processes, which costs some 50 µs, more
        than an 8 KB batch; and with three quarters still under way the server never runs dry.
        """
        return max(1, self.credit // 4)

    def say_ready(self) -> None:
        """Tell the server that batches can come, and by which data path."""
        self._send(
            say.Attached(
                generation=self.opened.generation,
                plane=self.data_path.kind,
                reason=self.data_path.reason,
            )
        )

    # ---- what the server says

    def set_spec(self, spec: say.Spec) -> None:
        """Take the columns that the server has declared; they come before the first batch."""
        self.columns = columns_of(spec)
        self._names = tuple(column.name for column in self.columns)
        self._axes = tuple(column.axis for column in self.columns)
        self._row_bytes = sum([column.row_bytes for column in self.columns])
        batch_bytes = layout(self.columns, spec.batch_size).num_bytes
        # The server computes the same credit from the same columns, so it need not be sent.
        self.credit = self.opened.credit or credit_for(batch_bytes)
        self.data_path.set_columns(self.columns, spec.batch_size, self.credit)
        self.data_path.tell_every = self.tell_every

    def take_batches(self, message: say.Batches, frames: list[Any]) -> list[Batch]:
        """Return the batches of a message.

        Raises `ProtocolError` where they are not the next ones, or their bytes are not those that
        were sent.
        """
        if not self._names:
            raise ProtocolError("batches came before their columns")
        batches: list[Batch] = []
        for group in message.groups:
            # Order comes from numbers: one that is missing ends the lease, and nothing is guessed.
            if group.sequence != self._expected:
                raise ProtocolError(f"batch {group.sequence} came, expected {self._expected}")
            batches += self._take(group, frames)
            # Batches with shapes of their own have other bytes per row than the columns say.
            if group.shapes is not None:
                self._is_uniform = False
            self._expected += len(group.slots)
        return batches

    def count_bytes(self, batches: Sequence[Batch], rows: int) -> int:
        """Return the bytes of batches that have `rows` rows in all."""
        if self._is_uniform:
            return rows * self._row_bytes
        return sum([array.nbytes for batch in batches for array in batch.arrays])

    def _take(self, group: say.Group, frames: list[Any]) -> Iterator[Batch]:
        names, identity, stride = self._names, self.identity, group.stride
        index, step = group.index, group.step
        # A group names its first batch; the others follow at the stride, the number of queues.
        for at, arrays in enumerate(self.data_path.arrays(group, frames)):
            # What the user may write to holds other rows when the position is asked for.
            axes = None if arrays[0].flags.writeable else self._axes
            position: Any = RemotePosition(identity, None, group, at, axes)
            batch = Batch(names, arrays, position, group.epoch, index, step, group.rows)
            position.batch = ref(batch)
            yield batch
            index += stride
            step += stride

    # ---- what the server is told

    def tell_used(self, handed: int, *, begun: bool = False, renew: bool = False) -> None:
        """Tell the server how many batches were used and which slots are free, if that is news.

        `begun`: the user has asked for a batch; `renew`: tell it in any case, to keep the lease.
        Used and released go in one message, since each message wakes both processes.
        """
        # Negative while batches of earlier leases are with the user: they are `pending`, and until
        # they are used the server must not take this queue for one that has ended.
        used = handed - self.base
        renew = renew or begun > self._has_begun
        self._has_begun = self._has_begun or begun
        slots = self.data_path.take_released()
        # A message holds so many slots at most, so several may be needed.
        while slots or used > self._last_told or renew:
            renew, self._last_told = False, max(used, self._last_told)
            point("consumer.before_used")
            self._send(
                say.Used(
                    generation=self.opened.generation, sequence=max(0, used),
                    pending=max(0, -used), begun=self._has_begun, slots=slots,
                    report=self._report(),
                )
            )  # fmt: skip
            point("consumer.used")
            self.renew_at = time.monotonic() + min(_TELL_S, self.opened.lease_s / 3)
            slots = self.data_path.take_released()

    def ask_snapshot(self, handed: int, receipt: bytes) -> bool:
        """Ask for the state after `handed` batches; False where this lease cannot know it.

        `receipt` came with the last answer and proves that it was read.
        """
        # The batch at hand came under an earlier lease, whose rows this server may not have.
        if handed < self.base:
            return False
        # First what was used: the server knows the state behind batches that it was told of.
        self.tell_used(handed)
        self._send(
            say.Snapshot(
                generation=self.opened.generation, sequence=handed - self.base, receipt=receipt
            )
        )
        return True

    def say_bye(self, handed: int) -> None:
        """End the lease: the server may give the queue to another at once."""
        # The goodbye carries nothing, so what was used and released goes before it: the server's
        # checkpoint then has it, and arenas that were given back whole serve the next consumer.
        self.tell_used(handed)
        self._send(say.Bye(generation=self.opened.generation))
