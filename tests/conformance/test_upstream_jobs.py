"""The tests of Caffe2's checkpoint and JobRunner, asked of these jobs.

Every job reads the rows 0 to 9, three in an epoch, and adds them to a total that starts at 100.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jobs
from feeder.job import (
    CheckpointManager,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Node,
    Task,
    epoch_limiter,
)
from jobs import NODES, NUM_EPOCHS, TOTALS

pytestmark = pytest.mark.process

TESTS = Path(__file__).parents[1]
LMDB = pytest.mark.needs("lmdb")


def total(session: LocalSession, node: str = NODES[0]) -> int:
    return int(session.fetch(node, ["total"])["total"][0])


def run_child(*arguments: str) -> dict[str, Any]:
    """Run the job in a fresh process."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "job_child.py"), *arguments],
        cwd=TESTS.parent, env={"PYTHONPATH": f"{TESTS.parent}:{TESTS}"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- 1: from scratch, from each epoch, and each epoch loaded


@pytest.mark.parametrize("db_type", ["file", pytest.param("lmdb", marks=LMDB)])
@pytest.mark.parametrize("kind", ["single", "multi"])
def test_totals_from_scratch_and_from_each_epoch_in_fresh_sessions(
    tmp_path: Path, kind: str, db_type: str
) -> None:
    job = jobs.make_single()

    def make_manager() -> MultiNodeCheckpointManager:
        if kind == "single":
            return CheckpointManager(tmp_path, "temp_node", db_type)
        return MultiNodeCheckpointManager(tmp_path, db_type)

    for start in (None, *range(1, NUM_EPOCHS + 1)):
        with LocalSession() as session:
            manager = make_manager()
            assert JobRunner(job, manager, resume_from_epoch=start).train(session) == NUM_EPOCHS
            assert total(session) == TOTALS[-1]
            seen = []
            for epoch in range(1, NUM_EPOCHS + 1):
                session.run(manager.load(epoch))
                seen.append(total(session))
            assert seen == TOTALS


@pytest.mark.parametrize(
    ("kind", "db_type"),
    [
        ("single", "file"),
        ("multi", "file"),
        pytest.param("single", "lmdb", marks=LMDB),
        pytest.param("multi", "lmdb", marks=LMDB),
    ],
)
def test_totals_are_the_same_when_each_resume_is_a_fresh_process(
    tmp_path: Path, kind: str, db_type: str
) -> None:
    ends = [TOTALS[-1]] * (1 if kind == "single" else 3)
    for start, num_epochs in (("newest", 4), ("1", 3), ("2", 2), ("3", 1), ("4", 0), ("0", 4)):
        told = run_child(kind, str(tmp_path), db_type, start)
        assert told == {"last": NUM_EPOCHS, "totals": ends, "ran": num_epochs}, start


def test_a_finished_job_runs_no_further_epoch_and_finds_that_out_by_itself(tmp_path: Path) -> None:
    for num_epochs in (NUM_EPOCHS, 0, 0):
        told = run_child("multi", str(tmp_path), "file", "newest")
        assert told == {"last": NUM_EPOCHS, "totals": [TOTALS[-1]] * 3, "ran": num_epochs}


# ---- 2: the names of checkpoints, and entries of several nodes


@pytest.mark.parametrize("db_type", ["file", pytest.param("lmdb", marks=LMDB)])
def test_names_and_entries_of_nodes_that_were_saved_by_jobs_of_their_own(
    tmp_path: Path, db_type: str
) -> None:
    manager = MultiNodeCheckpointManager(tmp_path, db_type)
    manager.init(jobs.make_three().nodes_to_checkpoint())
    for node in NODES:
        assert manager.get_ckpt_db_name(node, 5) == f"{tmp_path}/{node}.5"
        with LocalSession() as session:
            own = MultiNodeCheckpointManager(tmp_path, db_type)
            assert JobRunner(jobs.make_job(node), own).train(session) == NUM_EPOCHS
            # What the init group and add_object have made; not the rows that epochs add.
            assert own.blob_list() == {node: ["total", "state/reader"]}

    with LocalSession() as session:
        runner = JobRunner(jobs.make_three(), MultiNodeCheckpointManager(tmp_path, db_type))
        names = ["trainer_1/total", "trainer_2/total"]
        for epoch, expected in enumerate(TOTALS, start=1):
            session.workspace.clear()
            assert runner.load_blobs_from_checkpoints(names, epoch, session) is True
            assert session.workspace == {name: np.array([expected]) for name in names}
        session.workspace.clear()
        assert runner.load_blobs_from_checkpoints(names, 5, session) is False
        assert session.workspace == {}


# ---- 3: uploads


def test_uploads_are_built_once_for_the_last_epoch_and_make_a_file_for_each_node(
    tmp_path: Path,
) -> None:
    uploads = tmp_path / "uploads"
    uploads.mkdir()
    for node in NODES:
        assert not (uploads / node).exists()
        manager = MultiNodeCheckpointManager(tmp_path)
        builder = jobs.CopyParts(str(uploads))
        runner = JobRunner(jobs.make_job(node), manager, upload_task_group_builder=builder)
        with LocalSession() as session:
            assert runner.train(session) == NUM_EPOCHS
        assert builder.built == [(NUM_EPOCHS, manager)]
    assert sorted(path.name for path in uploads.iterdir()) == NODES


# ---- 4: saves that fail


def test_all_epochs_run_where_nothing_can_be_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = MultiNodeCheckpointManager(tmp_path / "does" / "not" / "exist")
    runner = JobRunner(jobs.make_three(), manager)
    with LocalSession() as session:
        assert runner.train(session) == NUM_EPOCHS
        assert total(session) == TOTALS[-1]
    assert runner.failed_saves == [0, 1, 2, 3, 4]
    assert sum("is not saved" in record.message for record in caplog.records) == 5
    assert not (tmp_path / "does").exists()


# ---- 5: the download group


def test_the_download_group_runs_once_between_the_epochs_and_the_exit_group() -> None:
    events: list[str] = []

    def start(workspace: Any) -> None:
        for name in ("input1", "input2", "output", "download_result"):
            workspace[name] = np.ones(8)

    def add(workspace: Any) -> None:
        events.append("epoch")
        workspace["output"] = workspace["input1"] + workspace["input2"]

    def download(workspace: Any) -> None:
        events.append("download")
        workspace["download_result"] = workspace["output"].copy()

    with Job() as job, Node("trainer"):
        with job.init_group:
            Task(start)
        with job.epoch_group:
            Task(add)
        with job.download_group:
            Task(download)
        with job.exit_group:
            Task(lambda workspace: events.append("exit"))
        epoch_limiter(job, 1)
    with LocalSession() as session:
        JobRunner(job).train(session)
        got = session.fetch("trainer", ["output", "download_result"])
    assert events == ["epoch", "download", "exit"]
    assert got["output"].tolist() == got["download_result"].tolist() == [2.0] * 8


# ---- 6: one manager for several runs


def test_one_manager_and_one_session_serve_all_runs(tmp_path: Path) -> None:
    manager, job = MultiNodeCheckpointManager(tmp_path), jobs.make_single()
    with LocalSession() as session:
        assert JobRunner(job, manager).train(session) == NUM_EPOCHS
        for start in range(1, NUM_EPOCHS + 1):
            JobRunner(job, manager, resume_from_epoch=start).train(session)
            assert total(session) == TOTALS[-1]


# ---- 7: limits


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limited_job_ends_after_exactly_so_many_epochs(tmp_path: Path, limit: int) -> None:
    job = jobs.make_single()
    epoch_limiter(job, limit)
    with LocalSession() as session:
        assert JobRunner(job, MultiNodeCheckpointManager(tmp_path)).train(session) == limit
        assert total(session) == TOTALS[limit - 1]
