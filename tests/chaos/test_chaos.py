"""Processes are killed and stopped at random times and at named points, and no batch is lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from chaos.faults import BLOWS, TRANSPORTS, Plan
from chaos.running import run_chaos
from chaos.streams import FORMS, NUM_QUEUES, Record, chain_of, make, reference
from feeder.service.faults import POINTS

pytestmark = pytest.mark.process


@pytest.mark.timeout(180)
def test_fifty_faults_change_nothing() -> None:
    status, output = run_chaos("--faults", "50", "--seed", "7", limit_s=170)
    assert status == 0, output
    rows = [line.split() for line in output.splitlines()]
    totals = {row[0]: int(row[-1]) for row in rows if row and row[0] in POINTS}
    assert totals.keys() == set(POINTS)
    assert sum(total > 0 for total in totals.values()) >= len(POINTS) // 2, output


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        ("drop-offset", "kill server"),
        ("head", "kill trainer"),
        ("no-discard", "kill trainer"),
        ("stale", "kill server"),
    ],
)
def test_a_planted_bug_is_caught(plant: str, fault: str) -> None:
    only = ("--plant", plant, "--only", fault)
    status, output = run_chaos("--faults", "10", "--seed", "1", *only, limit_s=80)
    assert status == 1, output
    # A server may find out by itself that positions do not fit each other.
    assert "FAILED, Differs" in output or "are not of one stream" in output, output


@pytest.mark.parametrize("form", FORMS)
def test_most_cuts_of_a_fetch_function_leave_rows_over(form: str) -> None:
    with make(form) as coordinator:
        cuts = [batch.cut for batch in coordinator["train"]]
    num_leftovers = sum(cut.leftover is not None for cut in cuts)
    # A source's calls keep in step with its batches, over the ends of epochs too.
    assert num_leftovers == 0 if form == "source" else num_leftovers > len(cuts) // 2
    assert sum(map(len, reference(form))) == len(cuts) > 400 * NUM_QUEUES


def test_a_chain_tells_the_order_and_the_number_of_batches() -> None:
    first, second = (Record(i, 0, i, 8, bytes(16)) for i in range(2))
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
