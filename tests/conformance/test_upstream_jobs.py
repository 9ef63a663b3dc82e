"""The tests of Caffe2's checkpoint and JobRunner, asked of these jobs in fresh processes; others
are asked in `tests/feeder/job/test_sessions.py`.

Every job reads the rows 0 to 9, three in an epoch, and adds them to a total that starts at 100.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jobs
from feeder.job import JobRunner, LocalSession, MultiNodeCheckpointManager
from jobs import NODES, NUM_EPOCHS, TOTALS
from project import TESTS, printed

pytestmark = pytest.mark.process

LMDB = pytest.mark.needs("lmdb")


def run_child(*arguments: str) -> dict[str, Any]:
    """Run the job in a fresh process."""
    return json.loads(printed(TESTS / "job_child.py", *arguments))


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
