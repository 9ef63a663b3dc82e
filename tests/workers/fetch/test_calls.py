"""When the fetch function is called: what waits for what, and what is not called any more."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest

import feeder
from small import WAIT_S, Counted, ids, make


@pytest.mark.parametrize("pure", [False, True], ids=["fetch(worker_id)", "fetch(call)"])
def test_a_worker_whose_call_failed_is_not_called_again(pure: bool) -> None:
    calls: Counter[int] = Counter()
    again = threading.Event()

    def fail(worker_id: int) -> Any:
        calls[worker_id] += 1
        if calls[worker_id] > 1:
            again.set()
        raise OSError

    def ring(worker_id: int, batch_size: int) -> Any:
        return fail(worker_id)

    def by_index(call: feeder.Call) -> Any:
        return fail(call.worker_id)

    with make(by_index if pure else ring) as coordinator:
        with pytest.raises(feeder.FetchError):
            next(coordinator["train"])
        assert not again.wait(0.05)
    assert set(calls.values()) == {1}


def test_no_worker_is_called_for_an_epoch_before_all_have_ended_the_one_before() -> None:
    seen: list[tuple[int, int]] = []
    epochs: Counter[int] = Counter()
    lock = threading.Lock()

    class Noting(Counted):
        def __call__(self, worker_id: int, batch_size: int) -> Any:
            with lock:
                seen.append((epochs[worker_id], worker_id))
            try:
                return super().__call__(worker_id, batch_size)
            except StopIteration:
                with lock:
                    epochs[worker_id] += 1
                raise

    with make(Noting(3), epochs=20, num_worker_threads=3) as coordinator:
        list(coordinator["train"])
    assert [epoch for epoch, _ in seen] == sorted(epoch for epoch, _ in seen)
    assert Counter(seen) == {(epoch, worker): 4 for epoch in range(20) for worker in range(3)}


def test_a_worker_is_called_by_one_thread_at_a_time_whatever_their_number() -> None:
    busy: Counter[int] = Counter()
    overlaps = []

    class Looking(Counted):
        def __call__(self, worker_id: int, batch_size: int) -> Any:
            busy[worker_id] += 1
            overlaps.append(busy[worker_id])
            try:
                return super().__call__(worker_id, batch_size)
            finally:
                busy[worker_id] -= 1

    with make(Looking(100), num_worker_threads=2, num_threads=8) as coordinator:
        assert len(ids(coordinator["train"])) == 600
    assert set(overlaps) == {1}


def test_a_fetch_that_is_asked_in_vain_is_not_asked_at_full_speed() -> None:
    calls = [0]
    again, enough = threading.Event(), threading.Event()

    def fetch(worker_id: int, batch_size: int) -> Any:
        calls[0] += 1
        if calls[0] > 1:
            again.set()
        if calls[0] > 100:
            enough.set()

    with make(fetch, num_worker_threads=1):
        assert not enough.wait(0.2)
        assert again.wait(WAIT_S)


def test_the_fetch_function_is_not_called_before_the_start() -> None:
    def fetch(worker_id: int, batch_size: int) -> Any:
        raise AssertionError("called before the start")

    coordinator = make(fetch)
    coordinator.snapshot()
    coordinator.state_dict()
    assert coordinator.stop() is True


class Sides(NamedTuple):
    left: Any
    right: Any


def test_mappings_and_named_tuples_in_a_chunk_are_columns() -> None:
    def fetch(call: feeder.Call) -> Any:
        if call.index == 3:
            raise StopIteration
        i = np.full(2, call.index)
        return {"label": i, "image": {"both": Sides(i + 10, i + 20), "wide": i + 30}}

    names = ["image.both.left", "image.both.right", "image.wide", "label"]
    with make(fetch, names, 3, epochs=1) as feeds:
        batches = [feeder.sources.nested(batch) for batch in feeds["train"]]
    assert [batch["image"]["both"]["right"].tolist() for batch in batches] == [
        [20, 20, 21], [21, 22, 22],
    ]  # fmt: skip
    assert batches[1]["image"]["wide"].tolist() == [31, 32, 32]


def test_two_columns_of_one_name_in_a_chunk_are_told() -> None:
    def fetch(call: feeder.Call) -> Any:
        return {"image": {"left": np.ones(2)}, "image.left": np.ones(2)}

    feeds = make(fetch, ["image.left", "label"], 3)
    with feeds, pytest.raises(feeder.ChunkError, match=r"keys \['image', 'image.left'\]"):
        next(feeds["train"])
