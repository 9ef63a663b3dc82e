"""A fetch function with cursors that has been called is put back also where a position has no
cursor of a worker: to where that worker stood at first."""

from __future__ import annotations

import gc
import threading
from itertools import islice
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from unit.small import WAIT_S, Seekable, ids, make
from workers.origins import _known, begin_anew, origins_of

NUM_WORKERS = 8
WHOLE: dict[str, Any] = {"num_worker_threads": NUM_WORKERS, "num_threads": 1}
AHEAD = WHOLE | {"max_buffered_batches": 40}
"""All workers are called before a second batch is taken."""


class Noted(Seekable):
    """It says when all workers have been called."""

    def __init__(self, num_calls: int, rows: int) -> None:
        super().__init__(num_calls, rows)
        self.all_called = threading.Event()

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        chunk = super().__call__(worker_id, batch_size)
        if len(self.calls) == NUM_WORKERS:
            self.all_called.set()
        return chunk


class Forgetful(Noted):
    """It has no cursor of a worker that was not called."""

    def cursor(self, worker_id: int) -> int:
        if worker_id not in self.calls:
            raise KeyError(worker_id)
        return self.calls[worker_id]


def seekable() -> Noted:
    return Noted(1000, 3)


def expected(num: int) -> list[int]:
    """The rows of the first batches."""
    with make(seekable(), **WHOLE) as coordinator:
        return ids(islice(coordinator["train"], num))


def take(coordinator: feeder.Coordinator, fetch: Noted, num: int) -> list[int]:
    """Take batches of a feed whose fetch function is called ahead of them for all workers."""
    got = ids(islice(coordinator["train"], num))
    assert fetch.all_called.wait(WAIT_S)
    return got


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("form", ["snapshot", "token"])
def test_the_same_function_is_resumed_in_the_same_process(form: str, retries: int) -> None:
    fetch = seekable()
    with make(fetch, retries=retries, **AHEAD) as coordinator:
        got = take(coordinator, fetch, 1)
        position = coordinator.snapshot() if form == "snapshot" else coordinator.state_dict()
    for _ in range(2):
        resumed = make(fetch, retries=retries, **AHEAD)
        if isinstance(position, dict):
            resumed.load_state_dict(position)
        else:
            resumed = make(fetch, retries=retries, resume=position, **AHEAD)
        with resumed:
            assert got + take(resumed, fetch, 19) == expected(20)


def test_a_method_is_known_by_its_object() -> None:
    reader = seekable()
    with make(reader.__call__, **AHEAD) as coordinator:
        got = take(coordinator, reader, 1)
        position = coordinator.snapshot()
    with make(reader.__call__, resume=position, **AHEAD) as coordinator:
        assert got + take(coordinator, reader, 19) == expected(20)


def test_who_does_not_resume_goes_on_where_the_function_stands() -> None:
    fetch = seekable()
    with make(fetch, **AHEAD) as coordinator:
        take(coordinator, fetch, 1)
    stands = dict(fetch.calls)
    with make(fetch, **AHEAD) as coordinator:
        rows = take(coordinator, fetch, 2)
        position = coordinator.snapshot()
    assert rows[:3] == [100 * stands[0] + 1 + i for i in range(3)]
    with make(fetch, resume=position, **AHEAD) as coordinator:
        rows += take(coordinator, fetch, 18)
    assert rows[:24:3] == [10_000 * i + 100 * stands[i] + 1 for i in range(NUM_WORKERS)]


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("from_start", [False, True])
def test_a_served_function_goes_back_any_number_of_times(runs: bool, from_start: bool) -> None:
    """Later consumers begin where the feed begins, or where the first of them was."""
    whole, fetch, before = expected(30), seekable(), []
    coordinator = make(fetch, **AHEAD)
    if runs:
        coordinator.start()
        before = take(coordinator, fetch, 1)
    with serving(coordinator) as server:
        with reading(server) as consumer:
            got = before + ids(islice(consumer, 1))
            position = consumer.state_dict()
        for _ in range(2):
            with reading(server, resume=None if from_start else position) as consumer:
                rows = (before if from_start else got) + ids(islice(consumer, 20))
            assert rows == whole[: len(rows)]


def test_one_that_has_no_cursor_at_first_is_not_put_back_there() -> None:
    """Rows would be lost in silence."""
    fetch = Forgetful(1000, 3)
    with make(fetch, **AHEAD) as coordinator:
        got = take(coordinator, fetch, 1)
        position = coordinator.snapshot()
    with make(Forgetful(1000, 3), resume=position, **AHEAD) as coordinator:
        assert got + ids(islice(coordinator["train"], 19)) == expected(20)
    with (
        make(fetch, resume=position, **AHEAD) as coordinator,
        pytest.raises(feeder.ResumeError, match="worker 2 of the fetch function has been"),
    ):
        list(coordinator["train"])


def test_what_is_known_goes_with_the_function() -> None:
    gc.collect()
    fetch, num = seekable(), len(_known)
    origins = origins_of(fetch, fetch.cursor)
    origins.update({0: b"a", 1: b"b", 5: b"c"})
    assert origins_of(fetch, fetch.cursor) is origins
    assert origins_of(fetch.__call__, fetch.cursor) is origins
    assert origins_of(seekable(), seekable().cursor) == {}
    begin_anew(fetch, fetch.cursor, range(2))
    assert origins == {5: b"c"}
    del fetch
    gc.collect()
    assert len(_known) == num


def test_one_that_cannot_be_referred_to_weakly_is_asked_each_time() -> None:
    assert origins_of(3, None) == {}
