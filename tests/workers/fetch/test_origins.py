"""A fetch function with cursors that has been called is put back also where a position has no
cursor of a worker: to where that worker stood at first."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from feeder.workers.fetch.calls import _known, begin_anew, origins_of
from small import WAIT_S, Seekable, ids, make

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


NOT_KNOWN: Any = {"match": r"worker \d of the fetch function may have been called before"}


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


class Slotted:
    """It cannot be referred to weakly."""

    __slots__ = ("cursor", "reader", "seek")

    def __init__(self, reader: Noted) -> None:
        self.reader, self.cursor, self.seek = reader, reader.cursor, reader.seek

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        return self.reader(worker_id, batch_size)


class Alone(Slotted):
    """And its cursors are no methods."""

    def __init__(self, reader: Noted) -> None:
        super().__init__(reader)
        self.cursor = reader.calls.__getitem__
        self.seek = reader.calls.__setitem__


class Equal(Noted):
    """Equal to anything, and not to be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class Given(Noted):
    """It was given its cursors."""

    def __init__(self, num_calls: int, rows: int) -> None:
        super().__init__(num_calls, rows)
        self.cursor = lambda worker_id: self.calls[worker_id]  # type: ignore[method-assign]


def with_cursors(reader: Noted) -> Any:
    def fetch(worker_id: int, batch_size: int) -> Any:
        return reader(worker_id, batch_size)

    fetch.cursor = reader.calls.__getitem__  # type: ignore[attr-defined]
    fetch.seek = reader.calls.__setitem__  # type: ignore[attr-defined]
    return fetch


def same(function: Any) -> Callable[[], Any]:
    return lambda: function


KINDS: dict[str, Callable[[], tuple[Noted, Callable[[], Any]]]] = {
    "method": lambda: (reader := seekable(), lambda: reader.__call__),
    "wrapper, made anew": lambda: (reader := seekable(), lambda: Slotted(reader)),
    "slots alone": lambda: (reader := seekable(), same(Alone(reader))),
    "function": lambda: (reader := seekable(), same(with_cursors(reader))),
    "equal to all": lambda: (reader := Equal(1000, 3), lambda: reader.__call__),
    "lambda": lambda: (reader := Given(1000, 3), lambda: reader.__call__),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_is_known_whatever_kind_it_is_of(kind: str) -> None:
    reader, function = KINDS[kind]()
    with make(function(), **AHEAD) as coordinator:
        got = take(coordinator, reader, 1)
        position = coordinator.snapshot()
    with make(function(), resume=position, **AHEAD) as coordinator:
        assert got + take(coordinator, reader, 19) == expected(20)
    for key, (refer, _) in list(_known.items()):
        if isinstance(refer(), Alone):
            del _known[key]


def test_who_does_not_resume_goes_on_where_the_function_stands() -> None:
    fetch = seekable()
    with make(fetch, **AHEAD) as coordinator:
        take(coordinator, fetch, 1)
        first = coordinator.snapshot()
    stands = dict(fetch.calls)
    with make(fetch, **AHEAD) as coordinator:
        rows = take(coordinator, fetch, 2)
        position = coordinator.snapshot()
    assert rows[:3] == [100 * stands[0] + 1 + i for i in range(3)]
    # It has two beginnings now, and neither position says which it means.
    for earlier in (first, position):
        with (
            make(fetch, resume=earlier, **AHEAD) as coordinator,
            pytest.raises(feeder.ResumeError, **NOT_KNOWN),
        ):
            list(coordinator["train"])


@pytest.mark.served
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
        pytest.raises(feeder.ResumeError, **NOT_KNOWN),
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
    assert origins == {0: None, 1: None, 5: b"c"}
    del fetch
    gc.collect()
    assert len(_known) == num


@pytest.mark.served
def test_an_init_fun_that_failed_is_called_for_the_next_consumer() -> None:
    calls = []

    def init(feed: feeder.Feed, coordinator: feeder.Coordinator) -> None:
        calls.append(feed.name)
        if len(calls) == 1:
            raise feeder.ConfigError("not yet")

    with serving(make(seekable(), init_fun=init, **WHOLE)) as server:
        with reading(server) as consumer, pytest.raises(feeder.FeedError, match="not yet"):
            next(consumer)
        assert calls == ["train"]
        with reading(server) as consumer:
            assert ids(islice(consumer, 20)) == expected(20)
    assert calls == ["train", "train"]


@pytest.mark.parametrize("retries", [0, 1])
def test_whatever_a_cursor_raises_reaches_the_user(retries: int) -> None:
    class Quitting(Noted):
        def cursor(self, worker_id: int) -> int:
            if retries or worker_id in self.calls:
                raise SystemExit("no cursor")
            return 0

    with (
        make(Quitting(5, 3), retries=retries) as coordinator,
        pytest.raises(feeder.FetchError, match="raised SystemExit: no cursor"),
    ):
        next(coordinator["train"])
