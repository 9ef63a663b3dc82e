"""Timeouts and retries: what counts as a chunk that does not come, and what is told of it."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

import feeder
from small import make, wait_until

pytestmark = pytest.mark.served


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 16])
def test_chunks_without_rows_for_ever_are_a_timeout(num_workers: int, slow: bool) -> None:
    """Whether they come list by list, or are looked at from under the calls."""
    calls, never = itertools.count(), threading.Event()

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


def test_a_call_that_returned_while_nobody_waited_is_not_late() -> None:
    go_on = threading.Event()

    def fetch(call: feeder.Call) -> Any:
        if call.index == 1:
            go_on.wait(1.5)
        return [np.full(4, call.index)]

    with make(fetch, ["x"], 4, timeout=1.0, num_worker_threads=1) as coordinator:
        feed = coordinator["train"]
        wait_until(lambda: feed.stats()["queued_batches"])
        assert next(feed)["x"][0] == 0
        wait_until(lambda: feed.stats()["fetch_calls"] >= 2)
        assert next(feed)["x"][0] == 1


def test_a_timeout_amid_retries_names_what_was_raised() -> None:
    def fetch(call: feeder.Call) -> Any:
        raise OSError("the disk is gone")

    with make(fetch, ["x"], 4, timeout=0.3, retries=9, retry_backoff_s=0.2) as coordinator:
        feed = coordinator["train"]
        wait_until(lambda: feed.stats()["fetch_errors"])
        with pytest.raises(feeder.FetchTimeout, match="raised OSError: the disk is gone") as got:
            next(feed)
        assert isinstance(got.value.__cause__, OSError)
