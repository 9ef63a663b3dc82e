"""Processes are killed and stopped at random times and at named points, and no batch is lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from chaos.faults import BLOWS, TRANSPORTS, Plan
from chaos.processes import PLANTS
from chaos.streams import FORMS, NUM_QUEUES, chain_of, make, reference
from feeder.service.faults import POINTS
from project import ROOT

LIMIT_S = 90

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
    "campaign", ["--faults 3 --transport shared", "--soak 600", "--executors 3"]
)
def test_a_few_kills_change_nothing(campaign: str, tmp_path: Path) -> None:
    status, output = run_chaos(tmp_path, "--seed", "7", *campaign.split())
    assert (status, ", 0 failures" in output) == (0, True), output


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


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_most_cuts_of_a_fetch_function_leave_rows_over(form: str) -> None:
    with make(form) as coordinator:
        cuts = [batch.cut for batch in coordinator["train"]]
    num_leftovers = sum(cut.leftover is not None for cut in cuts)
    # A source's calls keep in step with its batches, over the ends of epochs too.
    assert num_leftovers == 0 if form == "source" else num_leftovers > len(cuts) // 2
    assert sum(map(len, reference(form))) == len(cuts) > 400 * NUM_QUEUES


def test_a_chain_tells_the_order_and_the_number_of_batches() -> None:
    first, second = bytes(16), bytes([1] * 16)
    chains = {chain_of(r) for r in ([first], [first, second], [second, first], [first, first])}
    assert len(chains) == 4


def test_a_plan_deals_every_point_at_least_three_times_in_a_thousand_faults() -> None:
    plan = Plan(random.Random(3))
    dealt = Counter(
        (fault.name, TRANSPORTS[i % 3])
        for i in range(100)
        for fault in plan.leg(TRANSPORTS[i % 3], num_faults=10)
    )
    by_name = Counter(name for name, _ in dealt.elements())
    assert by_name.keys() == {*POINTS, *BLOWS}
    assert min(by_name[point] for point in POINTS) >= 3
    assert not dealt["server.arena", "tcp"] and dealt["server.arena", "shared"]
