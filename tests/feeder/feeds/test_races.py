"""What only shows at one moment of many, brought about by waiting for that moment."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest

import feeder
from feeder.workers.stream.memory import Pool
from small import WAIT_S, Pure, chunk, ids, make


@pytest.mark.parametrize("late", [0, 1], ids=["worker 0 late", "worker 1 late"])
def test_the_worker_whose_turn_is_later_is_blamed_whichever_came_first(late: int) -> None:
    other_goes_on = threading.Event()
    calls = [0, 0]

    def fetch(worker_id: int, batch_size: int) -> Any:
        calls[worker_id] += 1
        if worker_id == late:
            assert other_goes_on.wait(WAIT_S)
        elif calls[worker_id] == 2:
            other_goes_on.set()  # its first chunk has been handed over
        if calls[worker_id] > 2:
            raise StopIteration
        return (np.ones(batch_size, np.float64 if worker_id else np.float32),)

    with make(fetch, num_worker_threads=2) as coordinator:
        assert next(coordinator["train"])["id"].dtype == np.float32
        with pytest.raises(feeder.ChunkError) as caught:
            next(coordinator["train"])
    assert (caught.value.worker_id, caught.value.call) == (1, 0)
    assert (caught.value.got, caught.value.expected) == ("float64", "float32")


def test_a_cache_of_the_fetch_function_is_not_the_users_to_write() -> None:
    cache = {index: chunk(0, index, 4) for index in range(6)}

    def fetch(call: feeder.Call) -> Any:
        if call.index == len(cache):
            raise StopIteration
        return cache[call.index]

    seen = []
    with make(fetch, epochs=2, writable=True) as coordinator:
        for batch in coordinator["train"]:
            seen += ids([batch])
            batch["id"][:] = 0
    assert seen == 2 * [int(row) for index in range(6) for row in chunk(0, index, 4)[0]]
    assert all(array.all() for (array,) in cache.values())


@pytest.mark.parametrize("rows", (4, 2**17), ids=("own memory", "memory of the pool"))
def test_nor_is_what_it_may_find_by_a_weak_reference(rows: int) -> None:
    """The second epoch finds an array for as long as the user keeps its batch, if that is it."""
    cache: WeakValueDictionary[int, Any] = WeakValueDictionary()
    pool = Pool()

    def fetch(call: feeder.Call) -> Any:
        if call.index == 3:
            raise StopIteration
        array = cache.get(call.index)
        if array is None:
            array = cache[call.index] = pool.empty((rows,), np.int64)
            array[:] = call.index + 1
        return [array]

    kept, seen = [], []
    with make(fetch, batch_size=rows, epochs=2, writable=True, num_threads=1) as coordinator:
        for batch in coordinator["train"]:
            kept.append(batch)
            seen.append(set(batch["id"].tolist()))
            batch["id"][:] = 0
    assert seen == 2 * [{1}, {2}, {3}]


def test_a_stop_wakes_an_enqueuer_in_the_middle_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = make(Pure(1, 100), max_buffered_batches=4, devices=2)
    feed = coordinator["train"]
    queue, _ = feed.streams[0].queues
    wait, waits = queue._drained.wait, threading.Event()

    def tell_and_wait() -> None:
        waits.set()  # under the lock, which a stop gets once the wait has begun
        wait()

    monkeypatch.setattr(queue._drained, "wait", tell_and_wait)
    coordinator.start()
    for _ in range(2):  # of the second device, so that the first is full when it wants more
        next(feed.on(1))
    assert waits.wait(WAIT_S)
    assert coordinator.stop(deadline_s=WAIT_S) is True
