"""How many actors a feed takes: by the verdict's own shares, and by nothing else."""

from __future__ import annotations

import pytest

from feeder.executors import scaling
from feeder.executors.scaling import Scaling, Seen
from feeder.observe import verdict

pytestmark = pytest.mark.process


def run(rule: Scaling, starved: float, at_work: float, looks: int, at: float = 0.0) -> list[int]:
    """What is wanted after each look, a second apart; as many are ready as are wanted."""
    wanted, starved_s, busy_s = [], 0.0, 0.0
    for i in range(looks + 1):
        rule.look(Seen(at + i * 1.5, starved_s, busy_s, rule.wanted))
        starved_s += starved * 1.5
        busy_s += at_work * rule.wanted * 1.5
        wanted.append(rule.wanted)
    return wanted[1:]


def test_a_starved_merge_takes_more_up_to_the_most() -> None:
    assert run(Scaling(1, 8), 0.9, 1.0, 7) == [2, 3, 4, 6, 8, 8, 8]


def test_where_the_bound_holds_actors_up_no_more_come() -> None:
    assert run(Scaling(1, 8), 0.9, 0.6, 5) == [1] * 5


def test_idle_ones_go_one_by_one_and_late() -> None:
    rule = Scaling(2, 8)
    run(rule, 0.9, 1.0, 7)
    wanted = run(rule, 0.0, 0.1, 40, at=100.0)
    assert wanted[:3] == [8] * 3
    assert wanted == sorted(wanted, reverse=True) and wanted[-1] == 2


def test_a_feed_that_keeps_up_is_left_alone() -> None:
    rule = Scaling(1, 8)
    run(rule, 0.9, 1.0, 2)
    assert run(rule, 0.1, 0.9, 20, at=50.0) == [3] * 20


def test_who_was_asked_for_comes_first() -> None:
    rule = Scaling(1, 8)
    assert run(rule, 0.9, 1.0, 1) == [2]
    for at in range(10, 20):
        assert not rule.look(Seen(at * 2.0, at * 2.0, at * 2.0, ready=1))


def test_who_never_comes_is_asked_for_no_more() -> None:
    """Where the cluster has no room for all, and fewer are enough."""
    rule, wanted = Scaling(1, 8), []
    run(rule, 0.9, 1.0, 4)
    assert rule.wanted == 6
    for at in range(10, 60):
        rule.look(Seen(at * 2.0, 0.0, 0.0, ready=4))
        wanted.append(rule.wanted)
    assert wanted == sorted(wanted, reverse=True) and wanted[-1] == 1


def test_the_shares_are_the_verdicts() -> None:
    assert scaling._FED == verdict.STARVING
