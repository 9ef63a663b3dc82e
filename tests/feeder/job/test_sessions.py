"""One suite for nodes in this process; where others have a part in it, for processes and a Ray
cluster of three nodes too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import feeder
import jobs
from feeder.job import (
    JobRunner,
    MultiNodeCheckpointManager,
    StoreMetadata,
    ray_session,
)
from feeder.job.checkpoints.epochs import Epochs
from feeder.job.checkpoints.parts import LoadPart, Operation
from jobs import FOLDER, NODES, NUM_EPOCHS, TOTALS


def totals(session: Any) -> list[int]:
    """Return the total of every node."""
    return [int(session.fetch(node, ["total"])["total"][0]) for node in NODES]


ON_RAY = pytest.param("ray", marks=[pytest.mark.process, pytest.mark.foreign_sockets])
everywhere = pytest.mark.parametrize(
    "place",
    ["threads", "messages", pytest.param("processes", marks=pytest.mark.process), ON_RAY],
    indirect=True,
)


class Told(StoreMetadata):
    """The default handler, which keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[tuple[str, dict[str, int]]] = []

    def report(self, action: str, durations: Mapping[str, int]) -> None:
        super().report(action, durations)
        self.reports.append((action, dict(durations)))


def manager_in(folder: Path, db_type: str = "file") -> MultiNodeCheckpointManager:
    return MultiNodeCheckpointManager(folder / "checkpoints", db_type)


@everywhere
@pytest.mark.parametrize(("db_type", "starts"), [("file", [1, 4])])
def test_totals_are_those_of_the_original_in_fresh_sessions(
    place: Any, tmp_path: Path, db_type: str, starts: list[int]
) -> None:
    job = jobs.make_three()
    for start in (None, *starts):
        with place.session("make_three", tmp_path) as session:
            manager = manager_in(tmp_path, db_type)
            assert JobRunner(job, manager, start).train(session) == NUM_EPOCHS
            assert totals(session) == [TOTALS[-1]] * 3
            for epoch, total in enumerate(TOTALS, start=1):
                session.run(manager.load(epoch))
                assert totals(session) == [total] * 3


def test_groups_and_tasks_run_in_their_order_and_after_a_resume_all_but_the_init_group(
    place: Any, tmp_path: Path
) -> None:
    for start in (None, 1):
        with place.session("make_marked", tmp_path) as session:
            JobRunner(jobs.make_marked(), manager_in(tmp_path), start).train(session)
            for node in NODES:
                marks = session.fetch(node, ["marks"])["marks"].tolist()
                assert marks == [0, 1, 2, 1, 2, 3, 4]


@everywhere
def test_uploads_run_once_on_the_nodes_after_the_last_epoch(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(jobs.FOLDER, str(jobs.folder_of(tmp_path)))
    runner = jobs.make_uploading()
    with place.session("make_uploading", tmp_path) as session:
        session.open(runner.job)
        assert list((tmp_path / "uploads").iterdir()) == []
        runner.train(session)
    builder = runner.upload_task_group_builder
    assert builder.built == [(NUM_EPOCHS, runner.checkpoint_manager)]
    assert sorted(path.name for path in (tmp_path / "uploads").iterdir()) == NODES
    for node in NODES:
        saved = tmp_path / "checkpoints" / f"{node}.{NUM_EPOCHS}"
        assert (tmp_path / "uploads" / node).read_bytes() == saved.read_bytes()


@everywhere
def test_feeds_go_on_with_the_very_next_batch(place: Any, tmp_path: Path) -> None:
    job = jobs.make_even()
    with place.session("make_even", tmp_path) as session:
        JobRunner(job, manager_in(tmp_path)).train(session)
        whole = [session.fetch(node, ["digest", "step"]) for node in NODES]
    assert [int(end["step"][0]) for end in whole] == [14, 14, 14]
    assert {(end["digest"].dtype.name, end["digest"].shape) for end in whole} == {("uint64", ())}
    for start in (0, 3):
        with place.session("make_even", tmp_path) as session:
            JobRunner(job, manager_in(tmp_path), start).train(session)
            resumed = [session.fetch(node, ["digest", "step"]) for node in NODES]
        assert resumed == whole


def test_feeds_at_different_steps_are_refused_with_all_of_them(
    place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with place.session("make_uneven", tmp_path) as session:
        manager = manager_in(tmp_path)
        JobRunner(jobs.make_uneven(), manager).train(session)
        assert "what was saved cannot be resumed from: epoch 1 " in caplog.text
        with pytest.raises(feeder.ResumeError) as caught:
            session.run(manager.load(2))
    assert str(caught.value) == (
        f"epoch 2 in {str(tmp_path / 'checkpoints')!r}: the nodes' positions are not of one step: "
        "feed 'train[0]': 'trainer_0' at 6, 'trainer_1' at 8, 'trainer_2' at 10; resume from a "
        "checkpoint that all nodes made at the same step"
    )


@everywhere
def test_what_a_task_raises_ends_the_job_and_names_node_and_task(
    place: Any, tmp_path: Path
) -> None:
    with place.session("make_raising", tmp_path) as session:
        with pytest.raises((jobs.Odd, feeder.RemoteError)) as caught:
            JobRunner(jobs.make_raising(), manager_in(tmp_path)).train(session)
        told = "".join([str(caught.value), *caught.value.__notes__])
        assert "the second epoch is not for me" in told
        assert "in task 'raise_later' on node 'trainer_1'" in told
        with pytest.raises(feeder.ClosedError, match="a node of the session has failed"):
            session.fetch(NODES[0], ["total"])


def test_a_bug_in_what_is_saved_is_no_failed_save(place: Any, tmp_path: Path) -> None:
    runner = JobRunner(jobs.make_unsaveable(), manager_in(tmp_path))
    with (
        place.session("make_unsaveable", tmp_path) as session,
        pytest.raises((jobs.Odd, feeder.RemoteError), match="no state to be had"),
    ):
        runner.train(session)
    assert runner.failed_saves == []


def test_a_save_that_fails_on_one_node_commits_nothing(place: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "trainer_1.2").mkdir(parents=True)
    manager = manager_in(tmp_path)
    runner = JobRunner(jobs.make_three(), manager)
    with place.session("make_three", tmp_path) as session:
        assert runner.train(session) == NUM_EPOCHS
    assert runner.failed_saves == [2]
    assert [epoch for epoch in range(6) if manager.exists(epoch)] == [0, 1, 3, 4]


def test_the_time_and_size_of_every_part_are_reported(place: Any, tmp_path: Path) -> None:
    told = Told()
    manager = MultiNodeCheckpointManager(tmp_path / "checkpoints", metadata_handler=told)
    with place.session("make_three", tmp_path) as session:
        JobRunner(jobs.make_three(), manager).train(session)
    with place.session("make_three", tmp_path) as session:
        runner = JobRunner(jobs.make_three(), manager, 3)
        runner.train(session)
        assert runner.load_blobs_from_checkpoints(["trainer_1/total"], 2, session)
    assert [action for action, _ in told.reports] == [
        *["checkpoint_save"] * 5, "checkpoint_load", "checkpoint_save", "checkpoint_partial_load",
    ]  # fmt: skip
    names = [[str(tmp_path / f"checkpoints/{n}.{epoch}") for n in NODES] for epoch in range(5)]
    assert [list(durations) for _, durations in told.reports] == [
        *names, names[3], names[4], names[2],
    ]  # fmt: skip
    assert min(min(durations.values()) for _, durations in told.reports) > 0
    for action, epoch in (("checkpoint_save", 4), ("checkpoint_load", 3)):
        sizes = {name: receipt.num_bytes for name, receipt in manager.reports[action].items()}
        assert sizes == {name: Path(name).stat().st_size for name in names[epoch]}
    read = manager.reports["checkpoint_partial_load"]
    assert [read[name].num_bytes for name in names[2]] == [0, 8, 0]


def failing(folder: Path, *how: str) -> None:
    for number, one in enumerate(how):
        (folder / f"{one}{number}-fail").touch()


@everywhere
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_node_that_fails_is_restarted_from_the_last_epoch(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "kill" and not place.has_pids:
        return  # They have no process of their own.
    monkeypatch.setenv(FOLDER, str(tmp_path))
    failing(tmp_path, how, how)
    manager = MultiNodeCheckpointManager(tmp_path / "checkpoints")
    runner = JobRunner(jobs.make_failing(), manager, retries=2)
    with place.session("make_failing", tmp_path) as session:
        assert runner.train(session) == NUM_EPOCHS
        totals = [int(session.fetch(node, ["total"])["total"][0]) for node in NODES]
    assert totals == [TOTALS[-1]] * 3
    assert not list(tmp_path.glob("*-fail"))


def test_an_epoch_is_done_again_so_often_and_no_more(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    failing(tmp_path, "raise", "raise")
    manager = MultiNodeCheckpointManager(tmp_path / "checkpoints")
    runner = JobRunner(jobs.make_failing(), manager, retries=1)
    with (
        place.session("make_failing", tmp_path) as session,
        pytest.raises((jobs.Odd, feeder.RemoteError), match="at raise1-fail"),
    ):
        runner.train(session)
    assert manager.get_resume_from_epoch_id() == 1


def test_retries_need_something_to_go_back_to() -> None:
    with pytest.raises(feeder.ConfigError, match="give the runner a checkpoint manager"):
        JobRunner(jobs.make_three(), retries=1)


@everywhere
def test_memory_of_one_process_is_refused_for_nodes_in_others(place: Any, tmp_path: Path) -> None:
    load = LoadPart(url="memory://here", db_type="file", name="trainer_0.1", digest=b"")
    with place.session("make_three", tmp_path) as session:
        if session.shares_memory:
            return  # Its nodes are in this process.
        session.open(jobs.make_three())
        with pytest.raises(feeder.ConfigError, match="in the memory of one process"):
            session.run(Operation(requests={NODES[0]: load}, settle=lambda answers: None))


@pytest.mark.parametrize("place", [ON_RAY], indirect=True)
def test_a_node_that_no_machine_has_a_place_for_is_told_and_given_up(
    place: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_session, "_TELL_S", 1.0)
    # One node: others would have to be there by then, however busy the machine is.
    options = {NODES[0]: {"resources": {"nowhere": 1}}}
    with (
        feeder.job.RaySession("jobs:make_single", options=options, placement_s=3.0) as session,
        pytest.raises(feeder.RemoteError, match=r"no place for nodes \['trainer_0'\] for 3 s"),
    ):
        JobRunner(jobs.make_single()).train(session)
    assert "nodes ['trainer_0'] wait for a place in the cluster" in caplog.text


def test_nodes_check_their_parts_while_they_load_and_pass_over_a_damaged_epoch(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with place.session("make_three", tmp_path) as session:
        assert JobRunner(jobs.make_three(), manager_in(tmp_path)).train(session) == NUM_EPOCHS
    part = tmp_path / "checkpoints" / f"{NODES[1]}.{NUM_EPOCHS}"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)

    def not_here(*arguments: Any) -> None:
        raise AssertionError("the process that runs the job reads the parts")

    monkeypatch.setattr(Epochs, "verify", not_here)
    with place.session("make_three", tmp_path) as session:
        runner = JobRunner(jobs.make_three(), manager_in(tmp_path))
        assert runner.train(session) == NUM_EPOCHS
        assert totals(session) == [TOTALS[-1]] * 3
    assert runner.resume_from_epoch == NUM_EPOCHS - 1
    assert "passed over: " in caplog.text
