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
from jobs import NODES


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
