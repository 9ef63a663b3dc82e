"""Processes are killed and stopped at random times and at named points, and no batch is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.network import is_possible
from chaos.processes import PLANTS
from project import ROOT

LIMIT_S = 110

pytestmark = pytest.mark.process


def run_chaos(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a campaign in a process of its own, whose children are its own; returns exit status and
    output. What a failed leg keeps to be looked at is in the folder."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-m", "chaos.campaign", *arguments],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate()
            raise AssertionError(f"not done within {LIMIT_S} s:\n{output}") from None
    return process.returncode, output


@pytest.mark.parametrize(
    "campaign",
    [
        "--faults 3 --transport shared",
        "--soak 600",
        "--executors 3",
        "--crowds 1 --crowd 20",
        "--servers 1",
    ],
)
def test_a_few_kills_change_nothing(campaign: str, tmp_path: Path) -> None:
    status, output = run_chaos(tmp_path, "--seed", "7", *campaign.split())
    assert (status, " 0 failures" in output) == (0, True), output


def test_harm_on_the_network_changes_nothing(tmp_path: Path) -> None:
    status, output = run_chaos(tmp_path, "--networks", "1", "--seed", "2")
    if is_possible():
        assert (status, " 0 failures" in output) == (0, True), output
    else:
        assert (status, "needs root" in output) == (2, True), output


# ---- the campaign itself


@pytest.mark.nightly
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_caught(plant: str, tmp_path: Path) -> None:
    is_servers = plant in ("rows that were taken come again", "asks for what it came with")
    fault = "kill server" if is_servers else "kill trainer"
    only = ("--plant", plant, "--only", fault)
    status, output = run_chaos(tmp_path, "--faults", "10", "--seed", "1", *only)
    assert status == 1, output
    # A server may find out by itself that positions do not fit each other.
    assert "FAILED, Differs" in output or "are not of one stream" in output, output
