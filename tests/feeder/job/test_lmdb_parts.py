"""Parts as LMDBs: what was put is got back, others can read it, and no damage is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
import parts
from feeder.checkpoint.format import DamagedError
from feeder.job.checkpoints import lmdbs
from feeder.job.checkpoints.databases import open_database
from feeder.job.checkpoints.lmdbs import LmdbDatabase
from feeder.job.checkpoints.parts import LoadPart, load_part
from feeder.state import codec
from needs import needs

needs("lmdb")

ENTRIES = {
    "scalar": np.array(3.5),
    "rows": np.arange(6, dtype=np.int16).reshape(2, 3),
    "big endian": np.arange(4, dtype=">u4"),
    "text": np.array(["one", "two"]),
    "fields": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "empty": np.zeros((0, 7), np.float32),
    "state/reader": b"some bytes",
    "feed/train": b"",
}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[LmdbDatabase]:
    made = LmdbDatabase(str(tmp_path), "trainer_0")
    yield made
    made.close()


def test_what_is_put_is_got_back(database: LmdbDatabase, tmp_path: Path) -> None:
    receipt = database.put("trainer_0.1", ENTRIES, meta={"epoch": 1, "steps": {"train[0]": 3}})
    loaded = database.get("trainer_0.1")
    assert list(loaded.entries) == list(ENTRIES) == database.entry_names("trainer_0.1")
    for name, entry in ENTRIES.items():
        got = loaded.entries[name]
        assert type(got) is type(entry)
        if isinstance(entry, bytes):
            assert got == entry
        else:
            assert (got.dtype, got.shape, got.tolist()) == (
                entry.dtype, entry.shape, entry.tolist(),
            )  # fmt: skip
            assert got.flags.writeable
    assert loaded.meta == {"epoch": 1, "steps": {"train[0]": 3}}
    size = (tmp_path / "trainer_0.1").stat().st_size
    assert receipt == database.verify("trainer_0.1")
    assert (receipt.num_bytes, loaded.num_bytes, receipt.digest) == (size, size, loaded.digest)
    assert database.digest_of("trainer_0.1") == receipt.digest
    assert list(database.get("trainer_0.1", ["text", "rows"]).entries) == ["text", "rows"]
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["trainer_0.1"]


def test_any_program_with_lmdb_can_read_one(database: LmdbDatabase, tmp_path: Path) -> None:
    import lmdb

    database.put("part", ENTRIES)
    path = str(tmp_path / "part")
    with lmdb.open(path, subdir=False, lock=False, readonly=True) as env, env.begin() as reading:
        assert np.frombuffer(reading.get(b"rows"), np.int16).tolist() == [0, 1, 2, 3, 4, 5]
        assert {key.decode() for key, _ in reading.cursor()} == {*ENTRIES, "\0feeder"}


def test_entries_that_are_not_there_are_named_with_those_that_are(database: LmdbDatabase) -> None:
    database.put("part", {"x": np.arange(3), "y": b""})
    with pytest.raises(feeder.CheckpointError, match=r"no entries \['z'\], expected some of \['x'"):
        database.get("part", ["x", "z"])


def test_a_name_is_written_once(database: LmdbDatabase) -> None:
    database.put("part", {"x": np.arange(3)})
    with pytest.raises(feeder.CheckpointError, match="exists; each is written once"):
        database.put("part", {"x": np.arange(4)})
    assert database.get("part").entries["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("", b""),
        ("x" * 512, b""),
        ("\0feeder", b""),
        ("object", np.array([{}])),
        ("list", [1, 2]),
        ("none", None),
    ],
)
def test_what_cannot_be_an_entry_is_refused(
    database: LmdbDatabase, tmp_path: Path, name: str, entry: Any
) -> None:
    kind = feeder.CheckpointError if name.isalpha() and len(name) < 9 else feeder.ConfigError
    with pytest.raises(kind, match=r"^entry "):
        database.put("part", {"x": np.arange(3), name: entry})
    assert list(tmp_path.glob("[!.]*")) == []


def test_only_an_lmdb_of_ours_is_removed(database: LmdbDatabase, tmp_path: Path) -> None:
    database.put("part", {})
    database.remove("part")
    assert not database.exists("part")
    with pytest.raises(feeder.CheckpointError, match="No such file"):
        database.remove("part")
    (tmp_path / "other").write_bytes(b"somebody's")
    assert not database.exists("other")
    with pytest.raises(feeder.CheckpointError, match="does not end with b'FEEDLMDB'"):
        database.remove("other")
    assert (tmp_path / "other").read_bytes() == b"somebody's"


# ---- damage


SMALL = {"total": np.array([145]), "state/reader": codec.pack({"position": 10})}


@pytest.fixture
def part(database: LmdbDatabase, tmp_path: Path) -> Path:
    database.put("part", SMALL)
    return tmp_path / "part"


def refuses(database: LmdbDatabase) -> bool:
    try:
        database.get("part")
    except feeder.CheckpointError:
        return True
    return False


def test_no_truncation_is_loaded(database: LmdbDatabase, part: Path) -> None:
    whole = part.read_bytes()
    sizes = {*range(0, len(whole), 397), *range(64), *range(len(whole) - 64, len(whole))}
    for size in sizes:
        part.write_bytes(whole[:size])
        assert refuses(database), size
    part.write_bytes(whole + b"\0")
    assert refuses(database)


def test_no_flipped_bit_is_loaded(database: LmdbDatabase, part: Path) -> None:
    whole = part.read_bytes()
    # Most of an LMDB is zeros: every byte that is not, and some of the others.
    places = [at for at, byte in enumerate(whole) if byte or at % 211 == 0]
    for at in places if not parts.is_full else range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        part.write_bytes(flipped)
        assert refuses(database), at
    part.write_bytes(whole)
    assert not refuses(database)


def test_a_newer_version_is_refused(
    database: LmdbDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdbs, "LMDB_VERSION", 2)
    database.put("part", SMALL)
    monkeypatch.undo()
    with pytest.raises(feeder.CheckpointError, match=r"has version 2, expected 1; update feeder"):
        database.get("part")


@pytest.mark.parametrize("about", [
    5, None, {"x": 1}, [5], [["x"]], [["x", None]], [[5, None, [], 1]], [[["x"], None, [], 1]],
    [["x", "<f9", [1], 4]], [["x", b"", [1], 4]], [["x", b"\xc1", [1], 4]],
    [["x", b"\x91", [1], 4]],
    [["x", "<f4", 5, 4]], [["x", "<f4", [-1, -1], 4]], [["x", "<f4", ["1"], 4]], [["x", 5, [1], 4]],
])  # fmt: skip
def test_what_makes_no_sense_is_damaged(
    about: Any, database: LmdbDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = codec.pack([lmdbs.LMDB_VERSION, about, {}])
    monkeypatch.setattr(codec, "pack", lambda value: packed)
    database.put("part", {"x": np.zeros(1, "<f4")})
    with pytest.raises(DamagedError):
        database.get("part")


@pytest.mark.parametrize("db_type", ["file", "lmdb"])
@pytest.mark.parametrize("steps", ["train", 3, {"train[0]": "3"}, {1: 2}])
def test_steps_that_make_no_sense_are_damage(tmp_path: Path, db_type: str, steps: Any) -> None:
    database = open_database(db_type, str(tmp_path), "a")
    digest = database.put("a.1", {}, meta={"steps": steps}).digest
    database.close()
    request = LoadPart(url=str(tmp_path), db_type=db_type, name="a.1", digest=digest)
    with pytest.raises(DamagedError, match="the steps that it says make no sense"):
        load_part(request)
