"""What a fetch function may do wrong: each is one clear error, in its place in the stream."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest

import feeder
from small import WAIT_S, Held, chunk, make

pytestmark = pytest.mark.served

NAMES = ("image", "label")
BAD_CALL = 2


class Bad(NamedTuple):
    """A chunk that is wrong, and what the user is told about it."""

    chunk: Any
    got: Any
    expected: Any
    column: str | None = None
    what: str = ""
    """What of the column is another one."""
    more: str = ""

    @property
    def told(self) -> str:
        if self.what == "rows":
            return f"column {self.column!r} has {self.got} rows, 'image' has {self.expected}"
        of = "chunk has" if self.column is None else f"column {self.column!r}: {self.what} is"
        return f"{of} {self.got}, expected {self.expected}{self.more}"


def good(worker_id: int, call: int, rows: int = 3) -> tuple[Any, ...]:
    number = chunk(worker_id, call, rows)[0]
    return np.repeat(number.astype(np.float32), 2).reshape(rows, 2), number


def images(*shape: int) -> Any:
    return np.ones(shape, np.float32)


LABELS = np.ones(3, np.int64)
WHOLE = "a list, tuple or dict of arrays"
TWO = "2: ('image', 'label')"
ARRAY = "numpy.ndarray"
PLAIN = "one without Python objects"

BAD = {
    "one column too few": Bad((images(3, 2),), "1 columns", TWO),
    "one column too many": Bad((images(3, 2), LABELS, LABELS), "3 columns", TWO),
    "no column": Bad((), "0 columns", TWO),
    "another name": Bad(
        {"image": images(3, 2), "lable": LABELS}, "keys ['image', 'lable']", ["image", "label"]
    ),
    "different row counts": Bad((images(3, 2), np.ones(4, np.int64)), 4, 3, "label", "rows"),
    "another dtype": Bad(
        (images(3, 2).astype(np.float64), LABELS), "float64", "float32", "image", "dtype"
    ),
    "another row shape": Bad(
        (images(3, 5), LABELS), (5,), (2,), "image", "row shape",
        "; where each call pads its own rows, dont_rebatch=True makes each call a batch",
    ),
    "another number of axes": Bad(
        (images(3, 2), np.ones((3, 1), np.int64)), 2, 1, "label", "ndim"
    ),
    "objects": Bad(
        (images(3, 2), np.array([1, "2", None], object)), "object", PLAIN, "label", "dtype"
    ),
    "objects in a field": Bad(
        (images(3, 2), np.zeros(3, [("x", object)])), "[('x', 'O')]", PLAIN, "label", "dtype"
    ),
    "None inside": Bad((None, LABELS), "None", ARRAY, "image", "type"),
    "a 0-d array": Bad(
        (images(3, 2), np.array(3)), 0, "at least 1, axis 0 is rows", "label", "ndim"
    ),
    "a number in a column": Bad((images(3, 2), 3), "int", ARRAY, "label", "type"),
    "a list in a column": Bad(([[1.0, 2.0]] * 3, LABELS), "list", ARRAY, "image", "type"),
    "a masked array": Bad(
        (images(3, 2), np.ma.masked_equal(LABELS, 2)), "MaskedArray", ARRAY, "label", "type"
    ),
    "an array alone": Bad(images(3, 2), "type ndarray", WHOLE),
    "a number": Bad(5, "type int", WHOLE),
    "a generator": Bad((row for row in ()), "type generator", WHOLE),
}  # fmt: skip


def ring(bad: Callable[[], Any]) -> tuple[Callable[..., Any], int]:
    """Return a fetch function of the first form whose worker 1 does wrong in `BAD_CALL`, and the
    rows that come before it in the order of the stream."""
    calls = {0: -1, 1: -1}

    def fetch(worker_id: int, batch_size: int) -> Any:
        calls[worker_id] += 1
        wrong = (worker_id, calls[worker_id]) == (1, BAD_CALL)
        return bad() if wrong else good(worker_id, calls[worker_id])

    return fetch, 3 * (2 * BAD_CALL + 1)


def pure(bad: Callable[[], Any]) -> tuple[Callable[..., Any], int]:
    """Return a pure fetch function whose call with index 5 (worker 1) is wrong, and likewise."""

    def fetch(call: feeder.Call) -> Any:
        return bad() if call.index == 5 else good(0, call.index)

    return fetch, 3 * 5


FORMS = [(ring, BAD_CALL), (pure, 5)]
both_forms = pytest.mark.parametrize(
    ("form", "call"), FORMS, ids=["fetch(worker_id)", "fetch(call)"]
)


def expect_error(
    coordinator: feeder.Coordinator, kind: type[feeder.FeedError], rows: int
) -> feeder.FeedError:
    """Take all batches of `rows` rows; return the error in place of the next, which is raised
    again and again and does not move the position."""
    with coordinator:
        feed = coordinator["train"]
        for step in range(rows // 4):
            assert next(feed).step == step
        step = feed.snapshot().states[0].summary[2]
        with pytest.raises(feeder.FeedError) as first:
            next(feed)
        # Not taken before: that the last batch ended its epoch may have become known since.
        position = feed.state_dict()
        assert feed.snapshot().states[0].summary[2] == step == rows // 4
        with pytest.raises(feeder.FeedError) as again:
            next(feed)
        assert feed.state_dict() == position
        assert coordinator.stop() is True
        with pytest.raises(feeder.FeedError) as stopped:
            next(feed)
    assert feed.state_dict() == position
    assert again.value is first.value is stopped.value
    assert type(first.value) is kind
    return first.value


@both_forms
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_wrong_chunk_is_named_in_its_place(form: Any, call: int, bad: Bad) -> None:
    fetch, rows = form(lambda: bad.chunk)
    error = expect_error(make(fetch, NAMES), feeder.ChunkError, rows)
    assert str(error) == f"worker 1, call {call}: {bad.told}"
    assert isinstance(error, feeder.FetchError)
    assert (error.worker_id, error.call) == (1, call)
    assert (error.column, error.got, error.expected) == (bad.column, bad.got, bad.expected)


class Trouble(Exception):
    pass


@both_forms
@pytest.mark.parametrize("kind", [Trouble, MemoryError, SystemExit, KeyboardInterrupt])
def test_what_the_fetch_function_raises_is_chained(
    form: Any, call: int, kind: type[BaseException]
) -> None:
    trouble = kind("no such image")

    def bad() -> Any:
        raise trouble

    fetch, rows = form(bad)
    error = expect_error(make(fetch, NAMES), feeder.FetchError, rows)
    told = f"worker 1, call {call}: fetch function raised {kind.__name__}: no such image"
    assert str(error) == told
    assert (error.worker_id, error.call) == (1, call)
    assert error.__cause__ is trouble
    assert "bad" in [frame.function for frame in inspect.getinnerframes(trouble.__traceback__)]


def test_a_fetch_that_does_not_return_in_time_is_shown_with_its_stack() -> None:
    fetch = Held(chunks_before=1)
    coordinator = make(fetch, timeout=1.0, num_worker_threads=1)
    with coordinator:
        assert len(next(coordinator["train"])["id"]) == 4
        assert fetch.entered.wait(WAIT_S)
        with pytest.raises(feeder.FetchTimeout) as caught:
            next(coordinator["train"])
        fetch.release()
    assert re.fullmatch(
        r"worker 0, call 1: no chunk for 1\.0 s; the call was made [0-9]+\.[0-9] s ago and has not "
        "returned; see in its stack what it waits for, or raise timeout",
        str(caught.value),
    )
    (note,) = caught.value.__notes__
    assert note.startswith("the call has not returned:\n")
    assert "self._released.wait(WAIT_S)" in note


def test_an_epoch_without_a_row_is_an_error_where_several_were_asked_for() -> None:
    def fetch(worker_id: int, batch_size: int) -> Any:
        calls[worker_id] = calls.get(worker_id, -1) + 1
        if calls[worker_id] > 0:
            raise StopIteration  # and does not start over
        return chunk(worker_id, 0, 4)

    calls: dict[int, int] = {}
    error = expect_error(make(fetch, epochs=3), feeder.FetchError, 8)
    assert str(error) == (
        "epoch 1 ended without a row; after raising StopIteration the fetch function must start "
        "over"
    )


@pytest.mark.parametrize("last_batch", ["keep", "carry"])
@pytest.mark.parametrize("sizes", [[4, 0, 4], [0, 4], [4, 4, 0, 4], [2, 4, 0, 3]])
def test_an_epoch_without_a_row_is_an_error_after_a_resume_as_before(
    sizes: list[int], last_batch: str
) -> None:
    def fetch(call: feeder.Call) -> Any:
        if call.index or not sizes[call.epoch]:
            raise StopIteration
        return [np.full(sizes[call.epoch], call.epoch)]

    def ends(**settings: Any) -> tuple[str, list[bytes]]:
        made = make(fetch, ["x"], 4, epochs=len(sizes), last_batch=last_batch, **settings)
        tokens: list[bytes] = []
        with made, pytest.raises(feeder.FetchError, match="ended without a row") as caught:
            for batch in made["train"]:
                tokens.append(batch.cut.token())
        return str(caught.value), tokens

    told, tokens = ends()
    assert told.startswith(f"epoch {sizes.index(0)} ended")
    assert [ends(resume=token)[0] for token in tokens] == [told] * len(tokens)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("last_round", ["uneven", "drop", "pad"])
@pytest.mark.parametrize("rounds", ["stream", "epoch"])
@pytest.mark.parametrize("kind", ["function", "replay", "source", "shard", "filter", "global"])
def test_epochs_that_fill_no_batch_are_an_error_in_a_stream_without_end(
    kind: str, rounds: str, last_round: str, devices: int
) -> None:
    def fetch(call: feeder.Call) -> Any:
        if call.index:
            raise StopIteration
        return [np.arange(5)]

    def replay(worker_id: int, batch_size: int) -> Any:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise StopIteration
        return [np.arange(5)]

    calls: list[int] = []
    source = feeder.sources.arrays(np.arange(18 if kind == "filter" else 5))
    given: Any = {
        "function": fetch, "replay": replay, "shard": source.shard(1, 2),
        "filter": source.filter(lambda record: record < 5),
    }.get(kind, source)  # fmt: skip
    size: Any = {"global_batch_size": 6 * devices} if kind == "global" else {"batch_size": 6}
    coordinator = feeder.init_data_input_workers(
        ["x"], given, epochs=None, last_batch="drop", last_round=last_round, rounds=rounds,
        devices=devices, num_worker_threads=1, coordinator=feeder.Coordinator(), timeout=WAIT_S,
        **size,
    )  # fmt: skip
    says = "did not fill a batch of 6 rows|has fewer batches than the 2 queues"
    with coordinator, pytest.raises(feeder.FeedError, match=says):
        next(coordinator["train"].on(devices - 1))


@pytest.mark.parametrize("num_shards", [1, 2, 7])
def test_an_epoch_that_fills_no_batch_may_come_before_one_that_does(num_shards: int) -> None:
    def fetch(call: feeder.Call) -> Any:
        if call.index:
            raise StopIteration
        return [np.arange(2 + call.epoch % 2)]

    records = feeder.sources.arrays(np.arange(2 * num_shards + 1))
    given: Any = fetch if num_shards == 1 else records.shard(0, num_shards)
    with make(given, ["x"], 3, epochs=None, last_batch="drop") as coordinator:
        epochs = [batch.epoch for batch in islice(coordinator["train"], 3)]
    period = max(2, num_shards)
    assert [epoch - epochs[0] for epoch in epochs] == [0, period, 2 * period]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_without_words_is_told_by_its_class() -> None:
    def fetch(worker_id: int, batch_size: int) -> Any:
        raise Unspeakable

    with (
        make(fetch, ["x"], 8) as coordinator,
        pytest.raises(feeder.FetchError, match="Unspeakable, of which the text cannot be had"),
    ):
        next(coordinator["train"])


@pytest.mark.parametrize(
    ("left_out", "epochs"), [("skipped", None), ("skipped", 1), ("filtered", None)]
)
def test_a_shard_whose_records_are_all_left_out_blames_no_fetch_function(
    left_out: str, epochs: int | None
) -> None:
    def sound(record: Any) -> Any:
        if record < 10:
            raise ValueError("defective")
        return record

    records = feeder.sources.arrays(np.arange(20))
    if left_out == "skipped":
        source = records.map(sound, on_error="skip").shard(0, 2, stick_to_shard=True)
        says = r"^epoch 0 ended without a row; \d+ reads of defective records were left out, all "
    else:
        source = records.filter(lambda record: record >= 10).shard(0, 2, stick_to_shard=True)
        says = r"^epoch 0 ended without a row; a filter leaves out every record of this shard$"
    coordinator = make(source, ["x"], epochs=epochs)
    with coordinator, pytest.raises(feeder.FetchError, match=says):
        next(coordinator["train"])


def test_epochs_that_are_all_dropped_are_an_error() -> None:
    def fetch(call: feeder.Call) -> list[np.ndarray]:
        if call.index == 1:
            raise StopIteration
        return [np.full(5 if call.epoch % 100 == 0 else 2, call.epoch)]

    settings = {"last_batch": "drop", "epochs": None, "coordinator": feeder.Coordinator()}
    with feeder.init_data_input_workers(["x"], fetch, 5, **settings) as coordinator:
        feed = coordinator["train"]
        assert [next(feed).epoch for _ in range(3)] == [0, 100, 200]  # 99 epochs between them.
    settings["coordinator"] = feeder.Coordinator()
    with (
        feeder.init_data_input_workers(["x"], fetch, 6, **settings) as coordinator,
        pytest.raises(
            feeder.FeedError, match="the last 100 epochs, up to epoch 99, did not fill a batch of 6"
        ),
    ):
        next(coordinator["train"])
