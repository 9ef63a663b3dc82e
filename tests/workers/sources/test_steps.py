"""Steps on sources: each against a list that plain Python makes, in any epoch, call and order."""

from __future__ import annotations

import random
from collections import Counter, namedtuple
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import feeder
import steps
from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, Source, arrays, nested, records
from small import make as make_feed
from steps import NUM, numbers


def rows_of(source: Any, epoch: int = 0, batch_size: int = 5) -> list[Any]:
    """The rows of an epoch's calls, made in another order."""
    chunks = list(epoch_of(source, batch_size, epoch))
    for index in random.Random(batch_size).sample(range(len(chunks)), len(chunks)):
        again = source(call(index, batch_size, epoch))
        assert [column.tolist() for column in again] == [c.tolist() for c in chunks[index]]
    return [
        row[0] if len(row) == 1 else row
        for chunk in chunks
        for row in zip(*(column.tolist() for column in chunk), strict=True)
    ]


def order_of(epoch: int, seed: int = 5, num: int = NUM) -> list[int]:
    """The order of a shuffle, as a source without steps has it."""
    return rows_of(arrays(np.arange(num), random_shuffle=True, seed=seed), epoch)


NAIVE: dict[str, tuple[Callable[[], Source], Callable[[int], list[Any]]]] = {
    "take more than there are": (lambda: numbers().take(99), lambda e: [*range(NUM)]),
    "shuffle of take": (lambda: numbers().take(7).shuffle(5), lambda e: order_of(e, num=7)),
    "zip with filter": (
        lambda: numbers().shuffle(5).zip(numbers().filter(steps.is_odd)),
        lambda e: [(x, y) for y, x in enumerate(order_of(e)) if y % 2],
    ),
    "shuffle of shuffle": (
        lambda: numbers().shuffle(5).shuffle(6),
        lambda e: [order_of(e)[i] for i in order_of(e, seed=6)],
    ),
}
"""What no composition has."""


@pytest.mark.parametrize("name", NAIVE)
def test_a_step_is_what_plain_python_makes(name: str) -> None:
    make, naive = NAIVE[name]
    for epoch, batch_size in product(range(2), (1, 5)):
        assert rows_of(make(), epoch, batch_size) == naive(epoch)


# ---- rows of different lengths


def test_padding_of_some_columns() -> None:
    source = records([{"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones(3), "b": np.ones(2)}])
    assert source.pad({"a": 4})(call(0, 2))["a"].shape == (2, 4)
    with pytest.raises(RecordError, match=r"sample 1: column 'a' .*of columns that length= names"):
        source.pad({"b": 4})(call(0, 2))


def test_padding_of_two_axes_and_of_bfloat16() -> None:
    rows = [np.ones((n, 2), ml_dtypes.bfloat16) for n in (1, 3)]
    (column,) = records(rows).pad(3, value=0.5)(call(0, 2))
    assert column.dtype == ml_dtypes.bfloat16
    assert column.astype(float)[0].tolist() == [[1, 1], [0.5, 0.5], [0.5, 0.5]]


def test_values_and_offsets_keep_each_byte() -> None:
    strings: list[Any] = ["ab\0", "\0", "", "é", b"ab\0\0", b"\0", b"", np.str_("c"), np.array("d")]
    wanted = [b"ab\0", b"\0", b"", "é".encode(), b"ab\0\0", b"\0", b"", b"c", b"d"]
    for source in (records(strings), records(strings).map(lambda x: {"x": x})):
        columns: Any = source.offsets()(call(0, len(strings)))
        pair = columns.values() if isinstance(columns, dict) else columns
        octets, offsets = (column[0] for column in pair)
        assert [octets[a:b].tobytes() for a, b in pairwise(offsets.tolist())] == wanted


def test_rows_that_cannot_be_joined_are_named() -> None:
    for first, other, told in (
        (np.ones(2), np.ones((2, 2)), r"float64\[2, 2\], sample 0 has float64\[2\]"),
        (np.ones(2, "i8"), np.ones(2), r"float64\[2\], sample 0 has int64\[2\]: [a-z ]+$"),
        (1, 1.5, r"float64\[\], sample 0 has int64\[\]"),
        ([1, 2], [], r"float64\[0\], .* of an empty list NumPy makes floats: make arrays"),
        (np.ones(2), 1.0, r"float64\[\], sample 0 has float64\[2\]"),
    ):
        with pytest.raises(RecordError, match=rf"sample 1: column 'x' is {told}"):
            records([{"x": first}, {"x": other}]).offsets()(call(0, 2))


@pytest.mark.parametrize(
    ("dtype", "value"), [("u1", -1), ("u1", 300), ("i4", np.nan), ("i4", 1.5), ("?", -100),
                         ("i4", None), ("i4", "a"), ("f4", "a")],
)  # fmt: skip
def test_a_value_that_a_column_cannot_hold_is_named(dtype: str, value: Any) -> None:
    source = records([np.zeros(n, dtype) for n in (1, 3)])
    for padded in (source.pad(3, value), source.pad(value=value)):
        with pytest.raises(RecordError, match=r"sample 0 and on: column 0 is .* cannot hold "):
            padded(call(0, 2))
    # Where no row is filled up the value is of no use.
    assert source.skip(1).pad(3, value)(call(0, 1))[0].shape == (1, 3)


@pytest.mark.parametrize(
    ("dtype", "value"), [("u1", 255), ("i4", -100), ("?", True), ("f4", np.nan), ("f4", 0.1),
                         ("i4", 2.0), (ml_dtypes.bfloat16, -1.5)],
)  # fmt: skip
def test_a_value_that_a_column_can_hold_is_put_there(dtype: Any, value: Any) -> None:
    (column,) = records([np.zeros(n, dtype) for n in (1, 3)]).pad(3, value)(call(0, 2))
    assert column[0].tobytes() == np.array([0, value, value], dtype).tobytes()


def test_rows_that_cannot_be_padded_are_named() -> None:
    for rows, length, told in (
        ([np.ones(2), np.ones(5)], 3, r"sample 1: column 0 has 5 values, length is 3"),
        ([np.ones(2), np.ones((2, 2))], 3, r"sample 1: column 0 is float64\[2, 2\], sample 0 has"),
        ([np.ones(2), np.ones(2, "i4")], 3, r"sample 1: column 0 is int32\[2\], sample 0 has"),
        (["ab", "abcd"], 3, r"sample 1: column 0 has 4 characters, length is 3"),
        (["ab", b"ab"], 3, r"sample 1: column 0 is \|S2, expected strings"),
        (["ab", "abcd"], None, r"column 0 holds strings, which need one width in all batches"),
        ([{"a": 1}, {"b": 1}], 3, r"sample 1: has the columns \['b'\], sample 0 has \['a'\]"),
        ([object(), object()], 3, r"sample 0: column 0 holds Python objects"),
    ):
        with pytest.raises(RecordError, match=told):
            records(rows).pad(length)(call(0, 2))
    with pytest.raises(
        RecordError, match=r"sample 0: has the columns \['x'\], length names \['y'\]"
    ):
        records([{"x": np.ones(2)}]).pad({"x": 2, "y": 3})(call(0, 1))


def test_a_window_is_cut_once() -> None:
    made: list[int] = []

    def fn(record: Any) -> Any:
        made.append(int(record))
        return steps.ragged(record)

    source = numbers(num=50).map(fn).batch_by_tokens(20, window=8)
    list(epoch_of(source, 1))
    # The first record again, to know what columns are like where a call has no rows.
    assert Counter(made) - Counter(range(50)) <= Counter({0: 1}) + Counter(range(8))


def test_a_record_beyond_the_budget_is_named() -> None:
    with pytest.raises(RecordError, match=r"row 6: has 7 tokens, the budget is 6"):
        list(epoch_of(numbers(num=8).map(steps.ragged).batch_by_tokens(6), 1))
    with pytest.raises(RecordError, match=r"row 0: has 9 tokens, the budget is 6"):
        source = numbers(num=8).map(steps.named).batch_by_tokens(6, length=lambda record: 9)
        source(call(0, 1))


# ---- nested samples


Point = namedtuple("Point", "x y")


def test_nested_samples_flatten_and_come_back() -> None:
    def sample(i: int) -> Any:
        return {"image": {"left": np.full(2, i), "size": {"h": i}}, "at": Point(i, -i), "n": i}

    columns = records([sample(i) for i in range(3)])(call(0, 3))
    assert list(columns) == ["image.left", "image.size.h", "at.x", "at.y", "n"]
    assert columns["at.y"].tolist() == [0, -1, -2]
    back = nested(columns)
    assert back["image"]["left"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert back["at"]["x"].tolist() == back["image"]["size"]["h"].tolist() == [0, 1, 2]
    padded = records([{"a": {"b": np.ones(n)}} for n in (1, 3)]).pad()(call(0, 2))
    assert {name: column.shape for name, column in padded.items()} == {"a.b": (2, 3)}
    for wrong in ({"a": 1, "a.b": 2}, {"a.b": 2, "a": 1}):
        with pytest.raises(ValueError, match="'a"):
            nested(wrong)
    for made in (records([{"a": {"b": 1}, "a.b": 2}]), records([{"a": {"b": 1}, "a.b": 2}]).pad(3)):
        with pytest.raises(
            RecordError, match=r"sample 0: several values are the columns \['a\.b'\]"
        ):
            made(call(0, 1))
    with pytest.raises(RecordError, match=r"sample 1: has \['a\.c'\], sample 0 has \['a\.b'\]"):
        records([{"a": {"b": 1}}, {"a": {"c": 1}}])(call(0, 2))


def test_nested_values_of_a_tuple_are_columns_in_order() -> None:
    columns = records([(1, {"a": 2, "b": Point(3, 4)}, [5, 6])] * 2)(call(0, 2))
    assert [column.tolist() for column in columns] == [
        [1, 1], [2, 2], [3, 3], [4, 4], [[5, 6], [5, 6]],
    ]  # fmt: skip


# ---- what else a step passes on


def test_records_that_a_map_cannot_make() -> None:
    with pytest.raises(RecordError, match="row 1: odd"):
        rows_of(numbers().map(steps.odd_fails))
    source = numbers().map(steps.odd_fails, on_error="skip").shuffle(5).concat(numbers(100, 2))
    assert rows_of(source, batch_size=64) == [x for x in order_of(0) if x % 2 == 0] + [100, 101]
    # Each call is made twice, and what it leaves out counts once.
    assert source.skipped == NUM // 2
    assert not source.gives_all_rows
    with pytest.raises(TypeError) as caught:
        rows_of(numbers().map(lambda record: record + "a"))
    assert "while reading row 0" in caught.value.__notes__
    with pytest.raises(RecordError, match=r"row 3: .*StopIteration"):
        rows_of(numbers().map(lambda x: next(iter([])) if x == 3 else x))


def test_columns_of_parts_that_do_not_fit() -> None:
    with pytest.raises(
        RecordError,
        match=r"concat: source 1: column 0 is float64\[\], that of "
        r"source 0 is int64\[\]",
    ):
        rows_of(numbers().concat(arrays(np.ones(3))), batch_size=64)
    with pytest.raises(
        RecordError, match=r"concat: source 1: has the columns \['x'\], source 0 has \[0\]"
    ):
        part = numbers().map(steps.named).pad(1)
        rows_of(numbers().concat(part), batch_size=64)
    with pytest.raises(RecordError, match=r"several sources have the columns \['x'\]"):
        named = arrays({"x": np.arange(3)})
        named.zip(named)(call(0, 3))
    with pytest.raises(RecordError, match=r"zip of records with names and without"):
        arrays({"x": np.arange(3)}).zip(numbers(num=3))(call(0, 3))


def test_lengths() -> None:
    assert len(numbers().concat(numbers()).take(30).repeat(2)) == 60
    assert numbers().repeat(2).rows(0, 5) == 2 * NUM
    assert numbers().map(steps.double).gives_all_rows
    for source in (numbers().filter(steps.is_odd), steps.budgeted(), numbers().offsets()):
        assert not source.gives_all_rows
        with pytest.raises(TypeError, match="is not known before they are read"):
            len(source)
        assert source


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "map of nothing": (lambda: numbers().map(5), "fn is 5, expected a function"),
    "map of three": (lambda: numbers().map(lambda a, b, c: 1), r"fn requires \['a', 'b', 'c'\]"),
    "on_error": (lambda: numbers().map(steps.double, on_error="x"), "on_error is 'x'"),
    "filter": (lambda: numbers().filter(None), "fn is None, expected a function"),
    "take": (lambda: numbers().take(0), "n is 0, expected a whole number of at least 1"),
    "skip": (lambda: numbers().skip(NUM), "n is 23, and the source has 23 records"),
    "repeat": (lambda: numbers().repeat(0), "times is 0"),
    "concat": (lambda: numbers().concat(5), "int is no source"),
    "zip": (lambda: numbers().zip(numbers(num=3)), r"zip of sources of \[23, 3\] records"),
    "take of filter": (
        lambda: numbers().filter(steps.is_odd).take(3),
        "take: the source is filtered, and so has no known length; filter after take",
    ),
    "skip of filter": (
        lambda: numbers().filter(steps.is_odd).skip(3),
        "skip: the source is filtered",
    ),
    "of shards": (lambda: numbers(num_shards=2).take(3), "take of a source with shards"),
    "of padding": (lambda: numbers(pad_last_batch=True).repeat(3), "repeat of a source with shard"),
    "shard of shards": (lambda: numbers().shard(0, 2).shard(0, 2), "shard of a source with shards"),
    "window": (lambda: numbers().shuffle(window=0), "window is 0"),
    "seed": (lambda: numbers().shuffle(-1), "seed is -1"),
    "length": (lambda: numbers().pad(0), "length is 0, expected a whole number"),
    "lengths": (lambda: numbers().pad({"a": None}), "length is {'a': None}, expected"),
    "after offsets": (lambda: numbers().offsets().map(steps.double), "offsets comes after map"),
    "after pad": (lambda: numbers().pad().concat(numbers()), "pad comes after concat"),
    "budget": (lambda: numbers().batch_by_tokens(0), "budget is 0"),
    "after budget": (lambda: steps.budgeted().filter(len), "batch_by_tokens comes after filter"),
    "shards of what varies": (
        lambda: steps.budgeted().shard(0, 2, pad_last_batch=True),
        "pad_last_batch cannot be had of batch_by_tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_when_it_is_made(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_filter_that_leaves_nothing_is_told() -> None:
    with pytest.raises(RecordError, match="row 0: left out, and so is every other record"):
        numbers().filter(lambda record: False)(call(0, 5))


def test_what_a_position_depends_on_is_described() -> None:
    said = [
        make().describe()
        for make in (
            numbers,
            lambda: numbers().map(steps.double),
            lambda: numbers().filter(steps.is_odd),
            lambda: numbers().take(9).skip(1),
            lambda: numbers().concat(numbers(num=4)),
            lambda: numbers().repeat(2),
            lambda: numbers().shuffle(1),
            lambda: numbers().shuffle(1, 5),
            lambda: numbers().shuffle(1).shuffle(2),
            lambda: numbers().shuffle(2).shuffle(1),
            lambda: numbers().shuffle(2).map(steps.double).shard(0, 2),
            lambda: numbers().pad(3),
            lambda: numbers().pad(3, value=1),
            lambda: numbers().offsets(),
            lambda: numbers().batch_by_tokens(4),
            lambda: numbers().batch_by_tokens(5),
        )
    ]
    assert len({repr(fields) for fields in said}) == len(said)


# ---- in feeds


@pytest.mark.process
@pytest.mark.parametrize("last_batch", ["keep", "carry"])
def test_records_that_processes_leave_out_are_counted(last_batch: str) -> None:
    source = numbers(num=20).map(steps.odd_fails, on_error="skip").shuffle()
    other = source.map(steps.double)
    for _ in range(2):
        before = source.skipped
        executor = feeder.Processes(2)
        with make_feed(source, ["x"], executor=executor, last_batch=last_batch) as made:
            assert sum(len(batch["x"]) for batch in made["train"]) == 10
        # A call that is made twice, to compare its rows, is counted twice.
        assert 10 <= source.skipped - before <= 14
    assert other.skipped == 0
