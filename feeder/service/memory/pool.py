"""The arenas of one queue of a served feed. Rules; `feeder.service.memory.arena` holds the lock."""

from __future__ import annotations

from collections.abc import Iterable

from feeder.service.memory.memfd import SLOTS_PER_ARENA, Arena, ArenaSlot

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
