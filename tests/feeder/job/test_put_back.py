"""A job that was put back to an earlier epoch stays so, whenever it is killed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import feeder
import jobs
from crashes.failing import FailingFs
from feeder.durable import OsFs
from feeder.job import Job, JobRunner, LocalSession, MultiNodeCheckpointManager
from jobs import NODES, NUM_EPOCHS, TOTALS


class Killed(Exception):
    """The process ends here."""


def manager_in(folder: Path | str, db_type: str = "file") -> MultiNodeCheckpointManager:
    manager = MultiNodeCheckpointManager(folder, db_type)
    manager.set_params(NODES)
    return manager


def train(manager: MultiNodeCheckpointManager, start: int | None = None, **settings: Any) -> int:
    """Run the job of three nodes; returns a node's total."""
    with LocalSession() as session:
        assert JobRunner(jobs.make_three(), manager, start, **settings).train(session) == NUM_EPOCHS
        return int(session.fetch(NODES[0], ["total"])["total"][0])


def job_killed_in_its_first_epoch() -> Job:
    def kill(workspace: Any) -> None:
        raise Killed

    job = jobs.make_three()
    feeder.job.Task(kill, node=NODES[1], group=job.epoch_group)
    return job


@pytest.mark.parametrize(
    ("start", "db_type"),
    [
        *((start, "file") for start in range(NUM_EPOCHS + 1)),
        pytest.param(2, "lmdb", marks=pytest.mark.needs("lmdb")),
    ],
)
def test_it_is_not_forgotten_before_the_first_save(
    tmp_path: Path, start: int, db_type: str
) -> None:
    assert train(manager_in(tmp_path, db_type)) == TOTALS[-1]
    before = sorted(os.listdir(tmp_path / "manifests"))
    if start < NUM_EPOCHS:
        with LocalSession() as session, pytest.raises(Killed):
            job = job_killed_in_its_first_epoch()
            JobRunner(job, manager_in(tmp_path, db_type), start).train(session)
    assert manager_in(tmp_path, db_type).get_resume_from_epoch_id() == start
    if start < NUM_EPOCHS:
        assert sorted(os.listdir(tmp_path / "manifests")) == [*before, f"trainer_0.g2.{start}"]
    runner = JobRunner(jobs.make_three(), manager_in(tmp_path, db_type))
    with LocalSession() as session:
        assert (runner.train(session), runner.resume_from_epoch) == (NUM_EPOCHS, start)


def test_it_is_noted_before_anything_is_loaded(tmp_path: Path) -> None:
    class Dying(MultiNodeCheckpointManager):
        def load(self, *arguments: Any) -> Any:
            raise Killed

    train(manager_in(tmp_path))
    with LocalSession() as session, pytest.raises(Killed):
        JobRunner(jobs.make_three(), Dying(tmp_path), 1).train(session)
    assert manager_in(tmp_path).get_resume_from_epoch_id() == 1


def test_what_cannot_be_noted_is_told_or_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(manager_in(tmp_path))
    failing = FailingFs("fsync", 1, errno.ENOSPC)
    monkeypatch.setattr("feeder.checkpoint.store.OsFs", lambda: failing)
    with pytest.raises(feeder.CheckpointError, match="free some space"):
        train(manager_in(tmp_path), 1, on_save_error="raise")
    failing = FailingFs("fsync", 1, errno.ENOSPC)
    runner = JobRunner(jobs.make_three(), manager_in(tmp_path), 1)
    with LocalSession() as session:
        assert (runner.train(session), runner.failed_saves) == (NUM_EPOCHS, [])
    assert "it cannot be noted that the job was put back to epoch 1; until its next" in caplog.text
    monkeypatch.setattr("feeder.checkpoint.store.OsFs", OsFs)
    assert manager_in(tmp_path).get_resume_from_epoch_id() == NUM_EPOCHS
