"""What sessions refuse, and how they end."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
import feeder.job.local
import jobs
from feeder.job import (
    Job,
    JobRunner,
    LocalHostSession,
    LocalSession,
    MultiNodeCheckpointManager,
    Task,
    TaskGroup,
)
from feeder.job.checkpoints.parts import PartReceipt
from feeder.job.messages import Plan
from feeder.state import codec
from jobs import NODES, NUM_EPOCHS, TOTALS, Actors


@pytest.mark.parametrize("factory", ["jobs", ":make", "jobs:", "a b:c", "__main__:make", 3, None])
def test_a_factory_that_is_no_name_is_refused(tmp_path: Path, factory: Any) -> None:
    with pytest.raises(feeder.ConfigError, match=r"factory is .*, expected 'MODULE:ATTR'"):
        LocalHostSession(factory, tmp_path)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_such_module:make", "no module 'no_such_module' is found"),
        ("jobs:make_nobody", "there is no 'make_nobody' in it"),
        ("jobs:TOTALS", "'jobs:TOTALS' is list, expected a function"),
        ("jobs:make_nothing", "'jobs:make_nothing' returned NoneType, expected a Job, or a JobR"),
        ("jobs:make_other", "node 'trainer_1' has made another job, .*in every process"),
        ("jobs:make_single", "node 'trainer_1' has made another job"),
    ],
)
def test_a_node_that_cannot_make_the_job_says_why(factory: str, message: str) -> None:
    with jobs.Actors(factory) as session, pytest.raises(feeder.ConfigError, match=message):
        session.open(jobs.make_job(NODES[1]))


@pytest.mark.process
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        LocalHostSession("jobs:make_three", tmp_path / "file") as session,
        pytest.raises(feeder.ConfigError, match=r"node 'trainer_0' cannot work in '.*/file/train"),
    ):
        session.open(jobs.make_three())


@pytest.mark.process
def test_a_node_works_in_its_folder_and_writes_into_its_log(tmp_path: Path) -> None:
    with LocalHostSession("jobs:make_talking", tmp_path / "nodes") as session:
        JobRunner(jobs.make_talking()).train(session)
    for node in NODES:
        told = (tmp_path / "nodes" / node / "output.log").read_text().splitlines()
        assert told == [f"{tmp_path}/nodes/{node}"]


def test_uploads_need_a_factory_of_the_whole_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(jobs.FOLDER, str(jobs.folder_of(tmp_path)))
    with (
        jobs.Actors() as session,
        pytest.raises(feeder.ConfigError, match="let the factory return a JobRunner"),
    ):
        jobs.make_uploading().train(session)


def test_a_session_is_of_one_job(tmp_path: Path) -> None:
    with LocalSession() as session:
        with pytest.raises(feeder.ConfigError, match="the session has no job yet"):
            session.fetch(NODES[0], ["total"])
        job = jobs.make_three()
        session.open(job)
        session.open(job)
        with pytest.raises(feeder.ConfigError, match="the session is of another job"):
            session.open(jobs.make_three())
        with pytest.raises(feeder.ConfigError, match=r"no node 'other', expected one of \['tr"):
            session.fetch("other", ["total"])
    with pytest.raises(feeder.ClosedError, match="the session is closed"):
        session.open(job)
    session.close()


def test_a_local_session_runs_any_group_and_others_those_of_the_job(tmp_path: Path) -> None:
    job, ran = jobs.make_three(), []
    with TaskGroup() as group:
        for node in NODES:
            Task(lambda workspace: ran.append(threading.current_thread().name), node=node)
    with LocalSession() as session:
        session.open(job)
        session.run(group)
        session.run(group)
    assert sorted(ran) == sorted(f"node {node}" for node in NODES * 2)
    group.key = None
    with (
        jobs.Actors() as session,
        pytest.raises(feeder.ConfigError, match="the group is not one of the job's"),
    ):
        session.open(job)
        session.run(group)


def test_a_stop_condition_may_be_an_array_and_must_be_there() -> None:
    def count(workspace: Any) -> None:
        workspace["done"] = np.array([False, len(workspace["reader"].read(6)) < 6])

    def start(workspace: Any) -> None:
        workspace["done"] = False

    with Job() as job:
        job.add_object("reader", lambda: feeder.job.Reader(range(10)))
        with job.init_group:
            Task(start)
        Task(count)
        job.add_stop_condition("done")
    with LocalSession() as session:
        assert JobRunner(job).train(session) == 2
    job.add_stop_condition("dune")
    with (
        LocalSession() as session,
        pytest.raises(feeder.ConfigError, match=r"'dune' is not in the workspace of 'local', exp"),
    ):
        JobRunner(job).train(session)


def test_a_node_that_fails_does_not_wait_for_one_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, gate = threading.Event(), threading.Event()

    def fail(workspace: Any) -> None:
        assert entered.wait(60.0)
        raise jobs.Odd

    with Job() as job:
        Task(fail, node=NODES[0])
        Task(lambda workspace: (entered.set(), gate.wait(60.0)), node=NODES[1], name="wait")
    feeder.job.epoch_limiter(job, 1)
    session = LocalSession()
    with pytest.raises(jobs.Odd):
        JobRunner(job).train(session)
    monkeypatch.setattr(feeder.job.local, "STOP_DEADLINE_S", 0.05)
    with pytest.raises(feeder.StuckWorkerError, match="node trainer_1") as caught:
        session.close()
    assert "<lambda>" in str(caught.value)  # whether it has come to its gate or not
    gate.set()


@pytest.mark.process
def test_a_process_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeder.job.processes, "STOP_DEADLINE_S", 0.2)
    with (
        LocalHostSession("jobs:make_stuck", tmp_path) as session,
        pytest.raises(feeder.RemoteError, match="Odd: one of us has to"),
    ):
        JobRunner(jobs.make_stuck()).train(session)
    for pid in session.pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_error_of_feeders_is_of_the_same_class_from_another_process(tmp_path: Path) -> None:
    with jobs.Actors() as session:
        session.open(jobs.make_three())
        manager = MultiNodeCheckpointManager(tmp_path / "checkpoints")
        session.run(manager.init(NODES))
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / ".writer-trainer_1.lock").symlink_to(tmp_path / "nowhere")
        with pytest.raises(feeder.CheckpointError, match="cannot write checkpoint") as caught:
            session.run(manager.save(0))
        assert any(note.startswith("on node 'trainer_") for note in caught.value.__notes__)
        assert session.run(manager.init(NODES)) is None  # the session goes on


@pytest.mark.process
def test_a_node_whose_runner_is_gone_ends(tmp_path: Path) -> None:
    with LocalHostSession("jobs:make_three", tmp_path) as session:
        session.open(jobs.make_three())
        ends = [os.pidfd_open(pid) for pid in session.pids.values()]
        for process in session._nodes.values():
            process.pipe.close()
        for end in ends:
            assert select.select([end], [], [], 60.0)[0], "a node has outlived its runner"
            os.close(end)


def test_a_job_that_would_never_end_is_refused() -> None:
    with Job() as job:
        Task(lambda workspace: None)
    with (
        LocalSession() as session,
        pytest.raises(feeder.ConfigError, match="the job would never end; give it a stop cond"),
    ):
        JobRunner(job).train(session)


# ---- a node that was started again in the middle of a job has lost its workspace, and says so


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
    trained = jobs.train(MultiNodeCheckpointManager(tmp_path))
    assert (trained.last, trained.total) == (NUM_EPOCHS, TOTALS[-1])
    assert trained.runner.resume_from_epoch == last


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
    jobs.train(manager)
    replace_part(manager, 3, {"state/reader": codec.pack({"position": 0})})
    with pytest.raises(feeder.CheckpointError) as caught:
        jobs.train(manager, start=3)
    assert f"checkpoint {str(tmp_path / 'trainer_1.3')!r} lacks ['total']" in str(caught.value)
    assert str(caught.value).endswith("when it was saved; resume from another epoch")
    assert jobs.train(manager, start=2)[:2] == (NUM_EPOCHS, TOTALS[-1])


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
