"""`verify=`: damage that a format has checksums for is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import shards
from calls import call
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, mds, parquet, tfrecord
from needs import needs
from project import TESTS

needs("pyarrow")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402


def write_mds(path: Path) -> Path:
    index = json.loads((TESTS / "oracles/mds/index.json").read_text())
    path.mkdir()
    for entry in index["shards"]:
        name = entry["raw_data"]["basename"]
        data = (TESTS / "oracles/mds" / name).read_bytes()
        (path / name).write_bytes(data)
        entry["raw_data"]["hashes"] = {"xxh64": xxhash.xxh64_hexdigest(data)}
    (path / "index.json").write_text(json.dumps(index))
    return path / name


def write_parquet(path: Path) -> Path:
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table({"x": ["target"] * 9}), path, **options)
    return path


FORMATS: dict[str, tuple[Callable[[Path], Path], Callable[..., Any], bytes, str]] = {
    "tfrecord": (
        lambda path: shards.write_tfrecord(
            path, [shards.example({"x": shards.field(1, shards.field(1, b"target"))})] * 3,
            is_sealed=True,
        ),
        tfrecord, b"target", r"at byte 12: its checksum is another",
    ),
    "mds": (write_mds, lambda p, **o: mds(p, ["n", "text"], **o), b"xxh",
            r"is damaged: its xxh64 is not"),
    "parquet": (write_parquet, parquet, b"\6\0\0\0target", "row group 0: .*could not verify page"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_named_where_it_is_looked_for(name: str, tmp_path: Path) -> None:
    write, make, target, told = FORMATS[name]
    path = tmp_path / "x"
    file = write(path)
    wanted = make(path).samples(np.arange(3), call(0, 3))
    assert repr(make(path, verify=True).samples(np.arange(3), call(0, 3))) == repr(wanted)
    data = bytearray(file.read_bytes())
    at = data.index(target) + len(target) - 1 if target in data else len(data) - 1
    data[at] ^= 1
    file.write_bytes(data)
    assert make(path).samples(np.arange(1), call(0, 3))
    with pytest.raises((ConfigError, RecordError), match=told):
        make(path, verify=True).samples(np.arange(3), call(0, 3))


def test_a_damaged_length_is_always_named(tmp_path: Path) -> None:
    path = shards.write_tfrecord(tmp_path / "x", [bytes(40)] * 3)
    data = bytearray(path.read_bytes())
    data[0] -= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="record at byte 0 has a length whose checksum is anoth"):
        tfrecord(path)


def test_shards_without_hashes_cannot_be_verified() -> None:
    with pytest.raises(ConfigError, match="has no hashes, expected one such as sha1"):
        mds(TESTS / "oracles/mds", verify=True)
