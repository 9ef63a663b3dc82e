"""Which blocks are brought, kept and let go, by what readers will use: a pure machine.

A reader says in advance which blocks each of its steps uses. The machine goes through these uses
ahead of the reader and decides at each as L. A. Belady's MIN does ("A study of replacement
algorithms for a virtual-storage computer", IBM Systems Journal 5, 1966): a block that is not kept
is brought, and if there is no room the block that is used farthest in the future goes, which may be
the one that was just used. So what is brought is decided by the uses alone, and never by how quick
a store or a reader is; the machine only has to be ahead of its readers.

Being ahead has its price in room: a block that is brought lies there before it is used, and one
that goes is needed until the uses before it are over. Both are *loose*. Of the room, `ahead` bytes
are for loose blocks, and the machine stops where they would be more; the rest is for blocks that
are kept. So of equal blocks and one reader exactly the misses of MIN in a room of `room - ahead`
are brought, and all that lies there fits into `room`. With blocks of several sizes, and of several
readers, of which nobody knows who will be faster, it is near to that.

No threads, no clock, no files: events are methods, instructions are what `instructions` returns.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

FOREVER = float("inf")

_LATE_USES = 1 << 14
"""A reader is closed that is so many uses later than it was thought to be."""
# As one that was stopped, or that evaluates once in an hour. It begins anew (2026-11-28).


@dataclass(slots=True, eq=False)
class _Block:
    """A block that some reader will use, or that is kept."""

    number: int
    size: int
    uses: deque[tuple[float, Hashable]] = field(default_factory=deque)
    """When the uses come that the machine has not gone through yet, each with its reader."""
    pins: list[float] = field(default_factory=list)
    """When the uses come that it has gone through and that are not over."""
    is_kept: bool = False
    is_wanted: bool = False
    """Whether it was asked for, and is there or on its way."""
    rank: int = 0
    """The entry of the ranking that is in force."""

    @property
    def next_use(self) -> float:
        return self.uses[0][0] if self.uses else FOREVER


@dataclass(slots=True)
class _Step:
    """The blocks that a reader uses at once."""

    blocks: list[_Block]
    times: list[float]
    missed: int = 0
    """Bytes that were brought for it."""
    is_over: bool = False


@dataclass(slots=True)
class _Reader:
    steps: deque[_Step] = field(default_factory=deque)
    """From the first that is not over on."""
    first: int = 0
    """The number of that one."""
    entered: int = 0
    """The number of the first step that the machine has not gone through."""
    ahead: int = 0
    """Bytes that were brought for steps that are not over."""
    used: int = 0
    """Uses that are over."""
    lately: int = 0
    """Those of them since the readers were others."""
    last: float = 0.0
    """The time of the last use that was foreseen."""
    foreseen: int = 0
    """Uses that were foreseen."""


@dataclass(slots=True)
class Instructions:
    """What is to be done, in this order."""

    let_go: list[int] = field(default_factory=list)
    """Blocks that nobody needs."""
    bring: list[int] = field(default_factory=list)
    """Blocks that are needed, the first one first."""


class Foresight:
    """The machine. Owner: the lock of whoever drives it."""

    def __init__(self, room: int, ahead: int) -> None:
        """`room` is how many bytes there are for blocks, `ahead` how many of them are for blocks
        that are brought before they are used."""
        self._room, self._ahead = room - ahead, ahead
        self._blocks: dict[int, _Block] = {}
        self._readers: dict[Hashable, _Reader] = {}
        self.kept = 0
        """Bytes of the blocks that are kept."""
        self._loose = 0
        self.used = 0
        """Uses that are over, of all readers."""
        self.uses = self.misses = 0
        """Uses that the machine has gone through, and those of them whose block was not kept."""
        # By the next use, farthest first. Entries that are no longer in force are passed over.
        self._farthest: list[tuple[float, int, _Block]] = []
        self._numbers = count()
        # Of blocks of which this has changed since the last instructions: whether it was wanted.
        self._were_wanted: dict[int, bool] = {}

    # ---- events

    def has(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Blocks that are there from before: numbers and sizes. As many as there is room for are
        kept."""
        for number, size in blocks:
            block = self._block(number, size)
            if not block.is_wanted and self.kept + size <= self._room:
                block.is_wanted = block.is_kept = True
                self.kept += size
                self._rank(block)

    def foresee(self, reader: Hashable, blocks: Sequence[tuple[int, int]]) -> None:
        """The next step of a reader, its first one if it is new: numbers and sizes of the blocks
        that it uses."""
        found = self._readers.get(reader)
        if found is None:
            found = self._readers[reader] = _Reader()
            self._compare_anew()
        step = _Step([], [])
        # Readers go at different speeds. The uses of one come as far apart as its share of the uses
        # that were over lately says; of a single one, one after the other.
        lately = sum(each.lately + 1 for each in self._readers.values())
        apart = lately / (found.lately + 1)
        for number, size in blocks:
            found.foreseen += 1
            time = max(found.last, self.used + (found.foreseen - found.used) * apart)
            found.last = time
            block = self._block(number, size)
            is_next = time < block.next_use
            insort(block.uses, (time, reader), key=lambda use: use[0])
            if is_next and block.is_kept:
                self._rank(block)
            step.blocks.append(block)
            step.times.append(time)
        found.steps.append(step)

    def enter(self, reader: Hashable, number: int) -> None:
        """A step begins: if the machine has not gone through it and those before, it does now. For
        a reader that is closed this does nothing."""
        found = self._readers.get(reader)
        while (
            found is not None
            and found.entered <= number
            and found.entered < found.first + len(found.steps)
        ):
            self._go_through(reader, found)

    def leave(self, reader: Hashable, number: int) -> None:
        """A step is over. Any step that was foreseen, in any order; a second time does nothing."""
        found = self._readers.get(reader)
        if found is None or not 0 <= number - found.first < len(found.steps):
            return
        self.enter(reader, number)
        step = found.steps[number - found.first]
        if step.is_over:
            return
        step.is_over = True
        found.ahead -= step.missed
        found.used += len(step.blocks)
        found.lately += len(step.blocks)
        self.used += len(step.blocks)
        for block, time in zip(step.blocks, step.times, strict=True):
            self._unpin(block, time)
        while found.steps and found.steps[0].is_over:
            found.steps.popleft()
            found.first += 1
        self._close_late()

    def _close_late(self) -> None:
        """Close readers that stand still: what they will use must not be kept for ever."""
        late = [
            reader
            for reader, found in self._readers.items()
            if found.steps
            and found.steps[0].times
            and found.steps[0].times[0] + _LATE_USES < self.used
        ]
        for reader in late:
            self.close(reader)

    def lost(self, number: int) -> None:
        """A block that was brought or kept is not there. It is brought again if it is used."""
        block = self._blocks.get(number)
        if block is not None and block.is_wanted:
            block.is_wanted = False
            self._were_wanted.pop(number, None)
            if block.is_kept:
                block.is_kept = False
                self.kept -= block.size
                self._loose += block.size if block.pins else 0
            self._forget(block)

    def close(self, reader: Hashable) -> None:
        """A reader will use nothing more."""
        found = self._readers.pop(reader, None)
        if found is None:
            return
        self._compare_anew()
        for number, step in enumerate(found.steps, found.first):
            for block, time in zip(step.blocks, step.times, strict=True):
                if number < found.entered:
                    if not step.is_over:
                        self._unpin(block, time)
                else:
                    block.uses = deque(use for use in block.uses if use[1] != reader)
                    self._rank(block)
                    self._forget(block)

    # ---- what it says

    @property
    def ahead(self) -> int:
        """Bytes that were brought, or are to be, for steps that are not over."""
        return sum(found.ahead for found in self._readers.values())

    def instructions(self) -> Instructions:
        """Go through uses as far ahead as there is room; what is to be done now."""
        behind = [
            (step.times[0] if step.times else 0.0, next(self._numbers), reader, found)
            for reader, found in self._readers.items()
            if (step := self._next_step(found)) is not None
        ]
        heapq.heapify(behind)
        while behind:
            _, _, reader, found = heapq.heappop(behind)
            step = self._next_step(found)
            if step is None or not self._may_go_through(found, step):
                continue
            self._go_through(reader, found)
            if (after := self._next_step(found)) is not None:
                time = after.times[0] if after.times else found.last
                heapq.heappush(behind, (time, next(self._numbers), reader, found))
        told = Instructions()
        for number, was_wanted in self._were_wanted.items():
            block = self._blocks.get(number)
            is_wanted = block is not None and block.is_wanted
            if is_wanted != was_wanted:
                (told.bring if is_wanted else told.let_go).append(number)
        self._were_wanted.clear()
        return told

    def distance(self, number: int) -> float:
        """After how many uses, of all readers, a block is used; `FOREVER` if nobody knows."""
        block = self._blocks.get(number)
        if block is None:
            return FOREVER
        return (min(block.pins) if block.pins else block.next_use) - self.used

    @property
    def num_readers(self) -> int:
        """How many readers there are."""
        return len(self._readers)

    def knows(self, reader: Hashable) -> bool:
        """Whether a reader is there: it has foreseen steps, and was not closed."""
        return reader in self._readers

    def blocks_of(self, reader: Hashable, number: int) -> list[int]:
        """The blocks of a step that is not over; none of others."""
        found = self._readers.get(reader)
        if found is None or not 0 <= number - found.first < len(found.steps):
            return []
        return [block.number for block in found.steps[number - found.first].blocks]

    def foreseen(self, reader: Hashable) -> int:
        """How many uses of a reader are known that the machine has not seen end."""
        found = self._readers.get(reader)
        return 0 if found is None else found.foreseen - found.used

    # ---- the rules

    def _compare_anew(self) -> None:
        """Readers have come or gone: who is quick is seen from now on."""
        for found in self._readers.values():
            found.lately = 0

    def _next_step(self, found: _Reader) -> _Step | None:
        at = found.entered - found.first
        return found.steps[at] if at < len(found.steps) else None

    def _may_go_through(self, found: _Reader, step: _Step) -> bool:
        size = sum(block.size for block in step.blocks if not block.is_kept)
        if not size or not (found.ahead or self._loose):
            # One step may need more than there is for all that is ahead.
            return True
        # A reader that stands still leaves the others their parts.
        part = self._ahead // len(self._readers)
        return found.ahead + size <= part and self._loose + size <= self._ahead

    def _go_through(self, reader: Hashable, found: _Reader) -> None:
        """Decide about the uses of a reader's next step."""
        step = found.steps[found.entered - found.first]
        found.entered += 1
        self.uses += len(step.blocks)
        for block, time in zip(step.blocks, step.times, strict=True):
            self._take_use(block, reader)
            block.pins.append(time)
            if block.is_kept:
                self._rank(block)
                continue
            if len(block.pins) == 1:
                self._loose += block.size
            if not block.is_wanted:
                self._want(block, is_wanted=True)
            self.misses += 1
            step.missed += block.size
            found.ahead += block.size
            self._keep(block)

    def _take_use(self, block: _Block, reader: Hashable) -> None:
        if block.uses[0][1] == reader:
            block.uses.popleft()
            return
        # Another reader was thought to be quicker.
        at = next(i for i, use in enumerate(block.uses) if use[1] == reader)
        del block.uses[at]

    def _keep(self, block: _Block) -> None:
        """Keep a block, if those that are used later make enough room."""
        goes: list[_Block] = []
        room = self._room - self.kept
        while room < block.size:
            farthest = self._pop_farthest()
            if farthest is None or farthest.next_use <= block.next_use:
                # It is used later than what is there, or does not fit at all.
                for one in (*goes, *([farthest] if farthest else [])):
                    self._rank(one)
                return
            goes.append(farthest)
            room += farthest.size
        for one in goes:
            one.is_kept = False
            self.kept -= one.size
            self._loose += one.size if one.pins else 0
            self._forget(one)
        block.is_kept = True
        self.kept += block.size
        self._loose -= block.size
        self._rank(block)

    def _rank(self, block: _Block) -> None:
        """Put a kept block where its next use belongs."""
        if not block.is_kept:
            return
        block.rank = next(self._numbers)
        heapq.heappush(self._farthest, (-block.next_use, block.rank, block))
        if len(self._farthest) > 4 * len(self._blocks) + 64:
            self._farthest = [each for each in self._farthest if self._is_in_force(each)]
            heapq.heapify(self._farthest)

    def _is_in_force(self, entry: tuple[float, int, _Block]) -> bool:
        _, rank, block = entry
        return block.is_kept and block.rank == rank

    def _pop_farthest(self) -> _Block | None:
        """Take the kept block that is used last out of the ranking."""
        while self._farthest:
            entry = heapq.heappop(self._farthest)
            if self._is_in_force(entry):
                return entry[2]
        return None

    def _unpin(self, block: _Block, time: float) -> None:
        block.pins.remove(time)
        if not block.pins and not block.is_kept:
            self._loose -= block.size
            self._forget(block)

    def _forget(self, block: _Block) -> None:
        """Let a block go that nobody keeps or uses."""
        if block.pins or block.is_kept:
            return
        if block.is_wanted:
            self._want(block, is_wanted=False)
        if not block.uses:
            self._blocks.pop(block.number, None)

    def _want(self, block: _Block, *, is_wanted: bool) -> None:
        # Put last: what is brought comes in the order in which it is used.
        was_wanted = self._were_wanted.pop(block.number, block.is_wanted)
        self._were_wanted[block.number] = was_wanted
        block.is_wanted = is_wanted

    def _block(self, number: int, size: int) -> _Block:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = _Block(number, size)
        return block
