"""Staged situations: real feeds with trainers in threads, and the verdict on what was seen.

Fetch functions and trainers that are slow wait on an event that nobody sets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import feeder
from feeder.observe.figures import FeedFigures, Figures
from feeder.observe.verdict import Verdict, judge

WAIT_S = 10.0
LOOK_S = 0.5
"""How long a situation is looked at, once it is under way."""


def let_pass(seconds: float) -> None:
    """Be slow."""
    threading.Event().wait(seconds)


def rows(num_rows: int = 16, width: int = 2000) -> Callable[[Any], list[np.ndarray]]:
    """Return a fetch function that gives the same chunk at once, again and again."""
    chunk = np.ones((num_rows, width), np.float32)
    return lambda call: [chunk]


def slow(seconds: float, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a fetch function that takes its time."""

    def fetch_slowly(call: Any) -> Any:
        let_pass(seconds)
        return fetch(call)

    return fetch_slowly


def make(fetch: Callable[..., Any], batch_size: int = 16, **settings: Any) -> feeder.Coordinator:
    """Return a coordinator of its own with one endless feed."""
    defaults = {
        "epochs": None, "timeout": WAIT_S, "max_buffered_batches": 20,
        "coordinator": feeder.Coordinator(),
    }  # fmt: skip
    return feeder.init_data_input_workers(["x"], fetch, batch_size, **(defaults | settings))


class Trainer:
    """Takes batches in a thread, with a step of so many seconds, until its source ends."""

    def __init__(self, batches: Iterable[feeder.Batch], step_s: float) -> None:
        self.taken = 0
        self.is_under_way = threading.Event()
        """It has taken some batches, or has one that it is busy with for ever."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(batches, step_s))
        self._thread.start()

    def _run(self, batches: Iterable[feeder.Batch], step_s: float) -> None:
        try:
            for _ in batches:
                self.taken += 1
                if self.taken == 3 or step_s > WAIT_S:
                    self.is_under_way.set()
                if step_s:
                    self._over.wait(step_s)
        except feeder.FeedError:
            pass  # It was stopped, or the feed has failed: the figures tell.
        finally:
            self.is_under_way.set()

    def join(self) -> None:
        self._over.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def look(read: Callable[[], Figures], seconds: float = LOOK_S) -> Verdict:
    """Return the verdict on the one feed, from two readings of its figures."""
    first = read()
    let_pass(seconds)
    last = read()
    (before,), (after,) = first.feeds, last.feeds
    return judge(before, after, last.at_s - first.at_s)


def look_for(kind: str, read: Callable[[], Figures], seconds: float = LOOK_S) -> Verdict:
    """Return the verdict on the one feed, looking three times at most for one of a kind: where the
    machine stood still for most of a look, that was another situation."""
    verdict = look(read, seconds)
    for _ in range(2):
        if verdict.kind != kind:
            verdict = look(read, seconds)
    return verdict


@contextmanager
def training(coordinator: feeder.Coordinator, *step_s: float) -> Iterator[Callable[[], Figures]]:
    """Train on each device of the one feed with a step of so many seconds; the last devices have
    no trainer where fewer steps are given. Yields what reads the figures."""
    (name,) = coordinator
    feed = coordinator[name]
    with coordinator:
        trainers = [Trainer(feed.on(i), step) for i, step in enumerate(step_s)]
        assert all(trainer.is_under_way.wait(WAIT_S) for trainer in trainers)
        try:
            yield coordinator.figures
        finally:
            coordinator.stop()
            for trainer in trainers:
                trainer.join()


def only(figures: Figures) -> FeedFigures:
    """Return the one feed."""
    (feed,) = figures.feeds
    return feed
