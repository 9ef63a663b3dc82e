"""The verdict on real feeds in staged situations, with trainers in threads: each is right, or the
test fails.

Fetch functions and trainers that are slow wait on an event that nobody sets.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

import feeder
from feeder.observe.figures import FeedFigures, Figures
from feeder.observe.verdict import Verdict, judge
from feeder.service.server import serve as server_module
from feeder.workers.stats import Stopwatch
from watching import CallsOf

pytestmark = pytest.mark.served

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


@pytest.fixture(autouse=True)
def a_slow_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LOOK_S", 8.0)


def fails_now_and_then() -> Callable[[Any], Any]:
    turns = itertools.count()

    def fetch(call: Any) -> Any:
        if next(turns) % 3 == 2:
            raise OSError("the disk is away")
        return rows()(call)

    return fetch


class Situation(NamedTuple):
    """A feed of this process, whose trainers take so long for a step, and what is said of it."""

    kind: str
    make: Callable[[], feeder.Coordinator]
    steps_s: tuple[float, ...]
    says: str
    """A pattern for the reason and the advice."""


TWO = {"devices": 2, "max_buffered_batches": 8}
SITUATIONS = {
    "slow fetch": Situation(
        "fetch-bound", lambda: make(slow(0.02, rows())), (0.0,),
        r"slowest, (2\d|[3-9]\d|1\d\d)[\d.]* ms a call; .*raise num_threads from 2"),
    "slow trainer": Situation(
        "trainer-bound", lambda: make(rows()), (0.02,), "the feed keeps up.*; $"),
    "one stalled queue": Situation(
        "stalled-queue", lambda: make(rows(), **TWO), (0.0,),
        "^queue 1 has batches that nobody takes, queue 0 waits behind it"),
    "fetch that fails now and then": Situation(
        "failing-fetch",
        lambda: make(fails_now_and_then(), retries=5, retry_backoff_s=0.02), (0.0,),
        "OSError: the disk is away"),
}  # fmt: skip


def nightly_but(name: str) -> list[Any]:
    """The names of the situations, of which one alone is looked at by day: each takes its time."""
    return [
        one if one == name else pytest.param(one, marks=pytest.mark.nightly) for one in SITUATIONS
    ]


@pytest.mark.parametrize("name", nightly_but("slow fetch"))
def test_a_feed_of_this_process(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    one = SITUATIONS[name]
    calls = CallsOf(monkeypatch, (Stopwatch, "start"))
    coordinator = one.make()
    with training(coordinator, *one.steps_s) as read:
        if one.kind == "stalled-queue":
            queue = coordinator["train"].streams[0].queues[0]
            calls.wait_until(lambda: queue.waited_since is not None)
        verdict = look_for(one.kind, read)
    assert verdict.kind == one.kind
    assert re.search(one.says, f"{verdict.why}; {verdict.advice}"), verdict


def test_fetch_that_fails_for_good() -> None:
    def fetch(call: Any) -> Any:
        if call.index == 5:
            raise OSError("the disk is gone")
        return rows()(call)

    with training(make(fetch), 0.0) as read:
        verdict = look(read, 0.05)
    assert verdict.kind == "failed"
    assert "call 5: fetch function raised OSError: the disk is gone" in verdict.why


# ---- served


def test_one_trainer_is_missing() -> None:
    with (
        feeder.serve(lambda: make(rows()), "tcp://127.0.0.1:0", queues=2) as server,
        feeder.connect(server.addresses[0], queue=0),
    ):
        verdict = look(server.figures, 0.01)
    assert (verdict.kind, verdict.why) == ("waiting", "for a consumer on queue 1")
