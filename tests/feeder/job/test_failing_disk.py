"""The disk fails at one call, or from one on: the job goes on, and what it has saved loads."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import feeder
import jobs
from crashes.failing import FailingFs
from feeder.job import JobRunner, LocalSession, MultiNodeCheckpointManager, epoch_limiter
from jobs import TOTALS

NUM_EPOCHS = 3


def run(folder: Path, db_type: str) -> list[int] | None:
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


def check(folder: Path, db_type: str, failed: list[int] | None) -> None:
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


@pytest.mark.parametrize("db_type", ["file", pytest.param("lmdb", marks=pytest.mark.needs("lmdb"))])
@pytest.mark.parametrize("kind", ["open", "write", "fsync", "rename", "list", "lock"])
@pytest.mark.served
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from-then-on"])
def test_whichever_call_fails_the_newest_that_was_saved_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, db_type: str, kind: str, lasting: bool
) -> None:
    num_failed_saves = 0
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        disk = FailingFs(kind, number, errno.ENOSPC, lasting=lasting)
        with monkeypatch.context() as patch:
            for module in ("checkpoint.store", "job.checkpoints.lmdbs"):
                patch.setattr(f"feeder.{module}.OsFs", lambda disk=disk: disk)
            failed = run(folder, db_type)
        if not disk.num_failed:
            break
        num_failed_saves += len(failed or ())
        check(folder, db_type, failed)
    assert number > 4 and num_failed_saves > 0
