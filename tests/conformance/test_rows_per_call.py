"""With `rows_per_call` the stream is the same, wherever a fetch function writes its rows."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import numpy as np
import pytest

from feeder import Call
from feeds import assert_same, deal, drain, expected, running
from fetches import make_rows, shaky
from parts import some

THREADS = (1, 2, 8)
DEVICES = (1, 3)
AXES = {"id": 0, "vector": 1, "label": 0}
"""Of each column the axis that is rows: one has rows that do not lie together."""
BAD = 7
"""What is written before the rows are."""

Columns = dict[str, np.ndarray]
Way = Callable[[Call, Columns], Any]


def into_out(call: Call, columns: Columns) -> Any:
    """Write to what there is of `call.out`, and return it."""
    out = call.out
    if out is None:
        return columns
    rows = len(columns["id"])
    shown = {name: np.moveaxis(out[name], AXES[name], 0)[:rows] for name in columns}
    for name, array in columns.items():
        shown[name][...] = BAD
        shown[name][...] = np.moveaxis(array, AXES[name], 0)
    if rows == len(out["id"]):
        return out
    return {name: np.moveaxis(shown[name], 0, AXES[name]) for name in columns}


def into_empty(call: Call, columns: Columns) -> Any:
    arrays = {name: call.empty(a.shape, a.dtype) for name, a in columns.items()}
    for name, array in columns.items():
        arrays[name][...] = array
    return tuple(arrays.values())


def elsewhere(call: Call, columns: Columns) -> Any:
    return list(columns.values())


def some_columns(call: Call, columns: Columns) -> Any:
    """Write one column to its place, and leave nonsense in those of others."""
    if call.out is not None:
        for array in call.out.values():
            array[...] = BAD
    label = call.empty(columns["label"].shape, np.uint16)
    label[:] = columns["label"]
    return {**columns, "label": label}


def now_and_then(call: Call, columns: Columns) -> Any:
    return (into_out, elsewhere, into_empty, some_columns)[call.index % 4](call, columns)


WAYS: dict[str, Way] = {
    "out": into_out, "empty": into_empty, "elsewhere": elsewhere, "some": some_columns,
    "mixed": now_and_then,
}  # fmt: skip


class Even:
    """Gives `rows` rows in each call, and perhaps fewer in the last call of an epoch."""

    def __init__(self, way: Way, rows: int, pause: Callable[[], object] = bool) -> None:
        self.way, self.rows, self.pause = way, rows, pause

    def __call__(self, call: Call) -> Any:
        self.pause()
        num = 41 + 4 * call.epoch
        rows = min(self.rows, num - call.index * self.rows)
        if rows <= 0:
            # Who looks beyond the end may have written there already.
            for array in (call.out or {}).values():
                array[...] = BAD
            raise StopIteration
        columns = make_rows(0, call.epoch, call.index, rows)
        columns["vector"] += call.rng.random((rows, 3), dtype=np.float32)
        columns["vector"] = np.ascontiguousarray(columns["vector"].T)
        return self.way(call, columns)


def plain(rows: int, **settings: Any) -> Any:
    """The stream of a function that writes nowhere, without the setting."""
    return drain(Even(elsewhere, rows), batch_columns=[0, 1, 0], **settings)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", (1, 2, 4, 8))
@pytest.mark.parametrize("last_batch", ("keep", "drop", "pad"))
def test_the_stream_is_the_same(way: str, rows: int, last_batch: str) -> None:
    for threads, devices, writable in some(
        (way, rows, last_batch), THREADS, DEVICES, (False, True)
    ):
        settings: dict[str, Any] = {
            "epochs": 3, "last_batch": last_batch, "devices": devices, "writable": writable,
        }  # fmt: skip
        stream = plain(rows, **settings)
        fetch = Even(WAYS[way], rows, shaky(rows))
        got = drain(
            fetch, rows_per_call=rows, num_threads=threads, batch_columns=[0, 1, 0], **settings
        )
        assert_same(got, stream, threads, devices, writable)


def test_the_stream_is_the_naive_one() -> None:
    stream = expected(Rowwise(elsewhere), pure=True, epochs=2)
    for way in WAYS:
        assert_same(drain(Rowwise(WAYS[way]), epochs=2, rows_per_call=4), stream, way)


class Rowwise(Even):
    """Rows along the first axis in all columns."""

    def __init__(self, way: Way) -> None:
        super().__init__(way, 4)

    def __call__(self, call: Call) -> Any:
        if call.index > 10:
            raise StopIteration
        columns = make_rows(0, call.epoch, call.index, 4 if call.index < 10 else 1)
        if self.way is into_out and call.out is not None:
            rows = len(columns["id"])
            for name, array in columns.items():
                call.out[name][:rows] = array
            return {name: array[:rows] for name, array in call.out.items()}
        return into_empty(call, columns) if self.way is not elsewhere else columns


@pytest.mark.parametrize("last_batch", ("keep", "pad"))
@pytest.mark.parametrize("threads", (2, 8))
def test_a_call_beyond_the_end_writes_into_no_batch(last_batch: str, threads: int) -> None:
    """Such a call may go on for as long as it likes: the epoch's last rows come meanwhile, and
    stay."""
    beyond, out = [Event() for _ in range(3)], Event()
    written: list[np.ndarray] = []

    def fetch(call: Call) -> Any:
        if call.index < 13:
            return into_empty(call, {"id": np.full(2, 1 + call.index)})
        if call.index == 13:
            assert beyond[call.epoch].wait(10)
            raise StopIteration
        written.append(call.empty((2,), np.int64))
        beyond[call.epoch].set()
        assert out.wait(10)
        for array in written:
            array[:] = 99
        raise StopIteration

    settings: dict[str, Any] = {
        "input_blob_names": ["id"], "rows_per_call": 2, "num_threads": threads,
        "last_batch": last_batch, "epochs": 1,
    }  # fmt: skip
    with running(fetch, **settings) as (_, feed):
        batches = [next(feed) for _ in range(4)]
        out.set()
        assert next(feed, None) is None
    ids = [row for batch in batches for row in batch["id"].tolist()]
    padding = [13] * (6 if last_batch == "pad" else 0)
    assert ids == [1 + i // 2 for i in range(26)] + padding


@pytest.mark.parametrize("way", WAYS)
def test_a_position_is_the_same_and_goes_on_with_and_without(way: str) -> None:
    """Tokens, snapshots and state dicts do not know of the setting."""
    settings: dict[str, Any] = {"epochs": 2, "batch_columns": [0, 1, 0]}
    stream = plain(4, epochs=2)
    tokens: list[bytes] = []
    for with_places in (False, True):
        rows = 4 if with_places else None
        with running(Even(WAYS[way], 4), rows_per_call=rows, **settings) as (coordinator, feed):
            taken = [(batch.cut.token(), coordinator.state_dict()) for batch in deal(feed)]
        if with_places:
            assert [token for token, _ in taken] == tokens
        tokens = [token for token, _ in taken]
        for i, position in enumerate(taken, 1):
            rest = drain(
                Even(WAYS[way], 4), resume=position[i % 2],
                rows_per_call=None if with_places else 4, num_threads=1 + i % 3, **settings,
            )  # fmt: skip
            assert_same(rest, stream[i:], with_places, i)


def test_resumed_where_a_batch_does_not_begin_with_a_call() -> None:
    """Other rows per call than then: rows are copied up to the next epoch, and are the same."""

    def fetch(rows: int) -> Any:
        def give(call: Call) -> Any:
            left = 36 - call.index * rows
            if left <= 0:
                raise StopIteration
            first = 1 + 100 * call.epoch + call.index * rows
            return into_empty(call, {"id": np.arange(first, first + min(rows, left))})

        return give

    settings: dict[str, Any] = {
        "input_blob_names": ["id"], "epochs": 2, "batch_size": None, "global_batch_size": 12,
    }  # fmt: skip
    ids = ids_of(drain(fetch(6), **settings))
    with running(fetch(6), devices=3, **settings) as (_, feed):
        tokens = [batch.cut.token() for batch in deal(feed)]
    for i, token in enumerate(tokens, 1):
        rest = drain(fetch(6), devices=2, rows_per_call=6, resume=token, **settings)
        # The rest of the round of three is made and dropped.
        assert ids_of(rest) == ids[12 * -(-i // 3) :], i


def ids_of(stream: Any) -> list[int]:
    return [row for one in stream for row in np.frombuffer(one[4][0][2], np.int64).tolist()]
