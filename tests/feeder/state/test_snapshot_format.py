"""Positions as bytes: what is not whole, not ours or not readable is refused, whichever byte."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import feeder
from feeder.state.snapshot import StreamState
from parts import examples
from small import Counted, Pure, ids, make

HEAD_BYTES = 36


def feed_to(step: int) -> feeder.Coordinator:
    """Return a stopped coordinator that has handed out `step` batches: one row is left over after
    the first, two after the second."""
    with make(Pure()) as coordinator:
        for _ in range(step):
            next(coordinator["train"])
    return coordinator


def snapshot_bytes() -> bytes:
    return bytes(feed_to(1).snapshot())


def token_bytes() -> bytes:
    with make(Pure()) as coordinator:
        return next(coordinator["train"]).cut.token()


def state_bytes() -> bytes:
    return feed_to(1).state_dict()["feeder"]


def by_snapshot(data: bytes) -> Any:
    return feeder.Snapshot.from_bytes(data)


def by_resume(data: bytes) -> Any:
    return make(Pure(), resume=data)


def by_state_dict(data: bytes) -> Any:
    make(Pure()).load_state_dict({"feeder": data})


FORMS: dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any], int]] = {
    "snapshot": (snapshot_bytes, by_snapshot, 1),
    "snapshot given to resume": (snapshot_bytes, by_resume, 17),
    "token": (token_bytes, by_resume, 1),
    "state dict": (state_bytes, by_state_dict, 17),
}
"""What makes the bytes, what reads them, and of how many changes one is tried: those that a feed
reads by way of another form are read by the same code."""
all_forms = pytest.mark.parametrize(("make_bytes", "read", "step"), FORMS.values(), ids=FORMS)


@all_forms
def test_every_flipped_bit_is_refused(
    make_bytes: Callable[[], bytes], read: Callable[[bytes], Any], step: int
) -> None:
    data = make_bytes()
    read(data)
    for bit in range(0, 8 * len(data), step):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(feeder.SnapshotFormatError):
            read(bytes(flipped))


@all_forms
def test_every_truncation_is_refused(
    make_bytes: Callable[[], bytes], read: Callable[[bytes], Any], step: int
) -> None:
    """And bytes too many."""
    data = make_bytes()
    for changed in (data + b"\0", *(data[:length] for length in range(0, len(data), step))):
        with pytest.raises(feeder.SnapshotFormatError):
            read(changed)


def reseal(data: bytes, *, version: int = 1, body: bytes | None = None) -> bytes:
    """Return a snapshot with another version or body under a digest that is right."""
    body = data[HEAD_BYTES:] if body is None else body
    numbers = struct.pack("<IQ", version, len(body))
    return b"FEEDSNAP" + numbers + xxhash.xxh3_128_digest(numbers + body) + body


def test_a_snapshot_of_a_newer_version_is_refused() -> None:
    """And a token."""
    assert reseal(snapshot_bytes()) == snapshot_bytes()
    for version in (4, 1000):
        told = f"^snapshot has version {version}, expected at most 3; update feeder$"
        with pytest.raises(feeder.SnapshotFormatError, match=told):
            by_snapshot(reseal(snapshot_bytes(), version=version))
    token = bytearray(token_bytes())
    token[2] = 4
    told = "^token has version 4, expected at most 3; update feeder$"
    with pytest.raises(feeder.SnapshotFormatError, match=told):
        by_resume(bytes(token))


def test_a_body_that_makes_no_sense_is_refused_under_a_right_digest() -> None:
    data = snapshot_bytes()
    body = data[HEAD_BYTES:]
    bodies = [b"", b"\1\0\0\0", b"\1\0\0\0\xc1", b"\xff" * 40, body[:-1], body[:40]]
    bodies += [bytes([*body[:i], body[i] ^ 1 << bit, *body[i + 1 :]])
               for i in range(len(body)) for bit in range(8)]  # fmt: skip
    num_refused = 0
    for changed in bodies:
        try:
            by_snapshot(reseal(data, body=changed))
        except feeder.SnapshotFormatError:
            num_refused += 1
    assert num_refused >= 6


# ---- headers that are compressed


def state_with(value: Any) -> StreamState:
    """A state with a value in its fingerprint."""
    (state,) = feed_to(1).snapshot().states
    return state._replace(fingerprint={**state.fingerprint, "value": value})


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
PAIRS = st.lists(st.integers(0, 2**63 - 1), min_size=30, max_size=50).map(
    lambda numbers: [[*pair] for pair in pairwise(sorted(numbers))][::2]
)
LARGE = st.recursive(
    LEAVES | PAIRS, lambda below: st.lists(below) | st.dictionaries(st.text(), below)
)


@settings(max_examples=examples(100))
@given(LARGE, st.booleans())
def test_a_large_header_comes_back_as_it_was(value: Any, has_left_out: bool) -> None:
    left_out = ((0, 1, "a name", "a reason"),) if has_left_out else ()
    state = state_with([value, "x" * 5000])._replace(left_out=left_out)
    data = bytes(feeder.Snapshot((state, state)))
    assert data[8] == 3 and len(data) < 5000 + len(msgpack.packb(value))
    for found in feeder.Snapshot.from_bytes(data).states:
        assert repr(found.fingerprint) == repr(state.fingerprint)
        assert found._replace(fingerprint={}, rows=None) == state._replace(
            fingerprint={}, rows=None
        )
        assert all(map(np.array_equal, found.rows or (), state.rows or ()))


SINGLE = [[n, n + 1] for n in range(7, 7 * 4000, 7)]
NO_PAIRS: dict[str, list[Any]] = {
    "falling": SINGLE[::-1],
    "negative": [[-1, 2], *SINGLE],
    "truths": [[False, True], *SINGLE],
    "three": [[1, 2, 3], *SINGLE],
    "too large": [*SINGLE, [2**63, 2**63 + 1]],
    "few": [[2**62 + n, 2**62 + n + 1] for n in range(0, 20, 2)] + [["x" * 5000, "y"]],
}


@pytest.mark.parametrize("value", [SINGLE, *NO_PAIRS.values()], ids=["single", *NO_PAIRS])
def test_only_pairs_of_growing_numbers_are_written_as_steps(value: list[Any]) -> None:
    (found,) = feeder.Snapshot.from_bytes(bytes(feeder.Snapshot((state_with(value),)))).states
    assert repr(found.fingerprint["value"]) == repr(value)


def test_a_small_header_stays_in_the_form_of_before() -> None:
    data = bytes(feeder.Snapshot((state_with("x" * 3000),)))
    assert data[8] == 1
    assert b"x" * 3000 in data


def compressed(header: bytes) -> bytes:
    return reseal(b"", version=3, body=len(header).to_bytes(4, "little") + header)


def ext(code: int, data: bytes) -> bytes:
    return zlib.compress(msgpack.packb([msgpack.ExtType(code, data)] * 2))


NO_HEADERS: dict[str, tuple[bytes, str]] = {
    "no zlib": (b"x" * 100, "its header is damaged: .*incorrect header check"),
    "cut": (zlib.compress(bytes(range(256)) * 40)[:-9], "its header is damaged: it ends too early"),
    "half": (zlib.compress(bytes(range(256)) * 40)[:99], "its header is damaged: it ends"),
    "empty": (b"", "its header is damaged: it ends"),
    "changed": (
        zlib.compress(bytes(range(256)) * 40)[:-1] + b"x",
        "its header is damaged: .*incorrect data check",
    ),
    "endless": (zlib.compress(bytes(2**21)), "has more than 1048576 bytes"),
    "no msgpack": (zlib.compress(b"\xc1"), "cannot be read"),
    "another extension": (ext(7, b""), "unknown extension 7"),
    "odd pairs": (ext(1, b"\1\1\1\1"), "cannot be read"),
    "no size": (ext(1, b""), "cannot be read"),
    "another size": (ext(1, b"\3abc"), "cannot be read"),
    "half a number": (ext(1, b"\4abcde"), "cannot be read"),
}


@pytest.mark.parametrize(("header", "told"), NO_HEADERS.values(), ids=NO_HEADERS.keys())
def test_a_header_that_is_none_is_refused_by_name(header: bytes, told: str) -> None:
    with pytest.raises(feeder.SnapshotFormatError, match=told):
        feeder.Snapshot.from_bytes(compressed(header), most_header_bytes=2**20)


def test_a_compressed_header_is_read_for_good() -> None:
    """As the first feeder that wrote one did; another zlib may write other bytes."""
    packed = bytes.fromhex(COMPRESSED)
    (state,) = feeder.Snapshot.from_bytes(packed).states
    assert state.fingerprint == {"value": SINGLE[:100], "text": "text" * 1200}
    assert (state.name, state.number, state.token, state.left_out) == ("train", 0, b"FT", ())


COMPRESSED = (
    "46454544534e4150030000005a00000000000000ce9dd80512529a693d47c4b3b18fb8cb56000000789c9b38"
    "6369495162661e43d3d2b2c49cd2d4e3271919d919d986055c52925a51724be800881ac5a378148fe2513c8a"
    "47f1281ec5a378148fe2513c8a47f1281ec5a378b0e2234c6e21070e4c610082090023855f81"
)


NO_STATE_DICTS = [
    (None, "state dict is NoneType, expected {'feeder': bytes}"),
    (b"", "state dict is bytes, expected {'feeder': bytes}"),
    ({}, "state dict has the keys [], expected {'feeder': bytes}, as "),
    ({"model": 1, "feed": b""}, "state dict has the keys ['model', 'feed'], expected {"),
    ({"feeder": None}, "state dict holds NoneType, expected {'feeder': bytes}: make bytes of it"),
    ({"feeder": np.zeros(9, np.uint8)}, "state dict holds ndarray, expected {'feeder': bytes}: "),
    (dict.fromkeys(map(str, range(1000)), b""), "state dict has the keys ['0', '1', "),
]


@pytest.mark.parametrize(("state_dict", "told"), NO_STATE_DICTS, ids=range(len(NO_STATE_DICTS)))
def test_what_is_no_state_dict_is_refused(state_dict: Any, told: str) -> None:
    for loader in (make(Pure()), make(Pure())["train"]):
        with pytest.raises(feeder.SnapshotFormatError) as caught:
            loader.load_state_dict(state_dict)
        assert str(caught.value).startswith(told) and len(str(caught.value)) < 200


def test_a_snapshot_goes_through_bytes_and_a_file_unchanged(tmp_path: Path) -> None:
    coordinator = feed_to(2)
    snapshot = coordinator.checkpoint(tmp_path / "feed.snap")
    data = bytes(snapshot)
    assert (tmp_path / "feed.snap").read_bytes() == data
    assert bytes(feeder.Snapshot.from_bytes(data)) == data
    assert bytes(feeder.Snapshot.read(tmp_path / "feed.snap")) == data
    assert os.listdir(tmp_path) == ["feed.snap"]
    with make(Pure()) as undisturbed:
        wanted = ids(undisturbed["train"])[8:]
    state, path = coordinator.state_dict(), tmp_path / "feed.snap"
    ways = [data, bytearray(data), memoryview(data), snapshot, path, str(path), state,
            state["feeder"], snapshot.states[0].token]  # fmt: skip
    for way in ways:
        with make(Pure(), resume=way) as resumed:
            assert ids(resumed["train"]) == wanted


@pytest.mark.parametrize("name", ["missing/feed.snap", "folder"])
def test_a_snapshot_that_cannot_be_written_leaves_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    path = str(tmp_path / name)
    for what, call in {
        "write": lambda: feed_to(1).checkpoint(path),
        "read": lambda: make(Pure(), resume=f"{path}.not there"),
    }.items():
        with pytest.raises(feeder.CheckpointError) as caught:
            call()
        assert str(caught.value).startswith(f"cannot {what} snapshot '{path}")
        assert isinstance(caught.value.__cause__, OSError)
    assert os.listdir(tmp_path) == ["folder"]


def test_rows_behind_those_of_a_type_without_a_name_are_found() -> None:
    """Of before such names were written: the rows are fetched again, and nobody's are mixed up."""
    (state,) = feed_to(1).snapshot().states
    assert state.rows is not None
    kept = (state.rows[0] + 100, *state.rows[1:])
    data = bytes(feeder.Snapshot((state, state._replace(number=1, rows=kept))))
    body = data[HEAD_BYTES:]
    end = 4 + int.from_bytes(body[:4], "little")
    header = msgpack.unpackb(body[4:end])
    header[0][4][0][2] = "<V2"
    packed = msgpack.packb(header)
    body = len(packed).to_bytes(4, "little") + packed + body[end:]
    numbers = data[8:12] + len(body).to_bytes(8, "little")
    sealed = data[:8] + numbers + xxhash.xxh3_128_digest(numbers + body) + body
    first, second = feeder.Snapshot.from_bytes(sealed).states
    assert (first.columns, first.rows) == (None, None)
    assert second.rows is not None
    assert all(np.array_equal(*pair) for pair in zip(second.rows, kept, strict=True))


def test_the_text_of_a_position_is_no_path_and_not_shown_in_full() -> None:
    with pytest.raises(feeder.CheckpointError) as caught:
        make(Pure(), resume=str(make(Pure()).state_dict()))
    told = str(caught.value)
    assert told.endswith("that is there, or give a position itself and not its text")
    assert told.count("FEEDSNAP") == 1 and len(told) < 300
    with pytest.raises(feeder.CheckpointError, match="null byte; name a file, or a folder"):
        make(Pure(), resume="a\0b")


@pytest.mark.parametrize("row_bytes", [65_535, 65_537, 2**20 + 1])
def test_every_byte_of_large_leftover_rows_is_in_the_digest(row_bytes: int) -> None:
    rows = np.random.default_rng(row_bytes).integers(0, 256, (5, row_bytes), np.uint8)
    with make(lambda call: (rows,), ["x"], epochs=None) as coordinator:
        next(coordinator["train"])
        data = bytes(coordinator.snapshot())
    assert reseal(data) == data
    (left,) = feeder.Snapshot.from_bytes(data).states[0].rows or ()
    assert np.array_equal(left, rows[4:])
    damaged = bytearray(data)
    for at in (-1, -65_535, -row_bytes // 2, -row_bytes):
        damaged[at] ^= 1
        with pytest.raises(feeder.SnapshotFormatError, match="corrupt"):
            by_snapshot(bytes(damaged))
        damaged[at] ^= 1


# ---- tokens whose digest is right, and that are none all the same


NAME, NUMBER, FINGERPRINT, EPOCH, INDEX, STEP, POSITION, LEFTOVER, DEALING = range(9)


TURN, LIVE, CALLS, ROWS, MARKS, DONE = range(1, 7)


def pure(**settings: Any) -> feeder.Coordinator:
    return make(Pure(50), epochs=None, num_worker_threads=2, **settings)


def ring(**settings: Any) -> feeder.Coordinator:
    return make(Counted(50), epochs=None, num_worker_threads=2, **settings)


@cache
def body_of(factory: Callable[..., feeder.Coordinator]) -> bytes:
    """Of the token after seven batches of four rows in chunks of three."""
    with factory() as coordinator:
        for _ in range(7):
            batch = next(coordinator["train"])
        return batch.cut.token()[11:]


def fields_of(factory: Callable[..., feeder.Coordinator]) -> list[Any]:
    return msgpack.unpackb(body_of(factory))


def token_of(fields: Any, version: int = 3) -> bytes:
    body = msgpack.packb(fields)
    return b"FT" + bytes((version,)) + xxhash.xxh3_64_digest(body) + body


def put(*path: int, value: Any) -> Callable[[list[Any]], None]:
    def change(fields: list[Any]) -> None:
        for at in path[:-1]:
            fields = fields[at]
        fields[path[-1]] = value

    return change


WRONG: dict[str, Callable[[list[Any]], None]] = {
    "too short": lambda fields: fields.__delitem__(-1),
    "too long": lambda fields: fields.append(0),
    "a name that is none": put(NAME, value=[1]),
    "a short fingerprint": put(FINGERPRINT, value=b"x"),
    "a negative epoch": put(EPOCH, value=-1),
    "a negative index": put(INDEX, value=-4),
    "a step that is no whole number": put(STEP, value=1.5),
    "no position": put(POSITION, value=None),
    "a turn of no partition": lambda fields: put(
        POSITION, TURN, value=len(fields[POSITION][CALLS])
    )(fields),
    "no partition that lives": put(POSITION, LIVE, value=b"\0"),
    "partitions that live and are none": put(POSITION, LIVE, value=b"\xff"),
    "calls below none": put(POSITION, CALLS, 0, value=-1),
    "calls far from the leftover": lambda fields: put(
        POSITION, CALLS, value=[2**62] * len(fields[POSITION][CALLS])
    )(fields),
    "calls of more partitions": put(POSITION, CALLS, value=[10] * 100),
    "no calls": put(POSITION, CALLS, value=[]),
    "rows that are text": put(POSITION, ROWS, value="rows"),
    "marks that are numbers": put(POSITION, MARKS, value=[7, 7]),
    "done that is no list": put(POSITION, DONE, value=7),
    "a leftover of no partition": put(LEFTOVER, 0, value=77),
    "a leftover of more than there is": put(LEFTOVER, 2, value=99),
    "a leftover of no rows": put(LEFTOVER, 3, value=0),
    "a leftover that is none": put(LEFTOVER, value=[1, 2]),
    "no dealing": put(DEALING, value=None),
    "dealt to no queue": put(DEALING, 1, value=0),
    "dealt from before the start": put(DEALING, 0, value=-1),
    "batches of no rows": put(DEALING, 2, value=0),
    "fewer than no rounds skipped": put(DEALING, 3, value=-1),
    "epochs that are none": put(DEALING, 4, value=-1),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_token_that_is_none_is_a_named_error(change: Callable[[list[Any]], None]) -> None:
    for factory in (pure, ring):
        fields = fields_of(factory)
        assert fields[LEFTOVER] is not None
        change(fields)
        with pytest.raises(feeder.SnapshotFormatError, match="token cannot be read: "):
            factory(resume=token_of(fields))


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_token_has_no_dealing(version: int) -> None:
    fields = fields_of(pure)
    with pytest.raises(feeder.SnapshotFormatError, match="token cannot be read: "):
        pure(resume=token_of(fields, version))
    del fields[DEALING]
    with pure(resume=token_of(fields, version)) as coordinator:
        assert next(coordinator["train"]).step == 7


def test_a_position_of_other_partitions_does_not_fit() -> None:
    fields = fields_of(ring)
    fields[POSITION] = [0, 0, b"\1", [10], [30], [None], []]
    fields[LEFTOVER] = None
    with pytest.raises(feeder.ResumeError, match="one of 1 workers, expected 2"):
        ring(resume=token_of(fields))
