"""How far fetchers run ahead of a user who has stopped taking batches."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.workers.fetch import fetcher as fetcher_module
from small import WAIT_S, make

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
        return (np.zeros((32, 100)),)

    def wait_for(self, num_calls: int) -> bool:
        """Wait until so many calls have been made; returns whether they have."""
        with self._called:
            return self._called.wait_for(lambda: self.calls >= num_calls, WAIT_S)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_bound_holds_where_chunks_are_taken_from_open_bundles(workers: int) -> None:
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


ROWS = np.ones((7, 2**17))


def shared(call: feeder.Call) -> Any:
    return (ROWS,)


def shared_view(call: feeder.Call) -> Any:
    return (ROWS[:],)


def new(call: feeder.Call) -> Any:
    return (ROWS.copy(),)


def new_and_small(call: feeder.Call) -> Any:
    threading.Event().wait(0.002)  # So that it is handed over by itself.
    return (np.ones((1, 2**10)),)


def new_and_half(call: feeder.Call) -> Any:
    return (np.ones((2, 2**17)),)


@pytest.mark.parametrize(
    ("fetch", "batch_size", "floods"),
    [
        (new, 32, True),
        (new_and_half, 32, False),
        (new, 7, False),  # It goes to the user as it is.
        (new_and_small, 32, False),
        (shared, 32, False),
        (shared_view, 32, False),
    ],
)
def test_large_chunks_in_new_memory_flood_the_caches(
    fetch: Any, batch_size: int, floods: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the machine is quick enough, and any is here."""
    monkeypatch.setattr(fetcher_module, "_FLOOD_BYTES_PER_S", 0.0)
    coordinator = feeder.init_data_input_workers(
        ["x"], fetch, batch_size, 2, max_buffered_batches=4, epochs=None,
        coordinator=feeder.Coordinator(),
    )  # fmt: skip
    until = time.monotonic() + WAIT_S
    with coordinator:
        feed = coordinator["train"].on(0)
        (stream,) = coordinator["train"].streams
        partitions = stream.pipeline.channel._rota.partitions

        def take() -> bool:
            next(feed)
            return any(partition.floods for partition in partitions)

        # What the merge has waited for and taken from under the fetcher does not count, and that
        # batches are passed on is known after the first ones.
        while take() is not floods:
            assert time.monotonic() < until
        if not floods:
            assert not any([take() for _ in range(50)])


def test_what_is_not_a_chunk_floods_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the end of an epoch it does not even matter."""
    monkeypatch.setattr(fetcher_module, "_FLOOD_BYTES_PER_S", 0.0)
    second = threading.Event()

    def fetch(call: feeder.Call) -> Any:
        if call.index < 6:
            return (np.ones((1, 2**19)),)
        if call.index == 6:
            second.wait(WAIT_S)
            raise StopIteration
        second.set()
        return {"y": 5}

    coordinator = feeder.init_data_input_workers(
        ["x"], fetch, 2, 2, max_buffered_batches=20, timeout=WAIT_S,
        coordinator=feeder.Coordinator(),
    )  # fmt: skip
    with coordinator:
        assert len(list(coordinator["train"])) == 3


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("row_bytes", [1024, 2**16, 2**18])
def test_bundles_together_stay_within_the_bound_and_half_of_its_bytes(
    workers: int, quick: bool, row_bytes: int
) -> None:
    """Or are a batch each, if that is more."""
    for max_batches, max_mib in ((20, None), (1000, 16), (1000, 32), (1000, 64), (1000, 1)):
        coordinator = feeder.init_data_input_workers(
            ["x"], Counted(), 4, workers, max_buffered_batches=max_batches, epochs=None,
            max_buffered_bytes=None if max_mib is None else max_mib * 2**20,
            coordinator=feeder.Coordinator(),
        )  # fmt: skip
        (stream,) = coordinator["train"].streams
        fetching = stream.pipeline._fetcher
        fetching.row_bytes = row_bytes
        total = 0
        for partition in stream.pipeline.channel._rota.partitions:
            partition.is_quick = quick
            fetching._targets[partition.number] = target = fetching._target_rows(partition)
            assert target >= 4 and target * row_bytes <= 16 * 2**20
            total += target
        assert total <= max(4 * workers, max_batches * 4)
        if max_mib is not None:
            assert total * row_bytes <= max(4 * workers * row_bytes, max_mib * 2**19)


def test_memory_is_bounded_however_many_threads_call_a_pure_function() -> None:

    def fetch(call: feeder.Call) -> Any:
        never.wait(0.0002)
        return [np.zeros((1, 8))]

    never = threading.Event()
    with make(fetch, ["x"], 4, num_worker_threads=1, num_threads=16, epochs=None,
              max_buffered_batches=100) as coordinator:  # fmt: skip
        feed = coordinator["train"]
        for _ in range(300):
            next(feed)
            never.wait(0.001)
        assert feed.stats()["peak_buffered_rows"] < 2 * 400
