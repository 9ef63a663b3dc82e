"""What a source will read, as steps of a reader of all_blocks: one step for each call.

The order of a source tells the records of any call, so calls are foreseen one after the other, in
this epoch and the next, some more at each call that is made. The calls that come are known by
epoch and index; if one comes that was not foreseen, as after a resume, the future begins there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

from feeder.workers.errors import FeedError
from feeder.workers.forks import call_in_child
from feeder.workers.sources.far.blocks import Blocks
from feeder.workers.sources.far.paths import FarPath
from feeder.workers.sources.far.waits import StoreWaits
from feeder.workers.stream.batch import Call
from feeder.workers.stream.parts import PartCalls

_MOST_USES = 1 << 17
"""So many uses of blocks are foreseen at most."""
# They take some 30 MB, and one of them 5 us (2026-11-28).

_MORE_STEPS, _MORE_RECORDS = 8, 2048
"""So many calls, or calls of so many records, are foreseen at each call that is made, until there
are enough."""
# 2,048 records take 5 to 20 ms; fewer make short requests at the start (2026-11-28).

_MOST_STEPS = 1 << 14
"""So many calls are foreseen at most, whatever they use."""

_LATE_STEPS = 64
"""A call that other calls are so far ahead of is over: another process has made it."""

Touch = tuple[FarPath, int, int]
"""Bytes of an object, from the first to the one after the last."""
Touched = Callable[[Call], Iterable[Touch]]
"""What a call reads. Raises StopIteration behind the end of its epoch."""


class Ahead:
    """The future of one source. Any thread makes calls; what changes is under the lock."""

    def __init__(self, part: PartCalls | None = None) -> None:
        """`part`: the calls that are made, where others are made elsewhere."""
        self.part = part
        self._start()

    def _start(self) -> None:
        """Know nothing; so begins a forked child too, where calls of the parent never end."""
        self._lock = Lock()
        self.waits = StoreWaits()
        self._of: tuple[int, int] | None = None
        self._reader: object = object()
        self._blocks: set[Blocks] = set()
        self._numbers: dict[tuple[int, int], int] = {}
        """Of each call that is foreseen and not long over its step."""
        self._next, self._foreseen, self._uses = (0, 0), 0, 0
        self._entered = self._left = -1
        call_in_child(self._start)

    @contextmanager
    def step(self, call: Call, touched: Touched) -> Iterator[None]:
        """A call, while it reads."""
        with self._lock:
            is_known = (call.epoch, call.index) in self._numbers
            number = self._number(call, touched) if is_known or not self._has_all() else None
            reader, all_blocks, late = self._reader, [*self._blocks], []
            if number is not None:
                self._entered = max(self._entered, number)
                late = [*range(self._left + 1, self._entered - _LATE_STEPS)]
                self._left = max([self._left, *late])
        if number is None:
            with self.waits.counting():
                yield
            return
        for blocks in all_blocks:
            blocks.enter(reader, number)
            if late:
                blocks.leave(reader, late)
        try:
            with self.waits.counting():
                yield
        finally:
            for blocks in all_blocks:
                blocks.leave(reader, [number])

    def close(self) -> None:
        """Nothing more is read, and no call is under way. It takes no lock: the garbage collector
        calls it, in a thread that may hold any."""
        for blocks in self._blocks:
            blocks.forget(self._reader)

    def _begin(self, at: tuple[int, int]) -> None:
        for blocks in self._blocks:
            blocks.forget(self._reader)
        self._reader, self._numbers = object(), {}
        self._next, self._foreseen, self._uses = at, 0, 0
        self._entered = self._left = -1

    def _number(self, call: Call, touched: Touched) -> int | None:
        """The step of a call; more steps are foreseen. None if what it reads is not known."""
        key, of = (call.epoch, call.index), (call.seed, call.batch_size)
        if not all(blocks.knows(self._reader) for blocks in self._blocks):
            # It stood still for so long that it was forgotten.
            self._begin(key)
        if of != self._of or key not in self._numbers:
            self._of = of
            if key != self._made_from(*self._next) or not self._foreseen:
                self._begin(key)
        for _ in range(max(_MORE_STEPS, _MORE_RECORDS // call.batch_size)):
            is_enough = self._uses >= _MOST_USES or len(self._numbers) >= _MOST_STEPS
            if (is_enough or self._has_all()) and key in self._numbers:
                break
            if not self._foresee_one(call, touched):
                break
        while self._numbers and (old := next(iter(self._numbers))) != key:
            # They are in the order of their steps.
            if self._numbers[old] >= self._entered - _LATE_STEPS:
                break
            del self._numbers[old]
        return self._numbers.get(key)

    def _made_from(self, epoch: int, index: int) -> tuple[int, int]:
        """The first call from there on that is made here."""
        if self.part is None:
            return epoch, index
        self.part.go_to(epoch)
        return epoch, self.part.block(index)[0]

    def _has_all(self) -> bool:
        """Whether all that may be read is there."""
        return bool(self._blocks) and all(blocks.has_all() for blocks in self._blocks)

    def _foresee_one(self, call: Call, touched: Touched) -> bool:
        """One more step; whether there may be others."""
        epoch, index = self._made_from(*self._next)
        if epoch > call.epoch + 1:
            return False
        try:
            touches = [*touched(call._replace(epoch=epoch, index=index))]
        except StopIteration:
            self._next = epoch + 1, 0
            return index > 0
        except (FeedError, OSError, ValueError):
            # What is defective is told when it is read.
            return False
        by_blocks: dict[Blocks, list[tuple[FarPath, int, int]]] = {}
        for touch in touches:
            by_blocks.setdefault(touch[0].blocks, []).append(touch)
        for blocks in by_blocks.keys() - self._blocks:
            # Steps have one number in all all_blocks.
            self._blocks.add(blocks)
            for _ in range(self._foreseen):
                blocks.foresee(self._reader, ())
        self._uses = 0
        for blocks in self._blocks:
            parts = ((path.known, start, stop) for path, start, stop in by_blocks.get(blocks, ()))
            self._uses += blocks.foresee(self._reader, parts)
        self._numbers[epoch, index] = self._foreseen
        self._foreseen += 1
        self._next = epoch, index + 1
        return True
