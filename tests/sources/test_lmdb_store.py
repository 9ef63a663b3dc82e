"""LMDB folders as one list of values: keys of all kinds, several folders, damage."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stores import write_lmdb
from workers.errors import ConfigError
from workers.sources import RecordError, extras
from workers.sources.lmdb_keys import ListedKeys, NumberedKeys
from workers.sources.lmdb_store import LmdbStore


def read(store: LmdbStore, indices: list[int]) -> list[bytes]:
    with store.values(np.array(indices)) as values:
        return [bytes(value) for value in values]


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
def test_records_lie_in_the_order_of_their_keys(tmp_path: Path, keys: list[bytes]) -> None:
    store = LmdbStore(write_lmdb(tmp_path / "db", {key: b"value of " + key for key in keys}))
    assert len(store) == len(keys)
    wanted = [b"value of " + key for key in sorted(keys)]
    assert read(store, list(range(len(keys)))) == wanted
    for i in range(len(keys)):
        assert read(store, [i]) == [wanted[i]]
        assert store.name(i).startswith(f"{str(tmp_path / 'db')!r} at key b")


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


def test_which_keys_are_known_from_the_index(tmp_path: Path) -> None:
    for name, keys in KEYS.items():
        store = LmdbStore(write_lmdb(tmp_path / name, {key: key for key in keys}))
        kind = (
            NumberedKeys
            if name in ("numbered", "from one", "named", "named with a break", "one")
            else ListedKeys
        )
        assert type(store._folders[0]._keys) is kind, name


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
    assert LmdbStore(paths).describe() == store.describe()
    assert LmdbStore(paths[:2]).describe() != store.describe()


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


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    store = LmdbStore(write_lmdb(tmp_path / "db", [b"%d" % i * 50 for i in range(500)]))
    wrong: list[int] = []

    def check(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            indices = rng.integers(0, 500, 20)
            if read(store, indices.tolist()) != [b"%d" % i * 50 for i in indices]:
                wrong.append(seed)

    threads = [threading.Thread(target=check, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


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
        (garbage, "is not a sound LMDB"),
        (nothing, "is not a sound LMDB"),
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


def test_find_of_packages() -> None:
    assert extras.find("numpy") is np
    assert extras.find("surely_there_is_no_such_package") is None
