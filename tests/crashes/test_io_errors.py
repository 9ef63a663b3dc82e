"""Any call to the file system may fail: what was saved before is there, nothing is left over."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from pathlib import Path

import numpy as np
import pytest

import feeder
import jobs
import parts
from crashes.failing import KINDS, FailingFs, ShortFs
from crashes.positions import snapshot_at, step_of
from feeder.checkpoint.store import CheckpointStore
from feeder.durable import Fs
from feeder.job import JobRunner, LocalSession, MultiNodeCheckpointManager, epoch_limiter
from jobs import TOTALS
from small import Pure, ids, make

pytestmark = pytest.mark.served


def begun(folder: Path) -> Path:
    """Return a folder in which two snapshots are saved, of steps 1 and 2."""
    with CheckpointStore(folder) as store:
        store.save(snapshot_at(1))
        store.save(snapshot_at(2))
    return folder


def try_to_save(folder: Path, fs: Fs) -> feeder.CheckpointError | None:
    """Save a third; return how that failed."""
    with CheckpointStore(folder, keep=2, fs=fs) as store:
        try:
            store.save(snapshot_at(3))
        except feeder.CheckpointError as error:
            return error
    return None


def partials(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".partial")]


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("kind", KINDS)
def test_whichever_call_fails_the_one_before_loads_and_nothing_is_left_over(
    kind: str, lasting: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for number in itertools.count(1):
        folder = begun(tmp_path / str(number))
        fs = FailingFs(kind, number, errno.ENOSPC, lasting=lasting)
        failed = try_to_save(folder, fs)
        if not fs.num_failed:
            break
        loaded = step_of(CheckpointStore(folder).load())
        if failed is None:  # what failed came after the save: what is old stays a while
            assert loaded == 3
            assert kind in ("unlink", "open", "list", "read")
        else:
            assert loaded == 2
            assert isinstance(failed.__cause__, OSError)
            assert str(folder) in str(failed)
        # A temporary file that cannot be removed is removed by the next writer.
        assert kind == "unlink" or not partials(folder)
        assert try_to_save(folder, Fs()) is None
        assert step_of(CheckpointStore(folder).load()) == 3
        assert not partials(folder)
    assert number > 1, "no call of this kind was ever made"


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (errno.EACCES, "give this user the right to it, or name another folder"),
        (errno.EROFS, "name a folder that can be written to"),
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
    ],
    ids=errno.errorcode.get,
)
def test_an_error_says_which_file_and_what_to_do(error: int, cure: str, tmp_path: Path) -> None:
    folder = begun(tmp_path / "store")
    failed = try_to_save(folder, FailingFs("fsync", 1, error))
    file = str(folder / "feed.00000002")
    assert str(failed) == f"cannot write checkpoint {file!r}: {os.strerror(error)}; {cure}"


@pytest.mark.parametrize("kind", ["open", "read", "list"])
def test_whichever_call_fails_a_load_raises_or_passes_over_what_cannot_be_read(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = begun(tmp_path / "store")
    num_refused = 0
    for number in itertools.count(1):
        fs = FailingFs(kind, number, errno.EIO)
        try:
            loaded = step_of(CheckpointStore(folder, fs=fs).load())
            # A file that cannot be read is damaged, and named.
            assert loaded == 2 or (kind == "read" and "passed over" in caplog.text)
        except feeder.CheckpointError as error:
            assert isinstance(error.__cause__, OSError)
            num_refused += 1
        if not fs.num_failed:
            break
    assert num_refused


@pytest.mark.parametrize("kind", KINDS)
def test_feeding_goes_on_whichever_call_fails_from_then_on(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with make(Pure(num_calls=33)) as undisturbed:
        wanted = ids(undisturbed["train"])
    num_failed = 0
    for number in (1, 4, 9):
        folder = tmp_path / str(number)
        with CheckpointStore(folder) as before, make(Pure(num_calls=33)) as coordinator:
            next(coordinator["train"])
            before.save(coordinator.snapshot())
        fs = FailingFs(kind, number, errno.ENOSPC, lasting=True)
        store = CheckpointStore(folder, keep=2, fs=fs)
        coordinator = feeder.Coordinator(feeder.Checkpointing(store, every_batches=2))
        with make(Pure(num_calls=33), coordinator=coordinator):
            fed = ids(coordinator["train"])
        assert fed == wanted
        assert kind == "unlink" or not partials(folder)
        with make(Pure(num_calls=33), resume=folder) as resumed:
            rest = ids(resumed["train"])
        assert len(rest) <= len(wanted) - 4
        assert rest == wanted[len(wanted) - len(rest) :]
        num_failed += fs.num_failed
    assert num_failed


def test_what_is_written_and_read_bit_by_bit_is_the_same(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "store", fs=ShortFs()) as store:
        rows = np.arange(100.0).reshape(10, 10)
        store.put("a/b", {"rows": rows, "text": b"some text"})
        loaded = store.get("a/b")
    assert np.array_equal(loaded.entries["rows"], rows)
    assert loaded.entries["text"] == b"some text"


def test_a_file_system_without_second_names_writes_once_too(tmp_path: Path) -> None:
    class LinklessFs(Fs):
        def link(self, old: str, new: str, folder: int) -> None:
            raise OSError(errno.EPERM, "no links here")

    folder = tmp_path / "store"
    with CheckpointStore(folder, fs=LinklessFs()) as store:
        store.put("a", {"x": b"first"})
        with pytest.raises(feeder.CheckpointError, match="exists"):
            store.put("a", {"x": b"second"})
        assert store.get("a").entries == {"x": b"first"}
    assert sorted(os.listdir(folder)) == [".writer-feed.lock", "a"]


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fs = FailingFs("lock", 1, errno.ENOLCK)
    with CheckpointStore(tmp_path / "store", fs=fs) as store:
        store.put("a", {})
        assert store.names() == ["a"]
    assert "lies on a file system without locks" in caplog.text


# ---- jobs: they go on, and what they have saved loads

NUM_EPOCHS = 3


def run_job(folder: Path, db_type: str) -> list[int] | None:
    """Run a job of one node for three epochs; returns those that could not be saved, or None
    where it could not begin."""
    job = jobs.make_single()
    epoch_limiter(job, NUM_EPOCHS)
    runner = JobRunner(job, MultiNodeCheckpointManager(folder, db_type))
    with LocalSession() as session:
        try:
            assert runner.train(session) == NUM_EPOCHS
        except feeder.CheckpointError:
            assert runner.failed_saves == []
            return None
        assert session.fetch("trainer_0", ["total"])["total"] == TOTALS[NUM_EPOCHS - 1]
    return runner.failed_saves


def check_job(folder: Path, db_type: str, failed: list[int] | None) -> None:
    """See that the newest that was saved is there, and that what is there is right."""
    saved = [] if failed is None else [e for e in range(NUM_EPOCHS + 1) if e not in failed]
    manager = MultiNodeCheckpointManager(folder, db_type)
    with LocalSession() as session:
        session.open(jobs.make_single())
        manager.set_params(["trainer_0"])
        newest = manager.get_resume_from_epoch_id()
        assert (-1 if newest is None else newest) >= max(saved, default=-1)
        for epoch in filter(manager.exists, range(NUM_EPOCHS + 1)):
            session.run(manager.load(epoch))
            expected = TOTALS[epoch - 1] if epoch else 100
            assert session.fetch("trainer_0", ["total"])["total"] == expected
    assert list(folder.rglob(".*.partial")) == []


LMDB = pytest.mark.needs("lmdb")
OF_JOBS = ["open", "write", "fsync", "rename", "list", "lock"]


@pytest.mark.parametrize(
    ("kind", "db_type", "lasting"),
    # The other half in the full part.
    [
        pytest.param(kind, db_type, lasting, marks=[LMDB] if db_type == "lmdb" else [])
        for i, kind in enumerate(OF_JOBS)
        for j, db_type in enumerate(("file", "lmdb"))
        for lasting in (False, True)
        if parts.is_full or (i + j + lasting) % 2 == 0
    ],
)
def test_whichever_call_fails_the_newest_that_was_saved_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, db_type: str, kind: str, lasting: bool
) -> None:
    num_failed_saves = 0
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        disk = FailingFs(kind, number, errno.ENOSPC, lasting=lasting)
        with monkeypatch.context() as patch:
            for module in ("checkpoint.store", "job.checkpoints.lmdbs"):
                patch.setattr(f"feeder.{module}.Fs", lambda disk=disk: disk)
            failed = run_job(folder, db_type)
        if not disk.num_failed:
            break
        num_failed_saves += len(failed or ())
        check_job(folder, db_type, failed)
    assert number > 4 and num_failed_saves > 0
