"""The page on snapshots and tokens says how to read and write them: the example's reader, which
knows no feeder, finds what the library does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash

import feeder
from docs.pages import ROOT
from feeder.state import codec
from feeder.workers.stream.digests import digest_chunk
from small import make

pytestmark = pytest.mark.process

PAGE = ROOT / "docs/snapshot-format.md"
READER = ROOT / "examples/formats/read_position.py"
POINT = np.dtype([("x", "<f4"), ("y", "<i2", (2,))])


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(READER.read_text(), READER, "exec"), names)
    return names


def pure(call: feeder.Call) -> list[np.ndarray]:
    if call.index == 9:
        raise StopIteration
    points = np.zeros(7, POINT)
    points["x"] = call.rng.random(7)
    return [points, call.rng.random((2, 7, 3))]


class Seek:
    """Cursors of everything that a cursor may be made of."""

    def __init__(self) -> None:
        self.at = {0: 0, 1: 0}

    def __call__(self, worker_id: int, batch_size: int) -> list[np.ndarray]:
        self.at[worker_id] += 1
        return [np.full(5, self.at[worker_id]), np.full((1, 5, 1), worker_id)]

    def cursor(self, worker_id: int) -> Any:
        array = np.arange(3, dtype=np.int16) * self.at[worker_id]
        return (self.at[worker_id], 2**70, [None, -1.5, b"x", {1: "\udc80é"}], array)

    def seek(self, worker_id: int, cursor: Any) -> None:
        self.at[worker_id] = cursor[0]


class Replay(Seek):
    """Large columns, so that their digests are of samples."""

    cursor = seek = None  # type: ignore[assignment]

    def __call__(self, worker_id: int, batch_size: int) -> list[np.ndarray]:
        self.at[worker_id] += 1
        large = np.arange(5 * 1000, dtype=np.float64).reshape(5, 1000) * self.at[worker_id]
        return [large, np.full((1, 5, 1), worker_id)]


Made = tuple[feeder.Coordinator, feeder.Batch | None]


def feed(fetch: Callable[..., Any], num_batches: int, **settings: Any) -> Made:
    """A stopped feed that has handed out so many batches, and the last of them."""
    coordinator = make(fetch, ["a", "b"], batch_columns=[0, 1], **settings)
    batch = None
    with coordinator:
        for _ in range(num_batches):
            batch = next(coordinator["train"])
    return coordinator, batch


CASES: dict[str, Callable[[], Made]] = {
    "before the first batch": lambda: feed(pure, 0),
    "pure, rows left over": lambda: feed(pure, 1),
    "pure, in its second epoch": lambda: feed(pure, 20, epochs=2, seed=2**64 - 1),
    "pure, finished": lambda: feed(pure, 16),
    "by arrival": lambda: feed(pure, 2, order="arrival", num_threads=3),
    "seek": lambda: feed(Seek(), 3),
    "replay, nine workers": lambda: feed(lambda w, b: [np.ones(3), np.ones((1, 3))], 5,
                                       num_worker_threads=9),
    "replay": lambda: feed(Replay(), 70),
    "rows that cannot be fetched again": lambda: feed(Seek(), 2, repeatable=False, version="v"),
}  # fmt: skip


def assert_token_is(token: dict[str, Any], cut: feeder.Cut) -> None:
    names = ["epoch", "index", "step"]
    assert [token[name] for name in names] == [getattr(cut, name) for name in names]
    position = dict(cut.position._asdict())
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in token["position"].items()} == (
        position
    )
    leftover = cut.leftover
    fields = ("partition", "call", "taken", "rows", "digest", "mark")
    wanted = None if leftover is None else {name: getattr(leftover, name) for name in fields}
    assert token["leftover"] == wanted


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_the_pages_reader_finds_what_the_library_does(
    make: Callable[[], Made], page: dict[str, Any]
) -> None:
    coordinator, batch = make()
    for data in (bytes(coordinator.snapshot()), coordinator.state_dict()["feeder"]):
        (read,), (state,) = page["read_snapshot"](data), feeder.Snapshot.from_bytes(data).states
        assert (read["name"], read["number"]) == (state.name, state.number)
        assert read["fingerprint"] == state.fingerprint
        assert (read["columns"] is None) == (state.columns is None)
        for (name, axis, dtype, shape), c in zip(
            read["columns"] or (), state.columns or (), strict=True
        ):
            assert (name, axis, np.dtype(dtype), tuple(shape)) == (c.name, c.axis, c.dtype, c.shape)
        assert (read["rows"] is None) == (state.rows is None)
        for (dtype, shape, raw), array in zip(read["rows"] or (), state.rows or (), strict=True):
            assert (np.dtype(dtype), tuple(shape), raw) == (
                array.dtype, array.shape, array.tobytes()
            )  # fmt: skip
        assert read["token"]["fingerprint"] == page["fingerprint_digest"](read["fingerprint"])
        if batch is not None:
            assert_token_is(read["token"], batch.cut)
            assert page["read_token"](batch.cut.token()) == read["token"]


@pytest.mark.parametrize("step", [2, 300, 70_000, 2**33])
def test_the_pages_reader_reads_headers_that_are_compressed(
    page: dict[str, Any], step: int
) -> None:
    source = feeder.sources.samples(lambda info: np.int64(info.idx_in_epoch), 2000 * step)
    excluded = source.exclude(range(1, 1000 * step, step))
    with make(excluded, ["x"]) as coordinator:
        next(coordinator["train"])
        data = bytes(coordinator.snapshot())
    assert data[8] == 3
    (read,), (state,) = page["read_snapshot"](data), feeder.Snapshot.from_bytes(data).states
    assert read["fingerprint"] == state.fingerprint
    assert len(read["fingerprint"]["source.excluded"]) == 1000


def test_the_pages_reader_reads_values_and_arrays(page: dict[str, Any]) -> None:
    values = (
        (), (1, ("a", b"b")), 2**200, -(2**64), {"k": [1.5, None, True]}, "\udcff", {1: 2, (3): ()}
    )  # fmt: skip
    for value in values:
        assert page["read_value"](codec.pack(value)) == value
    for array in (np.arange(6, dtype="<u2").reshape(2, 3), np.zeros(2, POINT)):
        dtype, shape, raw = page["read_value"](codec.pack(array))
        assert (np.dtype(dtype), tuple(shape), raw) == (array.dtype, array.shape, array.tobytes())


def damaged(data: bytes) -> list[bytes]:
    flipped = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))]
    return [*flipped, data[:-1], data + b"\0"]


def stored(folder: Path) -> bytes:
    """A checkpoint of everything that may be in one."""
    entries = {
        "array": np.arange(6, dtype=">i2").reshape(2, 3), "points": np.zeros((2, 0), POINT),
        "bytes": b"some", "none": b"", "number": np.float32(1.5),
    }  # fmt: skip
    with feeder.CheckpointStore(folder) as store:
        store.put("a/b", entries, meta={"step": 2**70, "who": ("x", [1])})
    return (folder / "a/b").read_bytes()


def test_the_pages_reader_reads_checkpoints(page: dict[str, Any], tmp_path: Path) -> None:
    read, added = page["read_checkpoint"](stored(tmp_path))
    loaded = feeder.CheckpointStore(tmp_path).get("a/b")
    assert added == loaded.meta
    assert list(read) == list(loaded.entries)
    for name, (dtype, shape, raw) in read.items():
        entry = loaded.entries[name]
        if dtype is None:
            assert raw == entry
        else:
            assert (np.dtype(dtype), tuple(shape), raw) == (
                entry.dtype, entry.shape, entry.tobytes()
            )  # fmt: skip


def test_the_pages_reader_refuses_what_is_damaged(page: dict[str, Any], tmp_path: Path) -> None:
    coordinator, batch = feed(Seek(), 1)
    assert batch is not None
    whole = {
        "read_snapshot": bytes(coordinator.snapshot()), "read_token": batch.cut.token(),
        "read_checkpoint": stored(tmp_path),
    }  # fmt: skip
    for read, data in whole.items():
        for wrong in damaged(data):
            with pytest.raises(ValueError):
                page[read](wrong)


def chunk_digest(arrays: list[np.ndarray]) -> int:
    """As the page describes it."""
    hasher = xxhash.xxh3_64()
    for array in arrays:
        raw = array.tobytes()
        if len(raw) > 16384:
            stride = (len(raw) - 64) // 255
            blocks = [raw[i * stride : i * stride + 64] for i in range(256)]
            raw = b"".join([*blocks, raw[-64:]])
        hasher.update(f"{array.dtype.str}{array.shape}".encode() + raw)
    return hasher.intdigest()


def test_a_chunks_digest_is_what_the_page_says() -> None:
    for num_bytes in (0, 1, 16384, 16385, 20000, 300_000):
        chunk = [np.arange(num_bytes, dtype=np.uint8), np.ones((3, 2), np.float32)]
        assert digest_chunk(chunk) == chunk_digest(chunk)
    # Padding counts as zeros.
    dtype = np.dtype([("flag", "i1"), ("value", "<f8")], align=True)
    padded, zeros = np.frombuffer(bytearray(b"9" * 48), dtype), np.zeros(3, dtype)
    for rows in (padded, zeros):
        rows["flag"], rows["value"] = 1, 2
    assert padded.tobytes() != zeros.tobytes()
    assert digest_chunk([padded]) == chunk_digest([zeros])


def write_token(fields: list[Any]) -> bytes:
    body = msgpack.packb(fields)
    return b"FT\x01" + xxhash.xxh3_64_digest(body) + body


def test_a_token_written_by_the_page_is_resumed_from(page: dict[str, Any]) -> None:
    coordinator, batch = feed(pure, 1, epochs=None)
    assert batch is not None
    fingerprint = page["read_token"](batch.cut.token())["fingerprint"]
    # Epoch 3, call 4, of which 2 rows are taken: 30 rows and so 7 batches of the epoch are gone.
    digest = chunk_digest(pure(feeder.Call(4, 3, 0, 4, 0)))
    position = [3, 0, b"\x01", [5], [0], [None], []]
    token = write_token(["train", 0, fingerprint, 3, 7, 55, position, [0, 4, 2, 7, digest, None]])
    coordinator = make(pure, ["a", "b"], batch_columns=[0, 1], epochs=None, resume=token)
    with coordinator:
        batch = next(coordinator["train"])
    assert (batch.epoch, batch.index, batch.step) == (3, 7, 55)
    assert batch["b"].tobytes() == pure(feeder.Call(4, 3, 0, 4, 0))[1][:, 2:6].tobytes()


def test_the_page_is_of_the_versions_in_force() -> None:
    text = Path(PAGE).read_text()
    assert (
        "at format 3 (formats 1 and 2 are read), checkpoints at format 1, tokens at format 3"
        in text
    )
    assert "version, 1 to 3" in text
    assert (feeder.state.snapshot.SNAPSHOT_VERSION, feeder.state.token.TOKEN_VERSION) == (3, 3)
