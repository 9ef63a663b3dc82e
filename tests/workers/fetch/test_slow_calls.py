"""A call that does not return, or gives nothing, holds up nobody else, nor what it has got before;
what counts as a chunk that does not come, and what is told of it."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.devices.host import HostQueue
from feeder.workers.fetch.queue import Queue
from feeder.workers.fetch.tickets import Ticket
from feeder.workers.stats import FetchStats
from small import WAIT_S, Pure, chunk, ids, make
from watching import CallsOf, Clock, around

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


def test_what_a_call_that_does_not_return_has_got_before_is_delivered(
    held: Endless,
) -> None:
    with make(held, num_worker_threads=2, batch_size=21) as coordinator:
        (batch,) = [next(coordinator["train"])]
        assert ids([batch]) == [100_000 * (i % 2) + i // 2 for i in range(21)]
        held.released.set()


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


# ---- timeouts and retries


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 16])
def test_chunks_without_rows_for_ever_are_a_timeout(num_workers: int, slow: bool) -> None:
    """Whether they come list by list, or are looked at from under the calls."""
    calls, never = count(), threading.Event()

    def fetch(worker_id: int, batch_size: int) -> Any:
        if slow and next(calls) % 20 == 0:
            never.wait(0.001)
        return [np.empty((0, 3))]

    with (
        make(fetch, ["x"], 8, num_worker_threads=num_workers, timeout=0.3) as coordinator,
        pytest.raises(feeder.FetchTimeout, match=r"no chunk for 0\.3 s; raise timeout"),
    ):
        next(coordinator["train"])


@pytest.mark.parametrize("num_workers", [2, 4])
def test_slow_calls_beyond_the_end_of_an_epoch_hold_the_next_one_up_for_one_call(
    num_workers: int,
) -> None:
    """The calls before them were quick, so that a list of hundreds of calls was begun."""
    end, never = 4000, threading.Event()

    def fetch(call: feeder.Call) -> Any:
        if call.index == end:
            raise StopIteration
        if call.index > end:
            never.wait(0.02)
        return [np.full(1, call.index)]

    settings: dict[str, Any] = {"epochs": 6, "timeout": 2.0, "max_buffered_batches": 1000}
    with make(fetch, ["x"], 8, num_worker_threads=num_workers, **settings) as coordinator:
        assert sum(1 for _ in coordinator["train"]) == 6 * end // 8


def test_a_call_that_gives_nothing_when_it_is_made_again_says_that_it_was() -> None:
    gives = True

    def fetch(call: feeder.Call) -> Any:
        return [np.full(4, call.index)] if gives else None

    with make(fetch, ["x"], 3, order="arrival") as coordinator:
        token = next(coordinator["train"]).cut.token()
    gives = False
    with (
        make(fetch, ["x"], 3, order="arrival", timeout=0.05, resume=token) as coordinator,
        pytest.raises(feeder.FetchTimeout, match=r"call 0: .* 0\.05 s when it was made again"),
    ):
        next(coordinator["train"])


@pytest.mark.parametrize("retries", [0, 1, 2, 3])
def test_the_call_that_a_resume_makes_again_has_its_retries(retries: int) -> None:
    failing = 0

    def fetch(call: feeder.Call) -> Any:
        nonlocal failing
        if call.index == 0 and failing:
            failing -= 1
            raise OSError("the disk is away")
        if call.index == 2:
            raise StopIteration
        return [np.arange(4) + 4 * call.index]

    settings: dict[str, Any] = {"order": "arrival", "num_worker_threads": 1}
    with make(fetch, ["x"], 3, **settings) as coordinator:
        token = next(coordinator["train"]).cut.token()
    failing = 2
    settings |= {"retries": retries, "retry_backoff_s": 0.001, "resume": token}
    with make(fetch, ["x"], 3, **settings) as coordinator:
        feed = coordinator["train"]
        if retries < 2:
            told = "^worker 0, call 0: fetch function raised OSError: the disk is away"
            with pytest.raises(feeder.FetchError, match=told) as caught:
                next(feed)
            assert (caught.value.worker_id, caught.value.call) == (0, 0)
            assert isinstance(caught.value.__cause__, OSError)
        else:
            assert [batch["x"].tolist() for batch in feed] == [[3, 4, 5], [6, 7]]
        stats = feed.stats()
    assert stats["fetch_retries"] == min(retries, 2)
    assert stats["fetch_errors"] == min(retries + 1, 2)


def test_a_call_that_returned_while_nobody_waited_is_not_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, calls = Clock(monkeypatch), CallsOf(monkeypatch, (HostQueue, "put"))
    is_taken, is_looked_at = threading.Event(), threading.Event()
    around(monkeypatch, Queue, "_check", after=lambda *_: is_looked_at.set())

    def fetch(call: feeder.Call) -> Any:
        if call.index == 1:
            assert is_taken.wait(WAIT_S)
            clock.set_ahead(1.5)
            is_looked_at.clear()
            assert is_looked_at.wait(WAIT_S)
        return [np.full(4, call.index)]

    with make(fetch, ["x"], 4, timeout=1.0, num_worker_threads=1) as coordinator:
        feed = coordinator["train"]
        calls.wait_until(lambda: feed.stats()["queued_batches"])
        assert next(feed)["x"][0] == 0
        is_taken.set()
        calls.wait_until(lambda: feed.stats()["queued_batches"])
        assert next(feed)["x"][0] == 1


def test_a_timeout_amid_retries_names_what_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallsOf(monkeypatch, (FetchStats, "fail"))

    def fetch(call: feeder.Call) -> Any:
        raise OSError("the disk is gone")

    with make(fetch, ["x"], 4, timeout=0.3, retries=9, retry_backoff_s=0.2) as coordinator:
        feed = coordinator["train"]
        calls.wait_until(lambda: feed.stats()["fetch_errors"])
        with pytest.raises(feeder.FetchTimeout, match="raised OSError: the disk is gone") as got:
            next(feed)
        assert isinstance(got.value.__cause__, OSError)
