"""Pinned slots of the host: the assembler writes batches into them, and a GPU reads them there."""

from __future__ import annotations

import contextlib
import time
from queue import Empty, SimpleQueue
from typing import Any

from numpy.typing import NDArray

from feeder.devices.cuda.driver import Driver, HostMemory
from feeder.devices.cuda.packed import Packed, check_dtypes, pack
from feeder.devices.cuda.rules import PINNED, Life
from feeder.devices.layout import ALIGNMENT, LaidOut, Layout, credit_for, layout
from feeder.errors import DeviceError, FeedError
from feeder.workers.stats import Stopwatch
from feeder.workers.stream.buffers import OpenSlot
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.position import HasColumns

Arrays = tuple[NDArray[Any], ...]

_FEWEST = 3
"""Slots at least: one is written, one may have to be repeated, one is copied from."""


def alloc_pinned(driver: Driver, num_slots: int, slot_bytes: int, cure: str) -> HostMemory:
    """Pinned memory for slots; raises `DeviceError` that says what to lower."""
    try:
        return driver.alloc_pinned(num_slots * slot_bytes)
    except Exception as error:
        raise DeviceError(
            f"{driver.name}: {num_slots * slot_bytes} bytes of pinned host memory for {num_slots} "
            f"slots of {slot_bytes} bytes were refused: {error}; lower {cure}, or let the process "
            "lock more memory (ulimit -l)"
        ) from error


class PinnedSlot(LaidOut):
    """Memory for one batch: the enqueuer's while it writes, then the copier's until the copy is
    done (`PINNED` is the table of its states)."""

    __slots__ = ("address", "life", "ring")

    def __init__(self, ring: PinnedRing, memory: memoryview, address: int) -> None:
        super().__init__(memory)
        self.ring = ring
        self.address = address
        self.life = Life(PINNED)

    def put_back(self) -> None:
        """It will not be leased."""
        self.life.on("put_back")
        self._free_again()

    def lease(self, rows: int) -> Packed:
        """The first `rows` rows of each column, as they are to be copied."""
        self.life.on("pack")
        return pack(
            self.views(rows), region=self.ring, address=self.address, layout=self.layout,
            rows=self.rows, length=rows, give_back=self._give_back,
        )  # fmt: skip

    def _give_back(self) -> None:
        self.life.on("copied")
        self._free_again()

    def _free_again(self) -> None:
        # A slot of a ring that was replaced goes with its ring.
        if not self.ring.dropped:
            self.ring.free.put(self)


class PinnedRing:
    """Pinned slots of one size, one behind another, in the order in which they were freed.

    Owned by the thread that merges, except for `free`, a queue without a lock that any thread
    puts into.
    """

    def __init__(
        self,
        memory: HostMemory,
        slot_bytes: int,
        free: SimpleQueue[PinnedSlot | FeedError] | None = None,
    ) -> None:
        self.slot_bytes = slot_bytes
        self.free = SimpleQueue() if free is None else free
        """The free ones, and why none will come any more."""
        self.dropped = False
        """Whether no slot of it will be taken any more."""
        view = memory.view
        for start in range(0, memory.num_bytes, slot_bytes):
            part = view[start : start + slot_bytes]
            self.free.put(PinnedSlot(self, part, memory.address + start))

    def drop(self) -> None:
        """Let go of the free slots, which refer to this."""
        self.dropped = True
        empty(self.free)


def empty(queue: SimpleQueue[Any]) -> None:
    """Take out all that is in a queue now."""
    with contextlib.suppress(Empty):
        while True:
            queue.get_nowait()


class PinnedSlots:
    """The pinned slots of one device's batches.

    Owned by the thread that merges, which alone takes and waits; slots come back from the copier's
    thread through a `SimpleQueue`, and `fail` may be called by any thread. The first batch fixes
    the number of slots; a larger batch (`dont_rebatch`) makes as many larger ones.
    """

    def __init__(self, driver: Driver, depth: int) -> None:
        self._driver = driver
        self._depth = depth
        self._ring: PinnedRing | None = None
        self._checked: Columns | None = None
        self._known: tuple[Columns | None, int, Layout] = (None, 0, Layout((), 0))
        self._over: FeedError | None = None
        # The slot that was waited for, until `take_slot` is asked for it again.
        self._found: PinnedSlot | FeedError | None = None
        self.blocked = Stopwatch()
        """The enqueuer's waits for a slot."""

    def take_slot(self, columns: Columns, rows: int) -> PinnedSlot | None:
        """A slot for a batch of `rows` rows; None where all are taken. Raises what ended the
        device."""
        # Columns are one object for the whole stream, so that this is asked once.
        if self._checked is not columns:
            check_dtypes(self._driver.name, columns)
            self._checked = columns
        if self._known[0] is not columns or self._known[1] != rows:
            self._known = (columns, rows, layout(columns, rows))
        places, ring = self._known[2], self._ring
        # Slots of a smaller ring that are still out come back to that ring, and go with it.
        if ring is None or ring.slot_bytes < places.num_bytes:
            ring = self._make(places.num_bytes)
        slot = self._find(ring)
        if slot is not None:
            slot.life.on("take")
            slot.arrange(columns, rows, places)
        return slot

    def _find(self, ring: PinnedRing) -> PinnedSlot | None:
        if self._over is not None:
            raise self._over
        # What was waited for comes first: slots are taken in the order in which they were freed,
        # and neighbours share a copy.
        slot, self._found = self._found, None
        if slot is None:
            try:
                slot = ring.free.get_nowait()
            except Empty:
                return None
        if isinstance(slot, FeedError):
            raise slot
        return slot

    def wait_for_slot(self) -> None:
        """Wait until `take_slot` finds a slot, or why there is none."""
        assert self._ring is not None
        self.blocked.start(time.monotonic())
        # Not put back: it would be behind those that came meanwhile.
        self._found = self._ring.free.get()
        self.blocked.stop(time.monotonic())

    def take_back(self, batch: HasColumns) -> None:
        """A batch is thrown away: there will be no copy of it to wait for."""
        assert isinstance(batch.columns, Packed)
        batch.columns.give_back()

    def put_back(self, slot: OpenSlot) -> None:
        """A slot that was taken is not used."""
        assert isinstance(slot, PinnedSlot)
        slot.put_back()

    def _make(self, num_bytes: int) -> PinnedRing:
        slot_bytes, ring = num_bytes, self._ring
        self._found = None
        if ring is not None:
            slot_bytes = max(num_bytes, 2 * ring.slot_bytes)
            ring.drop()
        slot_bytes += -slot_bytes % ALIGNMENT
        num = max(_FEWEST, self._depth or credit_for(num_bytes))
        memory = alloc_pinned(self._driver, num, slot_bytes, "depth= or batch_size")
        self._ring = PinnedRing(memory, slot_bytes)
        return self._ring

    def fail(self, why: FeedError) -> None:
        """Who takes a slot from now on, or waits for one, is given an error: the first one."""
        self._over = self._over or why
        ring = self._ring
        if ring is not None:
            # Wakes the enqueuer, if it waits; else `take_slot` finds the reason before it looks
            # here.
            ring.free.put(self._over)

    def forget(self) -> None:
        """Let go of all memory that nobody looks at; when the enqueuer has ended."""
        ring, self._ring, self._found = self._ring, None, None
        if ring is not None:
            ring.drop()
        if self._over is not None:
            # It was raised where the batches at hand were.
            self._over.__traceback__ = None
