"""Parquet and Arrow: the rows that their own library gives."""

from __future__ import annotations

import math
import pickle  # noqa: TID251  (a source may be sent to other processes)
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, arrow, parquet, tables
from feeder.workers.sources.stores.arrow_columns import to_columns, value_of
from feeder.workers.sources.stores.kept import Kept
from needs import needs
from shards import write_table

needs("pyarrow")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

NUM = 50


def table(start: int = 0, stop: int = NUM) -> Any:
    """Columns of every kind that has arrays."""
    numbers = range(start, stop)
    return pa.table({
        "n": pa.array(numbers, pa.int32()),
        "x": pa.array([i / 2 for i in numbers], pa.float32()),
        "b": pa.array([i % 2 == 0 for i in numbers]),
        "v": pa.array([[i, -i] for i in numbers], pa.list_(pa.int64(), 2)),
        "s": pa.array([{"a": i, "t": {"u": i * 10}} for i in numbers]),
        "d": pa.array([["p", "q"][i % 2] for i in numbers]).dictionary_encode()
        .cast(pa.string()),
        "l": pa.array([list(range(i % 4)) for i in numbers], pa.list_(pa.int16())),
        "t": pa.array(["é" * (i % 3) for i in numbers]),
        "y": pa.array([b"z" * (i % 5) for i in numbers], pa.large_binary()),
    })  # fmt: skip


FIXED = ["n", "x", "b", "v", "s"]


def write_parquet(folder: Path) -> list[Path]:
    return [
        write_table(folder / "0.parquet", table(0, 23), 10),
        write_table(folder / "1.parquet", table(23, NUM), 10),
    ]


def write_arrow(folder: Path) -> list[Path]:
    """A file and a stream."""
    return [
        write_table(folder / "0.arrow", table(0, 23), 10),
        write_table(folder / "1.stream", table(23, NUM), 10),
    ]


STORES: dict[str, tuple[Callable[[Path], Any], Callable[..., Any]]] = {
    "parquet": (write_parquet, parquet), "arrow": (write_arrow, arrow),
}  # fmt: skip
each_store = pytest.mark.parametrize("store", STORES)


@each_store
def test_rows_of_one_shape_are_columns(store: str, tmp_path: Path) -> None:
    write, read = STORES[store]
    source = read(write(tmp_path), FIXED)
    assert len(source) == NUM
    for size in (1, 7, 64):
        chunks = list(epoch_of(source, size))
        assert list(chunks[0]) == ["n", "x", "b", "v", "s.a", "s.t.u"]
        whole = {name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]}
        flat = table().select(FIXED).flatten().flatten()
        for name, column in whole.items():
            assert column.tolist() == flat.column(name).to_pylist()
        assert (whole["n"].dtype, whole["x"].dtype, whole["b"].dtype) == ("i4", "f4", "?")
        assert whole["v"].shape == (NUM, 2)


@each_store
def test_rows_of_different_lengths_are_samples(store: str, tmp_path: Path) -> None:
    write, read = STORES[store]
    source = read(write(tmp_path), ["n", "l", "t", "y", "d"])
    columns = source.pad(6)(call(0, NUM))
    wanted = table()
    assert columns["t"].tolist() == wanted.column("t").to_pylist()
    assert columns["y"].tolist() == wanted.column("y").to_pylist()
    assert columns["d"].tolist() == wanted.column("d").to_pylist()
    assert columns["l"].dtype == np.int16
    lists = wanted.column("l").to_pylist()
    assert columns["l"].tolist() == [[*row, *[0] * (6 - len(row))] for row in lists]
    made = source.shuffle(1, 10).map(lambda row: (row["n"], len(row["t"]), row["l"].sum()))
    for n, t, total in zip(*made(call(3, 12)), strict=True):
        assert (t, total) == (n % 3, sum(range(n % 4)))
    with pytest.raises(RecordError, match=r"row 1: column 'l' is int16\[1\], .* int16\[0\]"):
        read(tmp_path / f"0.{store}", ["l"])(call(0, 5))


def test_a_row_group_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, decoded = write_parquet(tmp_path), []
    source = parquet(tmp_path / "*.parquet", ["n"], row_group_cache=2).shuffle(1, 10)
    read = pq.ParquetFile.read_row_group

    def counting(self: Any, number: int, **options: Any) -> Any:
        decoded.append(number)
        return read(self, number, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counting)
    rows = [n for c in epoch_of(source, 4) for n in c["n"].tolist()]
    assert sorted(rows) == list(range(NUM))
    # The windows and groups of the second file do not begin at the same rows.
    assert len(decoded) <= 10
    assert len(paths) == 2


def test_so_many_bytes_of_groups_are_kept() -> None:
    kept, made = Kept(4, 100, len), []

    def get(key: str, size: int) -> None:
        kept.get(key, lambda: made.append(key) or bytes(size))

    for key, size in (("a", 30), ("b", 40), ("a", 30), ("c", 30), ("d", 10)):
        get(key, size)
    # "b" was asked for longest ago: it went for "d".
    for key in ("a", "c", "d", "b"):
        get(key, 40)
    assert made == ["a", "b", "c", "d", "b"]
    # The last one is kept, however large.
    get("e", 500)
    get("e", 500)
    assert made[5:] == ["e"]
    get("a", 30)
    assert made[6:] == ["a"]


def test_rows_keep_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path)
    monkeypatch.setattr(tables, "_GROUP_BYTES_KEPT", 0)
    wanted, alive = table(), weakref.WeakSet[Any]()
    decode = tables.TableRecords._decode

    class Columns(dict[str, Any]):
        """A group's columns, which a weak reference can be had of."""

        __hash__ = object.__hash__

    def decoding(self: Any, number: int) -> Any:
        # Groups are read one after the other: that before the last may still be at hand.
        assert len(alive) <= 2
        columns = Columns(decode(self, number))
        alive.add(columns)
        return columns

    monkeypatch.setattr(tables.TableRecords, "_decode", decoding)
    for columns in (["n", "v"], ["n", "v", "t", "l"]):
        source = parquet(tmp_path / "*.parquet", columns)
        samples = source.records.samples(np.arange(NUM), call(0, 1))  # type: ignore[attr-defined]
        assert all(sample["v"].base is None for sample in samples)
        for name in columns:
            found = [np.asarray(sample[name]).tolist() for sample in samples]
            assert found == wanted.column(name).to_pylist()
    assert parquet(tmp_path / "*.parquet", ["n"])(call(0, NUM))["n"].tolist() == [*range(NUM)]  # type: ignore[call-overload]


def test_texts_of_a_group_may_be_more_than_2_gib() -> None:
    octets = np.zeros(2**30 + 2, np.uint8)
    octets[-2:] = 7
    offsets = np.array([0, 2**30, 2**30 + 2], np.int32)
    chunk = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(octets)]
    )
    columns = to_columns(pa.table({"x": pa.chunked_array([chunk] * 3)}))
    assert [value_of(columns["x"], row) for row in (1, 3, 5)] == [b"\7\7"] * 3


def test_a_footer_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path)
    source, parsed = parquet(tmp_path / "*.parquet", ["n"], row_group_cache=1), []
    open_file = pq.ParquetFile.__init__

    def opening(self: Any, path: Any, **options: Any) -> None:
        if options.get("metadata") is None:
            parsed.append(path)
        open_file(self, path, **options)

    monkeypatch.setattr(pq.ParquetFile, "__init__", opening)
    rows = [n for c in epoch_of(source, 10) for n in c["n"].tolist()]
    assert rows == list(range(NUM))
    # Two files, of three groups each.
    assert len(parsed) == 2


def test_columns_of_categories_are_those_of_their_values(tmp_path: Path) -> None:
    values = {
        "t": pa.array(["p", "qq", "p", "é"]).dictionary_encode(),
        "j": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1", "[2]", "1", "{}"])),
        "n": pa.array([7, 8, 7, 9]).dictionary_encode(),
    }
    pq.write_table(pa.table(values), tmp_path / "c.parquet")
    columns = parquet(tmp_path / "c.parquet").pad(3)(call(0, 4))
    assert {name: c.tolist() for name, c in columns.items()} == {
        name: column.to_pylist() for name, column in values.items()
    }
    mapped = parquet(tmp_path / "c.parquet").map(lambda row: len(row["t"]))
    assert mapped(call(0, 4))[0].tolist() == [1, 2, 1, 1]
    # Without a step, too, they are read sample by sample.
    with pytest.raises(RecordError, match=r"row 1: column 't' is <U2\[\], .* has <U1"):
        parquet(tmp_path / "c.parquet")(call(0, 4))


@each_store
def test_no_function_changes_what_is_kept(store: str, tmp_path: Path) -> None:
    write, read = STORES[store]
    source = read(write(tmp_path), ["b", "v"])

    def change(row: Any) -> Any:
        for column in row.values():
            if isinstance(column, np.ndarray):
                column += 1
        return row

    with pytest.raises(RecordError, match=r"row 0: .* read-only"):
        source.map(change)(call(0, 4))
    path, kind = tmp_path / f"w.{store}", pa.list_(pa.bool_(), 2)
    write_table(path, pa.table({"w": pa.array([[True, False]] * 4, kind)}))

    def flip(row: Any) -> Any:
        row["w"] ^= True
        return row

    with pytest.raises(RecordError, match=r"row 0: .* read-only"):
        read(path).map(flip)(call(0, 4))


def test_other_columns_are_named(tmp_path: Path) -> None:
    paths = write_parquet(tmp_path)
    other = tmp_path / "other.parquet"
    pq.write_table(table().set_column(0, "n", pa.array(range(NUM), pa.int64())), other)
    with pytest.raises(
        ConfigError, match=r"other\.parquet' has the columns \['n: int64'\], .*'n: int32'"
    ):
        parquet([*paths, other], ["n"])
    with pytest.raises(ConfigError, match=r"0\.parquet' has the columns \[.*\], and no 'z'"):
        parquet(paths, ["n", "z"])
    assert len(parquet([*paths, other], ["x"])) == 2 * NUM


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    for columns, told in (
        ({"n": [1, None]}, r"x\.parquet', row group 0, row 1: column 'n' is null: give nulls="),
        (
            {"n": [[[1]], [[1, 2]]]},
            r"row 1: column 'n' is int64\[1, 2\], .*row 0 has int64\[1, 1\]",
        ),
    ):
        pq.write_table(pa.table(columns), path)
        with pytest.raises(RecordError, match=told):
            parquet(path)(call(0, 2))
    for data, told in (
        (b"", r"x\.parquet' cannot be read"),
        (b"PAR1 nonsense PAR1" * 9, "cannot be read"),
    ):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=told):
            parquet(path)
        with pytest.raises(ConfigError, match=told):
            arrow(path)
    pq.write_table(table(0, 0), path)
    with pytest.raises(ConfigError, match="holds no rows"):
        parquet(path)
    with pytest.raises(ConfigError, match=r"y\.parquet' cannot be read: "):
        parquet(tmp_path / "y.parquet")
    with pytest.raises(ConfigError, match="columns is 'n'"):
        parquet(path, "n")
    with pytest.raises(ConfigError, match="row_group_cache is 0"):
        parquet(path, row_group_cache=0)


@pytest.mark.parametrize("read", [parquet, arrow])
def test_folders_of_a_partition_are_columns_as_pyarrow_reads_them(
    read: Any, tmp_path: Path
) -> None:
    import pyarrow.dataset as ds

    kind = "parquet" if read is parquet else "arrow"
    for i, (lang, year) in enumerate([("en", 1), ("d%20e", 20), ("__HIVE_DEFAULT_PARTITION__", 3)]):
        folder = tmp_path / "all" / f"lang={lang}" / f"year={year}"
        folder.mkdir(parents=True)
        write_table(folder / f"x.{kind}", pa.table({"n": [i, i + 10], "s": [{"a": i}, {"a": 0}]}))
    wanted = ds.dataset(tmp_path / "all", format=kind, partitioning="hive").to_table().to_pylist()
    source = read(tmp_path / "all")
    made = source.samples(np.arange(6), call(0, 6))
    assert [
        {"n": row["n"], "s": {"a": row["s.a"]}, "lang": row["lang"], "year": row["year"]}
        for row in made
    ] == wanted
    chosen = read(tmp_path / "all", ["year", "s.a"])(call(0, 6))
    assert {name: column.tolist() for name, column in chosen.items()} == {
        "year": [row["year"] for row in wanted], "s.a": [row["s"]["a"] for row in wanted],
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"has the columns \['n', 's', 'lang', 'year'\], and no"):
        read(tmp_path / "all", ["month"])
    (tmp_path / "all" / f"y.{kind}").write_bytes((folder / f"x.{kind}").read_bytes())
    with pytest.raises(ConfigError, match=r"lies in the folders \[\], .* in \['lang', 'year'\]"):
        read(tmp_path / "all")


@pytest.mark.parametrize("read", [parquet, arrow])
def test_types_bring_files_to_one_schema(read: Any, tmp_path: Path) -> None:
    kind = "parquet" if read is parquet else "arrow"
    paths = [tmp_path / f"{name}.{kind}" for name in "abc"]
    write_table(paths[0], pa.table({"n": pa.array([1, 2], pa.int32()), "t": ["a", "b"]}))
    write_table(
        paths[1],
        pa.table({"t": pa.array(["c"], pa.large_string()), "n": pa.array([3], pa.int64())}),
    )
    write_table(paths[2], pa.table({"n": [2.5], "t": ["d"]}))
    with pytest.raises(ConfigError, match="columns= puts them in one order, types= brings them"):
        read(paths[:2])
    options = {"columns": ["n", "t"], "types": {"n": "int64", "t": pa.string()}}
    source = read(paths, **options)
    made = source.samples(np.arange(3), call(0, 3))
    assert [(row["n"].item(), row["n"].dtype, str(row["t"])) for row in made] == [
        (1, np.int64, "a"), (2, np.int64, "b"), (3, np.int64, "c"),
    ]  # fmt: skip
    with pytest.raises(RecordError, match=rf"c\.{kind}'.* batch 0|row group 0: .*truncated"):
        source.samples(np.array([3]), call(0, 1))
    for types, told in (
        ({"n": "whole"}, "No type alias"),
        ({"n": int}, "expected a type of Arrow"),
        ({"n.x": "int8"}, r"types names \['n\.x'\], .* the type of the whole struct"),
    ):
        with pytest.raises(ConfigError, match=told):
            read(paths, types=types)


@pytest.mark.parametrize(
    ("values", "kind", "holds"),
    [
        ([0.5, math.nan, math.inf, None], "float32", True),
        ([0.1], "float32", False),
        ([1e300], "float32", False),
        ([0, 1, None], "bool", True),
        ([2], "bool", False),
        ([[0.5], None, []], pa.list_(pa.float16()), True),
        ([[{"a": 0.5}], [{"a": 0.1}]], pa.list_(pa.struct([("a", pa.float32())])), False),
        (pa.array([0.1]).dictionary_encode(), "float32", False),
    ],
)
def test_a_type_holds_each_value_or_is_refused(values: Any, kind: Any, holds: bool) -> None:
    source = arrow(pa.table({"x": values}), types={"x": kind})
    if not holds:
        with pytest.raises(RecordError, match=r"column 'x' has values that .* does not hold"):
            source.samples(np.arange(len(values)), call(0, 1))
        return
    made = [row["x"] for row in source.samples(np.arange(len(values)), call(0, 1))]
    wanted = pa.array(values).cast(kind).to_pylist()
    assert repr([x if x is None else np.asarray(x).tolist() for x in made]) == repr(wanted)


class Exported:
    """Another library's table, whose stream may be read once."""

    def __init__(self, made: Any) -> None:
        self._reader = made.to_reader(max_chunksize=4)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._reader.__arrow_c_stream__(requested_schema)


def test_a_table_of_any_library_is_read(tmp_path: Path) -> None:
    made = pa.table({"n": range(11), "s": [{"a": str(i)} for i in range(11)], "x": [1.5] * 11})
    write_table(tmp_path / "x.arrow", made)
    options: Any = {"columns": ["s.a", "n"], "types": {"n": "int16"}}
    source, wanted = arrow(Exported(made), **options), arrow(tmp_path / "x.arrow", **options)
    order = np.array([10, 0, 3, 4, 8])
    there = pickle.loads(pickle.dumps(source))
    for one in (source, there):
        rows = one.samples(order, call(0, 5))
        assert repr(rows) == repr(wanted.samples(order, call(0, 5)))
        assert rows[0]["n"].dtype == np.int16
        assert one.describe() == source.describe()
    with pytest.raises(ConfigError, match=r"the table of Exported' has .* and no 'gone'"):
        arrow(Exported(made), ["gone"])
    with pytest.raises(RecordError, match=r"the table of Exported, record batch 0: .* truncated"):
        arrow(Exported(made), types={"x": "int8", "n": "int8"}).map(lambda row: row["x"])(
            call(0, 4)
        )
