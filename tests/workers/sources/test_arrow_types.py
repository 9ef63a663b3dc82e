"""Tables of all types that pyarrow can write: the values that pyarrow itself reads, or an error."""

from __future__ import annotations

import uuid
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import parts
from calls import call
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, arrow, parquet
from needs import needs
from shards import write_table

needs("pyarrow")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from feeder.workers.sources.stores.arrow_columns import to_columns, value_of  # noqa: E402
from fuzz.tables import LEAVES, a_type, a_value, plain, rows_of  # noqa: E402


def dtype_of(kind: Any) -> Any:
    """The dtype of the numbers of a type; None if it has none."""
    while kind not in LEAVES and hasattr(kind, "value_type") and not pa.types.is_map(kind):
        kind = kind.value_type
    is_number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return np.dtype(kind.to_pandas_dtype()) if is_number else None


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@settings(max_examples=1500 if parts.is_full else 200, deadline=None)
@given(rng=st.randoms(use_true_random=False), nulls=st.booleans())
def test_values_are_those_of_pyarrow_or_an_error(
    ending: str, rng: Random, nulls: bool, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / f"types.{ending}"
    kind = a_type(rng)
    num = rng.randint(1, 5)
    table = pa.table({"x": pa.array([a_value(rng, kind, 0.3 * nulls) for _ in range(num)], kind)})
    try:
        write_table(path, table, 2)
        if ending == "parquet":
            table = pq.read_table(path)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        assume(False)
    wanted = rows_of(table)
    read = parquet if ending == "parquet" else arrow
    source = read(path)
    order = rng.choices(range(num), k=rng.randint(1, 6))
    samples = source.records.samples(np.array(order), call(0, 1))  # type: ignore[attr-defined]
    assert plain(samples) == plain([wanted[i] for i in order])
    # Slices, and columns in several pieces.
    joined = pa.concat_tables([table.slice(1), table])
    for name, made in to_columns(joined).items():
        again = [row[name] for row in wanted[1:] + wanted]
        assert [plain(value_of(made, i)) for i in range(2 * num - 1)] == plain(again)
    try:
        columns: Any = source(call(0, num))
    except RecordError:
        return
    for name in wanted[0]:
        assert plain(columns[name]) == plain([row[name] for row in wanted])
        if (dtype := dtype_of(kind)) is not None and np.size(columns[name]):
            assert columns[name].dtype == dtype


WHOLE = [pa.int8(), pa.float32(), pa.string(), pa.binary(3), pa.list_(pa.int16())]


@pytest.mark.parametrize("as_mask", [False, True])
@pytest.mark.parametrize("kind", WHOLE, ids=str)
@settings(max_examples=10, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_nulls_are_masked_filled_or_named(
    tmp_path_factory: Any, rng: Random, kind: Any, as_mask: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "nulls.parquet"
    rows = [rng.choice([None, a_value(rng, kind, 0)]) for _ in range(rng.randint(1, 7))]
    write_table(path, pa.table({"x": pa.array(rows, kind), "n": range(len(rows))}), 2)
    zero = {pa.string(): "", pa.binary(3): bytes(3), pa.list_(pa.int16()): []}.get(kind, 0)
    fill = 0 if kind == pa.binary(3) else zero
    source = parquet(path, nulls="mask" if as_mask else {"x": fill})
    samples = source.records.samples(np.arange(len(rows)), call(0, 1))  # type: ignore[attr-defined]
    assert [plain(sample["x"]) for sample in samples] == [
        plain(zero if row is None else row) for row in rows
    ]
    if as_mask:
        assert [bool(sample["x.is_null"]) for sample in samples] == [row is None for row in rows]
        assert not any(sample["n.is_null"] for sample in samples)
    told = r"nulls\.parquet', row group \d, row \d: column 'x' is null: give nulls=\{'x': value\}"
    if None in rows:
        with pytest.raises(RecordError, match=told):
            parquet(path)(call(0, len(rows)))
    # A function of the user's takes them.
    (are_null,) = parquet(path).map(lambda row: row["x"] is None)(call(0, len(rows)))
    assert are_null.tolist() == [row is None for row in rows]


@pytest.mark.parametrize(
    ("nulls", "told"),
    [
        (300, r"column 'n' has nulls, and is int8, which cannot hold 300: give nulls=\{name"),
        ({"n": 0.5}, "is int8, which cannot hold 0.5"),
        ({"t": 5}, "column 't' has nulls, and is str, which cannot hold 5"),
        (0, "column 't' has nulls, and is str, which cannot hold 0"),
        ({"l": [1]}, r"column 'l' has nulls, and is lists of int64, which cannot hold \[1\]"),
    ],
)
def test_a_value_for_nulls_that_a_column_cannot_hold_is_named(
    nulls: Any, told: str, tmp_path: Path
) -> None:
    columns = {"n": pa.array([1, None], pa.int8()), "t": ["a", None], "l": [[1], None]}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(RecordError, match=rf"x\.parquet', row group 0: .*{told}"):
        parquet(tmp_path / "x.parquet", nulls=nulls).map(len)(call(0, 1))


def test_what_nulls_cannot_be_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "x.is_null": [2]}), tmp_path / "x.parquet")
    for nulls, told in (
        (None, "nulls is None, expected 'error', 'mask', a value"),
        ("masks", "nulls is 'masks', expected 'error', 'mask', a value"),
        ({"y": 0}, r"nulls names 'y', the columns are \['x', 'x.is_null'\]"),
        ("mask", r"x\.parquet', row group 0: several values are the column 'x\.is_null'"),
    ):
        with pytest.raises(ConfigError, match=told):
            parquet(tmp_path / "x.parquet", nulls=nulls)


def test_a_position_depends_on_what_nulls_become(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    made = [parquet(tmp_path / "x.parquet", nulls=n).describe() for n in ("error", "mask", 0, 1)]
    assert "nulls" not in made[0] and len({str(one) for one in made}) == 4


def test_fields_of_structs_are_chosen_by_name(tmp_path: Path) -> None:
    image = [{"bytes": b"ab", "path": None, "at": {"x": i}} for i in range(5)]
    table = pa.table({"label": range(5), "image": image})
    write_table(tmp_path / "x.parquet", table)
    write_table(tmp_path / "x.arrow", table)
    for source in (parquet, arrow):
        path = tmp_path / f"x.{source.__name__}"
        read = source(path, ["image.at.x", "label", "image.bytes"])
        assert [*read(call(0, 5))] == ["image.at.x", "label", "image.bytes"]
        assert read(call(0, 5))["image.at.x"].tolist() == [*range(5)]  # type: ignore[call-overload]
        assert [*source(path, ["image.at"])(call(0, 5))] == ["image.at.x"]
        (sizes,) = source(path).map(lambda row: len(row["image.bytes"]))(call(0, 5))
        assert sizes.tolist() == [2] * 5
        with pytest.raises(ConfigError, match=r"x\.\w+' has the columns .*, and no 'image.size'"):
            source(path, ["image.size"])


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_two_values_of_one_name_are_refused(ending: str, tmp_path: Path) -> None:
    path, read = tmp_path / f"x.{ending}", parquet if ending == "parquet" else arrow
    write_table(path, pa.table({"a": [{"b": 1, "c": {"d": 2}}], "a.b": [10], "a.c": [{"e": 3}]}))
    with pytest.raises(ConfigError, match=r"x\..*: several values are the column 'a\.b': choose"):
        read(path)
    wanted: dict[str, dict[str, int]] = {
        "a": {"a.b": 1, "a.c.d": 2}, "a.b": {"a.b": 10}, "a.c": {"a.c.e": 3}, "a.c.d": {"a.c.d": 2},
    }  # fmt: skip
    for name, rows in wanted.items():
        columns = read(path, [name])(call(0, 1))
        assert {name: column.item() for name, column in columns.items()} == rows  # type: ignore[union-attr]


def test_tensors_have_their_shape(tmp_path: Path) -> None:
    flat = pa.array([[*range(i, i + 6)] for i in range(5)], pa.list_(pa.int16(), 6))
    for axes in (None, [1, 0]):
        kind = pa.fixed_shape_tensor(pa.int16(), [2, 3], permutation=axes)
        array = pa.ExtensionArray.from_storage(kind, flat)
        for ending, read in (("parquet", parquet), ("arrow", arrow)):
            write_table(tmp_path / f"x.{ending}", pa.table({"x": array}))
            column = read(tmp_path / f"x.{ending}")(call(0, 5))["x"]  # type: ignore[call-overload]
            assert column.dtype == np.int16
            assert column.tolist() == array.to_numpy_ndarray().tolist()


def test_other_types(tmp_path: Path) -> None:
    """Those that pyarrow does not make of Python's values alone."""
    ids = [uuid.UUID(int=2**64 * i) for i in range(4)]
    columns = {
        "uuid": pa.array(ids, pa.uuid()),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([3, 4], pa.int32()), pa.array([5, 7])),
        "nanos": pa.array([1, 2, 3, 4], pa.time64("ns")),
    }
    write_table(tmp_path / "x.arrow", pa.table(columns))
    read = arrow(tmp_path / "x.arrow", ["uuid", "runs"])(call(0, 4))
    assert [uuid.UUID(bytes=row.tobytes()) for row in read["uuid"]] == ids  # type: ignore[call-overload]
    assert read["runs"].tolist() == [5, 5, 5, 7]  # type: ignore[call-overload]
    # Python's times of day have no nanoseconds.
    with pytest.raises(
        RecordError, match=r"x\.arrow', record batch 0, row 0: column 'nanos': Nano"
    ):
        arrow(tmp_path / "x.arrow", ["nanos"]).map(len)(call(0, 1))
    write_table(tmp_path / "x.arrow", pa.table({"x": pa.array([pa.MonthDayNano([1, 2, 3])])}))
    with pytest.raises(
        ConfigError, match=r"x\.arrow', .*column 'x' is month_day_nano_interval, of"
    ):
        arrow(tmp_path / "x.arrow")


@pytest.mark.parametrize("outer", [pa.list_, pa.large_list, pa.list_view, lambda k: pa.list_(k, 2)])
@pytest.mark.parametrize("inner", [pa.string_view(), pa.binary_view(), pa.list_(pa.int8())])
def test_lists_of_which_pyarrow_drops_no_nulls(outer: Any, inner: Any, tmp_path: Path) -> None:
    one = {pa.string_view(): "a", pa.binary_view(): b"longer than twelve"}.get(inner, [1])
    rows = [[one, one], None, [one, None], None, [one, one]]
    write_table(tmp_path / "x.arrow", pa.table({"x": pa.array(rows, outer(inner))}))
    seen: list[Any] = []
    arrow(tmp_path / "x.arrow").map(lambda row: seen.append(row["x"]) or 0)(call(0, 5))
    assert plain(seen) == plain(rows)
    maps = [{"a": one}, None, {}, {"b": one, "c": None}]
    write_table(tmp_path / "x.arrow", pa.table({"x": pa.array(maps, pa.map_(pa.string(), inner))}))
    seen.clear()
    arrow(tmp_path / "x.arrow").map(lambda row: seen.append(row["x"]) or 0)(call(0, 4))
    assert plain(seen) == [None if one is None else plain([*one.items()]) for one in maps]


def test_a_group_that_pyarrow_cannot_make_at_once_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of lists with more than 2 GiB of texts."""
    rows = [["a" * i] * (i % 3) for i in range(200)]
    pq.write_table(pa.table({"x": rows, "n": range(200)}), tmp_path / "x.parquet")

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise pa.ArrowNotImplementedError("Nested data conversions not implemented")

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", refuse)
    seen: list[Any] = []
    parquet(tmp_path / "x.parquet").map(lambda row: seen.append(row["x"]) or 0)(call(0, 200))
    assert seen == rows
    numbers = parquet(tmp_path / "x.parquet", ["n"])(call(0, 200))["n"]  # type: ignore[call-overload]
    assert numbers.tolist() == [*range(200)]


def test_maps_are_no_arrays(tmp_path: Path) -> None:
    kind = pa.map_(pa.int8(), pa.float32())
    rows = {
        "x": pa.array([[(1, 0.5)], [(2, 1.5)]], kind),
        "y": pa.array([[[(1, 2)]]] * 2, pa.list_(kind)),
    }
    for name, column in rows.items():
        write_table(tmp_path / "x.parquet", pa.table({name: column}))
        source = parquet(tmp_path / "x.parquet")
        for one in (source, source.filter(lambda row: True), source.pad(1)):
            with pytest.raises(
                RecordError, match=rf"column '{name}' is no array: a map has no array"
            ):
                one(call(0, 2))


def test_what_has_no_array_needs_a_map(tmp_path: Path) -> None:
    chats = [[{"role": "user", "n": i}] * i for i in range(3)]
    pq.write_table(pa.table({"chat": chats}), tmp_path / "x.parquet")
    seen: list[Any] = []
    parquet(tmp_path / "x.parquet").map(lambda row: seen.append(row["chat"]) or 0)(call(0, 3))
    assert seen == chats
    told = r"row 0: column 'chat' has Python objects, list here: make arrays of them with map"
    with pytest.raises(RecordError, match=told):
        parquet(tmp_path / "x.parquet")(call(0, 1))


def test_a_type_that_pyarrow_has_no_arrays_of_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nulls(num: int, kind: Any) -> Any:
        raise KeyError(22)  # as of intervals, which Python cannot write

    write_table(tmp_path / "x.arrow", pa.table({"x": [1]}))
    monkeypatch.setattr(pa, "nulls", nulls)
    with pytest.raises(ConfigError, match=r"no arrays of one of the types \['int64'\]"):
        arrow(tmp_path / "x.arrow")
