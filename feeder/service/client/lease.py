"""How the batches of one lease reach their consumer: through shared memory, or in frames.

Numbers come in messages, memory beside them. A batch's arrays are the memory itself wherever that
is possible, so what the user lets go of has to come back to the server: the end of the last array
of a batch puts its slot on a deque, in C, from whichever thread drops it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from weakref import ref

from numpy.typing import NDArray

from feeder.devices.cuda.landing import Landing
from feeder.devices.cuda.pinned import PinnedSlot
from feeder.devices.layout import Layout, credit_for, layout
from feeder.devices.slots import HostSlot
from feeder.errors import ConfigError, ProtocolError, TransportError
from feeder.service.client.machine import ConsumerOptions
from feeder.service.client.remote import Identity, RemotePosition, columns_of
from feeder.service.memory import forking
from feeder.service.memory.fdpass import Attachment, attach
from feeder.service.memory.mapping import FrameSlots, MappedArena, view
from feeder.service.memory.memfd import SLOTS_PER_ARENA
from feeder.service.protocol import messages as say
from feeder.service.protocol.batches import checksum, full_checksum
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.loans import Loan
from feeder.workers.stream.memory import keep_freed_memory

logger = logging.getLogger("feeder")

_ATTACH_S = 2.0
"""How long the server may take to accept the connection for descriptors, or to send one over it.
It answers from its I/O thread, which never waits, so longer means that it hangs."""
_LARGE_BYTES = 64 * 1024
"""Batches in frames below this are copied, so that they lie at multiples of 64 bytes; larger ones
are read where ZeroMQ received them, since the copy would take as long as the receiving."""

Arrays = tuple[NDArray[Any], ...]


class ConsumerStats:
    """A consumer's own counts. The I/O thread owns `checked_s` and `corrupt`, and calls
    `take_report`; whichever thread asks for a position writes the others, where a lost increment is
    harmless."""

    def __init__(self) -> None:
        self.checked_s = 0.0
        """Seconds spent on checksums."""
        self.corrupt = 0
        """Batches whose bytes did not match their checksum."""
        self.positions = 0
        """How often the position was asked for."""
        self.position_asked_at: float | None = None
        """When it was last asked for (monotonic clock); None before the first time."""
        self._told = (0.0, 0.0, 0, 0)

    def note_position_asked(self, now: float) -> None:
        """Count that the user asks for the position."""
        self.positions += 1
        self.position_asked_at = now

    def take_report(self, waited_s: float) -> say.Report:
        """Return the increments since the last report; `waited_s` is the trainer's whole wait."""
        # Increments and not totals: a server that has just taken the queue over must not count
        # what its predecessor was told already.
        seen = (waited_s, self.checked_s, self.corrupt, self.positions)
        told, self._told = self._told, seen
        # Never negative: the server adds these up into counters, and a counter must not fall.
        waited, checked = (
            max(0.0, now - then) for now, then in zip(seen[:2], told[:2], strict=True)
        )
        return say.Report(waited, checked, seen[2] - told[2], seen[3] - told[3])


class ClientLease:
    """The batches of one lease: a server's promise to send one queue's batches to this consumer.

    Owned by the I/O thread. Arrays are let go of in any thread, perhaps inside the garbage
    collector: a C callback appends to `_released`, a deque, and only the I/O thread takes from it.
    `freeze` and `thaw` are called by threads that fork. The user's thread reads public fields,
    which do not change once batches have come, and `num_released`.
    """

    def __init__(
        self,
        opened: say.Opened,
        identity: Identity,
        base: int,
        options: ConsumerOptions,
        wake: Callable[[], None],
        stats: ConsumerStats,
        landing: Landing | None = None,
    ) -> None:
        self.opened = opened
        self.identity = identity
        self.base = base
        """How many batches the consumer had received before this lease."""
        self.starts: dict[int, RemotePosition] = {}
        """Where this lease and those before it began, as their servers said it, by how many batches
        had been received before. Of places that the user has passed there are none."""
        self.columns: Columns | None = None
        """The columns, once the server has declared them or if the resumed position has them."""
        self.tell_every = 1
        """After how many batches, at the latest, the server is told that they were used."""
        self._expected = 0
        self._names: tuple[str, ...] = ()
        self._axes: tuple[int, ...] = ()
        self._rows = self._row_bytes = 0
        self._layout = Layout((), 0)
        self._wake = wake
        self._stats = stats
        self._landing = landing
        # What the user writes into is a copy. To map the slot privately instead, so that a write
        # copies a page, takes five to ten times as long if all is written, and never less.
        self._copies = landing is None and (options.writable or opened.writable)
        self._frames = FrameSlots(1)
        self._arenas: dict[int, MappedArena] = {}
        self._released: deque[Loan] = deque()
        self._num_taken = 0
        # A reason for each forked child that has not yet copied what it looks at. While there is
        # one, no slot is reported free: the server would write it under the child.
        self._freezes: set[object] = set()
        self.attachment: Attachment | None = None
        """The unix connection that descriptors come over; None if batches come in frames."""
        self.reason = ""
        """Why batches come in frames; empty if they do not."""
        if options.plane == "frames":
            self.reason = options.why_frames
        elif opened.shared is None:
            self.reason = "the server is on another host, or offers none"
        else:
            self._attach(opened.shared)
        if self.lends:
            forking.register_lent(self)
        # Shared memory is not changed on a way, so a sample finds the mistakes there are (a slot
        # written too early); frames cross a network, whose own checksums have 16 bits.
        auto = "full" if self.attachment is None else "sampled"
        self._mode: Any = auto if options.checksum == "auto" else options.checksum
        # A server that offers none never will; one that could not be reached may be back soon.
        if options.plane == "shared" and self.attachment is None:
            kind = ConfigError if opened.shared is None else TransportError
            raise kind(f"there is no shared memory to this server: {self.reason}")

    def _attach(self, offer: say.Offer) -> None:
        try:
            self.attachment = attach(offer.path, offer.nonce, _ATTACH_S)
        except (OSError, TransportError) as error:
            self.reason = str(error)[:500]  # The protocol bounds the text.
            logger.info("consumer: no shared memory, because %s", self.reason)

    @property
    def kind(self) -> Literal["shared", "frames"]:
        """How batches come: the public word for the data path."""
        return "frames" if self.attachment is None else "shared"

    @property
    def lends(self) -> bool:
        """Whether the user's arrays lie in the server's slots, which then are held for as long."""
        return self.attachment is not None and self._landing is None and not self._copies

    def set_spec(self, spec: say.Spec) -> None:
        """Take the columns that the server has declared; they come before the first batch."""
        self.columns = columns = columns_of(spec)
        self._names = tuple(column.name for column in columns)
        self._axes = tuple(column.axis for column in columns)
        self._row_bytes = sum([column.row_bytes for column in columns])
        self._rows, self._layout = spec.batch_size, layout(columns, spec.batch_size)
        # The server computes the same credit from the same columns, so it need not be sent.
        credit = self.opened.credit or credit_for(self._layout.num_bytes)
        # A quarter of it: each message wakes both processes, which costs some 50 µs, more than an
        # 8 KB batch; and with three quarters still under way the server never runs dry.
        self.tell_every = max(1, credit // 4)
        # As many free slots are kept as batches may wait: with fewer, memory is made anew again.
        self._frames = FrameSlots(credit, writable=self._copies)
        if self.kind == "frames" and self._layout.num_bytes >= _LARGE_BYTES:
            keep_freed_memory()
        if self._landing is not None:
            self._landing.check(columns)

    def add_arena(self, arena: say.Arena) -> None:
        """Map the arena that the server has announced; its descriptor is at `attachment`."""
        if self.attachment is None:
            raise ProtocolError("an arena came, but no shared memory was agreed on")
        # The server sends the descriptor first and the message after it, so this waits for nothing
        # but a server that hangs.
        given = self.attachment.receive()
        if given.number != arena.number:
            raise ProtocolError(f"arena {given.number} came, expected {arena.number}")
        self._arenas[given.number] = mapped = MappedArena(
            given.descriptor, given.number, given.slot_bytes, given.num_slots, self._released,
            self._on_release, is_private=self.lends,
        )  # fmt: skip
        if self._landing is not None:
            mapped.pin(self._landing.register)

    def take_batches(self, message: say.Batches, frames: Sequence[Any]) -> list[Batch]:
        """Return the batches of a message.

        Raises `ProtocolError` if they are not the next ones, or their bytes are not those that
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
            self._expected += len(group.slots)
        return batches

    def _take(self, group: say.Group, frames: Sequence[Any]) -> Iterator[Batch]:
        names, identity, stride = self._names, self.identity, group.stride
        index, step = group.index, group.step
        # A group names its first batch; the others follow at the stride, the number of queues.
        for at, arrays in enumerate(self._arrays(group, frames)):
            # What the user may write to holds other rows when the position is asked for.
            axes = None if arrays[0].flags.writeable else self._axes
            position: Any = RemotePosition(identity, None, group, at, axes)
            batch = Batch(names, arrays, position, group.epoch, index, step, group.rows)
            position.batch = ref(batch)
            # With shapes of their own they have other bytes per row than the columns say.
            batch.held_bytes = (
                batch.rows * self._row_bytes
                if group.shapes is None
                else sum([array.nbytes for array in arrays])
            )
            yield batch
            index += stride
            step += stride

    def _arrays(self, group: say.Group, frames: Sequence[Any]) -> Iterator[Arrays]:
        """Yield the arrays of each batch of a group."""
        assert self.columns is not None
        columns, rows, whole = self.columns, self._rows, self._layout
        # Slots are laid out for full batches; a batch copied in as it was has shapes of its own.
        if group.shapes is not None:
            columns, rows = _shaped(columns, group), group.length
            whole = layout(columns, rows)
        # A negative slot: the bytes came in frames of this message, which holds one batch then.
        if group.slots[0] < 0:
            yield self._take_frames(group, frames, columns, rows, whole)
            return
        length = group.length
        for at, slot in enumerate(group.slots):
            number, index = divmod(slot, SLOTS_PER_ARENA)
            arena = self._arenas.get(number)
            if arena is None:
                raise ProtocolError(f"slot {slot} is in an arena that was not announced")
            root = arena.root(index, whole.num_bytes)
            # Before the arrays are made: a batch that is refused must hold no slot.
            self._check([root.data], group, at)
            arrays = arena.lend(index, root, whole.places, rows, length)
            if self._copies:
                # The slot goes back at once, as `arrays` dies here.
                own = self._frames.take_slot(0, columns, rows)
                own.memory[:] = root.data
                yield own.lease(length)
            elif self._landing is None:
                yield arrays
            elif arena.pinned is not None:
                yield arena.pack(index, arrays, whole, rows, length)
            else:
                # The driver refused to register the arena, so the GPU may not read it: the batch
                # goes through a pinned slot, and the server's slot goes back at once.
                bounce = self._landing.take_slot(columns, rows)
                bounce.memory[:] = root.data
                yield bounce.lease(length)

    def _take_frames(
        self, group: say.Group, frames: Sequence[Any], columns: Columns, rows: int, whole: Layout
    ) -> Arrays:
        memories = [frame.buffer for frame in frames]
        num_bytes = sum(map(len, memories))
        if num_bytes != whole.num_bytes:
            raise ProtocolError(f"frames hold {num_bytes} bytes, expected {whole.num_bytes}")
        # A sampled sum looks at places of the whole batch, which lies in one piece once copied.
        is_in_parts = len(memories) > 1 and self._mode == "sampled"
        may_view = self._landing is None and not self._copies
        if may_view and num_bytes >= _LARGE_BYTES and not is_in_parts:
            # None if a column is cut in two by the end of a frame.
            arrays = view(memories, whole, rows, group.length)
            if arrays is not None:
                self._check(memories, group, 0)
                return arrays
        slot: HostSlot | PinnedSlot
        if self._landing is None:
            slot = self._frames.take_slot(0, columns, rows)
        else:
            slot = self._landing.take_slot(columns, rows)
        at, memory = 0, slot.memory
        for data in memories:
            # Not copied by NumPy, and not summed frame by frame, though the caches hold each frame
            # now: both release the interpreter, and beside a trainer that computes in Python each
            # release costs a wait as long as ten frames (22 batches of 20 MB a second, not 107).
            memory[at : at + len(data)] = data
            at += len(data)
        self._check([memory], group, 0)
        return slot.lease(group.length)

    def _check(self, memories: Sequence[memoryview], group: say.Group, at: int) -> None:
        if self._mode == "off":
            return
        began = time.monotonic()
        is_whole = len(memories) == 1  # Several parts are summed in full: see `is_in_parts`.
        found = checksum(memories[0], self._mode) if is_whole else full_checksum(memories)
        self._stats.checked_s += time.monotonic() - began
        if found != group.checksums[at]:
            # The lease ends with this, and the batch comes again under the next one.
            self._stats.corrupt += 1
            raise ProtocolError(
                f"batch {group.step + at * group.stride} is corrupt: its "
                f"{sum(map(len, memories))} bytes do not give the checksum that was sent "
                f"({self._mode}): they were changed on the way, or by the fetch function after it "
                "had returned them (FEEDER_DEBUG=1 tells)"
            )

    @property
    def num_released(self) -> int:
        """Slots that the user has let go of since the lease began, reported or not."""
        return self._num_taken + len(self._released)

    def _on_release(self) -> None:
        # In any thread, perhaps inside the garbage collector: no lock may be taken here. The I/O
        # thread is woken for several slots at once, as each message wakes the server too.
        if len(self._released) >= self.tell_every:
            self._wake()

    def take_released(self) -> tuple[int, ...]:
        """Take the slots that became free, at most as many as a message holds."""
        released = self._released
        # Counted first: a fork freezes, and then the child may look at what is released from there
        # on. Counted after, a slot could slip in between the look at `_freezes` and the count.
        num = min(len(released), say.MAX_ITEMS)
        if self._freezes:
            return ()
        self._num_taken += num
        slots = tuple([released.popleft().what for _ in range(num)])
        numbers = {slot // SLOTS_PER_ARENA for slot in slots}
        for number in numbers & self._arenas.keys():
            # Nearly always there is one.
            is_only, arena = len(numbers) == 1, self._arenas[number]
            arena.take_back(
                slots if is_only else [n for n in slots if n // SLOTS_PER_ARENA == number]
            )
        return slots

    def freeze(self, why: object) -> None:
        """Report no slot as free until `thaw` is called for the same reason. From any thread."""
        self._freezes.add(why)

    def thaw(self, why: object) -> None:
        """End a freeze, and report what has been released meanwhile. From any thread."""
        self._freezes.discard(why)
        self._wake()

    def copy_for_child(self) -> None:
        """In a forked child: replace the slots it looks at by copies of its own."""
        for arena in self._arenas.values():
            arena.copy_for_child()

    def close(self) -> None:
        """End the data path; arrays that exist stay valid.

        The server never writes again into what it gave to a lease that is over.
        """
        forking.unregister_lent(self)
        if self.attachment is not None:
            self.attachment.close()
        if self._landing is not None:
            # The user has copies on the GPU; only copies under way still refer to the mappings,
            # and hold them. Pinned memory is scarce, so it goes as soon as those are done.
            self._arenas.clear()


def _shaped(columns: Columns, group: say.Group) -> Columns:
    """Return the columns with the shapes that a group has of its own."""
    assert group.shapes is not None
    if len(group.shapes) != len(columns):
        raise ProtocolError(f"{len(group.shapes)} shapes came for {len(columns)} columns")
    return tuple(
        column._replace(shape=tuple(shape))
        for column, shape in zip(columns, group.shapes, strict=True)
    )
