"""Tables as chunks, and batches as tables: there and back, by each library that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as of_numpy

import feeder
from feeder.sources import RecordError
from parts import examples
from small import make as make_feed

KINDS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64", "datetime64[s]", "datetime64[ns]", "timedelta64[us]", "datetime64[D]",
)  # fmt: skip


def readers() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What reads a batch and gives a table: pyarrow, and others that are there."""
    yield "pyarrow", pa.table
    yield "batch", pa.record_batch
    for name, read in (
        ("polars", lambda polars: polars.from_arrow),
        ("duckdb", lambda duckdb: lambda batch: duckdb.sql("SELECT * FROM batch").to_arrow_table()),
    ):
        try:
            yield name, read(importlib.import_module(name))
        except ModuleNotFoundError:
            continue


READERS = dict(readers())


def feed(columns: list[str], chunks: list[Any], size: int = 2, **settings: Any) -> Any:
    """A feed of these chunks."""

    def fetch(call: feeder.Call) -> Any:
        if call.index >= len(chunks):
            raise StopIteration
        return chunks[call.index]

    return make_feed(fetch, columns, size, **settings)


def given_by(columns: list[str], chunks: list[Any], size: int = 2) -> list[dict[str, Any]]:
    """Its batches."""
    with feed(columns, chunks, size) as coordinator:
        return [{name: batch[name].copy() for name in batch} for batch in coordinator["train"]]


@st.composite
def arrays(draw: Any, rows: int) -> np.ndarray[Any, Any]:
    """A column: any kind, up to three axes, perhaps not contiguous."""
    kind = np.dtype(draw(st.sampled_from(KINDS)))
    axes = draw(st.lists(st.integers(1, 3), max_size=2))
    elements = None
    if kind.kind in "mM":
        # None of these is no time.
        elements = st.integers(-(10**6), 10**6).map(lambda n: np.array(n).astype(kind)[()])
    made = draw(of_numpy.arrays(kind, (rows * 2, *axes), elements=elements))
    return made[::2] if draw(st.booleans()) else made[:rows].copy()


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=examples(200))
@given(st.data(), st.integers(1, 5), st.integers(1, 3))
def test_a_batch_is_a_table_is_a_chunk(
    reader: str, data: st.DataObject, rows: int, num: int
) -> None:
    made = {f"c{i}": data.draw(arrays(rows)) for i in range(num)}
    kinds, names = {column.dtype for column in made.values()}, list(made)
    # What that library has no type for.
    hypothesis.assume(reader != "duckdb" or not kinds & {*map(np.dtype, ("f2", "m8[us]"))})
    hypothesis.assume(reader != "polars" or np.dtype("datetime64[s]") not in kinds)
    with feed(names, [made], rows) as coordinator:
        batch = next(coordinator["train"])
        table = READERS[reader](batch)
    (again,) = given_by(names, [table], rows)
    for name, column in made.items():
        assert again[name].shape == column.shape
        assert again[name].dtype == column.dtype
        np.testing.assert_array_equal(again[name], column)


@pytest.mark.parametrize("kind", ["S3", "U3", ">U3"])
def test_texts_with_zeros_are_whole_in_a_table(kind: str) -> None:
    texts = [["a\0b", ""], ["\0\0x", "abc"], ["\0", "y"]]
    made = np.array(
        [[text.encode() for text in row] for row in texts] if kind == "S3" else texts, kind
    )
    with feed(["x"], [{"x": made}], 3) as coordinator:
        batch = next(coordinator["train"])
        assert pa.record_batch(batch)["x"].to_pylist() == batch["x"].tolist()


def test_a_batch_is_lent_and_not_copied() -> None:
    made = np.arange(6.0).reshape(2, 3)
    with feed(["x"], [[made]]) as coordinator:
        batch = next(coordinator["train"])
        (column,) = pa.record_batch(batch).columns
        lent = column.flatten().to_numpy(zero_copy_only=True)
        assert np.shares_memory(lent, batch["x"])


TABLE = pa.table(
    {"s": [{"a": i, "t": f"t{i}"} for i in range(5)], "x": [[i, i] for i in range(5)]}
).cast(
    pa.schema(
        [("s", pa.struct([("a", "int16"), ("t", "string")])), ("x", pa.list_(pa.float32(), 2))]
    )
)


@pytest.mark.parametrize("give", [
    lambda table: table, lambda table: table.to_batches()[0], lambda table: table.to_reader(2),
])  # fmt: skip
def test_structs_lists_and_texts_are_as_in_a_source(give: Callable[[Any], Any]) -> None:
    names = ["s.a", "s.t", "x"]
    wanted = feeder.sources.arrow(TABLE)
    with make_feed(wanted, names, 2) as made:
        want = [{name: batch[name].tolist() for name in batch} for batch in made["train"]]
    # A reader gives its rows once, and a feed looks at its first call twice.
    chunks = [give(TABLE.slice(0, 3)), give(TABLE.slice(3))]
    if hasattr(chunks[0], "read_all"):
        chunks = [chunk.read_all() for chunk in chunks]
    got = given_by(names, [TABLE.slice(0, 0), *chunks])
    assert [{name: column.tolist() for name, column in batch.items()} for batch in got] == want


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"x": [1, None]}, "row 1: column 'x' is null: fill nulls in the table"),
        ({"x": ["a", "bcd"]}, "<U3"),
        ({"x": [[{"a": 1}], [{"a": 2}]]}, "of which there is no array"),
        # pyarrow ends the process if it is asked for an array of these.
        ({"x": pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval())}, "there is no array: "),
        ({"x": [[1], [1, 2]]}, r"\[2\], .* the rows of a batch must be alike"),
        ({"y": [1, 2]}, r"chunk has keys \['y'\]"),
    ],
)
def test_what_is_no_array_is_named(table: Any, told: str) -> None:
    with pytest.raises((feeder.FetchError, feeder.ChunkError), match=told) as error:
        given_by(["x"], [pa.table(table)])
    cause = error.value.__cause__
    assert isinstance(cause, RecordError) or isinstance(error.value, feeder.ChunkError)


@pytest.mark.parametrize("column", [np.zeros(2, complex), np.zeros(2, [("a", "i4")])])
def test_what_arrow_has_no_type_for_is_named(column: Any) -> None:
    with feed(["x"], [[column]]) as coordinator:
        batch = next(coordinator["train"])
        with pytest.raises(TypeError, match=r"column 'x' is .*, of which Arrow has no type"):
            pa.table(batch)
