"""Jobs whose checkpoints are in an object store: the totals, resumes, and what is refused. What a
save costs does not grow with the number of epochs that are there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import obstore
import pytest

import feeder
import jobs
from feeder.checkpoint.store import CheckpointStore
from feeder.durable import Fs
from feeder.job import (
    JobRunner,
    LocalHostSession,
    LocalSession,
    MultiNodeCheckpointManager,
    epoch_limiter,
)
from jobs import NODES, NUM_EPOCHS, TOTALS

# A thread of the library's own opens and closes connections.
pytestmark = [pytest.mark.process, pytest.mark.foreign_sockets]


def with_epochs(num: int, url: str, **settings: Any) -> tuple[Any, MultiNodeCheckpointManager]:
    """A session and manager that have saved so many epochs."""
    session, manager = LocalSession(), MultiNodeCheckpointManager(url, **settings)
    job = jobs.make_three()
    session.open(job)
    session.run(job.init_group)
    session.run(manager.init(NODES))
    for epoch in range(num):
        save(session, manager, epoch)
    return session, manager


def save(session: Any, manager: MultiNodeCheckpointManager, epoch: int) -> None:
    session.run(manager.save(epoch))
    manager.write_checkpoint_metadata(epoch)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is asked of object stores; of a listing also the names that it brings."""
    counted: Counter[str] = Counter()

    def counting(name: str, call: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            answer = call(*args, **kwargs)
            if name == "list":
                answer = list(answer)
                counted["listed"] += sum(map(len, answer))
            return answer

        return called

    for name in ("put", "head", "get", "get_range", "list", "delete"):
        monkeypatch.setattr(obstore, name, counting(name, getattr(obstore, name)))
    return counted


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_as_many_requests_are_made_beside_many_epochs_as_beside_few(
    requests: Counter[str], url: str
) -> None:
    seen = []
    for num in (5, 30):
        with with_epochs(num, f"{url}/{num}")[0] as session:
            manager = MultiNodeCheckpointManager(f"{url}/{num}")
            session.run(manager.init(NODES))
            save(session, manager, num)  # the first of a run writes down that it saves
            requests.clear()
            save(session, manager, num + 1)
            seen.append(Counter(requests))
    assert seen[0] == seen[1]
    assert sum(seen[0].values()) <= 3 * len(NODES)


@pytest.mark.parametrize("db_type", ["file", pytest.param("lmdb", marks=pytest.mark.needs("lmdb"))])
def test_a_folder_is_not_looked_through_again_at_each_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, db_type: str
) -> None:
    listed: list[str] = []

    def listing(fs: Fs, folder: int) -> list[tuple[str, bool]]:
        found = list_folder(fs, folder)
        listed.extend(name for name, _ in found)
        return found

    list_folder = Fs.list
    session, _ = with_epochs(10, str(tmp_path), db_type=db_type)
    with session:
        manager = MultiNodeCheckpointManager(tmp_path, db_type)
        session.run(manager.init(NODES))
        save(session, manager, 10)  # the first of a run looks for what a killed one has left
        monkeypatch.setattr(Fs, "list", listing)
        save(session, manager, 11)
    assert listed == ["trainer_0.0000000002"]


# ---- keep


def test_a_number_to_keep_that_is_none_is_refused(tmp_path: Path) -> None:
    for keep in (0, -1, 1.5, True, "3"):
        with pytest.raises(feeder.ConfigError, match=r"keep is .*, expected a whole number"):
            MultiNodeCheckpointManager(tmp_path, keep=keep)  # type: ignore[arg-type]


def test_the_newest_that_are_to_be_kept_are_and_all_else_is_removed(url: str) -> None:
    with LocalSession() as session:
        manager = MultiNodeCheckpointManager(url, keep=2)
        assert JobRunner(jobs.make_three(), manager).train(session) == 4
    assert [manager.exists(epoch) for epoch in range(5)] == [False, False, False, True, True]
    parts = [f"{node}.{epoch}" for node in NODES for epoch in (3, 4)]
    manifests = [f"manifests/trainer_0.g1.{epoch}" for epoch in (3, 4)]
    assert CheckpointStore(url).names() == [*manifests, "runs/trainer_0.0000000001", *parts]


def test_the_line_that_a_job_was_put_back_from_goes_first(tmp_path: Path) -> None:
    with LocalSession() as session:
        JobRunner(jobs.make_three(), MultiNodeCheckpointManager(tmp_path)).train(session)
    with LocalSession() as session:
        job = jobs.make_three()
        epoch_limiter(job, 2)
        manager = MultiNodeCheckpointManager(tmp_path, keep=2)
        assert JobRunner(job, manager, 1).train(session) == 2
    assert [epoch for epoch in range(5) if manager.exists(epoch)] == [1, 2]


def test_only_the_newest_run_is_written_down(tmp_path: Path) -> None:
    for start in (None, 1, 2):
        with LocalSession() as session:
            runner = JobRunner(jobs.make_three(), MultiNodeCheckpointManager(tmp_path), start)
            assert (runner.train(session), runner.failed_saves) == (4, [])
    assert CheckpointStore(tmp_path).names("runs/") == ["runs/trainer_0.0000000003"]


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_totals_are_those_of_the_original_from_an_epoch(url: str) -> None:
    for start in (None, 2):
        with LocalSession() as session:
            runner = JobRunner(jobs.make_three(), MultiNodeCheckpointManager(url), start)
            assert (runner.train(session), runner.failed_saves) == (NUM_EPOCHS, [])
            assert session.fetch(NODES[1], ["total"])["total"] == TOTALS[-1]
    assert f"{NODES[1]}.{NUM_EPOCHS}" in CheckpointStore(url).names()


def test_processes_share_a_bucket(tmp_path: Path) -> None:
    with LocalHostSession("jobs:make_three", tmp_path) as session:
        manager = MultiNodeCheckpointManager("s3://bucket/processes")
        assert JobRunner(jobs.make_three(), manager).train(session) == NUM_EPOCHS
        assert session.fetch(NODES[2], ["total"])["total"] == TOTALS[-1]
    assert manager.get_ckpt_db_name(NODES[0], 4) == "s3://bucket/processes/trainer_0.4"


@pytest.mark.parametrize("url", ["memory", "s3"], indirect=True)
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
