"""The tests of Caffe2's data_workers and parallel_workers, asked of this feeder.

There the values were zero or the same in every row, which hid what was lost; here no two rows are
equal and none is zero.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest

from feeder import Coordinator, init_data_input_workers

WAIT_S = 10.0
STEP_S = 5.0


def start_rows(worker_id: int, call: int) -> int:
    """Return the first id of a call; calls give fewer than 1,000 rows."""
    return 1 + 1000 * (call + 10_000 * worker_id)


NEARLY_FULL = 2 * 32
"""Rows that are fetched under a bound of three batches: those of a chunk that is kept count too."""


class Counted:
    """Counts the calls of each worker, and says when so many rows have been fetched."""

    def __init__(self, make: Callable[[int, int], Any], *, announce: int = 0) -> None:
        self.make = make
        self.calls: dict[int, int] = {}
        self.rows = 0
        self.announced = threading.Event()
        self._announce = announce
        self._lock = threading.Lock()

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        call = self.calls.get(worker_id, 0)
        self.calls[worker_id] = call + 1
        chunk = self.make(worker_id, call)
        with self._lock:
            self.rows += len(chunk[-1])
            if self.rows >= self._announce:
                self.announced.set()
        return chunk


def make_labelled(worker_id: int, call: int) -> list[np.ndarray]:
    """Return 1 to 64 rows, each the label three times over, and the labels."""
    dice = np.random.Generator(np.random.Philox(key=[worker_id, call]))
    first = start_rows(worker_id, call)
    label = np.arange(first, first + dice.integers(1, 65), dtype=np.int32)
    return [np.repeat(label[:, None], 3, axis=1).astype(np.float64), label]


def labels_in_turn(workers: int) -> Iterator[int]:
    """Yield the labels of one call of each worker in turn."""
    for call in count():
        for worker_id in range(workers):
            yield from make_labelled(worker_id, call)[1].tolist()


def make_sequences(worker_id: int, call: int) -> list[np.ndarray]:
    """Return 7 sequences of 20 steps; rows lie along the second axis of the first two columns."""
    first = start_rows(worker_id, call)
    label = np.arange(first, first + 7, dtype=np.int32)
    steps = label[None, :] * 100 + np.arange(20)[:, None]
    return [np.repeat(steps[:, :, None], 33, axis=2).astype(np.float64), steps, label]


def add_source(
    coordinator: Coordinator, name: str, fetch: Callable[..., Any], **settings: Any
) -> None:
    settings = {"batch_size": 32, "epochs": None, "timeout": STEP_S} | settings
    init_data_input_workers(
        ["data", "label"], fetch, input_source_name=name, coordinator=coordinator, **settings
    )


def feeder_threads(name: str = "") -> list[str]:
    """Return the names of the threads of a source, or of all."""
    names = (thread.name for thread in threading.enumerate())
    return [thread for thread in names if thread.startswith(f"feeder {name}")]


def test_exact_batches_and_stop_by_name() -> None:
    coordinator = Coordinator()
    add_source(coordinator, "other", Counted(make_labelled))
    ids_before = len(coordinator.get_worker_ids())
    add_source(coordinator, "unittest", Counted(make_labelled), num_worker_threads=2)
    assert len(coordinator.get_worker_ids()) == ids_before + 2
    labels: list[int] = []
    with coordinator:
        for _ in range(500):
            began = time.monotonic()
            batch = next(coordinator["unittest"])
            assert time.monotonic() - began <= STEP_S
            assert batch["data"].shape == (32, 3) and batch["label"].shape == (32,)
            assert (batch["data"] == batch["label"][:, None]).all()
            labels += batch["label"].tolist()
        assert labels == list(islice(labels_in_turn(workers=2), 500 * 32))
        others = next(coordinator["other"])["label"].tolist()

        assert coordinator.stop("unittest") is True
        assert list(coordinator) == ["other"]
        assert not feeder_threads("unittest")
        assert feeder_threads("other")
        for _ in range(50):
            others += next(coordinator["other"])["label"].tolist()
    assert others == list(islice(labels_in_turn(workers=2), 51 * 32))


def stop_while_everything_is_full(coordinator: Coordinator, fetch: Counted) -> None:
    """See that a stop is prompt while the fetchers wait for room and nobody takes a batch."""
    assert fetch.announced.wait(WAIT_S)
    began = time.monotonic()
    assert coordinator.stop() is True
    assert time.monotonic() - began < 4.0  # and not at the deadline, 5 s
    assert not feeder_threads()


def test_graceful_stop_with_rows_along_other_axes() -> None:
    fetch = Counted(make_sequences, announce=NEARLY_FULL)
    coordinator = init_data_input_workers(
        ["data", "steps", "label"], fetch, 32, 2, "unittest", 3,
        batch_columns=[1, 1, 0], epochs=None, coordinator=Coordinator(),
    )  # fmt: skip
    coordinator.start()
    assert fetch.announced.wait(WAIT_S)
    for _ in range(2):
        batch = next(coordinator["unittest"])
        assert [array.shape for array in batch.arrays()] == [(20, 32, 33), (20, 32), (32,)]
        assert (batch["steps"] == batch["label"] * 100 + np.arange(20)[:, None]).all()
        assert (batch["data"] == batch["steps"][:, :, None]).all()
        assert len(set(batch["label"].tolist())) == 32
    stop_while_everything_is_full(coordinator, fetch)


@pytest.mark.parametrize("take", (0, 2))
def test_early_graceful_stop(take: int) -> None:
    fetch = Counted(make_labelled, announce=NEARLY_FULL)
    coordinator = Coordinator()
    add_source(coordinator, "unittest", fetch, max_buffered_batches=3)
    coordinator.start()
    for _ in range(take):
        next(coordinator["unittest"])
    stop_while_everything_is_full(coordinator, fetch)


def test_input_order_of_two_sources_with_the_same_names() -> None:
    def counting_from(first: int) -> Counted:
        def make_stamped(worker_id: int, call: int) -> list[np.ndarray]:
            columns = [np.ones((32, 3)), np.ones((32, 2, 2)), np.ones(32, np.int64)]
            for column in columns:
                column.flat[0] = first + call
            return columns

        return Counted(make_stamped, announce=900 * 32)

    coordinator = Coordinator()
    sources = {"train": counting_from(1), "val": counting_from(1_000_001)}
    for name, fetch in sources.items():
        init_data_input_workers(
            ["data", "mask", "label"], fetch, 32, 1, name, 1000, dont_rebatch=True, epochs=None,
            coordinator=coordinator,
        )  # fmt: skip
    with coordinator:
        assert all(fetch.announced.wait(WAIT_S) for fetch in sources.values())
        for turn in range(10):
            for name, first in (("train", 1), ("val", 1_000_001)):
                stamps = [column.flat[0] for column in next(coordinator[name]).arrays()]
                assert stamps == [first + turn] * 3


def test_workers_run_under_their_ids_alone() -> None:
    def make_own(worker_id: int, call: int) -> list[np.ndarray]:
        return [np.full(1, worker_id + 1), np.full(1, start_rows(worker_id, call))]

    coordinator = Coordinator()
    add_source(coordinator, "unittest", Counted(make_own), num_worker_threads=2, batch_size=1)
    coordinator.start()
    taken = [next(coordinator["unittest"]) for _ in range(10)]
    assert [int(batch["data"][0]) - 1 for batch in taken] == [0, 1] * 5
    assert coordinator.stop() is True


def test_init_fun_runs_before_any_worker() -> None:
    state = {"value": 7, "thread": None}

    def init(feed: Any, coordinator: Any) -> None:
        assert coordinator["unittest"] is feed
        state.update(value=42, thread=threading.current_thread())

    def make_state(worker_id: int, call: int) -> list[np.ndarray]:
        return [np.full(1, state["value"]), np.full(1, start_rows(worker_id, call))]

    coordinator = Coordinator()
    add_source(coordinator, "unittest", Counted(make_state), init_fun=init, batch_size=1)
    assert state["value"] == 7
    with coordinator:
        assert [int(next(coordinator["unittest"])["data"][0]) for _ in range(10)] == [42] * 10
    assert state["thread"] is threading.current_thread()


def test_what_workers_use_may_be_closed_after_the_stop() -> None:
    """There `shutdown_fun` ran at the stop; here it is what follows the with block."""
    closed = threading.Event()
    used_after = []

    def make_checked(worker_id: int, call: int) -> list[np.ndarray]:
        if closed.is_set():
            used_after.append(worker_id)
        return make_labelled(worker_id, call)

    fetch = Counted(make_checked)
    coordinator = Coordinator()
    add_source(coordinator, "unittest", fetch, num_worker_threads=8)
    with coordinator:
        next(coordinator["unittest"])
    closed.set()
    calls = dict(fetch.calls)
    assert not feeder_threads()
    assert fetch.calls == calls and not used_after
