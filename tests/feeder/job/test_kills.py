"""Nodes and runners are killed, and the job goes on from the last epoch that all nodes have."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import feeder
import jobs
from feeder.job import JobRunner, LocalHostSession, MultiNodeCheckpointManager
from jobs import NODES, NUM_EPOCHS, TOTALS
from project import TESTS

pytestmark = pytest.mark.process

END_S = 10.0


def train(folder: Path) -> tuple[int | None, list[int]]:
    """Run the job of three nodes from its newest epoch; returns that, and the totals."""
    runner = JobRunner(jobs.make_three(), MultiNodeCheckpointManager(folder / "checkpoints"))
    with LocalHostSession("jobs:make_three", folder / "nodes") as session:
        assert runner.train(session) == NUM_EPOCHS
        totals = [int(session.fetch(node, ["total"])["total"][0]) for node in NODES]
    return runner.resume_from_epoch, totals


def parts_of(folder: Path, epoch: int) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob(f"*.{epoch}"))


@pytest.mark.parametrize(
    ("when", "parts"),
    [
        ("before", ["trainer_0.3", "trainer_2.3"]),
        ("after", ["trainer_0.3", "trainer_1.3", "trainer_2.3"]),
    ],
)
def test_an_epoch_whose_node_is_killed_before_the_manifest_does_not_exist(
    tmp_path: Path, when: str, parts: list[str]
) -> None:
    manager = MultiNodeCheckpointManager(tmp_path / "checkpoints")
    runner = JobRunner(jobs.make_three(), manager)
    with (
        LocalHostSession(f"jobs:make_killed_{when}", tmp_path / "nodes") as session,
        pytest.raises(feeder.RemoteError) as caught,
    ):
        runner.train(session)
    assert str(caught.value) == (
        "node 'trainer_1' ended with signal SIGKILL; what it wrote is in "
        f"{str(tmp_path / 'nodes/trainer_1/output.log')!r}"
    )
    assert runner.failed_saves == []
    assert [epoch for epoch in range(6) if manager.exists(epoch)] == [0, 1, 2]
    # The nodes that were not killed have written theirs, or are about to have been ended.
    assert set(parts_of(tmp_path, 3)) <= set(parts)
    assert ("trainer_1.3" in parts_of(tmp_path, 3)) == (when == "after")

    assert train(tmp_path) == (2, [TOTALS[-1]] * 3)
    assert train(tmp_path) == (NUM_EPOCHS, [TOTALS[-1]] * 3)


class Killing(LocalHostSession):
    """Kills a node just after the `number`-th request has been sent."""

    def __init__(self, folder: Path, node: str, number: int) -> None:
        super().__init__("jobs:make_three", folder)
        self.num_sent = 0
        self._victim, self._number = node, number

    def _send(self, node: str, request: Any) -> None:
        super()._send(node, request)
        self.num_sent += 1
        if self.num_sent == self._number:
            os.kill(self.pids[self._victim], signal.SIGKILL)


@pytest.mark.parametrize("first", [1, 5])
def test_a_node_may_be_killed_at_any_request(tmp_path: Path, first: int) -> None:
    """51 requests make a run; every fourth is looked at, so that all kinds are, and all nodes."""
    for number in range(first, 52, 8):
        folder = tmp_path / str(number)
        manager = MultiNodeCheckpointManager(folder / "checkpoints")
        manager.set_params(NODES)
        with Killing(folder / "nodes", NODES[number % 3], number) as session:
            try:
                JobRunner(jobs.make_three(), manager).train(session)
            except feeder.RemoteError as error:
                assert "ended with signal SIGKILL" in str(error)
        assert session.num_sent >= number
        last = max((epoch for epoch in range(6) if manager.exists(epoch)), default=None)
        assert train(folder) == (last, [TOTALS[-1]] * 3)


RUNNER = """
import os, signal, sys
import jobs
from feeder.job import JobRunner, LocalHostSession, MultiNodeCheckpointManager

class Manager(MultiNodeCheckpointManager):
    def write_checkpoint_metadata(self, epoch, finished_by=""):
        if epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().write_checkpoint_metadata(epoch, finished_by)

with LocalHostSession("jobs:make_three", sys.argv[1] + "/nodes") as session:
    session.open(job := jobs.make_three())
    print(*session.pids.values(), flush=True)
    JobRunner(job, Manager(sys.argv[1] + "/checkpoints")).train(session)
"""


def test_where_the_runner_is_killed_before_the_manifest_its_nodes_end_and_the_epoch_does_not_exist(
    tmp_path: Path,
) -> None:
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    command = [sys.executable, "-c", RUNNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as runner:
        nodes = [os.pidfd_open(int(pid)) for pid in runner.stdout.readline().split()]
        assert runner.wait(END_S * 3) == -signal.SIGKILL
    for node in nodes:
        assert select.select([node], [], [], END_S)[0], "a node has outlived its runner"
        os.close(node)
    assert parts_of(tmp_path, 2) == ["trainer_0.2", "trainer_1.2", "trainer_2.2"]
    assert not any((tmp_path / "checkpoints/manifests").glob("*.2"))
    assert train(tmp_path) == (1, [TOTALS[-1]] * 3)
