"""The slots of a served feed: for each queue a list of arenas, in memory that its consumer reads.

A slot is free again when its consumer says so, and for no other reason. The arenas of a consumer
that is gone are dropped whole and never used again, so that a late reader sees old bytes and not
torn ones.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable

from feeder.devices.layout import ALIGNMENT, MAX_ARENA_BYTES, Layout, layout
from feeder.errors import ClosedError, ProtocolError, TransportError
from feeder.service.memory.memfd import (
    NOTHING,
    SLOTS_PER_ARENA,
    Arena,
    ArenaSlot,
    Pages,
    Wanted,
)
from feeder.workers.stats import Stopwatch
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.chunks import Columns

# ---- The arenas of one queue of a served feed. Rules; `feeder.service.memory.arena` holds the
# lock.


_PLENTY_BYTES = 100_000
"""Free slots of so many bytes are worth a wake-up."""


class Pool:
    """The arenas of one queue, and which of their slots are free."""

    def __init__(self) -> None:
        self.slots: dict[int, list[ArenaSlot]] = {}
        self.free: dict[int, list[ArenaSlot]] = {}
        self.retired: set[int] = set()
        self.num_retirements = 0
        # Where there is one arena: its free slots, and how large they are. The enqueuer takes from
        # these without the lock, as taking off a list is one operation.
        self.only: list[ArenaSlot] = []
        self.only_bytes = 0

    def add(self, arena: Arena) -> None:
        slots = [ArenaSlot(arena, i) for i in range(arena.num_slots)]
        self.slots[arena.number] = slots
        self.free[arena.number] = free = slots[::-1]
        is_only = len(self.free) == 1
        self.only, self.only_bytes = (free, arena.slot_bytes) if is_only else ([], 0)

    def pop(self, num_bytes: int) -> ArenaSlot | None:
        """The slot that came back last, of the smallest arena that fits and has one."""
        for number, free in self.free.items():
            if free and self.slots[number][0].arena.slot_bytes >= num_bytes:
                return free.pop()
        return None

    def is_exhausted(self, num_bytes: int) -> bool:
        """Whether slots of so many bytes exist and none of them is free. Else no slot has to come
        back: one is free, or an arena is to be made."""
        fitting = [n for n, slots in self.slots.items() if slots[0].arena.slot_bytes >= num_bytes]
        return bool(fitting) and not any(self.free[number] for number in fitting)

    def find(self, numbers: Iterable[int]) -> list[ArenaSlot] | None:
        """The slots of these numbers that are not of retired arenas; None where there is one that
        the consumer has not been sent, or that comes twice."""
        wanted = [n for n in numbers if n // SLOTS_PER_ARENA not in self.retired]
        if len(set(wanted)) < len(wanted):
            return None
        try:
            slots = [self.slots[n // SLOTS_PER_ARENA][n % SLOTS_PER_ARENA] for n in wanted]
        except (KeyError, IndexError):
            return None
        return slots if all([slot.sent for slot in slots]) else None

    def push(self, slots: Iterable[ArenaSlot]) -> None:
        for slot in slots:
            slot.sent = False
            self.free[slot.arena.number].append(slot)

    def retire(self) -> None:
        self.retired.update(self.slots)
        self.only, self.only_bytes = [], 0
        self.slots.clear()
        self.free.clear()

    @property
    def num_leased(self) -> int:
        return sum(map(len, self.slots.values())) - sum(map(len, self.free.values()))

    @property
    def has_plenty(self) -> bool:
        """Whether so much is free that waking the enqueuer for it is worth it."""
        if not self.only_bytes:
            return True
        num_slots = len(next(iter(self.slots.values())))
        return len(self.only) >= min(_PLENTY_BYTES // self.only_bytes, num_slots // 4)

    @property
    def most_bytes(self) -> int:
        return max((slots[0].arena.slot_bytes for slots in self.slots.values()), default=0)


_RESERVE_BYTES = 24 * 1024 * 1024
"""How large batches are is not known before somebody comes. It takes 8 ms, which otherwise are
those of the first consumer, where batches are large."""

__all__ = ["SLOTS_PER_ARENA", "Arena", "ArenaSlot", "ArenaSlots", "slot_of"]


def slot_of(batch: Batch) -> ArenaSlot:
    """The slot that a served batch lies in."""
    slot = batch._slot
    assert isinstance(slot, ArenaSlot)
    return slot


class ArenaSlots:
    """The slots of all queues of one feed (`feeder.workers.stream.buffers.Slots`).

    `take_slot` and `wait_for_slot` are called by the batcher's thread; all else by any thread.
    `num_slots(device, slot_bytes)` says how many slots an arena has, when it is made; an arena has
    at most `max_arena_bytes`.
    """

    passes, writable, reserved = False, False, True

    def __init__(
        self,
        num_devices: int,
        num_slots: Callable[[int, int], int],
        *,
        max_arena_bytes: int = MAX_ARENA_BYTES,
    ) -> None:
        self._num_slots = num_slots
        self._max_arena_bytes = max_arena_bytes
        self._freed = threading.Condition(threading.Lock())
        # The device for whose slots the enqueuer waits.
        self._waiting: int | None = None
        self._pools = [Pool() for _ in range(num_devices)]
        # Memory for the first arena of each queue, and that which turned out to be too much.
        self._reserve: dict[int, Pages] = {}
        self._spare: list[Pages] = []
        self.on_spare: Callable[[], None] = lambda: None
        """Called by the I/O thread where it is time to `let_go`."""
        self._numbers = itertools.count()
        self._wanted = [NOTHING] * num_devices
        self._closed = False
        self._known: tuple[Columns | None, int, Layout] = (None, 0, Layout((), 0))
        self.num_made = 0
        """Slots made so far."""
        self.waited = Stopwatch()
        """The enqueuer's waits for a slot."""

    @property
    def num_leased(self) -> int:
        """Slots that are not free: being written, waiting to be sent, or with a consumer."""
        with self._freed:
            return sum(pool.num_leased for pool in self._pools)

    @property
    def num_bytes(self) -> int:
        """Shared memory in slots that may be written or read."""
        with self._freed:
            arenas = [slots for pool in self._pools for slots in pool.slots.values()]
            return sum(slots[0].arena.slot_bytes * len(slots) for slots in arenas)

    def num_slots(self, device: int) -> int:
        """Slots of a queue; 0 while it has no arena."""
        with self._freed:
            return sum(map(len, self._pools[device].slots.values()))

    # ---- memory that is ready before anybody comes; the feed's own thread's

    def reserve(self) -> None:
        """Have memory ready for the first arena of each queue. Done once, before anybody takes."""
        num_bytes = _RESERVE_BYTES // len(self._pools)
        # Who is short of memory is told so when it is needed.
        with contextlib.suppress(OSError):
            for device in range(len(self._pools)):
                pages = Pages(num_bytes)
                pages.write(num_bytes)
                self._reserve[device] = pages

    def let_go(self) -> None:
        """Give back to the system what was more than queues' arenas need: that takes 5 ms."""
        self._spare.clear()

    def forget(self) -> None:
        """Let go of all of it: nobody comes any more."""
        self.on_spare = lambda: None
        self._reserve.clear()
        self._spare.clear()

    # ---- the enqueuer's

    def take_slot(self, device: int, columns: Columns, rows: int) -> ArenaSlot | None:
        """A free slot for a batch of `rows` rows; None where the consumer has them all.

        Raises `ClosedError` after `close`, and `TransportError` where there is no memory.
        """
        if self._known[0] is not columns or self._known[1] != rows:
            self._known = (columns, rows, layout(columns, rows))
        places, pool = self._known[2], self._pools[device]
        try:
            free = pool.only if pool.only_bytes >= places.num_bytes and not self._closed else []
            slot = free.pop()
        except IndexError:
            found = self._find(device, places.num_bytes)
            if found is None:
                return None
            slot = found
        if columns is not slot.columns or rows != slot.rows:
            index = slot.number % SLOTS_PER_ARENA
            if not slot.arena.back(index, lambda: self._closed) or self._closed:
                # Else a consumer that connects now waits until a batch for nobody is copied.
                raise ClosedError("the feed is stopped")
            slot.arrange(columns, rows, places)
        wanted = self._wanted[device]
        if wanted is not NOTHING or slot.wanted is not NOTHING:
            slot.prepare(wanted)
        return slot

    def _find(self, device: int, num_bytes: int) -> ArenaSlot | None:
        """A free slot, of a new arena where those that are there are too small."""
        pool = self._pools[device]
        while True:
            with self._freed:
                if self._closed:
                    raise ClosedError("the feed is stopped")
                slot = pool.pop(num_bytes)
                if slot is not None or pool.most_bytes >= num_bytes:
                    return slot
                consumer = pool.num_retirements
            self._open(device, pool, num_bytes, consumer)

    def wait_for_slot(self, device: int) -> None:
        """Wait until there may be a slot of a queue for what `take_slot` was asked for last, or
        until `close`. Returns at once where a slot came back since then."""
        pool, num_bytes = self._pools[device], self._known[2].num_bytes
        with self._freed:
            if not self._closed and pool.is_exhausted(num_bytes):
                self.waited.start(time.monotonic())
                self._waiting = device
                self._freed.wait()
                self.waited.stop(time.monotonic())

    def _open(self, device: int, pool: Pool, num_bytes: int, consumer: int) -> None:
        """Make an arena, at least twice as large as those that were too small."""
        size = max(num_bytes, 2 * pool.most_bytes)
        if size * self._num_wanted(device, size) > self._max_arena_bytes:
            size = num_bytes
        size += -size % ALIGNMENT
        num = self._num_wanted(device, size)
        if size * num > self._max_arena_bytes:
            raise TransportError(
                f"a batch of {num_bytes} bytes needs shared memory of {size * num} bytes for "
                f"{num} slots, expected at most {self._max_arena_bytes}; make batches or credit "
                "smaller"
            )
        reserve = self._reserve.pop(device, None)
        if reserve is not None and reserve.num_backed > size * num:
            self._spare.append(reserve)
            reserve = None
        arena = Arena(size, num, next(self._numbers), reserve)
        with self._freed:
            if self._closed:
                raise ClosedError("the feed is stopped")
            if pool.num_retirements != consumer:
                return  # It is as large as another consumer wished it.
            pool.add(arena)
            self.num_made += num

    def _num_wanted(self, device: int, slot_bytes: int) -> int:
        num = self._num_slots(device, slot_bytes)
        return min(max(1, num), SLOTS_PER_ARENA)

    # ---- the I/O thread's

    def prepare(self, device: int, wanted: Wanted) -> None:
        """Have a queue's batches made as its consumer wants them."""
        self._wanted[device] = wanted

    def release(self, device: int, slot_numbers: Iterable[int]) -> None:
        """The consumer needs these no more; those of retired arenas are ignored. Who waits for a
        slot learns of it by `wake`.

        Raises `ProtocolError`, and frees none, where one is not with this queue's consumer.
        """
        with self._freed:
            pool = self._pools[device]
            slots = pool.find(slot_numbers)
            if slots is None:
                raise ProtocolError(
                    f"slots {[*slot_numbers][:8]!r} of queue {device} were released, but not all "
                    "of them are with its consumer; expected each slot once"
                )
            pool.push(slots)
        if self._spare:
            self.on_spare()  # Not before: a consumer would wait for its first batch.

    def wake(self, *, hungry: bool) -> None:
        """Wake who waits for a slot: for one slot where a consumer is `hungry`, else for several
        small ones. Apart from `release`, since whoever wakes wants the interpreter at once: it
        comes after all that a consumer waits for."""
        device = self._waiting
        if device is not None and (hungry or self._pools[device].has_plenty):
            with self._freed:
                self._wake()

    def _wake(self) -> None:
        self._waiting = None
        self._freed.notify_all()

    def free(self, device: int, slot: ArenaSlot) -> None:
        """The batch in this slot of a queue will not be sent."""
        with self._freed:
            pool = self._pools[device]
            if slot.arena.number in pool.slots:
                pool.push([slot])
                self._wake()

    def retire(self, device: int, keep: Callable[[Arena], bool] = lambda arena: False) -> None:
        """The consumer of a queue is gone, or has stopped: what it may still look at is never
        written again. Who waits for a slot of the queue goes on in a new arena. Arenas that `keep`
        wants stay, where the consumer has given back all that it was sent."""
        with self._freed:
            pool = self._pools[device]
            pool.num_retirements += 1
            slots = [slot for slots in pool.slots.values() for slot in slots]
            if any(slot.sent or not keep(slot.arena) for slot in slots):
                pool.retire()
            self._wake()

    def drop(self) -> None:
        """Nobody will take or be sent a slot any more."""
        for device in range(len(self._pools)):
            self.retire(device)
        self.forget()

    def close(self) -> None:
        """Who takes a slot gets `ClosedError`, who waits for one too. Arenas stay as they are:
        consumers may have batches in them."""
        with self._freed:
            self._closed = True
            self._wake()

    def reopen(self) -> None:
        """Slots may be taken again. To be called when nobody takes or writes any more: the slots
        that had been taken and not sent are free."""
        with self._freed:
            self._closed = False
            for pool in self._pools:
                for number, slots in pool.slots.items():
                    # The first ones are taken first: of them it is known that they are backed.
                    pool.free[number][:] = [slot for slot in reversed(slots) if not slot.sent]
