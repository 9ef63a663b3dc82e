"""The slots of a served feed: for each queue its arenas, in memory that the queue's consumer reads.

A slot is free again when its consumer says so, and for no other reason: the server does not count
references of its own. The replicas of a shared queue read one and the same slot, which is free when
all of them have said so. The arenas of a consumer that is gone are dropped whole and never written
again, so that a late reader sees old bytes and not torn ones.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from feeder.devices.layout import MAX_ARENA_BYTES, Layout, layout
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
from feeder.workers.stream.buffers import OpenSlot
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.position import HasColumns

_PLENTY_BYTES = 100_000
"""Free slots of so many bytes are worth waking the enqueuer for: to wake a thread takes some 50 µs,
in which it copies about as much."""


class Pool:
    """The arenas of one queue, and which of their slots are free.

    Owned by the lock of `ArenaSlots`, but for `only` and `only_bytes`, from which the enqueuer
    takes without it.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self.slots: dict[int, list[ArenaSlot]] = {}
        self.free: dict[int, list[ArenaSlot]] = {}
        self.retired: set[int] = set()
        self.num_retirements = 0
        # Whether more slots are needed than there are, since consumers keep those.
        self.is_short = False
        # Where there is one arena: its free slots, and how large they are. The enqueuer takes from
        # these without the lock, since taking off a list is one operation under the interpreter's.
        self.only: list[ArenaSlot] = []
        self.only_bytes = 0

    def add(self, arena: Arena) -> None:
        """Add an arena, all of whose slots are free."""
        slots = [ArenaSlot(arena, i, self._replicas) for i in range(arena.num_slots)]
        self.slots[arena.number] = slots
        # The first slot is taken first: it is the one that has memory already.
        self.free[arena.number] = free = slots[::-1]
        self.is_short = False
        is_only = len(self.free) == 1
        self.only, self.only_bytes = (free, arena.slot_bytes) if is_only else ([], 0)

    def pop(self, num_bytes: int) -> ArenaSlot | None:
        """Take a slot of the smallest arena that fits; None if there is none."""
        # The slot that came back last, since a cache may still hold it.
        for number, free in self.free.items():
            if free and self.slots[number][0].arena.slot_bytes >= num_bytes:
                return free.pop()
        return None

    def is_exhausted(self, num_bytes: int) -> bool:
        """Whether slots of so many bytes exist and none of them is free. Else no slot has to come
        back: one is free, or an arena is to be made."""
        if self.is_short:
            return False
        fitting = [n for n, slots in self.slots.items() if slots[0].arena.slot_bytes >= num_bytes]
        return bool(fitting) and not any(self.free[number] for number in fitting)

    def find(self, numbers: Iterable[int], replica: int) -> list[ArenaSlot] | None:
        """Return the slots of these numbers, without those of retired arenas.

        None where this replica was not sent one of them, or names one twice: freed twice, a slot
        would be written while somebody reads it.
        """
        wanted = [n for n in numbers if n // SLOTS_PER_ARENA not in self.retired]
        if len(set(wanted)) < len(wanted):
            return None
        try:
            slots = [self.slots[n // SLOTS_PER_ARENA][n % SLOTS_PER_ARENA] for n in wanted]
        except (KeyError, IndexError):
            return None
        bit = 1 << replica
        return slots if all([slot.sent & bit for slot in slots]) else None

    def let_go(self, slots: list[ArenaSlot], had: int = 0) -> None:
        """One replica wants these slots no more: those are free that no other one wants. `had` is
        the replica's bit in `sent`; 0 where it was not sent them."""
        if self._replicas > 1:
            for slot in slots:
                if had:
                    slot.sent &= ~had
                slot.left -= 1
            slots = [slot for slot in slots if not slot.left]
        self.push(slots)

    def push(self, slots: Iterable[ArenaSlot]) -> None:
        """Put slots back that nobody writes or reads any more."""
        for slot in slots:
            # Before it is on the list: the enqueuer may take it from `only` at once.
            slot.sent, slot.left = 0, self._replicas
            self.free[slot.arena.number].append(slot)

    def reopen(self) -> None:
        """Free the slots that no replica was sent. Of all others, only those that were sent one
        have to let go of it."""
        for number, slots in self.slots.items():
            for slot in slots:
                slot.left = slot.sent.bit_count() or self._replicas
            # The first ones are taken first: they have memory behind them already.
            self.free[number][:] = [slot for slot in reversed(slots) if not slot.sent]

    def retire(self) -> None:
        """Give all arenas up: none of their slots is taken again."""
        # Their numbers are remembered: what a consumer still gives back of them is no mistake.
        self.retired.update(self.slots)
        # A new list: the enqueuer may be about to take from the old one, and then finds the slot's
        # arena gone, which is harmless, as nobody is sent it.
        self.only, self.only_bytes = [], 0
        self.slots.clear()
        self.free.clear()
        self.is_short = False

    @property
    def num_leased(self) -> int:
        """Number of slots that are not free."""
        return sum(map(len, self.slots.values())) - sum(map(len, self.free.values()))

    @property
    def has_plenty(self) -> bool:
        """Whether so much is free that it is worth waking the enqueuer for."""
        if not self.only_bytes:
            return True
        # Of few slots a quarter is enough: the enqueuer must not wait until all are back.
        num_slots = len(next(iter(self.slots.values())))
        return len(self.only) >= min(_PLENTY_BYTES // self.only_bytes, num_slots // 4)

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest slots; 0 without an arena."""
        return max((slots[0].arena.slot_bytes for slots in self.slots.values()), default=0)


_RESERVE_BYTES = 24 * 1024 * 1024
"""Memory that a feed has ready before the first consumer comes, when nobody knows yet how large
batches are. To clear and map it takes 8 ms, which the first consumer of 20 MB batches would wait
for: its first batch came 10.7 ms after `connect`, and 18.0 ms without the reserve."""

__all__ = ["SLOTS_PER_ARENA", "Arena", "ArenaSlot", "ArenaSlots", "slot_of"]


def slot_of(batch: Batch) -> ArenaSlot:
    """The slot that a served batch lies in."""
    slot = batch._slot
    assert isinstance(slot, ArenaSlot)
    return slot


class ArenaSlots:
    """The slots of all queues of one feed (`feeder.workers.stream.buffers.Slots`).

    `take_slot` and `wait_for_slot` are called by the thread that merges; all else by any thread.
    `num_slots(device, slot_bytes)` says how many slots an arena has, when it is made; an arena has
    at most `max_arena_bytes`. Each queue has so many `replicas`.

    The lock of `_freed` guards the pools and `_closed`; it is held for lists and counts alone, and
    never while memory is asked for. The reserve belongs to the thread that starts the feed, then to
    the enqueuer. `_wanted` is written by the I/O thread, one tuple at a time, and read by the
    enqueuer. `_known` and `waited` are the enqueuer's.
    """

    passes, writable, reserved, opens = False, False, True, True

    def __init__(
        self,
        num_devices: int,
        num_slots: Callable[[int, int], int],
        *,
        replicas: int = 1,
        max_arena_bytes: int = MAX_ARENA_BYTES,
    ) -> None:
        self._num_slots = num_slots
        self._max_arena_bytes = max_arena_bytes
        self._freed = threading.Condition(threading.Lock())
        # The queue for whose slots the enqueuer waits. Whoever frees a slot looks at this without
        # the lock, since nearly always nobody waits.
        self._waiting: int | None = None
        self._pools = [Pool(replicas) for _ in range(num_devices)]
        # Memory for the first arena of each queue, and memory that turned out to be too much for
        # one: to give it back takes 5 ms, so that waits until a consumer is being fed.
        self._reserve: dict[int, Pages] = {}
        self._spare: list[Pages] = []
        self.on_spare: Callable[[], None] = lambda: None
        """Called by the I/O thread when it is time to `let_go`, which some other thread must do."""
        self._numbers = itertools.count()
        self._wanted = [NOTHING] * num_devices
        self._closed = False
        # The layout that was asked for last: it is nearly always the next one too.
        self._known: tuple[Columns | None, int, Layout] = (None, 0, Layout((), 0))
        self.num_made = 0
        """Slots made so far."""
        self.waited = Stopwatch()
        """The enqueuer's waits for a slot."""

    @property
    def num_leased(self) -> int:
        """Number of slots that are being written, wait to be sent, or are with a consumer."""
        with self._freed:
            return sum(pool.num_leased for pool in self._pools)

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory in the arenas that are in use."""
        with self._freed:
            arenas = [slots for pool in self._pools for slots in pool.slots.values()]
            return sum(slots[0].arena.slot_bytes * len(slots) for slots in arenas)

    def num_slots(self, device: int) -> int:
        """Number of slots of a queue; 0 while it has no arena."""
        with self._freed:
            return sum(map(len, self._pools[device].slots.values()))

    # ---- memory that is ready before anybody comes: for the thread that starts the feed

    def reserve(self, devices: Sequence[int] | None = None) -> None:
        """Have memory ready for the first arena of these queues, or of all. Once, before anybody
        takes.

        Not in a thread beside the start: a consumer that came at once would wait for it longer.
        """
        devices = range(len(self._pools)) if devices is None else devices
        num_bytes = _RESERVE_BYTES // len(devices)
        # A lack of memory is reported when the memory is needed, to the consumer that needs it.
        with contextlib.suppress(OSError):
            for device in devices:
                pages = Pages(num_bytes)
                pages.write(num_bytes)
                self._reserve[device] = pages

    def let_go(self) -> None:
        """Give back to the system what the queues' arenas did not need. That takes 5 ms."""
        self._spare.clear()

    def forget(self) -> None:
        """Give back all of the reserve: no consumer will come any more."""
        self.on_spare = lambda: None
        self._reserve.clear()
        self._spare.clear()

    # ---- the merging thread's

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
        """A free slot, of a new arena where those that are there are too small, or too few."""
        pool = self._pools[device]
        while True:
            with self._freed:
                if self._closed:
                    raise ClosedError("the feed is stopped")
                slot = pool.pop(num_bytes)
                if slot is not None or (pool.most_bytes >= num_bytes and not pool.is_short):
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
        """Make an arena, at least twice as large as those that were too small; where they were too
        few, one more like them.

        Twice, so that a feed whose batches grow makes few arenas.
        """
        known = pool.most_bytes
        size = known if known >= num_bytes else max(num_bytes, 2 * known)
        if size * self._num_wanted(device, size) > self._max_arena_bytes:
            size = num_bytes
        # Slots begin at pages, so that a consumer's write, which copies a page, is of one slot.
        size += -size % mmap.PAGESIZE
        num = self._num_wanted(device, size)
        if size * num > self._max_arena_bytes:
            raise TransportError(
                f"a batch of {num_bytes} bytes needs shared memory of {size * num} bytes for "
                f"{num} slots, expected at most {self._max_arena_bytes}; make batches or credit "
                "smaller"
            )
        # A reserve that is too large is not cut to size: that takes 5 ms of a consumer's time.
        reserve = self._reserve.pop(device, None)
        if reserve is not None and reserve.num_backed > size * num:
            self._spare.append(reserve)
            reserve = None
        # Without the lock, since this asks the system for memory; so all is looked at again below.
        arena = Arena(size, num, next(self._numbers), reserve)
        with self._freed:
            if self._closed:
                raise ClosedError("the feed is stopped")
            if pool.num_retirements != consumer:
                # The consumer changed meanwhile, and the next one may want another number of slots.
                return
            pool.add(arena)
            self.num_made += num

    def _num_wanted(self, device: int, slot_bytes: int) -> int:
        # At least one, or nothing could ever be sent; at most what slot numbers have room for.
        num = self._num_slots(device, slot_bytes)
        return min(max(1, num), SLOTS_PER_ARENA)

    # ---- the I/O thread's

    def prepare(self, device: int, wanted: Wanted) -> None:
        """Set what is done with a queue's batches from now on, as its consumer wants it."""
        self._wanted[device] = wanted

    def release(self, device: int, slot_numbers: Iterable[int], replica: int = 0) -> None:
        """Take slots that a consumer has given back; those of retired arenas are ignored. A slot is
        free when no other replica has it to come or has it still.

        Raises `ProtocolError`, and takes none, where one is not with this consumer. It does not
        wake the enqueuer: see `wake`.
        """
        # Checked as a whole first: a message that is refused must have changed nothing.
        with self._freed:
            pool = self._pools[device]
            slots = pool.find(slot_numbers, replica)
            if slots is None:
                raise ProtocolError(
                    f"slots {[*slot_numbers][:8]!r} of queue {device} were released, but not all "
                    "of them are with its consumer; expected each slot once"
                )
            pool.let_go(slots, 1 << replica)
        if self._spare:
            # Only now: slots that come back show that a consumer has its first batch.
            self.on_spare()

    def wake(self, *, hungry: bool) -> None:
        """Wake the enqueuer if it waits for a slot, and enough are free.

        One slot is enough where a consumer is `hungry`, else several small ones are awaited. Apart
        from `release`, since the woken thread wants the interpreter at once: first the I/O thread
        does all that a consumer waits for.
        """
        device = self._waiting
        if device is not None and (hungry or self._pools[device].has_plenty):
            with self._freed:
                self._wake()

    @property
    def waiting(self) -> int | None:
        """The queue for one of whose slots the enqueuer waits; None while it waits for none."""
        return self._waiting

    def grow(self, device: int) -> None:
        """Have one more arena made for a queue whose consumers keep all slots."""
        with self._freed:
            self._pools[device].is_short = True
            self._wake()

    def _wake(self) -> None:
        self._waiting = None
        self._freed.notify_all()

    def free(self, device: int, slot: ArenaSlot) -> None:
        """The batch in this slot of a queue will not be sent, or not to one of its replicas."""
        self._give_up(device, slot, Pool.let_go)

    def take_back(self, device: int, batch: HasColumns) -> None:
        """A batch is thrown away before anybody was sent it."""
        assert isinstance(batch, Batch)
        self._give_up(device, slot_of(batch), Pool.push)

    def put_back(self, device: int, slot: OpenSlot) -> None:
        """A slot that was taken holds no batch."""
        assert isinstance(slot, ArenaSlot)
        self._give_up(device, slot, Pool.push)

    def _give_up(
        self, device: int, slot: ArenaSlot, give: Callable[[Pool, list[ArenaSlot]], None]
    ) -> None:
        with self._freed:
            pool = self._pools[device]
            if slot.arena.number in pool.slots:
                give(pool, [slot])
                self._wake()

    def retire(self, device: int, keep: Callable[[Arena], bool] = lambda arena: False) -> None:
        """Drop the arenas of a queue, whose consumer is gone: nothing in them is written again.

        An enqueuer that waits for a slot of the queue goes on in a new arena. Arenas stay where
        `keep` wants them all and the consumer has given back all that it was sent.
        """
        # Arenas that stay are memory that the system need not make for the next consumer: 13 of the
        # 28 ms from `connect` to the first batch of 20 MB. Whoever could map an arena before may
        # read what the next consumer is sent, but descriptors go to this user's processes alone.
        with self._freed:
            pool = self._pools[device]
            # Tells an arena that is being made now that it is for a consumer that is gone.
            pool.num_retirements += 1
            slots = [slot for slots in pool.slots.values() for slot in slots]
            # All or nothing: one slot that is out may be looked at for ever, in a process whose end
            # nobody sees.
            if any(slot.sent or not keep(slot.arena) for slot in slots):
                pool.retire()
            self._wake()

    def drop(self) -> None:
        """Drop all arenas: no slot will be taken or sent any more."""
        for device in range(len(self._pools)):
            self.retire(device)
        self.forget()

    def close(self) -> None:
        """Have takers of slots, also one that waits, get `ClosedError`.

        Arenas stay as they are, since consumers may have batches in them.
        """
        with self._freed:
            self._closed = True
            self._wake()

    def reopen(self) -> None:
        """Let slots be taken again, and free those that had been taken and not sent.

        To be called when no thread takes or writes any more.
        """
        with self._freed:
            self._closed = False
            for pool in self._pools:
                pool.reopen()
