"""Checkpoints as bytes: what is not whole or makes no sense is refused, whichever bit."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import feeder
from feeder.checkpoint import format
from feeder.checkpoint.store import CheckpointStore
from feeder.state import codec
from sealing import reseal
from watching import says

HEAD_BYTES = 44
ENTRIES: dict[str, Any] = {
    "rows": np.arange(6, dtype=np.int16).reshape(2, 3),
    "text": b"some text",
    "none": np.empty((0, 4), np.float32),
    "count": np.float64(2.5),
}
META = {"step": 7, "where": ("a", 1)}


class InMemory:
    """The bytes of a checkpoint that is nowhere."""

    path = "here"

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.num_read = 0

    @property
    def size(self) -> int:
        return len(self.data)

    def read_into(self, buffer: memoryview, at: int) -> None:
        assert at + len(buffer) <= len(self.data), "bytes were asked for that are not there"
        buffer[:] = self.data[at : at + len(buffer)]
        self.num_read += len(buffer)


def encoded() -> bytes:
    parts, num_bytes, _ = format.encode(ENTRIES, META)
    data = b"".join(parts)
    assert len(data) == num_bytes
    return data


def decode(data: bytes) -> dict[str, Any]:
    reader = InMemory(data)
    header = format.read_header(reader)
    return {name: format.read_entry(reader, name, at) for name, at in header.entries.items()}


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, bytes):
        return bool(found == wanted)
    return bool(
        np.array_equal(found, wanted)
        and (found.dtype, found.shape) == (np.asarray(wanted).dtype, np.shape(wanted))
    )


def test_what_goes_in_comes_out() -> None:
    found = decode(encoded())
    assert list(found) == list(ENTRIES)
    assert all(same(found[name], ENTRIES[name]) for name in ENTRIES)
    assert format.read_header(InMemory(encoded())).meta == META


def test_every_truncation_is_refused() -> None:
    """And bytes too many."""
    data = encoded()
    for changed in (data + b"\0", *(data[:length] for length in range(len(data)))):
        with pytest.raises(format.DamagedError):
            decode(changed)


def test_every_flipped_bit_is_refused() -> None:
    data = encoded()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(format.DamagedError):
            decode(bytes(flipped))


NO_ENTRIES: list[tuple[Any, str]] = [
    (np.array([None, 1]), "entry 'x' has dtype object: arrays of Python objects are not saved"),
    (np.zeros(2, "i4,O"), "entry 'x' has dtype "),
    ([1, 2], "entry 'x' is list, expected a NumPy array or bytes"),
    ("text", "entry 'x' is str, expected a NumPy array or bytes"),
    (np.ma.array([1, 2], mask=[0, 1]), "entry 'x' is MaskedArray, expected a NumPy array or"),
    (None, "entry 'x' is NoneType, expected a NumPy array or bytes"),
]


def test_what_cannot_be_saved_is_refused() -> None:
    for entry, told in NO_ENTRIES:
        with pytest.raises(feeder.CheckpointError, match="^" + re.escape(told)):
            format.encode({"x": entry}, None)
    with pytest.raises(feeder.CheckpointError, match="named by int, expected str"):
        format.encode({3: b""}, None)  # type: ignore[dict-item]
    with pytest.raises(feeder.CheckpointError, match="what is said of a checkpoint cannot be"):
        format.encode({}, {"step": object()})


def header_of(*entries: list[Any], meta: Any = None) -> bytes:
    return codec.pack([list(entries), {} if meta is None else meta])


@pytest.mark.parametrize("version", [0, 2, 1000])
def test_another_version_is_an_error_of_its_own_and_no_damage(version: int) -> None:
    told = f"checkpoint 'here' has version {version}, expected 1; update feeder, or name another "
    with says(feeder.CheckpointError, told + "checkpoint") as caught:
        decode(reseal(b"whatever it is by then", version=version))
    assert not isinstance(caught.value, format.DamagedError)


DIGEST = xxhash.xxh3_128_digest(bytes(8))
HOSTILE = {
    "not msgpack": b"\xc1",
    "no list": codec.pack(3),
    "one thing": codec.pack([[]]),
    "remarks that are none": header_of(["x", None, [], 8, DIGEST], meta=[1]),
    "bytes of nobody": header_of(),
    "an entry beyond the end": header_of(["x", None, [], 9, DIGEST]),
    "an entry of less than nothing": header_of(
        ["x", None, [], -8, DIGEST], ["y", None, [], 16, DIGEST]
    ),
    "a shape of another size": header_of(["x", "<i8", [2], 8, DIGEST]),
    "a shape of less than nothing": header_of(["x", "<i8", [-1, -1], 8, DIGEST]),
    "a shape of a thousand terabytes": header_of(["x", "<i8", [2**50], 8, DIGEST]),
    "a shape past all integers": header_of(["x", "<i8", [2**60, 2**60], 8, DIGEST]),
    "objects": header_of(["x", "|O", [1], 8, DIGEST]),
    "fields of objects": header_of(["x", codec.pack([("f", "|O")]), [1], 8, DIGEST]),
    "no dtype at all": header_of(["x", "<q9", [1], 8, DIGEST]),
    "a size that is true": header_of(["x", None, [], True, DIGEST]),
    "a name twice": header_of(["x", None, [], 4, DIGEST], ["x", None, [], 4, DIGEST]),
    "a name that is none": header_of([1, None, [], 8, DIGEST]),
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE)
def test_a_header_that_makes_no_sense_is_refused_under_a_right_digest(header: bytes) -> None:
    reader = InMemory(reseal(header, bytes(8)))
    with pytest.raises(format.DamagedError, match=r"^checkpoint 'here' is damaged: its header"):
        format.read_header(reader)
    assert reader.num_read <= HEAD_BYTES + len(header)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**15])
def test_lengths_are_compared_with_the_file_before_anything_is_read(length: int) -> None:
    for numbers in (struct.pack("<IQQ", 1, length, 0), struct.pack("<IQQ", 1, 0, length)):
        reader = InMemory(b"FEEDCKPT" + numbers + xxhash.xxh3_128_digest(numbers))
        with pytest.raises(format.DamagedError, match=f"expected {length + HEAD_BYTES}"):
            format.read_header(reader)
        assert reader.num_read == HEAD_BYTES


def test_damage_is_seen_through_the_store_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointStore(tmp_path / "store") as store:
        store.put("a.1", {"x": b"first"})
        store.put("a.2", {"x": b"second"})
        file = tmp_path / "store" / "a.2"
        data = file.read_bytes()
        for at in (8, 20, 40, len(data) - 1):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            for read in (store.get, store.verify):
                with pytest.raises(feeder.CheckpointError, match=f"{str(file)!r} is damaged"):
                    read("a.2")
            assert store.latest() == "a.1"
            assert f"passed over: checkpoint {str(file)!r} is damaged" in caplog.text
            caplog.clear()
        file.write_bytes(data)
        assert store.latest() == "a.2"
        assert not caplog.records
