"""Jobs whose checkpoints are in an object store: the totals, resumes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import feeder
import jobs
from feeder.checkpoint.store import CheckpointStore
from feeder.job import JobRunner, LocalHostSession, LocalSession, MultiNodeCheckpointManager
from jobs import NODES, NUM_EPOCHS, TOTALS

# A thread of the library's own opens and closes connections.
pytestmark = [pytest.mark.process, pytest.mark.foreign_sockets]


def test_totals_are_those_of_the_original_from_every_epoch(url: str) -> None:
    for start in (None, *range(NUM_EPOCHS + 1)):
        with LocalSession() as session:
            runner = JobRunner(jobs.make_three(), MultiNodeCheckpointManager(url), start)
            assert (runner.train(session), runner.failed_saves) == (NUM_EPOCHS, [])
            assert session.fetch(NODES[1], ["total"])["total"] == TOTALS[-1]
    assert f"{NODES[1]}.{NUM_EPOCHS}" in CheckpointStore(url).names()


def test_processes_share_a_bucket(tmp_path: Path) -> None:
    for start in (None, 2):
        with LocalHostSession("jobs:make_three", tmp_path) as session:
            manager = MultiNodeCheckpointManager("s3://bucket/processes")
            assert JobRunner(jobs.make_three(), manager, start).train(session) == NUM_EPOCHS
            assert session.fetch(NODES[2], ["total"])["total"] == TOTALS[-1]
    assert manager.get_ckpt_db_name(NODES[0], 4) == "s3://bucket/processes/trainer_0.4"


def test_damaged_and_lost_parts_are_found_as_in_a_folder(url: str) -> None:
    with LocalSession() as session:
        manager = MultiNodeCheckpointManager(url)
        JobRunner(jobs.make_three(), manager).train(session)
    with CheckpointStore(url, writer="thief") as store:
        store.remove("trainer_1.4")
    assert manager.get_resume_from_epoch_id() == 3
    assert [manager.exists(epoch) for epoch in (3, 4, 5)] == [True, False, False]
    with pytest.raises(feeder.CheckpointError, match=r"its part '.*trainer_1.4' is missing"):
        manager.load(4)
    with pytest.raises(feeder.CheckpointError, match=r"epoch 5 of nodes .* is not complete"):
        manager.load(5)


def test_a_place_that_cannot_be_reached_is_no_place_to_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("feeder.checkpoint.objects._MAX_RETRIES", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    runner = JobRunner(jobs.make_three(), MultiNodeCheckpointManager("s3://bucket/nowhere"))
    with (
        LocalSession() as session,
        pytest.raises(feeder.CheckpointError, match="cannot list checkpoint 's3://bucket/nowhere"),
    ):
        runner.train(session)
