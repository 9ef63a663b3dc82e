"""What a fetch function does with the place of its rows, and what is done about it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeder import Call, Coordinator
from feeder.service.server import run
from feeder.workers.fetch.queue import Queue
from small import WAIT_S, Calls
from watching import around

pytestmark = pytest.mark.served

END = 20
"""Calls of an epoch."""


def make(fetch: Callable[[Call], Any], **settings: Any) -> Coordinator:
    plain: dict[str, Any] = {
        "batch_size": 4, "rows_per_call": 2, "num_threads": 1, "timeout": 10.0,
        "coordinator": Coordinator(),
    }  # fmt: skip
    names = settings.pop("input_blob_names", ["x"])
    return feeder.init_data_input_workers(names, fetch, **(plain | settings))


@contextmanager
def in_process(fetch: Callable[[Call], Any], **settings: Any) -> Iterator[Any]:
    with make(fetch, **settings) as coordinator:
        yield coordinator["train"]


@contextmanager
def over_service(fetch: Callable[[Call], Any], **settings: Any) -> Iterator[Any]:
    with serving(make(fetch, **settings)) as server, reading(server) as consumer:
        yield consumer


FEEDS = {"in process": in_process, "served": over_service}
both = pytest.mark.parametrize("running", FEEDS.values(), ids=FEEDS)
threads = pytest.mark.parametrize("num_threads", (1, 3))


def rows_of(call: Call, num: int = 2) -> np.ndarray:
    if call.index >= END:
        raise StopIteration
    return np.arange(num) + 10 * call.index + 1000 * call.epoch + 1


def give(call: Call) -> Any:
    array = call.empty((2,), np.int64)
    array[:] = rows_of(call)
    return (array,)


def all_of(running: Any, fetch: Callable[[Call], Any], **settings: Any) -> list[int]:
    with running(fetch, **settings) as feed:
        return [row for batch in feed for row in batch["x"].tolist()]


WHOLE = [10 * index + 1 + row for index in range(END) for row in range(2)]


@both
def test_a_batch_is_where_its_calls_wrote(running: Any) -> None:
    places: dict[int, tuple[int, np.ndarray | None]] = {}

    def fetch(call: Call) -> Any:
        out = call.out
        rows = rows_of(call)
        if out is None:
            return (rows,)
        out["x"][:] = rows
        places[call.index] = (out["x"].ctypes.data, None)
        return out

    seen, num = [], 0
    with running(fetch, max_buffered_batches=2) as feed:
        for batch in feed:
            seen += batch["x"].tolist()
            first = batch["x"].ctypes.data
            if running is in_process and 2 * batch.step in places:
                assert [places[2 * batch.step + i][0] - first for i in (0, 1)] == [0, 16]
                num += 1
    assert seen == WHOLE
    # Only what is called before the first batch is made has no place to write to.
    assert len(places) >= END // 2
    assert num or running is over_service


@both
@threads
@pytest.mark.parametrize("num", (0, 1, 3, 4))
def test_a_call_that_gives_another_number_of_rows_is_named(
    running: Any, num_threads: int, num: int
) -> None:
    def fetch(call: Call) -> Any:
        return (rows_of(call, num if call.index == 7 else 2),)

    got: list[int] = []
    with (
        running(fetch, num_threads=num_threads) as feed,
        pytest.raises(feeder.ChunkError, match=rf"call 7: chunk has {num} rows, expected 2") as e,
    ):
        for batch in feed:
            got += batch["x"].tolist()
    assert got == WHOLE[:12]
    assert e.value.call == 7


@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("counts", [[3, 4], [4, 4, 3, 4], [3, 0], [4, 1, 1]])
def test_only_the_last_call_of_an_epoch_gives_fewer_rows(
    counts: list[int], num_threads: int
) -> None:
    """Also if each call is made only when its rows are asked for, and so merged by itself."""

    def fetch(call: Call) -> Any:
        if call.index >= len(counts):
            raise StopIteration
        return [np.full(counts[call.index], call.index)]

    short = next(i for i, num in enumerate(counts) if num < 4)
    with (
        make(fetch, rows_per_call=4, num_threads=num_threads) as coordinator,
        pytest.raises(feeder.ChunkError, match=rf"call {short}: chunk has {counts[short]} rows"),
    ):
        list(coordinator["train"])


@both
def test_who_keeps_the_arrays_cannot_write_to_a_batch(running: Any) -> None:
    kept: list[Any] = []

    def fetch(call: Call) -> Any:
        rows = rows_of(call)
        if kept and kept[-1] is not None:
            with pytest.raises(ValueError, match="read-only"):
                kept[-1]["x"][:] = -1
        kept.append(call.out)
        if call.out is None:
            return (rows,)
        call.out["x"][:] = rows
        return call.out

    assert all_of(running, fetch, max_buffered_batches=2) == WHOLE


def test_who_keeps_the_arrays_goes_on_seeing_the_same_rows() -> None:
    """In process a slot is written again only when nobody refers to it."""
    kept: dict[int, np.ndarray] = {}

    def fetch(call: Call) -> Any:
        (array,) = chunk = give(call)
        kept[call.index] = array
        return chunk

    assert all_of(in_process, fetch, max_buffered_batches=2, epochs=1) == WHOLE
    assert [row for index in sorted(kept) for row in kept[index].tolist()] == WHOLE


def test_a_server_says_so_where_the_arrays_of_all_calls_are_kept() -> None:
    kept = []

    def fetch(call: Call) -> Any:
        array = call.empty((1, 500_000), np.int64)
        array[:] = 1
        kept.append(array)
        return (array,)

    with (
        over_service(Calls(100, fetch), rows_per_call=1, batch_size=1) as feed,
        pytest.raises(feeder.FetchError, match=r"keeps what call\.out or call\.empty gave it"),
    ):
        for batch in feed:
            assert batch["x"].all()


Way = Callable[[Call, np.ndarray, np.ndarray], Any]


def swapped(call: Call, x: np.ndarray, y: np.ndarray) -> Any:
    """The arrays of one column hold the rows of the other."""
    out = call.out
    if out is None:
        return x, y
    out["x"][:], out["y"][:] = y, x
    return {"x": out["y"], "y": out["x"]}


def one_twice(call: Call, x: np.ndarray, y: np.ndarray) -> Any:
    """One array is written to the place, and copied from there as well."""
    first, second = call.empty((2,), np.int64), call.empty((2,), np.int64)
    third = call.empty((2,), np.int64)  # No column is left: other memory.
    first[:], second[:], third[:] = x, -1, y
    return first, third


def of_the_call_before(call: Call, x: np.ndarray, y: np.ndarray) -> Any:
    """Returns what lies in the place of the call before, which is of the same batch."""
    before = last.pop() if last else None
    out = call.out
    if out is None:
        return x, y
    out["x"][:], out["y"][:] = x, y
    last.append(dict(out))
    if before is None or call.index % 2 == 0:
        return out
    out["x"][:] = -1
    return {"x": before["x"] + 10, "y": out["y"]}


last: list[Any] = []


def as_a_subclass(call: Call, x: np.ndarray, y: np.ndarray) -> Any:
    """A view of the place of another class."""
    array = call.empty((2,), np.int64)
    array[:] = x
    return array.view(Rows), y


class Rows(np.ndarray):
    pass


def in_other_bytes(call: Call, x: np.ndarray, y: np.ndarray) -> Any:
    """The place holds other bytes, in an order that is not the machine's."""
    out = call.out
    if out is None:
        return x, y
    out["x"][:] = x.byteswap()
    out["y"][:] = y
    return {"x": out["x"].view(">i8"), "y": out["y"]}


def read_as_bytes(call: Call, x: np.ndarray, y: np.ndarray) -> Any:
    """What a file holds, in an order that is not the machine's."""
    array = call.empty((2,), ">i8")
    array.data.cast("B")[:] = x.astype(">i8").tobytes()
    return array, y


WAYS = (swapped, one_twice, of_the_call_before, as_a_subclass, in_other_bytes, read_as_bytes)


@both
@pytest.mark.parametrize("batch_size", (2, 4))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whatever_is_returned_is_the_batch(running: Any, way: Way, batch_size: int) -> None:
    def fetch(call: Call) -> Any:
        rows = rows_of(call)
        return way(call, rows, -rows)

    last.clear()
    with running(fetch, input_blob_names=["x", "y"], batch_size=batch_size) as feed:
        batches = [(batch["x"].tolist(), batch["y"].tolist()) for batch in feed]
    last.clear()
    assert [row for x, _ in batches for row in x] == WHOLE
    assert [-row for _, y in batches for row in y] == WHOLE


@pytest.mark.parametrize(
    ("settings", "match"),
    (
        ({"rows_per_call": 3}, "expected a divisor of the 4 rows of a batch"),
        ({"rows_per_call": 8}, "expected a divisor of the 4 rows of a batch"),
        ({"rows_per_call": 0}, "expected a whole number >= 1"),
        ({"rows_per_call": True}, "expected a whole number >= 1"),
        ({"order": "arrival"}, "leave it out, or order"),
        ({"last_batch": "carry"}, "leave it out, or last_batch"),
        ({"dont_rebatch": True}, "leave it out, or dont_rebatch"),
        ({"batch_size": None, "global_batch_size": 6, "devices": 2}, "a divisor of the 3 rows"),
        ({"fetch_fun": lambda worker_id, batch_size: None}, r"only for fetch\(call\)"),
    ),
)
def test_where_the_place_of_rows_is_not_known_it_is_refused(
    settings: dict[str, Any], match: str
) -> None:
    settings = {"fetch": settings.pop("fetch_fun", give), **settings}
    with pytest.raises(feeder.ConfigError, match=match):
        make(**settings)


def test_a_source_that_leaves_records_out_is_refused() -> None:
    source = feeder.sources.records([1, 2, 3], on_error="skip")
    with pytest.raises(feeder.ConfigError, match="leaves out defective records"):
        make(source)


def test_the_queues_of_a_server_have_to_share_the_rows_evenly() -> None:
    coordinator = make(give, batch_size=None, global_batch_size=12, rows_per_call=4)
    with pytest.raises(feeder.ConfigError, match="a divisor of the 6 rows"):
        feeder.serve(coordinator, "tcp://127.0.0.1:0", queues=2)


@both
def test_what_calls_beyond_the_end_write_is_in_no_batch(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch of an epoch is filled up when the calls that have places in it are over."""
    begun, waits = threading.Barrier(3), threading.Event()

    def fetch(call: Call) -> Any:
        if call.index < 5:
            return give(call)
        if call.index < 8:
            begun.wait(WAIT_S)
        if call.index in (6, 7):
            assert waits.wait(WAIT_S)
            call.empty((2,), np.int64)[:] = -1
        raise StopIteration

    around(monkeypatch, Queue, "wait_for_calls", before=lambda *_: waits.set())
    rows = all_of(running, fetch, batch_size=8, last_batch="pad", num_threads=3)
    assert rows == [*WHOLE[:10], *[WHOLE[9]] * 6]


def test_a_call_that_does_not_return_writes_into_no_batch_of_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that does not end is given up, and so is the memory that its calls have."""
    monkeypatch.setattr(run, "_JOIN_S", 0.2)
    waits, goes_on, wrote = threading.Event(), threading.Event(), threading.Event()

    def fetch(call: Call) -> Any:
        array = call.empty((2,), np.int64)
        array[:] = rows_of(call)
        if call.index == 10 and not waits.is_set():
            assert call.out is not None
            waits.set()
            assert goes_on.wait(20)
            array[:] = -1
            wrote.set()
        return (array,)

    # Its server says so when it is closed, too.
    with (
        pytest.raises(feeder.StuckWorkerError),
        serving(make(fetch, max_buffered_batches=2)) as server,
    ):
        with reading(server, hold=50) as consumer:
            assert [row for _ in range(5) for row in next(consumer)["x"].tolist()] == WHOLE[:20]
            assert waits.wait(10)
        with pytest.raises(feeder.FeedError), reading(server, hold=50) as consumer:
            next(consumer)
        with reading(server, hold=50) as consumer:
            batches = list(consumer)
            goes_on.set()
            assert wrote.wait(10)
            assert [row for batch in batches for row in batch["x"].tolist()] == WHOLE
            del batches
