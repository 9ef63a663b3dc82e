"""A node that was started again in the middle of a job has lost its workspace, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import feeder
import jobs
from feeder.job import JobRunner, LocalSession, MultiNodeCheckpointManager
from feeder.job.checkpoints.parts import PartReceipt
from feeder.job.messages import Plan
from feeder.state import codec
from jobs import NODES, NUM_EPOCHS, TOTALS, Actors


class Restarting(MultiNodeCheckpointManager):
    """Restarts a node before or after epoch 2 is saved."""

    session: Actors
    when: str

    def save(self, epoch: int) -> Any:
        if (epoch, self.when) == (2, "before the save"):
            self.session.start_again(NODES[1])
        return super().save(epoch)

    def write_checkpoint_metadata(self, *arguments: Any) -> None:
        super().write_checkpoint_metadata(*arguments)
        if (arguments[0], self.when) == (2, "after the save"):
            self.session.start_again(NODES[1])


@pytest.mark.parametrize(("when", "last"), [("before the save", 1), ("after the save", 2)])
def test_a_job_ends_where_a_node_was_started_again(tmp_path: Path, when: str, last: int) -> None:
    manager = Restarting(tmp_path)
    manager.when = when
    with Actors() as manager.session:
        runner = JobRunner(jobs.make_three(), manager)
        with pytest.raises(feeder.RemoteError, match="node 'trainer_1' was started again"):
            runner.train(manager.session)
    assert (runner.failed_saves, manager.get_resume_from_epoch_id()) == ([], last)
    with LocalSession() as session:
        runner = JobRunner(jobs.make_three(), MultiNodeCheckpointManager(tmp_path))
        assert (runner.train(session), runner.resume_from_epoch) == (NUM_EPOCHS, last)
        assert session.fetch(NODES[1], ["total"])["total"] == TOTALS[-1]


def test_a_node_that_was_not_told_to_begin_refuses_everything(tmp_path: Path) -> None:
    job, manager = jobs.make_three(), MultiNodeCheckpointManager(tmp_path)
    with Actors() as session:
        JobRunner(job, manager).train(session)
        session.start_again(NODES[1])
        calls = [
            lambda: session.run(manager.init(NODES)),
            lambda: session.run(manager.save(5)),
            lambda: session.run(manager.load(2)),
            session.evaluate,
            lambda: session.fetch(NODES[1], ["total"]),
        ]
        for call in calls:
            with pytest.raises(feeder.RemoteError, match="run the job again, which goes on from"):
                call()
        assert session._ask({NODES[1]: Plan()})[NODES[1]] == job.plan()
        session.open(job)
        session.run(manager.load(2))
        assert session.fetch(NODES[1], ["total"])["total"] == TOTALS[1]
        session.start_again(NODES[1])
        with pytest.raises(feeder.RemoteError, match="has lost its workspace"):
            session.run(job.epoch_group)
        with pytest.raises(feeder.ClosedError):
            session.run(job.epoch_group)


@pytest.mark.parametrize("db_type", ["file", pytest.param("lmdb", marks=pytest.mark.needs("lmdb"))])
def test_an_epoch_of_a_lost_workspace_is_not_loaded(tmp_path: Path, db_type: str) -> None:
    manager = MultiNodeCheckpointManager(tmp_path, db_type)
    with LocalSession() as session:
        JobRunner(jobs.make_three(), manager).train(session)
    replace_part(manager, 3, {"state/reader": codec.pack({"position": 0})})
    with LocalSession() as session, pytest.raises(feeder.CheckpointError) as caught:
        JobRunner(jobs.make_three(), manager, 3).train(session)
    assert f"checkpoint {str(tmp_path / 'trainer_1.3')!r} lacks ['total']" in str(caught.value)
    assert str(caught.value).endswith("when it was saved; resume from another epoch")
    with LocalSession() as session:
        assert JobRunner(jobs.make_three(), manager, 2).train(session) == NUM_EPOCHS
        assert session.fetch(NODES[1], ["total"])["total"] == TOTALS[-1]


def replace_part(manager: MultiNodeCheckpointManager, epoch: int, entries: dict[str, Any]) -> None:
    """Commit an epoch again, with another part of trainer_1."""
    place, manifest = manager._find(epoch)
    with LocalSession() as session:
        session.open(jobs.make_three())
        session.run(manager.load(epoch))
        session.run(manager.save(epoch))
        database = place.open_database(NODES[1])
        database.remove(f"{NODES[1]}.{epoch}")
        receipt = database.put(f"{NODES[1]}.{epoch}", entries)
        database.close()
        assert manager._saved is not None
        manager._saved[1][NODES[1]] = PartReceipt(
            digest=receipt.digest, num_bytes=receipt.num_bytes, nanoseconds=1, steps={},
            entries=list(entries),
        )  # fmt: skip
        manager.write_checkpoint_metadata(epoch, manifest.finished_by)
