"""MDS shards: what MosaicML's own writer has written, and what is wrong with a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, mds
from needs import needs
from project import TESTS
from small import make as make_feed

needs("PIL")

WRITTEN = TESTS / "oracles/mds"
NUM = 16


def sample(i: int) -> dict[str, Any]:
    """What was given to the writer."""
    return {
        "digits": 10**12 + i, "fixed": np.full((2, 3), i, "f4"), "h": np.float16(i / 2),
        "meta": {"a": i}, "n": i, "png": np.full((3, 4, 3), i, "u1"), "raw": bytes([i, 0, 255]),
        "real": i + 0.25, "text": "é" * (i % 3) + "x", "u": np.uint16(7 * i),
        "v": np.arange(i + 1, dtype=np.int16), "w": np.full((2, i + 1), i, "u1"),
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "mds"))


def test_samples_are_those_that_were_written() -> None:
    source = mds(WRITTEN)
    assert len(source) == NUM
    order = np.array([*range(NUM), 9, 2, 15])
    for i, made in zip(order.tolist(), source.samples(order, call(0, 19)), strict=True):
        wanted = sample(i)
        assert list(made) == list(wanted)
        for name, value in wanted.items():
            assert np.asarray(made[name]).dtype == np.asarray(value).dtype
            assert np.array_equal(made[name], value), name


def test_columns_that_are_chosen_and_decoders() -> None:
    chunks = list(epoch_of(mds(WRITTEN, ["n", "u", "meta"], random_shuffle=True), 5))
    assert list(chunks[0]) == ["n", "u", "meta.a"]
    numbers = [n for chunk in chunks for n in chunk["n"].tolist()]
    assert sorted(numbers) == list(range(NUM)) != numbers
    assert [u for chunk in chunks for u in chunk["u"].tolist()] == [7 * n for n in numbers]
    (sizes,) = mds(WRITTEN, ["v"], decoders={"v": len}).map(lambda r: r["v"])(call(0, 3))
    # One byte of axes, one of the length, and two for each number.
    assert sizes.tolist() == [4, 6, 8]
    columns = mds(WRITTEN, ["text", "v"]).pad(16)(call(0, NUM))
    assert columns["text"].tolist() == [sample(i)["text"] for i in range(NUM)]
    assert columns["v"].shape == (NUM, 16)


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def compress(folder: Path) -> None:
    (folder / "shard.00001.mds").unlink()
    (folder / "shard.00001.mds.br").write_bytes(b"brotli says nothing of itself")
    packed = {"zip_data": {"basename": "shard.00001.mds.br"}, "compression": "br"}
    change_index(folder, lambda index: index["shards"][1].update(packed))


def encode(encoding: str) -> Callable[[Path], Any]:
    def change(index: dict[str, Any]) -> None:
        for entry in index["shards"]:
            entry["column_encodings"][3] = encoding

    return lambda folder: change_index(folder, change)


SPOILED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (lambda f: (f / "index.json").unlink(), r"index\.json' cannot be read: No such"),
    "no JSON": (lambda f: (f / "index.json").write_text("{"), "is no index of MDS shards: JSON"),
    "another JSON": (lambda f: (f / "index.json").write_text("[1]"), "is no index of MDS shards"),
    "no shards": (lambda f: change_index(f, lambda i: i["shards"].clear()), "lists no shards"),
    "another format": (
        lambda f: change_index(f, lambda i: i["shards"][0].update(format="csv")),
        "lists shards of format 'csv', not mds",
    ),
    "no sizes": (
        lambda f: change_index(f, lambda i: i["shards"][0]["column_sizes"].pop()),
        "a shard without names, encodings and sizes of its columns",
    ),
    "missing": (lambda f: (f / "shard.00002.mds").unlink(), r"00002\.mds' cannot be read: No such"),
    "truncated": (
        lambda f: (f / "shard.00001.mds").write_bytes((f / "shard.00001.mds").read_bytes()[:-1]),
        r"00001\.mds' has 1518 bytes and 5 samples, its index says 1519 and 5: it is truncated",
    ),
    "another shard": (
        lambda f: change_index(f, lambda i: i["shards"][0].update(samples=4)),
        r"00000\.mds' has 1407 bytes and 5 samples, its index says 1407 and 4",
    ),
    "compressed": (compress, r"00001\.mds\.br' is compressed \(br\): decompress it"),
    "other columns": (
        lambda f: change_index(f, lambda i: i["shards"][1]["column_names"].reverse()),
        r"00001\.mds' has the columns \['w', .*00000\.mds' has \['digits'",
    ),
    "pickles": (encode("pkl"), r"column 'meta' has the encoding 'pkl': give decoders=\{'meta'"),
    "an unknown encoding": (encode("list[png]"), r"column 'meta' has the encoding 'list\[png\]'"),
    "a damaged dtype": (encode("ndarray:i~t16:2"), "has the encoding 'ndarray:i~t16:2'"),
    "a damaged shape": (encode("ndarray:int16:2,"), "has the encoding 'ndarray:int16:2,'"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_a_folder_that_is_spoiled_is_told(name: str, folder: Path) -> None:
    spoil, told = SPOILED[name]
    spoil(folder)
    with pytest.raises(ConfigError, match=told):
        mds(folder)


def test_arguments_that_are_wrong_are_told() -> None:
    for arguments, told in (
        ({"columns": "n"}, "columns is 'n', expected names such as"),
        ({"columns": ["z"]}, r"has the columns \['digits', .*, and no 'z'"),
        ({"decoders": {"z": len}}, "and no 'z'"),
        ({"decoders": {"n": 5}}, r"decoders\['n'\] is 5, expected a function of bytes"),
        ({"on_error": "x"}, "on_error is 'x'"),
    ):
        with pytest.raises(ConfigError, match=told):
            mds(WRITTEN, **arguments)


def test_samples_that_are_broken_are_named_or_left_out(folder: Path) -> None:
    path = folder / "shard.00001.mds"
    data = path.read_bytes()
    at = data.index(b'{"a": 6}')
    path.write_bytes(data[:at] + b"nonsense" + data[at + 8 :])
    with pytest.raises(
        RecordError, match=rf"00001\.mds', sample 1: column 'meta' at byte {at}: Expecting value"
    ):
        mds(folder)(call(6, 1))
    source = mds(folder, ["n", "meta"], on_error="skip")
    assert [n for c in epoch_of(source, 4) for n in c["n"].tolist()] == [
        *range(6), *range(7, NUM),
    ]  # fmt: skip
    # A table of samples that says what cannot be.
    path.write_bytes(data[:8] + b"\xff\xff\xff\x00" + data[12:])
    with pytest.raises(RecordError, match=r"00001\.mds', sample 1: the sample lies at bytes 1677"):
        mds(folder, ["n"])(call(6, 1))
    size = int.from_bytes(data[4:8], "little")
    path.write_bytes(data[:size] + b"\xff\xff" + data[size + 2 :])
    with pytest.raises(RecordError, match=r"sample 0: column 'digits' ends behind the sample"):
        mds(folder, ["n"])(call(5, 1))


@pytest.mark.parametrize("data", [b"", b"\x63", b"\x08", b"\x08\x04", b"\x10\x04\x02a"])
def test_arrays_that_are_none_are_told(data: bytes) -> None:
    read = mds(WRITTEN, ["w"]).records._files._decoders["w"]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"dtype|shape|buffer|multiple"):
        read(data)


def test_a_shard_that_has_changed_is_named_at_a_resume(folder: Path) -> None:
    def make(resume: Any) -> feeder.Coordinator:
        return make_feed(mds(folder, ["n"]).shuffle(), ["n"], resume=resume)

    with make(None) as made:
        next(made["train"])
        snapshot = made.snapshot()
    data = bytearray((folder / "shard.00002.mds").read_bytes())
    data[-1] ^= 1
    (folder / "shard.00002.mds").write_bytes(data)
    with pytest.raises(feeder.ResumeError, match=r"file shard\.00002\.mds: '4 samples") as told:
        make(snapshot)
    assert "00001" not in str(told.value)
