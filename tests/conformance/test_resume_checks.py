"""A resume makes the call of the last chunk again and compares, where that chunk was taken whole.

A fetch function that is not pure is then found out also where every chunk ends with its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import feeder

NUM_ROWS = 8
ROWS_PER_CALL = [8, 16, 4, 2]
"""Chunks that are a batch, two batches, a half and a quarter of one."""


class Counting:
    """A fetch function that goes on where its last call ended, whatever the index."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._next = 0

    def __call__(self, call: feeder.Call) -> list[Any]:
        if call.index == 100:
            raise StopIteration
        self._next += self._rows
        return [np.arange(self._next - self._rows, self._next)]


class Pure:
    """The same rows, by the index alone."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __call__(self, call: feeder.Call) -> list[Any]:
        if call.index == 100:
            raise StopIteration
        return [np.arange(call.index * self._rows, (call.index + 1) * self._rows)]


def make(fetch: Callable[..., Any], **options: Any) -> feeder.Coordinator:
    options = {"coordinator": feeder.Coordinator(), "num_worker_threads": 1, **options}
    return feeder.init_data_input_workers(["x"], fetch, NUM_ROWS, **options)


def token_after(coordinator: feeder.Coordinator, num: int) -> bytes:
    with coordinator:
        feed = coordinator["train"]
        batch = [next(feed) for _ in range(num)][-1]
        return batch.cut.token()


@pytest.mark.parametrize("rows", ROWS_PER_CALL)
@pytest.mark.parametrize("order", ["ticket", "arrival"])
def test_a_function_that_counts_its_calls_is_found_out(rows: int, order: str) -> None:
    token = token_after(make(Counting(rows), order=order), 6)
    with (
        make(Counting(rows), resume=token, order=order) as coordinator,
        pytest.raises(feeder.ResumeError, match=r"not deterministic.*other rows"),
    ):
        next(coordinator["train"])


def test_so_it_is_from_a_state_dict() -> None:
    with make(Counting(8)) as coordinator:
        for step, _batch in enumerate(coordinator["train"]):
            if step == 4:
                state, snapshot = coordinator.state_dict(), coordinator.snapshot()
                break
    with (
        make(Counting(8), resume=state) as coordinator,
        pytest.raises(feeder.ResumeError, match="worker 0, call 4: other rows"),
    ):
        next(coordinator["train"])
    # A snapshot holds what is left over, so no call is made again.
    with make(Counting(8), resume=snapshot) as coordinator:
        assert next(coordinator["train"]).step == 5


@pytest.mark.parametrize("plane", ["shared", "frames"])
def test_so_it_is_by_a_consumer(plane: Any) -> None:
    with (
        feeder.serve(lambda: make(Counting(8)), "tcp://127.0.0.1:0") as server,
        feeder.connect(server.addresses[0], plane=plane) as consumer,
    ):
        batches = [next(consumer) for _ in range(5)]  # So many kept are copied.
        state = consumer.state_dict()
        assert all(batch.cut.checked is not None for batch in batches)
    with (
        make(Counting(8), resume=state) as coordinator,
        pytest.raises(feeder.ResumeError, match="worker 0, call 4: other rows"),
    ):
        next(coordinator["train"])


@pytest.mark.parametrize("rows", ROWS_PER_CALL)
@pytest.mark.parametrize("num", [1, 2, 5])
def test_a_pure_function_goes_on(rows: int, num: int) -> None:
    token = token_after(make(Pure(rows)), num)
    with make(Pure(rows), resume=token) as coordinator:
        batch = next(coordinator["train"])
        assert batch["x"].tolist() == list(range(8 * num, 8 * num + 8))
        assert batch.step == num


def test_a_function_that_gives_other_sizes_is_found_out() -> None:
    token = token_after(make(Pure(8)), 3)
    with (
        make(Pure(4), resume=token) as coordinator,
        pytest.raises(feeder.ResumeError, match="8 rows then, 4 now"),
    ):
        next(coordinator["train"])


def test_nothing_is_compared_where_the_rows_may_have_changed_or_are_gone() -> None:
    with make(Pure(8), writable=True) as coordinator:
        batch = next(coordinator["train"])
        batch["x"][:] += 1
        assert batch.cut.checked is None
    with make(Pure(8)) as coordinator:
        batch = next(coordinator["train"])
        place = batch.place
        del batch
        assert place.cut().checked is None
    with make(Pure(8), repeatable=False) as coordinator:
        batch = next(coordinator["train"])
        assert batch.cut.checked is None


def test_where_two_cuts_name_one_place_they_are_equal_whatever_is_known_of_it() -> None:
    with make(Pure(8)) as coordinator:
        batch = next(coordinator["train"])
        known, place = batch.cut, batch.place
        del batch
        assert known == place.cut()
        assert known.checked != place.cut().checked


def test_a_token_of_eight_workers_is_small() -> None:
    token = token_after(make(Pure(8), num_worker_threads=8), 5)
    assert len(token) <= 300


def test_a_token_says_whether_an_older_feeder_can_read_it() -> None:
    """Version 2 has a last chunk that is taken whole; version 1 is read as ever."""
    with make(Pure(8)) as coordinator:
        batch = next(coordinator["train"])
        cut = batch.cut
    assert cut.token()[2] == 2
    with make(Pure(3)) as coordinator:
        batch = next(coordinator["train"])
        assert batch.cut.leftover is not None
        assert batch.cut.token()[2] == 1
