"""Whole services in one thread with a virtual clock: nothing breaks, and each check can fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from planted.bug import BUGS, planted
from simulation.faults import Fault, Plan
from simulation.planted import SIMULATED, kind_of, search
from simulation.simulate import campaign, replay, run, simulated
from simulation.stream import Feed

pytestmark = pytest.mark.served

FOUND = {
    bug.seed for bug in SIMULATED.values() if kind_of(bug) == "stream" and bug.seed is not None
}
SEEDS = sorted({*range(40), *FOUND})
"""Those with which planted bugs are found are among them: much happens there."""
CALM = Plan(seed="calm", feed=Feed(2, 60, 2, 2, 1, "keep"), credits=(2, 2))


def test_nothing_breaks_whatever_goes_wrong() -> None:
    num_events = 0
    for outcome in campaign(SEEDS):
        assert not outcome.violation, (
            f"scripts/nightly simulate --seed {outcome.plan.seed} --history"
        )
        num_events += outcome.num_events
    assert num_events > 200 * len(SEEDS)


def test_nor_where_a_round_begins_in_each_epoch() -> None:
    kinds = set[tuple[str, int]]()
    for outcome in campaign(range(20), "epoch"):
        feed = outcome.plan.feed
        assert not outcome.violation, (
            f"scripts/nightly simulate --rounds epoch --seed {outcome.plan.seed} --history"
        )
        kinds.add((feed.last_round, feed.epochs))
    assert kinds == {(last, epochs) for last in ("uneven", "drop") for epochs in (1, 2)}


def test_nor_where_feeds_of_sources_are_edited_and_fail() -> None:
    counted = Counter[str]()
    for outcome in campaign(range(20), "sources"):
        assert not outcome.violation, (
            f"scripts/nightly simulate --sources --seed {outcome.plan.seed} --history"
        )
        counted.update(outcome.counted)
    assert min(counted["edits"], counted["edits refused"], counted["calls that failed"]) > 0


@pytest.mark.parametrize(
    ("name", "invariant"),
    [
        ("begins at the newest", "rows"),
        ("what was made and not sent keeps slots", "slots"),
        ("a position before the first batch moves", "positions"),
        ("waits for one that had all", "waits"),
        ("what is pending counts as used", "stored"),
        ("two holders", "holders"),
        ("the base of a lease", "stored"),
        ("whoever deals", "rows"),
        ("an epoch begins no round", "errors"),
        ("an edit is forgotten until a batch has come", "positions"),
        ("a slot goes to another queue", "errors"),
    ],
)
def test_a_bug_is_found_by_what_it_breaks(name: str, invariant: str) -> None:
    num, outcome = search(BUGS[name], 0)
    assert num == 1 and outcome is not None
    assert outcome.invariant == invariant


@pytest.mark.parametrize("name", ["a file is not synced", "a name is not synced"])
def test_a_position_that_is_gone_after_a_loss_of_power_is_missed(name: str) -> None:
    faults = tuple(Fault(0.1 * i, "power", i % 2, 0.05, 0.9) for i in range(2, 8))
    plan = replace(CALM, has_disks=True, faults=faults, quiet_s=1.0)
    plans = [replace(plan, seed=str(i)) for i in range(4)]
    with simulated():
        assert {run(one).invariant for one in plans} == {""}
        with planted(BUGS[name]):
            assert "disk" in {run(one).invariant for one in plans}


def test_a_seed_gives_one_history() -> None:
    with simulated():
        first, second = replay(5), replay(5)
    assert first.history == second.history
    assert first.num_events == second.num_events


def test_who_has_nothing_of_a_new_job_when_its_server_dies_is_told_to_come_back() -> None:
    """The next server cannot tell it from a trainer that starts anew beside others. Who asks for
    its first batch before the next server comes goes on without a word."""
    faults = Fault(0.0, "late start", 1, seconds=0.4), Fault(0.3, "kill server", seconds=0.1)
    plan = replace(CALM, paces=(1, 40), faults=faults, quiet_s=0.5)
    with simulated():
        outcomes = [run(replace(plan, seed=str(i)), records=True) for i in range(8)]
    assert [outcome.violation for outcome in outcomes] == [""] * 8
    told = [[what for _, _, what in one.history if "gets ResumeError" in what] for one in outcomes]
    assert 0 < sum(map(bool, told)) < 8
    assert all("rejoin=True for one that goes on alone" in what for one in told for what in one)
