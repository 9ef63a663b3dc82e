"""Fetch functions of every form, over scripts that say how many rows each call returns.

No two rows are equal and no value is zero, over all workers, epochs and calls: a row that is
lost, doubled, moved or left blank shows.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from threading import Event
from typing import Any, NoReturn

import numpy as np

from feeder import Call

COLUMNS = ("id", "vector", "label")
BATCH_SIZE = 8
"""Rows per batch that the patterns are ragged against."""
NUM_WORKERS = 3
"""Workers that the patterns are written for; a pure function puts their scripts in a row."""

Sizes = Sequence[int | None]
Script = Callable[[int, int], Sizes]
"""From worker and epoch to the rows of each call; None stands for a call that returns None."""

_RAGGED = (5, 0, 17, 1, 8, 0, 3)
_GAPS = (4, None, None, 9, 0, 2, None)

PATTERNS: dict[str, Script] = {
    "whole": lambda worker, epoch: (BATCH_SIZE,) * (1 + (worker + epoch) % 2),
    "single": lambda worker, epoch: (1,) * (7 + 2 * worker + epoch),
    "small": lambda worker, epoch: (3,) * (4 + (worker + epoch) % 3),
    "large": lambda worker, epoch: (21, 10 + worker)[: 1 + (worker + epoch) % 2],
    "ragged": lambda worker, epoch: _RAGGED[(worker + epoch) % 3 :][: max(1, 4 - worker)],
    "gaps": lambda worker, epoch: _GAPS[worker % 2 + epoch % 2 :] if worker < 2 else (4, 0, 5),
    "idle": lambda worker, epoch: () if (worker + epoch) % 2 else (6, 0, 7),
    "short": lambda worker, epoch: (0, 3 + epoch) if worker == epoch % 2 else (0,),
}
"""Chunks of a batch, of one row, smaller and larger than a batch, mixed with empty ones, between
calls that return None, workers that give nothing in an epoch, epochs shorter than a batch."""


class Pattern:
    """A script by its name, so that a fetch function can be sent to another process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, worker: int, epoch: int) -> Sizes:
        return PATTERNS[self.name](worker, epoch)


NEED_TWO_WORKERS = ("idle", "short")
"""Patterns by which worker 0 alone gives no row in some epochs."""


def no_pause() -> None:
    """Do nothing before a call."""


def shaky(seed: int, longest_s: float = 0.001) -> Callable[[], object]:
    """Return a pause of a length that nobody can foresee, to be made before a call."""
    dice = random.Random(seed)

    def pause() -> None:
        if dice.random() < 0.3:
            Event().wait(dice.random() * longest_s)

    return pause


def first_call() -> list[int]:
    """Return where a worker stands that has not been called."""
    return [0, 0]


def make_rows(worker: int, epoch: int, call: int, rows: int) -> dict[str, np.ndarray]:
    """Return so many rows that no other call returns."""
    first = 1 + 1000 * (call + 100 * (epoch + 10 * worker))
    ids = np.arange(first, first + rows)
    vectors = ids[:, None] % np.array([997, 1009, 1013]) + 1
    return {
        "id": ids,
        "vector": vectors.astype(np.float32),
        "label": (ids * 40503 % 65521 + 1).astype(np.uint16),
    }


class Replay:
    """`fetch(worker_id, batch_size)` that can only be put back by being called again."""

    def __init__(self, script: Script, pause: Callable[[], object] = no_pause) -> None:
        self.script = script
        self.pause = pause
        self.at: dict[int, list[int]] = defaultdict(first_call)
        """Of each worker the epoch and the number of the call in it, changed in place."""

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        self.pause()
        at = self.at[worker_id]
        epoch, call = at
        sizes = self.script(worker_id, epoch)
        if call == len(sizes):
            at[:] = epoch + 1, 0
            self.end()
        at[1] += 1
        rows = sizes[call]
        return None if rows is None else self.make(worker_id, epoch, call, rows)

    def end(self) -> NoReturn:
        """End the epoch."""
        raise StopIteration

    def make(self, worker: int, epoch: int, call: int, rows: int) -> Any:
        """Return a chunk, here as a tuple."""
        return tuple(make_rows(worker, epoch, call, rows).values())


class Seek(Replay):
    """`fetch(worker_id, batch_size)` with cursors. The cursor is a list that goes on changing."""

    def cursor(self, worker_id: int) -> list[int]:
        """Return where a worker stands."""
        return self.at[worker_id]

    def seek(self, worker_id: int, cursor: list[int]) -> None:
        """Put a worker back."""
        self.at[worker_id] = list(cursor)

    def make(self, worker: int, epoch: int, call: int, rows: int) -> Any:
        """Return a chunk as a mapping whose order is not that of the names."""
        columns = make_rows(worker, epoch, call, rows)
        return {name: columns[name] for name in sorted(columns)}


class Pure:
    """`fetch(call)`, with random numbers in a column. A call that returns None is made again."""

    def __init__(self, script: Script, pause: Callable[[], object] = no_pause) -> None:
        self.script = script
        self.pause = pause
        self.refused: Counter[tuple[int, int]] = Counter()
        """How often each call of each epoch has returned None."""

    def __call__(self, call: Call) -> Any:
        self.pause()
        refusals, rows = self.plan(call.epoch).get(call.index, (0, None))
        if self.refused[call.epoch, call.index] < refusals:
            self.refused[call.epoch, call.index] += 1
            return None
        if rows is None:
            self.end()
        return self.make(call, rows)

    def end(self) -> NoReturn:
        """End the epoch."""
        raise StopIteration

    def plan(self, epoch: int) -> dict[int, tuple[int, int | None]]:
        """Return how often each index gives None before its rows; no rows are the end."""
        plan: dict[int, tuple[int, int | None]] = {}
        refusals = 0
        for rows in chain(*(self.script(worker, epoch) for worker in range(NUM_WORKERS))):
            if rows is None:
                refusals += 1
            else:
                plan[len(plan)] = refusals, rows
                refusals = 0
        plan[len(plan)] = refusals, None
        return plan

    def make(self, call: Call, rows: int) -> Any:
        """Return a chunk, here as a list."""
        columns = make_rows(0, call.epoch, call.index, rows)
        columns["vector"] += call.rng.random((rows, 3), dtype=np.float32)
        return list(columns.values())


FORMS: dict[str, type[Replay] | type[Pure]] = {"replay": Replay, "seek": Seek, "pure": Pure}
"""The forms of fetch function by the way in which they are put back."""


def make_fetch(form: str, pattern: str, pause: Callable[[], object] = no_pause) -> Any:
    """Return a new fetch function, which has not been called yet."""
    return FORMS[form](Pattern(pattern), pause)
