"""A user of batches on a GPU whose work is done late: what it reads is compared at the end."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

import numpy as np

from feeder import Batch
from feeds import Record, note_columns
from standin.gpu import Machine
from standin.streams import Stream


class LateReader:
    """Gives a stream the reading of each batch, and lets go of the batch before that is done.

    Of every batch a view may be kept for a while; how many at most, and for how long, is drawn
    from a seed.
    """

    def __init__(self, machine: Machine, *, seed: int = 0, most_kept: int = 0) -> None:
        self._machine = machine
        self._random = random.Random(seed)
        self._most_kept = most_kept
        self._kept: deque[tuple[int, list[np.ndarray], Batch]] = deque()
        self._seen: list[tuple[tuple[int, int, int, int], list[np.ndarray]]] = []

    def read(self, batch: Batch, stream: Stream | None = None) -> None:
        """Give the work on a batch to a stream: the current one, where none is named."""
        copies: list[np.ndarray] = []
        values = [array.values for array in batch.arrays()]

        def work() -> None:
            copies.extend(value.copy() for value in values)

        self._machine.launch(work, stream)
        self._seen.append(((batch.epoch, batch.index, batch.step, batch.rows), copies))
        if self._most_kept:
            self._kept.append((len(self._seen) - 1, copies, batch))
            while len(self._kept) > self._random.randint(0, self._most_kept):
                # Looked at once more, from under everything that came since.
                _, first, old = self._kept.popleft()
                again = [array.get() for array in old.arrays()]
                assert all(map(np.array_equal, first, again)) and len(first) == len(again)

    def read_all(self, batches: Iterable[Batch]) -> list[Record]:
        """Read batches, and return what was read when all work is done."""
        for batch in batches:
            self.read(batch)
        return self.records()

    def records(self) -> list[Record]:
        """What was read, when all work is done."""
        self._kept.clear()
        self._machine.clockwork.drain_all()
        return [(*head, note_columns(copies)) for head, copies in self._seen]
