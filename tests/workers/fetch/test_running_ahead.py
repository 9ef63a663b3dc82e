"""How far fetchers run ahead of a user who has stopped taking batches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import feeder
from small import WAIT_S, make

pytestmark = pytest.mark.served

BOUND, STOPPED_AT = 20, 40


class Counted:
    """Counts its calls; slow enough that the merge takes chunks from under it."""

    def __init__(self) -> None:
        self.calls = 0
        self._called = threading.Condition()
        self._disk = threading.Event()

    def __call__(self, call: feeder.Call) -> Any:
        self._disk.wait(0.001)
        with self._called:
            self.calls += 1
            self._called.notify_all()
        return (np.zeros((32, 1000)),)

    def wait_for(self, num_calls: int) -> bool:
        """Wait until so many calls have been made; returns whether they have."""
        with self._called:
            return self._called.wait_for(lambda: self.calls >= num_calls, WAIT_S)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_bound_holds_where_chunks_are_taken_from_open_chunk_lists(workers: int) -> None:
    fetch = Counted()
    coordinator = feeder.init_data_input_workers(
        ["x"], fetch, 32, workers, max_buffered_batches=BOUND, epochs=None,
        coordinator=feeder.Coordinator(),
    )  # fmt: skip
    with coordinator:
        feed = coordinator["train"].on(0)
        taken = 0
        # A user who is late gets several batches at once, and they count until the last is taken.
        while taken <= STOPPED_AT or feed._ready:
            assert next(feed).step == taken
            taken += 1
        assert fetch.wait_for(taken + BOUND)
    assert fetch.calls <= taken + BOUND + BOUND // 2 + workers


def test_memory_is_bounded_however_many_threads_call_a_pure_function() -> None:

    def fetch(call: feeder.Call) -> Any:
        never.wait(0.0002)
        return [np.zeros((1, 1000))]

    never = threading.Event()
    with make(fetch, ["x"], 4, num_worker_threads=1, num_threads=16, epochs=None,
              max_buffered_batches=100) as coordinator:  # fmt: skip
        feed = coordinator["train"]
        for _ in range(300):
            next(feed)
            never.wait(0.001)
        assert feed.stats()["peak_buffered_rows"] < 2 * 400
