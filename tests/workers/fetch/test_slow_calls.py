"""A call that fails, or does not return, holds up nobody else, nor what it has got before."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.workers.fetch.queue import Queue
from feeder.workers.fetch.tickets import Ticket
from small import WAIT_S, Pure, chunk, ids, make

pytestmark = pytest.mark.served


class Endless:
    """One row per call, numbered; each worker stays in call `held_at` until it is let go."""

    def __init__(self, **held_at: int) -> None:
        self.calls: dict[int, int] = defaultdict(int)
        self.held_at = {int(worker[1:]): call for worker, call in held_at.items()}
        self.released = threading.Event()

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        call = self.calls[worker_id]
        if call == self.held_at.get(worker_id):
            self.released.wait(WAIT_S)
            raise StopIteration
        self.calls[worker_id] += 1
        return (np.array([100_000 * worker_id + call]),)


@pytest.fixture
def held() -> Iterator[Endless]:
    """Worker 1 does not return from its eleventh call."""
    fetch = Endless(w1=10)
    yield fetch
    fetch.released.set()


def test_an_error_comes_in_its_place() -> None:
    def fetch(worker_id: int, batch_size: int) -> Any:
        calls[worker_id] += 1
        (rows,) = chunk(worker_id, calls[worker_id], 4)
        return (rows.astype(float) if worker_id == 1 and calls[1] == 50 else rows,)

    calls: dict[int, int] = defaultdict(int)
    with make(fetch, num_worker_threads=2) as coordinator:
        feed = coordinator["train"]
        for step in range(99):
            assert next(feed).step == step
        with pytest.raises(feeder.ChunkError, match="worker 1, call 49: "):
            next(feed)


def test_what_a_call_that_does_not_return_has_got_before_is_delivered(
    held: Endless,
) -> None:
    with make(held, num_worker_threads=2, batch_size=21) as coordinator:
        (batch,) = [next(coordinator["train"])]
        assert ids([batch]) == [100_000 * (i % 2) + i // 2 for i in range(21)]
        held.released.set()


def test_a_call_that_does_not_return_is_told_after_the_timeout(held: Endless) -> None:
    with make(held, num_worker_threads=2, timeout=1.0) as coordinator:
        feed = coordinator["train"]
        got = ids(next(feed) for _ in range(5))
        assert got == [100_000 * (i % 2) + i // 2 for i in range(20)]
        with pytest.raises(feeder.FetchTimeout, match="worker 1, call 10: ") as told:
            next(feed)
        held.released.set()
    assert "self.released.wait" in "".join(told.value.__notes__)


def test_in_order_of_arrival_others_go_on_beside_a_call_that_does_not_return(
    held: Endless,
) -> None:
    with make(held, num_worker_threads=2, order="arrival", max_buffered_batches=8) as coordinator:
        feed = coordinator["train"]
        workers = Counter(value // 100_000 for value in ids(next(feed) for _ in range(200)))
        held.released.set()
    assert workers[1] <= 10
    assert workers[0] >= 790


def test_rows_that_come_after_a_lull_are_handed_over() -> None:
    """The enqueuer looks rarely by then: the first rows go at once all the same."""
    taken, calls = threading.Event(), iter(range(100))

    def fetch(call: feeder.Call) -> Any:
        number = next(calls)
        if 0 < number < 9:
            return None  # For a quarter of a second in all.
        if number == 10:
            in_time.append(taken.wait(WAIT_S / 2))
        if number > 10:
            raise StopIteration
        return chunk(0, number, 4)

    in_time: list[bool] = []
    with make(fetch, num_worker_threads=1, timeout=10 * WAIT_S) as coordinator:
        feed = coordinator["train"]
        next(feed), next(feed)
        taken.set()
        assert len(list(feed)) == 1
    assert in_time == [True]


def test_a_thread_whose_tickets_are_all_taken_from_it_draws_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, turns = Queue.draw, count()

    def draw_in_vain(queue: Queue, most: int) -> deque[Ticket] | None:
        drawn = draw(queue, most)
        if drawn and next(turns) % 2:
            with queue._lock:
                queue._give_back_all(drawn)
        return drawn

    monkeypatch.setattr(Queue, "draw", draw_in_vain)
    with make(Pure(20, 4), num_threads=2, epochs=1) as coordinator:
        assert len(list(coordinator["train"])) == 20
