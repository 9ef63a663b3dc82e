"""For each keyword of `init_data_input_workers` what it does, as a function that sees it done.

A case is given the function to call, so that the tests can also give it one that ignores the
keyword, and see that the case notices.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import feeder
from small import WAIT_S, Counted, Pure, chunk, ids

Init = Callable[..., feeder.Coordinator]
CASES: dict[str, Callable[[Init], None]] = {}
"""The cases by keyword; what the keyword does apart from its name is in the case's docstring."""


def case(function: Callable[[Init], None]) -> Callable[[Init], None]:
    """Register the case of the keyword that the function is named after."""
    CASES[function.__name__] = function
    return function


def own(init: Init, fetch: Callable[..., Any], **settings: Any) -> feeder.Coordinator:
    """Return a new coordinator with one feed of four rows per batch."""
    return init(
        **{
            "input_blob_names": ["id"],
            "fetch_fun": fetch,
            "batch_size": 4,
            "coordinator": feeder.Coordinator(),
            "timeout": WAIT_S,
            **settings,
        }
    )


def drain(init: Init, fetch: Callable[..., Any], **settings: Any) -> list[feeder.Batch]:
    """Return all batches of such a feed."""
    with own(init, fetch, **settings) as coordinator:
        return list(coordinator["train"])


@case
def input_blob_names(init: Init) -> None:
    """Names the columns, in the order in which the fetch function returns them."""

    def fetch(call: feeder.Call) -> Any:
        if call.index:
            raise StopIteration
        return np.zeros((4, 3)), np.ones(4)

    (batch,) = drain(init, fetch, input_blob_names=["image", "label"])
    assert list(batch) == ["image", "label"]
    assert (batch["image"].shape, batch["label"].shape) == ((4, 3), (4,))


@case
def fetch_fun(init: Init) -> None:
    """Is where the rows come from."""
    assert ids(drain(init, Pure(2))) == [1, 2, 3, 101, 102, 103]


@case
def batch_size(init: Init) -> None:
    """Is the number of rows of a batch, and the hint that the fetch function is given."""
    hints = set()

    def fetch(worker_id: int, hint: int) -> Any:
        hints.add(hint)
        return whole(worker_id, hint)

    whole = Counted(5, 6)
    assert [len(batch["id"]) for batch in drain(init, fetch, batch_size=7)] == [7] * 8 + [4]
    assert hints == {7}


@case
def num_worker_threads(init: Init) -> None:
    """Is the number of worker ids, of which each has its turn."""
    got = ids(drain(init, Counted(1, 2), num_worker_threads=3))
    assert got == [1, 2, 10_001, 10_002, 20_001, 20_002]


@case
def input_source_name(init: Init) -> None:
    """Is the name of the feed."""
    coordinator = own(init, Pure(), input_source_name="val")
    assert list(coordinator) == ["val"]
    assert coordinator["val"].name == "val"


def most_buffered(init: Init, limit: int, fetch_rows: Callable[[int], Any], **bound: Any) -> None:
    """See that a feed that nobody takes from does not fetch more than `limit` rows, and that all
    rows come in the end."""
    exceeded = threading.Event()
    num_rows = 0

    def fetch(worker_id: int, batch_size: int) -> Any:
        nonlocal num_rows
        if num_rows >= 40 * 4:
            raise StopIteration
        num_rows += 4
        if num_rows > limit:
            exceeded.set()
        return fetch_rows(num_rows)

    with own(init, fetch, num_worker_threads=1, **bound) as coordinator:
        pause, until = threading.Event(), time.monotonic() + WAIT_S
        while not (exceeded.is_set() or coordinator["train"].stats()["fetchers_wait_s"]):
            assert time.monotonic() < until
            pause.wait(0.001)
        assert not exceeded.wait(0.3)
        assert sum(len(batch["id"]) for batch in coordinator["train"]) == 160
    assert exceeded.is_set()


@case
def max_buffered_batches(init: Init) -> None:
    """Bounds the rows between fetch function and user, but for one chunk list per worker."""
    most_buffered(init, 4 * 4, lambda first: (np.arange(4) + first,), max_buffered_batches=2)


@case
def max_buffered_bytes(init: Init) -> None:
    """Bounds their bytes, whichever is reached first."""
    row = np.zeros((4, 100_000), np.uint8)
    most_buffered(init, 4 * 4, lambda _: (row.copy(),), max_buffered_bytes=800_000)


@case
def init_fun(init: Init) -> None:
    """Is called once with feed and coordinator, before the fetch function."""
    calls: list[Any] = []

    def fetch(worker_id: int, batch_size: int) -> Any:
        calls.append("fetch")
        raise StopIteration

    def begin(*args: Any) -> None:
        calls.append(args)

    with own(init, fetch, init_fun=begin) as coordinator:
        assert list(coordinator["train"]) == []
    assert calls[0] == (coordinator["train"], coordinator)
    assert calls.count("fetch") == len(calls) - 1 == 2


class Log:
    """An external logger."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, stats: dict[str, Any]) -> None:
        self.lines.append(stats)


@case
def external_loggers(init: Init) -> None:
    """Are given the statistics at the stop."""
    logs = [Log(), Log()]
    drain(init, Pure(4), external_loggers=logs)
    for log in logs:
        (line,) = log.lines
        assert line["input_source_name"] == "train"
        assert (line["fetch_calls"], line["fetch_rows"], line["batches"], line["rows"]) == (
            4, 12, 3, 12,
        )  # fmt: skip


@case
def dont_rebatch(init: Init) -> None:
    """Makes each chunk with rows a batch."""
    sizes = [3, 0, 9, 1]

    def fetch(call: feeder.Call) -> Any:
        if call.index == len(sizes):
            raise StopIteration
        return chunk(0, call.index, sizes[call.index])

    got = drain(init, fetch, dont_rebatch=True)
    assert [len(batch["id"]) for batch in got] == [3, 9, 1]
    assert ids(got) == [1, 2, 3, *range(201, 210), 301]


@case
def batch_columns(init: Init) -> None:
    """Is the axis of each column that is rows."""

    def fetch(call: feeder.Call) -> Any:
        if call.index == 2:
            raise StopIteration
        numbers = chunk(0, call.index, 3)[0]
        return np.stack([numbers, -numbers]), numbers

    names = ["sequence", "number"]
    got = drain(init, fetch, input_blob_names=names, batch_columns=[1, 0])
    assert [batch["sequence"].shape for batch in got] == [(2, 4), (2, 2)]
    for batch in got:
        assert np.array_equal(batch["sequence"][0], batch["number"])
        assert np.array_equal(batch["sequence"][1], -batch["number"])
    assert ids(got, "number") == [1, 2, 3, 101, 102, 103]


@case
def timeout(init: Init) -> None:
    """Is how long the fetch function may give nothing."""
    calls = [0]

    def fetch(worker_id: int, batch_size: int) -> Any:
        calls[0] += 1
        return None if calls[0] < 12 else chunk(0, 0, 4)

    told = r"^worker 0, call 0: no chunk for 0\.02 s; "
    with (
        own(init, fetch, timeout=0.02, num_worker_threads=1) as coordinator,
        pytest.raises(feeder.FetchTimeout, match=told),
    ):
        next(coordinator["train"])
