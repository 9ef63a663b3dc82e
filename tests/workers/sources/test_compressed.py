"""Compressed files: what their content would give in a file of its own, in order and out of it."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calls import call
from feeder.cli import main
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, jsonl, mds, tfrecord, webdataset
from feeder.workers.sources.stores import inflated
from needs import needs
from project import TESTS
from shards import example, ints, numbered, write_tar, write_tfrecord
from small import make as make_feed

needs("pyarrow")

KINDS = ["gzip", "bz2", "lzma", "zstd", "lz4", "gzip twice"]
NUM = 40


def compressed(kind: str, data: bytes) -> bytes:
    """Data as a file of this kind; of two parts that were joined, where the kind says so."""
    name, _, twice = kind.partition(" ")
    if twice:
        return compressed(name, data[:100]) + compressed(name, data[100:])
    if name in ("zstd", "lz4"):
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, name) as stream:
            stream.write(data)
        return sink.getvalue().to_pybytes()
    return bytes(importlib.import_module(name).compress(data))


def lines(path: Path) -> Path:
    path.write_text(
        "".join(json.dumps({"x": i, "t": "a" * (40 * (i % 7))}) + "\n" for i in range(NUM))
    )
    return path


FORMATS: dict[str, tuple[Callable[[Path], Path], Callable[..., Any]]] = {
    "x.jsonl": (lines, jsonl),
    "x.tar": (lambda path: write_tar(path, numbered(0, NUM)), webdataset),
    "x.tfrecord": (
        lambda path: write_tfrecord(path, [example({"x": ints(i)}) for i in range(NUM)]), tfrecord,
    ),
}  # fmt: skip


def rows(source: Any, threads: int = 3) -> list[list[Any]]:
    source = source.map(lambda record: {"n": len(repr(record)), "x": hash(repr(record))})
    with make_feed(source, ["n", "x"], 3, num_threads=threads) as made:
        return [batch[name].tolist() for batch in made["train"] for name in ("n", "x")]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of few bytes, of which few are kept."""
    monkeypatch.setattr(inflated, "_STRETCH", 128)
    monkeypatch.setattr(inflated, "_STRETCHES_KEPT", 3)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_records_are_those_of_the_content(
    name: str, kind: str, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write, make = FORMATS[name]
    plain = make(write(tmp_path / name))
    packed = tmp_path / "packed" / f"{name}.{kind[:2]}"
    packed.parent.mkdir()
    packed.write_bytes(compressed(kind, (tmp_path / name).read_bytes()))
    # In order, then out of it, then from what was written down.
    assert rows(make(packed), 1) == rows(plain)
    assert not caplog.messages
    assert rows(make(packed)) == rows(plain)
    caplog.clear()
    wanted = rows(plain.shuffle(seed=1))
    # With one thread alone it is the same each time how often the file is begun anew.
    assert rows(make(packed).shuffle(seed=1), 1) == wanted
    assert sum("write what they hold down once" in m for m in caplog.messages) == 1
    described = make(packed).describe()
    assert main(["index", str(packed)]) == 0
    assert f"{NUM} records" in capsys.readouterr().out
    again = make(packed)
    packed.rename(packed.with_suffix(".away"))
    assert (rows(again.shuffle(seed=1)), again.describe()) == (wanted, described)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_damaged_file_is_named(kind: str, tmp_path: Path) -> None:
    data = compressed(kind, lines(tmp_path / "x.jsonl").read_bytes())
    path = tmp_path / "y.jsonl"
    path.write_bytes(data[:-9])
    with pytest.raises(ConfigError, match=r"y\.jsonl': cannot be decompressed"):
        jsonl(path)
    # Behind the back of a source that has an index.
    path.write_bytes(data)
    source = jsonl(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(RecordError, match=r"y\.jsonl' at byte \d+ of its content: cannot be dec"):
        source(call(0, NUM))


def test_shards_of_mds_are_read_where_they_are_compressed(tmp_path: Path, capsys: Any) -> None:
    written = TESTS / "oracles/mds"
    index = json.loads((written / "index.json").read_text())
    for entry in index["shards"]:
        name = entry["raw_data"]["basename"]
        data = compressed("zstd", (written / name).read_bytes())
        (tmp_path / f"{name}.zstd").write_bytes(data)
        entry["zip_data"] = {"basename": f"{name}.zstd", "bytes": len(data), "hashes": {}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    plain, columns = mds(written), ["n", "text", "fixed"]
    order = np.array([3, 0, 15, 9, 9, 1])
    for _ in range(2):
        source = mds(tmp_path)
        assert repr(source.samples(order, call(0, 6))) == repr(plain.samples(order, call(0, 6)))
        assert rows(mds(tmp_path, columns)) == rows(mds(written, columns))
        assert main(["index", str(tmp_path)]) == 0
    capsys.readouterr()
    for path in tmp_path.glob("*.zstd"):
        path.write_bytes(b"gone")
    assert repr(source.samples(order, call(0, 6))) == repr(plain.samples(order, call(0, 6)))


def test_a_record_whose_length_looks_like_gzip_is_none(tmp_path: Path) -> None:
    length = int.from_bytes(b"\x1f\x8b\x08", "little")
    path = write_tfrecord(tmp_path / "x", [bytes(length)])
    assert len(tfrecord(path, len)) == 1
    data = path.read_bytes()
    path.write_bytes(gzip.compress(data, mtime=0))
    assert tfrecord(path, len)(call(0, 1))[0].tolist() == [length]
