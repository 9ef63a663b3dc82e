"""LMDB folders as one list of values: keys of all kinds, several folders, damage."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, extras
from feeder.workers.sources.stores import lmdb_store, mapped
from feeder.workers.sources.stores.lmdb_store import LmdbStore
from feeder.workers.sources.stores.reading import Faults
from project import printed
from stores import damage_leaf, write_lmdb


def read(store: LmdbStore, indices: list[int]) -> list[bytes]:
    with store.values(np.array(indices), Faults("raise")) as (records, values):
        assert records == indices
        return [bytes(value) for value in values]


def read_as_is(store: LmdbStore, indices: list[int]) -> Sequence[memoryview]:
    with store.values(np.array(indices), Faults("raise")) as (_, values):
        return values


KEYS = {
    "numbered": [b"%08d" % i for i in range(40)],
    "from one": [b"%05d" % i for i in range(1, 41)],
    "named": [b"%08d_n%d/x.jpg" % (i, i * 7 % 5) for i in range(40)],
    "named with a break": [b"%04d_\n\xff%d" % (i, i % 3) for i in range(40)],
    "unpadded": sorted(b"%d" % i for i in range(40)),
    "gaps": [b"%08d" % (i * 2) for i in range(40)],
    "binary": sorted(bytes([i, 255 - i, 0]) for i in range(40)),
    "one": [b"7"],
    "mixed": sorted([*(b"%04d" % i for i in range(39)), b"__len__"]),
}
each_kind = pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS.keys())


@each_kind
@given(data=st.data())
def test_records_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, keys: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{hash(tuple(keys))}"
    if not path.exists():
        write_lmdb(path, {key: key for key in keys})
    run = st.tuples(st.integers(0, len(keys) - 1), st.integers(1, 6))
    runs = data.draw(st.lists(run, min_size=1, max_size=9))
    indices = [i for first, num in runs for i in range(first, min(first + num, len(keys)))]
    assert read(LmdbStore(path), indices) == [sorted(keys)[i] for i in indices]


def test_several_folders_are_read_one_after_the_other(tmp_path: Path) -> None:
    sizes = [3, 1, 5]
    values = [[b"%d.%d" % (f, i) for i in range(size)] for f, size in enumerate(sizes)]
    paths = [write_lmdb(tmp_path / str(f), values[f]) for f in range(3)]
    store = LmdbStore(paths)
    every = [value for part in values for value in part]
    assert len(store) == 9 and read(store, list(range(9))) == every
    assert read(store, [8, 0, 3, 4, 2, 2, 5]) == [every[i] for i in (8, 0, 3, 4, 2, 2, 5)]
    assert store.name(3) == f"{str(paths[1])!r} at key b'00000000'"
    assert store.name(8) == f"{str(paths[2])!r} at key b'00000004'"
    assert LmdbStore(paths).fingerprint_fields() == store.fingerprint_fields()
    assert LmdbStore(paths[:2]).fingerprint_fields() != store.fingerprint_fields()
    # As many keys, of which one is another.
    same, other = ({b"%d" % i: b"" for i in (*range(8), last)} for last in (8, 9))
    made = [LmdbStore(write_lmdb(tmp_path / f"{i}x", e)) for i, e in enumerate((same, same, other))]
    told = [each.fingerprint_fields() for each in made]
    assert told[0] == told[1] != told[2]


def test_a_folder_is_opened_once_and_closed_with_its_last_store(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [b"a", b"b"])
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    first, second = LmdbStore(path), LmdbStore([str(path), tmp_path / "." / "db"])
    assert len(second) == 4 and read(first, [0]) == read(second, [2]) == [b"a"]
    assert len(os.listdir("/proc/self/fd")) > before
    del first
    assert read(second, [1]) == [b"b"]
    del second
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_large_records_are_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "LARGE_BYTES", 5000)
    values = [bytes([i]) * (5000 + i % 3) for i in range(40)]
    path = write_lmdb(tmp_path / "db", values)
    store, other = LmdbStore(path), LmdbStore([path, path])
    assert read(store, [*range(8, 24)]) == values[8:24]
    with patch.object(lmdb_store._Folder, "_run", side_effect=AssertionError):
        assert read(store, [*range(8, 24)]) == values[8:24]
        assert read(store, [*range(20, 24), *range(8, 16)]) == [*values[20:24], *values[8:16]]
        assert read(other, [*range(50, 60), *range(9, 20)]) == [*values[10:20], *values[9:20]]
        assert isinstance(read_as_is(other, [*range(50, 60)]), mapped.MappedRows)
        with pytest.raises(AssertionError):
            read(store, [*range(16, 32)])
    assert read(store, [*range(16, 32)]) == values[16:32]


def test_what_is_no_lmdb(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    garbage = tmp_path / "garbage"
    garbage.mkdir()
    (garbage / "data.mdb").write_bytes(b"\x07" * 20_000)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    (nothing / "data.mdb").write_bytes(b"")
    empty = write_lmdb(tmp_path / "empty", [])
    single = shutil.copy(write_lmdb(tmp_path / "db", [b"a"]) / "data.mdb", tmp_path / "single.mdb")
    for path, message in [
        (tmp_path / "missing", "does not exist, expected an LMDB folder"),
        (single, r"is a file, expected the folder that holds data\.mdb"),
        (tmp_path / "folder", r"holds no data\.mdb"),
        (garbage, "cannot be opened as an LMDB"),
        (nothing, r"holds an empty data\.mdb, of 0 bytes, expected an LMDB"),
        (empty, "is an empty LMDB, expected at least 1 record"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            LmdbStore(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="no path is given"):
        LmdbStore([])


def test_a_truncated_file_is_refused_before_a_page_is_missed(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [b"x" * 5000 for _ in range(100)])
    size = (path / "data.mdb").stat().st_size
    os.truncate(path / "data.mdb", size // 2 // 4096 * 4096)
    with pytest.raises(ConfigError, match=r"is truncated: data.mdb has \d+ bytes, expected \d+"):
        LmdbStore(path)


def sound_of(store: LmdbStore, indices: list[int], faults: Faults) -> dict[int, bytes]:
    with store.values(np.array(indices), faults) as (records, values):
        return {record: bytes(value) for record, value in zip(records, values, strict=True)}


def test_records_in_a_damaged_page_are_named_or_skipped(tmp_path: Path) -> None:
    # Three lie in a page, and of every twelfth the key is looked at when the store is opened.
    path = write_lmdb(tmp_path / "db", [b"%1000d" % i for i in range(200)])
    damage_leaf(path, 10)
    store, shuffled = LmdbStore(path), np.random.default_rng(0).permutation(200).tolist()
    lost = []
    for i in range(200):
        try:
            assert read(store, [i]) == [b"%1000d" % i]
        except RecordError as error:
            assert str(error).startswith(f"{str(path)!r} at key b'{i:08}': mdb_")
            lost.append(i)
    assert len(lost) == 3 and lost == list(range(lost[0], lost[0] + 3))
    named = next(i for i in shuffled if i in lost)
    with pytest.raises(RecordError, match=rf"^{str(path)!r} at key b'{named:08}': mdb_.*CORRUPTED"):
        read(store, shuffled)
    faults = Faults("skip")
    found = sound_of(store, shuffled, faults)
    assert list(found) == [i for i in shuffled if i not in lost] and faults.skipped == 3
    assert all(int(value) == i for i, value in found.items())
    assert sound_of(store, lost, faults) == {} and faults.skipped == 3


def test_other_errors_of_lmdb_are_no_defect_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lmdb

    store = LmdbStore(write_lmdb(tmp_path / "db", [b"a"]))

    def refuse(indices: np.ndarray, transactions: object) -> list[memoryview]:
        raise lmdb.ReadersFullError("MDB_READERS_FULL")

    monkeypatch.setattr(store._folders[0], "read", refuse)
    with pytest.raises(lmdb.ReadersFullError):
        sound_of(store, [0], Faults("skip"))


@pytest.mark.process
def test_a_run_into_a_damaged_page_does_not_end_the_process(tmp_path: Path) -> None:
    # Some 150 lie in a page, large as they are: their data has pages of its own.
    path = write_lmdb(tmp_path / "db", [b"%2100d" % i for i in range(400)])
    damage_leaf(path, 1)
    code = (
        "import sys, numpy as np; from feeder.workers.sources.stores.lmdb_store import LmdbStore\n"
        "from feeder.workers.sources.stores.reading import Faults\n"
        "from feeder.workers.sources.stores import lmdb_keys\n"
        "lmdb_keys._NUM_SAMPLES = 1\n"
        "store, faults = LmdbStore(sys.argv[1]), Faults('skip')\n"
        "for first in range(0, 400, 40):\n"
        "    with store.values(np.arange(first, first + 40), faults) as (records, values):\n"
        "        assert all(int(bytes(v)) == r for r, v in zip(records, values, strict=True))\n"
        "print(faults.skipped)"
    )
    assert 100 < int(printed("-c", code, path)) < 200


def test_damage_is_found_before_the_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lmdb(tmp_path / "db", [b"%1000d" % i for i in range(60)])
    pytest.importorskip("lmdb.verify")
    assert len(LmdbStore(path, verify=True)) == 60
    with pytest.raises(ConfigError, match="does not exist, expected an LMDB folder"):
        LmdbStore(tmp_path / "missing", verify=True)
    with pytest.raises(ConfigError, match="verify is 1, expected True or False"):
        LmdbStore(path, verify=1)  # type: ignore[arg-type]
    monkeypatch.setattr(lmdb_store, "find", lambda package: None)
    with pytest.raises(ConfigError, match="verify=True needs the package lmdb of version 3"):
        LmdbStore(path, verify=True)
    monkeypatch.undo()
    gc.collect()
    damage_leaf(path, 10)
    with pytest.raises(ConfigError, match=rf"^{str(path)!r} is damaged: .*page.*, and \d+ more$"):
        LmdbStore(path, verify=True)
    (path / "data.mdb").write_bytes(b"\7" * 20_000)
    with pytest.raises(ConfigError, match=rf"^{str(path)!r} is damaged: "):
        LmdbStore(path, verify=True)


def test_of_a_damaged_key_among_numbers_damage_is_named(tmp_path: Path) -> None:
    pytest.importorskip("lmdb.verify")
    path = write_lmdb(tmp_path / "db", {b"%08d" % i: bytes(100) for i in range(400)})
    data = (path / "data.mdb").read_bytes()
    assert data.count(b"00000203") == 1
    (path / "data.mdb").write_bytes(data.replace(b"00000203", b"00000903"))
    with pytest.raises(RecordError, match=r"'00000203': .* store is damaged, which verify=True fi"):
        read(LmdbStore(path), [203])
    gc.collect()
    with pytest.raises(ConfigError, match=r"is damaged: .* keys out of order"):
        LmdbStore(path, verify=True)


def test_a_store_that_was_written_anew_is_another(tmp_path: Path) -> None:
    old = LmdbStore(write_lmdb(tmp_path / "db", [b"old"]))
    shutil.rmtree(tmp_path / "db")
    with pytest.raises(ConfigError, match="does not exist"):
        LmdbStore(tmp_path / "db")
    new = LmdbStore(write_lmdb(tmp_path / "db", [b"new", b"more"]))
    assert read(new, [0, 1]) == [b"new", b"more"] and read(old, [0]) == [b"old"]


def test_a_store_that_holds_fewer_keys_than_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lmdb(tmp_path / "db", {key: key for key in KEYS["binary"]})
    find_keys = lmdb_store.find_keys
    monkeypatch.setattr(lmdb_store, "find_keys", lambda cursor, num: find_keys(cursor, num + 1))
    with pytest.raises(ConfigError, match="is damaged: it says that it holds 40 records, and has"):
        LmdbStore(path)


def test_named_keys_that_only_look_numbered_are_all_listed(tmp_path: Path) -> None:
    keys = sorted([*(b"%04d_a" % i for i in range(40) if i != 4), b"0010_b"])
    store = LmdbStore(write_lmdb(tmp_path / "db", {key: key for key in keys}))
    assert read(store, list(range(40))) == keys
    assert store.name(0) == f"{str(tmp_path / 'db')!r} at key b'0000_a'"


def test_keys_that_only_look_numbered(tmp_path: Path) -> None:
    keys = [b"%04d" % i for i in range(100) if i != 37] + [b"0041x"]
    store = LmdbStore(write_lmdb(tmp_path / "db", {key: key for key in keys}))
    assert read(store, [5]) == [b"0005"]
    for indices in ([37], [36, 37, 38], [37, 1, 90, 12]):
        with pytest.raises(RecordError, match=r"at key b'0037': there is no such record"):
            read(store, indices)
    with pytest.raises(RecordError, match="there are records between those that are numbered"):
        read(store, list(range(40, 50)))


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lmdb(tmp_path / "db", [b"a"])
    monkeypatch.setattr(extras, "find", lambda package: None)
    with pytest.raises(
        ConfigError, match=r"lmdb is not installed: pip install 'feedworks\[lmdb\]'"
    ):
        LmdbStore(path)
