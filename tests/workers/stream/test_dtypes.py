"""Dtypes that NumPy's text does not tell: those of ml_dtypes, and what nobody could read back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeder.devices.cuda.packed import check_dtypes
from feeder.service.protocol.messages import ColumnSpec
from feeder.workers.stream import dtypes
from feeder.workers.stream.chunks import Column, native
from feeder.workers.stream.digests import digest_chunk
from feeder.workers.stream.dtypes import read_dtype, write_dtype
from small import make

KINDS = [
    kind for name in dir(ml_dtypes)
    if isinstance(kind := getattr(ml_dtypes, name), type) and issubclass(kind, np.generic)
]  # fmt: skip
BF16 = np.dtype(ml_dtypes.bfloat16)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
"""Of kind "f", with a text that NumPy does not read."""
NESTED = np.dtype([("a", BF16, (2,)), ("b", [("c", "u1"), ("d", ml_dtypes.int4)])], align=True)

COLUMNS = {
    "bfloat16": BF16,
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),  # Has the code of a long complex.
    "float8_e5m2": E5M2,
    "int4": np.dtype(ml_dtypes.int4),
    "structure": NESTED,
    "record": np.dtype((np.record, [("a", "<i4"), ("b", "<f8")])),
}
NAMED = {name: dtype for name, dtype in COLUMNS.items() if name != "record"}
"""Those of ml_dtypes, or with fields of it."""
SERVED = {name: dtype for name, dtype in COLUMNS.items() if dtype.names is None}

UNREADABLE = {
    "overlapping fields": np.dtype(
        {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2], "itemsize": 4}
    ),
    "fields out of order": np.dtype(
        {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [4, 0], "itemsize": 8}
    ),
    "no byte": np.dtype("V0"),
    "no field": np.dtype([]),
    "a union": np.dtype((np.int32, [("low", "<u2"), ("high", "<u2")])),
    "a type of another package": BF16,
}

ENDS = {"in a chunk": 2, "at the last rows": 6}
"""After how many batches of 4 rows, from chunks of 3 of which 9 make an epoch: the rest of the
rows is left over of the last chunk."""


@pytest.fixture(autouse=True)
def forget_packages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make bfloat16 a type of a package that nobody knows, where a test says so."""
    dtypes._write_plain.cache_clear()
    if "another package" in request.node.name:
        monkeypatch.setattr("feeder.workers.stream.dtypes._PACKAGE", "other_dtypes")
    request.addfinalizer(dtypes._write_plain.cache_clear)


def rows_of(dtype: np.dtype[Any], first: int, rows: int) -> np.ndarray:
    """Return rows whose bytes differ, none of them padding."""
    if dtype.names is None:
        return (np.arange(first, first + rows) % 7 + 1).astype(dtype)
    made = np.zeros(rows, dtype)
    for name in dtype.names:
        field = made[name]
        field[...] = rows_of(field.dtype, first, rows).reshape(-1, *[1] * (field.ndim - 1))
    return made


def feed(dtype: np.dtype[Any], **settings: Any) -> feeder.Coordinator:
    def fetch(call: feeder.Call) -> Any:
        if call.index == 9:
            raise StopIteration
        return [rows_of(dtype, 3 * call.index, 3)]

    return make(fetch, ["x"], 4, **settings)


def note(batches: Any) -> list[tuple[np.dtype[Any], type, bytes]]:
    return [(batch["x"].dtype, batch["x"].dtype.type, batch["x"].tobytes()) for batch in batches]


# ---- what is written comes back


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_type_of_ml_dtypes_comes_back(kind: type) -> None:
    dtype = np.dtype(kind)
    for one in (dtype, np.dtype([("a", dtype), ("b", dtype, (2, 3))])):
        fields = msgpack.unpackb(msgpack.packb(write_dtype(one)))
        assert read_dtype(_tupled(fields)) == one
    assert ColumnSpec(name="x", dtype=write_dtype(dtype), axis=0, shape=()).dtype == dtype.name


def _tupled(fields: Any) -> Any:
    if isinstance(fields, str):
        return fields
    return [(name, _tupled(of), *map(tuple, shape)) for name, of, *shape in fields]


@pytest.mark.parametrize(
    "dtype",
    [
        *("<f4", "|u1", "<U3", "|S2", "<M8[10s]", "|V4", "?", "<c16", "i4,f8"),
        np.dtype([("a", "i1"), ("b", "f8", (2,)), ("c", [("d", "i2")])], align=True),
        np.dtype([(("title", "a"), "<i4"), ("b", "|V3")]),
        np.dtype({"names": ["a"], "formats": ["i4"], "offsets": [4], "itemsize": 12}),
    ],
    ids=str,
)
def test_types_of_numpy_are_written_as_they_always_were(dtype: Any) -> None:
    found = np.dtype(dtype)
    written = write_dtype(found)
    assert written == (found.str if found.names is None else found.descr)
    assert read_dtype(written) == found


def test_a_record_is_not_taken_for_the_structure_that_it_is_equal_to() -> None:
    record, plain = COLUMNS["record"], np.dtype([("a", "<i4"), ("b", "<f8")])
    assert record == plain
    for dtype in (plain, record, np.dtype([("c", record)])):
        read = read_dtype(write_dtype(dtype))
        assert repr(read) == repr(dtype)


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("dtype", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("carrier", ["snapshot", "state dict", "token"])
def test_a_resumed_feed_gives_rows_of_the_same_type(
    dtype: np.dtype[Any], end: int, carrier: str
) -> None:
    with feed(dtype) as coordinator:
        for _ in range(end):
            batch = next(coordinator["train"])
        position = {
            "snapshot": lambda: bytes(coordinator.snapshot()),
            "state dict": coordinator.state_dict,
            "token": batch.cut.token,
        }[carrier]()
        wanted = note(coordinator["train"])
    assert wanted and all(found == dtype for found, _, _ in wanted)
    with feed(dtype, resume=position) as coordinator:
        assert note(coordinator["train"]) == wanted


@pytest.mark.served
@pytest.mark.parametrize("dtype", SERVED.values(), ids=SERVED)
@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_served_feed_gives_rows_of_the_same_type(dtype: np.dtype[Any], scheme: str) -> None:
    with feed(dtype) as coordinator:
        wanted = note(coordinator["train"])
    with serving(lambda: feed(dtype), scheme) as server, reading(server) as consumer:
        got = note([next(consumer) for _ in range(2)])
        state = consumer.state_dict()
        assert got + note(consumer) == wanted
    with serving(lambda: feed(dtype), scheme) as server, reading(server, resume=state) as consumer:
        assert note(consumer) == wanted[2:]


@pytest.mark.parametrize("dtype", COLUMNS.values(), ids=COLUMNS)
def test_entries_of_a_store_come_back(dtype: np.dtype[Any], tmp_path: Path) -> None:
    wanted = rows_of(dtype, 0, 6)
    with feeder.CheckpointStore(tmp_path) as store:
        store.put("model", {"weights": wanted})
        found = store.get("model").entries["weights"]
    assert found.dtype == dtype
    assert found.tobytes() == wanted.tobytes()


# ---- what could not be read back is refused first


@pytest.mark.parametrize("dtype", UNREADABLE.values(), ids=UNREADABLE)
def test_what_no_position_can_hold_is_an_error_of_the_first_chunk(dtype: np.dtype[Any]) -> None:
    with (
        make(lambda call: [np.zeros(3, dtype)], ["x"]) as coordinator,
        pytest.raises(feeder.ChunkError, match=r"call 0: column 'x': dtype .* would not be"),
    ):
        next(coordinator["train"])


@pytest.mark.parametrize("dtype", UNREADABLE.values(), ids=UNREADABLE)
def test_and_no_entry_of_a_store(dtype: np.dtype[Any], tmp_path: Path) -> None:
    with (
        feeder.CheckpointStore(tmp_path) as store,
        pytest.raises(feeder.CheckpointError, match=r"^entry 'x': dtype .* would not be"),
    ):
        store.put("model", {"x": np.zeros(3, dtype)})


def test_fields_of_fields_have_the_byte_order_of_the_machine() -> None:
    nested = np.dtype([("a", [("b", ">i4")], (2,)), ("c", "<i4")])
    with make(lambda call: [np.ones(4, nested)], ["x"]) as coordinator:
        batch = next(coordinator["train"])
    assert batch["x"].dtype == native(nested) == nested.newbyteorder("<")
    assert batch["x"]["a"]["b"].tolist() == 4 * [[1, 1]]


def test_a_digest_is_of_all_bytes_of_a_type_with_the_code_of_a_long_double() -> None:
    rows = np.arange(64, dtype=np.uint8)
    rows[:32] = 1
    dtype = np.dtype(ml_dtypes.float8_e4m3fnuz)
    assert dtype.char == "G"
    digests = {digest_chunk([(rows + i % 2 * (np.arange(64) == i)).astype(np.uint8).view(dtype)])
               for i in range(64)}  # fmt: skip
    assert len(digests) == 33


# ---- positions of before the names, and readers without the package


def nameless(state: bytes, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return a snapshot as it was before names were written."""
    with monkeypatch.context() as patch:
        old = lambda dtype: dtype.str if dtype.names is None else dtype.descr  # noqa: E731
        patch.setattr("feeder.workers.stream.dtypes.write_dtype", old)
        data = bytes(feeder.Snapshot.from_bytes(state))
    assert data != state
    return data


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("dtype", NAMED.values(), ids=NAMED)
def test_rows_of_a_snapshot_without_names_are_fetched_again(
    dtype: np.dtype[Any], end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with feed(dtype) as coordinator:
        for _ in range(end):
            next(coordinator["train"])
        old = nameless(bytes(coordinator.snapshot()), monkeypatch)
        wanted = note(coordinator["train"])
    with feed(dtype, resume=old) as coordinator:
        assert note(coordinator["train"]) == wanted


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes ml_dtypes a package that is not installed."""
    return lambda: monkeypatch.setitem(sys.modules, "ml_dtypes", None)


def test_a_missing_package_is_named_by_whoever_reads(
    missing: Callable[[], None], tmp_path: Path
) -> None:
    says = r"dtype 'bfloat16' is one of ml_dtypes, which is not installed: pip install ml-dtypes"
    with feed(BF16) as coordinator:
        next(coordinator["train"])
        data = bytes(coordinator.snapshot())
    with feeder.CheckpointStore(tmp_path) as store:
        store.put("model", {"x": rows_of(BF16, 0, 3)})
        missing()
        with pytest.raises(feeder.SnapshotFormatError, match=says):
            feeder.Snapshot.from_bytes(data)
        with pytest.raises(feeder.CheckpointError, match=rf"cannot be read here: {says}"):
            store.get("model")


@pytest.mark.served
def test_a_consumer_without_the_package_is_told_its_name(missing: Callable[[], None]) -> None:
    with serving(lambda: feed(BF16)) as server:
        write_dtype(BF16)  # The server, of the same process here, remembers it.
        missing()
        told = pytest.raises(feeder.ConfigError, match="ml_dtypes, which is not installed")
        with reading(server) as consumer, told:
            next(consumer)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_gpu_has_arrays_of_types_whose_code_is_that_of_another(kind: type) -> None:
    column = Column(name="x", axis=0, dtype=np.dtype(kind), shape=())
    with pytest.raises(feeder.ConfigError, match="'cuda:0' has no arrays"):
        check_dtypes("cuda:0", (column,))
