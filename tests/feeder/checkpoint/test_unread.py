"""What is there and cannot be read is an error, never "nothing": else a run would begin anew."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import feeder
import jobs
from crashes.failing import FailingFs
from crashes.positions import snapshot_at, step_of
from feeder.checkpoint.store import CheckpointStore
from feeder.durable import Fs
from feeder.job import LocalSession, MultiNodeCheckpointManager
from jobs import NODES
from watching import around

CALLS: list[Callable[[CheckpointStore], Any]] = [
    CheckpointStore.latest, CheckpointStore.names, CheckpointStore.load,
    lambda store: store.exists("feed.00000001"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two positions, of steps 0 and 1."""
    with CheckpointStore(tmp_path / "store") as store:
        store.save(snapshot_at(0))
        store.save(snapshot_at(1))
    return tmp_path / "store"


class Refusing(Fs):
    """Files or folders of some names cannot be opened."""

    def __init__(self, error: int, *names: str) -> None:
        self._error, self._names = error, names

    def open(self, name: str, folder: int, flags: int = os.O_RDONLY) -> int:
        self._refuse(name)
        return super().open(name, folder, flags)

    def open_folder(self, path: str, inside: int | None = None) -> int:
        self._refuse(os.path.basename(path))
        return super().open_folder(path, inside)

    def _refuse(self, name: str) -> None:
        if name in self._names:
            raise OSError(self._error, os.strerror(self._error))


class Unreadable(Fs):
    """A file of some name can be opened, and its bytes cannot be read."""

    def __init__(self, error: int, name: str) -> None:
        self._error, self._name = error, name
        self._files: set[int] = set()

    def open(self, name: str, folder: int, flags: int = os.O_RDONLY) -> int:
        file = super().open(name, folder, flags)
        (self._files.add if name == self._name else self._files.discard)(file)
        return file

    def read_into(self, file: int, buffer: memoryview, at: int) -> int:
        # What it is can be read, and the rest cannot.
        if file in self._files and at + len(buffer) > 8:
            raise OSError(self._error, os.strerror(self._error))
        return super().read_into(file, buffer, at)


@pytest.mark.parametrize("refused", ["feed.00000001", "store"])
def test_what_cannot_be_opened_is_not_nothing(folder: Path, refused: str) -> None:
    for error, call in product((errno.EACCES, errno.EIO, errno.ESTALE), CALLS):
        store = CheckpointStore(folder, fs=Refusing(error, refused))
        with pytest.raises(feeder.CheckpointError, match=os.strerror(error)) as caught:
            call(store)
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "error", [errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.ENOMEM], ids=errno.errorcode.get
)
def test_bytes_that_may_be_read_later_are_not_passed_over(folder: Path, error: int) -> None:
    store = CheckpointStore(folder, fs=Unreadable(error, "feed.00000001"))
    for call in (store.load, store.latest):
        with pytest.raises(feeder.CheckpointError, match=os.strerror(error)) as caught:
            call()
        assert "feed.00000001" in str(caught.value)


def test_a_bad_sector_is_damage_and_passed_over(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(folder, fs=Unreadable(errno.EIO, "feed.00000001"))
    assert (store.latest(), step_of(store.load())) == ("feed.00000000", 0)
    assert "passed over: cannot read checkpoint" in caplog.text


def test_a_bad_sector_and_damage_together_are_not_nothing(folder: Path) -> None:
    """The one that cannot be read may be whole, whichever of the two is the newer."""
    names = ("feed.00000000", "feed.00000001")
    for damaged, unread in (names, names[::-1]):
        data = (folder / damaged).read_bytes()
        (folder / damaged).write_bytes(data[:-1])
        store = CheckpointStore(folder, fs=Unreadable(errno.EIO, unread))
        with pytest.raises(feeder.CheckpointError, match="Input/output error") as caught:
            store.latest()
        assert unread in str(caught.value)
        (folder / damaged).write_bytes(data)


def test_a_folder_that_cannot_be_opened_is_not_empty(folder: Path) -> None:
    store = CheckpointStore(folder, fs=Refusing(errno.EACCES, "store"))
    with pytest.raises(feeder.CheckpointError, match="Permission denied; give this user the right"):
        store.is_empty()
    with pytest.raises(feeder.CheckpointError, match="Permission denied"):
        feeder.init_data_input_workers(
            ["x"], lambda call: [call.index], 1, resume="latest",
            coordinator=feeder.Coordinator(feeder.Checkpointing(store)),
        )  # fmt: skip


def test_the_newest_whose_bytes_cannot_be_read_is_not_nothing(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.put("only", {"x": b"something"})
    counting = FailingFs("read", 1000, errno.EIO)
    assert CheckpointStore(tmp_path, fs=counting).latest() == "only"
    assert counting.calls["read"] > 3
    for error, number in product((errno.EACCES, errno.EIO), range(1, counting.calls["read"] + 1)):
        store = CheckpointStore(tmp_path, fs=FailingFs("read", number, error, lasting=True))
        with pytest.raises(feeder.CheckpointError, match=os.strerror(error)):
            store.latest()


def test_one_folder_that_goes_meanwhile_hides_no_other(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        for name in ("a", "going/b", "staying/c"):
            store.put(name, {})
    store = CheckpointStore(tmp_path, fs=Refusing(errno.ENOENT, "going"))
    assert store.names() == ["a", "staying/c"]


def test_an_old_one_that_cannot_be_read_keeps_no_other_from_being_removed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointStore(folder, keep=1, fs=Refusing(errno.EACCES, "feed.00000000")) as store:
        store.save(snapshot_at(2))
    assert "an old checkpoint stays: cannot read" in caplog.text
    whole = CheckpointStore(folder)
    assert (whole.names(), step_of(whole.load())) == (["feed.00000000", "feed.00000002"], 2)


# ---- epochs of a job


@pytest.fixture(params=["file", pytest.param("lmdb", marks=pytest.mark.needs("lmdb"))])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> MultiNodeCheckpointManager:
    """The manager of a job that is done."""
    manager = MultiNodeCheckpointManager(tmp_path, request.param)
    jobs.train(manager)
    return manager


def put_under(monkeypatch: pytest.MonkeyPatch, fs: Fs) -> None:
    for module in ("checkpoint.store", "job.checkpoints.lmdbs"):
        monkeypatch.setattr(f"feeder.{module}.Fs", lambda: fs)


def test_an_epoch_that_cannot_be_read_is_not_missing(
    trained: MultiNodeCheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("trainer_1.4", "trainer_0.g1.4", "manifests")
    for refused, error in product(files, (errno.EACCES, errno.EIO)):
        put_under(monkeypatch, Refusing(error, refused))
        manager = MultiNodeCheckpointManager(trained._db_prefix, trained._location.db_type)
        manager.set_params(NODES)
        calls: list[Callable[[], Any]] = [
            partial(manager.exists, 4), manager.get_resume_from_epoch_id,
            partial(manager.load_blobs_locally, NODES, ["trainer_1/total"], 4, LocalSession()),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(feeder.CheckpointError, match=os.strerror(error)):
                call()


def test_a_bad_sector_is_no_missing_part(
    trained: MultiNodeCheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_under(monkeypatch, FailingFs("read", 1, errno.EIO, lasting=True))
    database = trained._location.open_database("nobody")
    with pytest.raises(feeder.CheckpointError, match="Input/output error"):
        database.exists("trainer_1.4")


def test_a_manifest_that_goes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.train(MultiNodeCheckpointManager(tmp_path))
    manager = MultiNodeCheckpointManager(tmp_path)
    manager.set_params(NODES)
    monkeypatch.setattr("feeder.job.checkpoints.epochs.Epochs.check_others", lambda self: None)
    going = tmp_path / "manifests/trainer_0.g1.4"
    around(monkeypatch, CheckpointStore, "get", before=lambda *_: going.unlink(missing_ok=True))
    assert manager.get_resume_from_epoch_id() == 3
