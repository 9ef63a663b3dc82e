"""A store keeps what it is given under names of its own, and finds the newest that is whole."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import feeder
from crashes.positions import snapshot_at, step_of
from feeder.checkpoint.local import LocalFolder, WriterLock
from feeder.checkpoint.store import CheckpointStore
from lineage import forked, status_of
from project import ROOT
from sealing import reseal
from small import WAIT_S
from watching import around, says


def modes(folder: Path) -> dict[str, str]:
    """Return the rights of a folder and all in it."""
    paths = [folder, *folder.rglob("*")]
    return {path.name: oct(stat.S_IMODE(path.lstat().st_mode)) for path in paths}


def test_some_entries_are_read_alone_and_the_others_not_at_all(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.put("a", {"x": b"111", "y": b"222", "z": b"333"})
        file = tmp_path / "a"
        file.write_bytes(file.read_bytes().replace(b"222", b"2_2"))
        assert store.get("a", ["z", "x"]).entries == {"z": b"333", "x": b"111"}
        assert store.get("a", []).entries == {}
        with pytest.raises(feeder.CheckpointError, match="entry 'y' does not match"):
            store.get("a", ["x", "y"])
        told = f"checkpoint {str(file)!r} has no entries ['w', 'v'], expected some of "
        with says(feeder.CheckpointError, told + "['x', 'y', 'z']"):
            store.get("a", ["x", "w", "v"])
        assert store.entry_names("a") == ["x", "y", "z"]


def test_a_name_is_written_once(tmp_path: Path) -> None:
    told = f"checkpoint {str(tmp_path / 'a')!r} exists; each is written once, choose another name"
    with CheckpointStore(tmp_path) as store:
        store.put("a", {"x": b"first"})
        with says(feeder.CheckpointError, told):
            store.put("a", {"x": b"second"})
        assert store.get("a").entries == {"x": b"first"}
    assert sorted(os.listdir(tmp_path)) == [".writer-feed.lock", "a"]


def test_only_checkpoints_are_listed_counted_and_removed(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep=1) as store:
        name = store.save(snapshot_at(1))
        strange = ["notes.txt", "feed.00000000x", ".hidden", "feed.", "feed.1.2", "job"]
        for file in strange[:-1]:
            (tmp_path / file).write_bytes(b"not to be touched")
        (tmp_path / "job").mkdir()
        (tmp_path / "feed.00000007").write_bytes(b"no checkpoint either")
        os.mkfifo(tmp_path / "pipe")
        os.symlink(tmp_path / name, tmp_path / "feed.00000009")
        assert store.names() == [name]
        assert store.exists(name) and not store.exists("notes.txt") and not store.exists("absent")
        for file in ("notes.txt", "feed.00000007"):
            with pytest.raises(feeder.CheckpointError, match="no checkpoint, and is left where"):
                store.remove(file)
        # Numbers that are taken are not given again.
        store.close()
        assert store.save(snapshot_at(2)) == "feed.00000008"
        assert store.names() == ["feed.00000008"]
    left = {*strange, "feed.00000007", "pipe", "feed.00000009", "feed.00000008"}
    assert set(os.listdir(tmp_path)) == left | {".writer-feed.lock"}
    for file in strange[:-1]:
        assert (tmp_path / file).read_bytes() == b"not to be touched"


def test_after_a_save_that_failed_the_next_one_has_a_number_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed may have been written all the same."""

    def fail(*written: Any) -> None:
        raise feeder.CheckpointError("no answer")

    with CheckpointStore(tmp_path) as store:
        store.save(snapshot_at(0))
        with monkeypatch.context() as patch:
            around(patch, LocalFolder, "create", after=fail)
            with pytest.raises(feeder.CheckpointError, match="no answer"):
                store.save(snapshot_at(1))
        store.save(snapshot_at(2))
        assert [step_of(store.load(name)) for name in store.names()] == [0, 1, 2]


def test_retire_tells_what_it_has_removed(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        names = [store.save(snapshot_at(step)) for step in range(4)]
        assert (store.retire(3), store.retire(3)) == (names[:1], [])
        (tmp_path / names[3]).write_bytes((tmp_path / names[3]).read_bytes()[:-1])
        # The newest that is whole stays.
        assert (store.retire(1), store.names()) == (names[1:2], names[2:])


def test_files_and_folders_are_this_users_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with CheckpointStore(tmp_path / "store") as store:
            store.put("job/a", {})
    finally:
        os.umask(old)
    assert modes(tmp_path / "store") == {
        "store": "0o700", "job": "0o700", "a": "0o600", ".writer-feed.lock": "0o600",
    }  # fmt: skip


def test_a_folder_is_named_by_a_path_or_a_url(tmp_path: Path) -> None:
    for number, url in enumerate(["{}", "file://{}", "file://localhost{}"]):
        folder = tmp_path / f"with a space {number}"
        place = url.format(str(folder) if url == "{}" else str(folder).replace(" ", "%20"))
        with CheckpointStore(place) as store:
            store.put("a", {})
        assert (folder / "a").exists()
    for url, told in {
        "http://host/x": "'http://host/x' cannot be the place of checkpoints, expected a path, ",
        "file://host/x": "'file://host/x' names host 'host', expected file:///PATH",
        "s3://": "'s3://' cannot be the place of checkpoints, expected a path, file:///PATH, s3:",
        "": "'' cannot be the folder of checkpoints, expected a path",
        "a\0b": "'a\\x00b' cannot be the folder of checkpoints, expected a path",
    }.items():
        with pytest.raises(feeder.ConfigError, match="^" + re.escape(told)):
            CheckpointStore(url)


NO_SETTINGS: list[dict[str, Any]] = [
    {"keep": 0}, {"keep": True}, {"keep": "2"}, {"writer": ""}, {"writer": "a/b"},
    {"writer": ".a"}, {"writer": None}, {"retry_s": 0}, {"retry_s": "1"},
]  # fmt: skip


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for settings in NO_SETTINGS:
        (name,) = settings
        with pytest.raises(feeder.ConfigError, match=f"^{name} is "):
            CheckpointStore(tmp_path, **settings)


NO_NAMES: list[Any] = ["", ".", "..", "../a", "a/../b", "/a", "a/", "a//b", "a\0", ".a", "a/.b",
    "a b", "ä", "a" * 65, "/".join(["a"] * 300), "a\n", None, 3, b"a"]  # fmt: skip
NO_PREFIXES: list[Any] = ["..", "../a", "a/../", "/", "\0", ".", "a b", None]


def test_names_that_lead_anywhere_else_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = CheckpointStore(folder)
    calls: list[Callable[[Any], Any]] = [
        store.get, store.verify, store.exists, store.remove, store.entry_names, store.load,
        lambda name: store.put(name, {}),
    ]  # fmt: skip
    for name in NO_NAMES:
        for call in calls if name is not None else calls[:-2]:
            with pytest.raises(feeder.CheckpointError, match="cannot be the name of a checkpoint"):
                call(name)
    for prefix, list_names in product(NO_PREFIXES, (store.names, store.latest)):
        with pytest.raises(feeder.CheckpointError, match="no name of a checkpoint begins with"):
            list_names(prefix)
    assert not folder.exists()


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    with CheckpointStore(outside) as other:
        other.put("a", {"x": b"secret"})
    with CheckpointStore(inside) as store:
        store.put("b", {})
        os.symlink(outside, inside / "job")
        os.symlink(outside / "a", inside / "a")
        assert store.names() == ["b"]
        link_to_file = f"cannot read checkpoint {str(inside / 'a')!r}: .*symbolic links are not"
        link_to_folder = f"checkpoint {str(inside / 'job/a')!r}: .*not a file or a symbolic link"
        for name, told in (("a", link_to_file), ("job/a", link_to_folder)):
            for call in (store.get, store.exists, store.remove):
                with pytest.raises(feeder.CheckpointError, match=told):
                    call(name)
        with pytest.raises(feeder.CheckpointError, match=link_to_folder):
            store.put("job/a", {})
        with pytest.raises(feeder.CheckpointError, match="exists; each is written once"):
            store.put("a", {})
    assert sorted(os.listdir(outside)) == [".writer-feed.lock", "a"]


def test_a_folder_whose_own_folder_is_missing_is_a_mistake(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "missing" / "new")
    calls: list[Callable[[], Any]] = [store.names, store.latest, lambda: store.put("a", {})]
    for call in calls:
        with pytest.raises(feeder.CheckpointError) as caught:
            call()
        assert str(caught.value).endswith(
            f": No such file or directory; make the folder {str(tmp_path / 'missing')!r}"
        )
    assert os.listdir(tmp_path) == []


# ---- the sequence of a writer


def test_one_of_a_newer_version_is_not_passed_over(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(snapshot_at(1))
        file = tmp_path / store.save(snapshot_at(2))
        file.write_bytes(reseal(b"", version=2))
        for call in (store.load, store.latest):
            with pytest.raises(feeder.CheckpointError, match=f"{str(file)!r} has version 2, "):
                call()


# ---- one writer


def test_two_writers_of_one_name_are_refused_with_the_first_ones_name(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store, CheckpointStore(tmp_path) as second:
        store.save(snapshot_at(1))
        with says(
            feeder.CheckpointError,
            f"{str(tmp_path)!r} has a writer 'feed' already, process {os.getpid()} on "
            f"{os.uname().nodename}; end it, or close its store, or give this one another writer=",
        ):
            second.save(snapshot_at(2))
        assert step_of(second.load()) == 1  # to read needs no right
        store.close()
        assert second.save(snapshot_at(2)) == "feed.00000001"


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_another_writer(tmp_path: Path) -> None:
    def save() -> None:
        with pytest.raises(feeder.CheckpointError, match=f"process {os.getppid()} "):
            store.save(snapshot_at(2))

    with CheckpointStore(tmp_path) as store:
        store.save(snapshot_at(1))
        assert status_of(forked(save)) == 0
        assert store.save(snapshot_at(3)) == "feed.00000001"


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_lock_ends_with_its_store_though_a_child_of_its_process_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the child has not closed it: made by C code, or not so far yet."""
    monkeypatch.setattr(WriterLock, "forget", lambda lock: None)
    with CheckpointStore(tmp_path) as store:
        store.save(snapshot_at(1))
        reading, writing = os.pipe()

        def live_on() -> None:
            os.close(writing)
            os.read(reading, 1)  # until the test is over

        child = forked(live_on)
    os.close(reading)
    try:
        with CheckpointStore(tmp_path) as other:
            assert other.save(snapshot_at(2)) == "feed.00000001"
    finally:
        os.close(writing)
        assert status_of(child) == 0


FORKER = """
import os, sys
from feeder.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.put("mine", {})
if os.fork():
    os.wait()
else:
    print("forked", flush=True)
    sys.stdin.read()
    print("the child ends", flush=True)
"""


@pytest.mark.process
def test_a_child_that_outlives_a_killed_trainer_does_not_hold_its_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKER, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdin is not None
        assert trainer.stdout.readline() == "forked\n"
        trainer.kill()
        trainer.wait(WAIT_S)
        with CheckpointStore(tmp_path) as other:
            other.put("other", {})
        trainer.stdin.close()
        assert trainer.stdout.readline() == "the child ends\n"
