"""One lease as its consumer sees it: what came, what was handed out, and what is told of that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from feeder.devices.layout import credit_for, layout
from feeder.errors import ProtocolError
from feeder.service.client.data_path import DataPath
from feeder.service.client.remote import RemotePosition, columns_of, identity_of
from feeder.service.faults import point
from feeder.service.protocol import messages as say
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.chunks import Columns

_TELL_S = 0.5
"""The server is told at least so often, so that it can show how a slow trainer does."""


class ClientLease:
    """The batches of one lease, from the server's messages. Belongs to the I/O thread.

    `base` is the number of batches that the consumer had received before this lease.
    """

    def __init__(
        self,
        opened: say.Opened,
        plane: DataPath,
        base: int,
        tell: Callable[[say.Message], None],
        report: Callable[[], say.Report],
    ) -> None:
        self.opened = opened
        self.identity = identity_of(opened)
        self.plane = plane
        self.lends = plane.lends
        """Whether the user is given the server's own slots to look at."""
        self.base = base
        self._tell = tell
        self._report = report
        self._expected = 0
        self._has_begun = False
        self._told = -1  # Where nothing is pending is news, also before the first batch.
        self._names: tuple[str, ...] = ()
        self._row_bytes = 0
        self._is_uniform = True
        self.columns: Columns | None = None
        """The columns, where the server has told them or the position has them."""
        self.credit = max(1, opened.credit)
        """Batches that may be under way."""
        self.renew_at = time.monotonic() + min(_TELL_S, opened.lease_s / 3)
        """When the server is to be told that this consumer lives."""

    @property
    def tell_every(self) -> int:
        """After how many batches the server is told of them, at the latest."""
        return max(1, self.credit // 4)

    def begin(self) -> None:
        """Say that batches can come."""
        self._tell(
            say.Attached(
                generation=self.opened.generation, plane=self.plane.kind, reason=self.plane.reason
            )
        )

    # ---- what the server says

    def learn(self, spec: say.Spec) -> None:
        """The columns have come."""
        self.columns = columns_of(spec)
        self._names = tuple(column.name for column in self.columns)
        self._row_bytes = sum([column.row_bytes for column in self.columns])
        batch_bytes = layout(self.columns, spec.batch_size).num_bytes
        self.credit = self.opened.credit or credit_for(batch_bytes)
        self.plane.set_columns(self.columns, spec.batch_size, self.credit)
        self.plane.tell_every = self.tell_every

    def read(self, message: say.Batches, frames: list[Any]) -> list[Batch]:
        """The batches of a message. Raises `ProtocolError` where they are not the next ones, or
        not what was sent."""
        if not self._names:
            raise ProtocolError("batches came before their columns")
        batches: list[Batch] = []
        for group in message.groups:
            if group.sequence != self._expected:
                raise ProtocolError(f"batch {group.sequence} came, expected {self._expected}")
            batches += self._take(group, frames)
            if group.shapes is not None:
                self._is_uniform = False
            self._expected += len(group.slots)
        return batches

    def count_bytes(self, batches: Sequence[Batch], rows: int) -> int:
        """Bytes of batches that have `rows` rows in all."""
        if self._is_uniform:
            return rows * self._row_bytes
        return sum([array.nbytes for batch in batches for array in batch.arrays])

    def _take(self, group: say.Group, frames: list[Any]) -> Iterator[Batch]:
        names, identity, stride = self._names, self.identity, group.stride
        index, step = group.index, group.step
        for at, arrays in enumerate(self.plane.arrays(group, frames)):
            place: Any = RemotePosition(identity, None, group, at)
            yield Batch(names, arrays, place, group.epoch, index, step, group.rows)
            index += stride
            step += stride

    # ---- what the server is told

    def tell(self, handed: int, *, begun: bool = False, renew: bool = False) -> None:
        """Tell how many batches have been handed out and which slots nobody looks at any more, and
        that the user has begun, where that is news or is to be renewed."""
        used = handed - self.base
        renew = renew or begun > self._has_begun
        self._has_begun = self._has_begun or begun
        slots = self.plane.take_released()
        while slots or used > self._told or renew:
            renew, self._told = False, max(used, self._told)
            point("consumer.before_used")
            self._tell(
                say.Used(
                    generation=self.opened.generation, sequence=max(0, used),
                    pending=max(0, -used), begun=self._has_begun, slots=slots,
                    report=self._report(),
                )
            )  # fmt: skip
            point("consumer.used")
            self.renew_at = time.monotonic() + min(_TELL_S, self.opened.lease_s / 3)
            slots = self.plane.take_released()

    def ask_snapshot(self, handed: int, receipt: bytes) -> bool:
        """Ask for the state after so many batches, with the receipt of the last answer; False
        where this lease cannot know it."""
        if handed < self.base:
            return False
        self.tell(handed)
        self._tell(
            say.Snapshot(
                generation=self.opened.generation, sequence=handed - self.base, receipt=receipt
            )
        )
        return True

    def leave(self, handed: int) -> None:
        """Say goodbye."""
        self.tell(handed)
        self._tell(say.Bye(generation=self.opened.generation))
