"""Processes are killed and stopped at random times and at named points, and no batch is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chaos.faults import BLOWS, Plan, fits
from chaos.streams import FORMS, NUM_QUEUES, Record, chain_of, reference
from feeder.transport.faults import POINTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def campaign(*arguments: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a campaign in a process of its own, whose children are its own."""
    command = [sys.executable, "-m", "chaos.campaign", *arguments]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s)


@pytest.mark.timeout(180)
def test_fifty_faults_change_nothing() -> None:
    done = campaign("--faults", "50", "--seed", "7", limit_s=170)
    assert done.returncode == 0, done.stdout + done.stderr
    table = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if "." in line[:10])
    assert set(POINTS) <= set(table)
    hit = [point for point in POINTS if table[point].split()[-1] != "0"]
    assert len(hit) >= len(POINTS) // 2, done.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("plant", "faults"),
    [
        ("drop-offset", ["kill server", "kill all"]),
        ("head", ["kill trainer"]),
        ("no-discard", ["kill trainer"]),
        ("stale", ["kill server"]),
    ],
)
def test_a_planted_bug_is_caught(plant: str, faults: list[str]) -> None:
    only = [word for fault in faults for word in ("--only", fault)]
    done = campaign("--faults", "10", "--seed", "1", "--plant", plant, *only, limit_s=110)
    assert done.returncode == 1, done.stdout
    assert "FAILED, Differs" in done.stdout, done.stdout + done.stderr
    unplanted = campaign("--faults", "10", "--seed", "1", *only, limit_s=110)
    assert unplanted.returncode == 0, unplanted.stdout


@pytest.mark.parametrize("form", FORMS)
def test_a_feed_of_the_campaign_leaves_rows_over_and_has_no_row_twice(form: str) -> None:
    records = sorted(record for queue in reference(form) for record in queue)
    assert [record.step for record in records] == list(range(len(records)))
    assert len({record.digest for record in records}) == (
        len(records) if form != "source" else len({record.digest for record in records})
    )
    assert len(records) > 100 * NUM_QUEUES


def test_a_chain_tells_the_order() -> None:
    first, second = (Record(i, 0, i, 8, bytes(16)) for i in range(2))
    assert chain_of([first, second]) != chain_of([second, first])
    assert chain_of([first]) != chain_of([first, second])


def test_a_plan_deals_every_point_equally_often() -> None:
    import random

    plan = Plan(random.Random(3))
    names = [
        fault.name
        for i in range(120)
        for fault in plan.leg(("shared", "ipc", "tcp")[i % 3], num_faults=10)
    ]
    counts = {point: names.count(point) for point in POINTS}
    assert min(counts.values()) >= 3
    assert set(names) == {*POINTS, *BLOWS}
    assert not fits("server.arena", "tcp") and fits("server.arena", "shared")
