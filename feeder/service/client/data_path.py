"""How the memory of batches reaches a consumer: through shared memory, or in frames."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from numpy.typing import NDArray

from feeder.devices.cuda.landing import Landing
from feeder.devices.cuda.pinned import PinnedSlot
from feeder.devices.layout import Layout, layout
from feeder.devices.slots import HostSlot
from feeder.errors import ConfigError, ProtocolError, TransportError
from feeder.service.client.options import ConsumerOptions
from feeder.service.client.stats import ConsumerStats
from feeder.service.memory import forking
from feeder.service.memory.fdpass import Attachment, attach
from feeder.service.memory.mapping import FrameSlots, Lease, MappedArena, keep_freed_memory, view
from feeder.service.memory.memfd import SLOTS_PER_ARENA
from feeder.service.protocol import messages as say
from feeder.service.protocol.checksums import checksum, full_checksum
from feeder.workers.stream.chunks import Columns

logger = logging.getLogger("feeder")

_ATTACH_S = 2.0
_LARGE_BYTES = 64 * 1024
"""Smaller batches in frames are copied: they are to lie at multiples of 64 bytes."""

Arrays = tuple[NDArray[Any], ...]


class DataPath:
    """The data plane of one lease."""

    def __init__(
        self,
        opened: say.Opened,
        wish: ConsumerOptions,
        wake: Callable[[], None],
        tally: ConsumerStats,
        landing: Landing | None = None,
    ) -> None:
        self._wake = wake
        self._tally = tally
        self._landing = landing
        # What the user writes into is a copy. To map the slot privately instead, so that a write
        # copies a page, takes five to ten times as long where all is written, and never less.
        self._copies = landing is None and (wish.writable or opened.writable)
        self._arenas: dict[int, MappedArena] = {}
        self._released: deque[Lease] = deque()
        self._num_taken = 0
        # For each forked child that has not copied yet what it looks at.
        self._freezes: set[object] = set()
        self.tell_every = 1
        """After how many slots the server is told that they are free, at the latest."""
        self._frames = FrameSlots(1)
        self._columns: Columns = ()
        self._rows = 0
        self._layout = Layout((), 0)
        self.connection: Attachment | None = None
        """The unix connection that descriptors come over; None where frames come."""
        self.reason = ""
        """Why frames come."""
        if wish.plane == "frames":
            self.reason = wish.why_frames
        elif opened.shared is None:
            self.reason = "the server is on another host, or offers none"
        else:
            self._attach(opened.shared)
        if self.lends:
            forking.lend(self)
        auto = "full" if self.connection is None else "sampled"
        self._mode: Any = auto if wish.checksum == "auto" else wish.checksum
        if wish.plane == "shared" and self.connection is None:
            kind = ConfigError if opened.shared is None else TransportError
            raise kind(f"there is no shared memory to this server: {self.reason}")

    def _attach(self, offer: say.Offer) -> None:
        try:
            self.connection = attach(offer.path, offer.nonce, _ATTACH_S)
        except (OSError, TransportError) as error:
            self.reason = str(error)[:500]
            logger.info("consumer: no shared memory, because %s", self.reason)

    @property
    def kind(self) -> Literal["shared", "frames"]:
        """How batches come."""
        return "frames" if self.connection is None else "shared"

    @property
    def lends(self) -> bool:
        """Whether batches are the server's slots themselves, for as long as they are looked at."""
        return self.connection is not None and self._landing is None and not self._copies

    def set_columns(self, columns: Columns, rows: int, credit: int) -> None:
        """The columns of the batches, the rows of a full one, and how many may be under way."""
        self._columns, self._rows, self._layout = columns, rows, layout(columns, rows)
        self._frames = FrameSlots(credit, writable=self._copies)
        if self.kind == "frames" and self._layout.num_bytes >= _LARGE_BYTES:
            keep_freed_memory()
        if self._landing is not None:
            self._landing.check(columns)

    def add_arena(self, arena: say.Arena) -> None:
        """Map an arena that the server has announced."""
        if self.connection is None:
            raise ProtocolError("an arena came, but no shared memory was agreed on")
        given = self.connection.receive()
        if given.number != arena.number:
            raise ProtocolError(f"arena {given.number} came, expected {arena.number}")
        self._arenas[given.number] = mapped = MappedArena(
            given.descriptor, given.number, given.slot_bytes, given.num_slots, self._released,
            self._on_release,
        )  # fmt: skip
        if self._landing is not None:
            mapped.pin(self._landing.register)

    def arrays(self, group: say.Group, frames: list[Any]) -> Iterator[Arrays]:
        """The arrays of each batch of a group; raises `ProtocolError` where its memory is not what
        was sent."""
        columns, rows, whole = self._columns, self._rows, self._layout
        if group.shapes is not None:
            columns, rows = _shaped(columns, group), group.length
            whole = layout(columns, rows)
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
            self._check([root.data], group, at)
            arrays = arena.lend(index, root, whole.places, rows, length)
            if self._copies:
                # The slot goes back at once.
                own = self._frames.take(0, columns, rows)
                own.memory[:] = root.data
                yield own.lease(length)
            elif self._landing is None:
                yield arrays
            elif arena.pinned is not None:
                yield arena.pack(index, arrays, whole, rows, length)
            else:
                # The GPU may not read it: by way of a slot that it may, and it goes back at once.
                bounce = self._landing.take(columns, rows)
                bounce.memory[:] = root.data
                yield bounce.lease(length)

    def _take_frames(
        self, group: say.Group, frames: list[Any], columns: Columns, rows: int, whole: Layout
    ) -> Arrays:
        memories = [frame.buffer for frame in frames]
        num_bytes = sum(map(len, memories))
        if num_bytes != whole.num_bytes:
            raise ProtocolError(f"frames hold {num_bytes} bytes, expected {whole.num_bytes}")
        is_in_parts = len(memories) > 1 and self._mode == "sampled"
        may_view = self._landing is None and not self._copies
        if may_view and num_bytes >= _LARGE_BYTES and not is_in_parts:
            arrays = view(memories, whole, rows, group.length)
            if arrays is not None:
                self._check(memories, group, 0)
                return arrays
        slot: HostSlot | PinnedSlot
        if self._landing is None:
            slot = self._frames.take(0, columns, rows)
        else:
            slot = self._landing.take(columns, rows)
        at, memory = 0, slot.memory
        for data in memories:
            # Not by NumPy, and not summed up one by one, though the caches hold it now: both let go
            # of the interpreter, and beside a busy trainer each time costs as much as ten frames.
            memory[at : at + len(data)] = data
            at += len(data)
        self._check([memory], group, 0)
        return slot.lease(group.length)

    def _check(self, memories: Sequence[memoryview], group: say.Group, at: int) -> None:
        if self._mode == "off":
            return
        began = time.monotonic()
        is_whole = len(memories) == 1
        found = checksum(memories[0], self._mode) if is_whole else full_checksum(memories)
        self._tally.checked_s += time.monotonic() - began
        if found != group.checksums[at]:
            self._tally.corrupt += 1
            raise ProtocolError(
                f"batch {group.step + at * group.stride} is corrupt: its "
                f"{sum(map(len, memories))} bytes do not give the checksum that was sent "
                f"({self._mode}): they were changed on the way, or by the fetch function after it "
                "had returned them (FEEDER_DEBUG=1 tells)"
            )

    @property
    def num_released(self) -> int:
        """Slots of shared memory that were looked at and are no more, counted since the start."""
        return self._num_taken + len(self._released)

    def _on_release(self) -> None:
        # In any thread, perhaps inside the garbage collector. One message tells of several.
        if len(self._released) >= self.tell_every:
            self._wake()

    def take_released(self) -> tuple[int, ...]:
        """The slots that have become free since last asked, at most as many as a message holds."""
        released = self._released
        num = min(len(released), say.MAX_ITEMS)
        if self._freezes:
            return ()  # Counted before: what comes back later, a child may look at.
        self._num_taken += num
        return tuple([self._take_back(released.popleft()) for _ in range(num)])

    def _take_back(self, lease: Lease) -> int:
        arena = self._arenas.get(lease.slot // SLOTS_PER_ARENA)
        if arena is not None:
            arena.take_back(lease)
        return lease.slot

    def freeze(self, why: object) -> None:
        """Tell of no slot that it is free, until it is told to thaw; from any thread."""
        self._freezes.add(why)

    def thaw(self, why: object) -> None:
        """The contrary."""
        self._freezes.discard(why)
        self._wake()

    def keep(self) -> None:
        """In a forked child: have what is looked at lie in this process's own memory."""
        for arena in self._arenas.values():
            arena.keep()

    def close(self) -> None:
        """No batch will come any more; arrays that exist stay as they are: the server does not
        write again what it gave to a lease that is over."""
        forking.forget(self)
        if self.connection is not None:
            self.connection.close()
        if self._landing is not None:
            # Nothing but copies under way looks at them: they need not stay pinned.
            self._arenas.clear()


def _shaped(columns: Columns, group: say.Group) -> Columns:
    assert group.shapes is not None
    if len(group.shapes) != len(columns):
        raise ProtocolError(f"{len(group.shapes)} shapes came for {len(columns)} columns")
    return tuple(
        replace(column, shape=tuple(shape))
        for column, shape in zip(columns, group.shapes, strict=True)
    )
