"""A pool of actors without a cluster: who is buried, who is replaced, what is blamed, and how many
actors a feed takes: by the verdict's own shares, and by nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import MagicMock

import pytest

from feeder import RayActors
from feeder.executors import ledger
from feeder.executors.actors import Actors
from feeder.executors.ledger import Scaling, Seen, Ticket
from feeder.executors.lines import Line
from feeder.executors.pool import MOST_STILLBORN, Asked, Lost, Pool, State
from feeder.executors.wire import Calls
from feeder.observe import verdict

pytestmark = pytest.mark.process


class Fake:
    """A pool whose actors are none: what they would be sent goes nowhere."""

    def __init__(self, num: int, per_actor: int = 1) -> None:
        self.launcher = Actors(RayActors(num, per_actor=per_actor), patience_s=60)
        self.pool = Pool(self.launcher, moves=True)
        self.killed: list[Any] = []
        """Actors that were ended."""
        self.ended: list[tuple[Any, int]] = []
        """Processes that were, each with its actor."""
        self.now = time.monotonic()
        cluster: Any = self.launcher.cluster
        cluster.start, cluster.hello = object, lambda *told: None
        cluster.kill, cluster.end = self.killed.append, lambda *which: self.ended.append(which)
        self.launcher._per = per_actor
        self.scale(num)

    def scale(self, num: int) -> None:
        """Have so many actors, as the verdict would."""
        with self.pool.lock:
            self.launcher._scaling = Scaling(num, num)
            self.launcher.fill_up()

    def close(self) -> None:
        """End it."""
        self.pool.close()

    def join(self, generation: int, line: Line) -> None:
        """An actor has come."""
        with self.pool.lock:
            self.pool.join(self.pool.members[generation], line)

    def bury(self, *generations: int, how: str = "has ended", **told: bool) -> None:
        """Actors have ended."""
        with self.pool.lock:
            for generation in generations:
                self.pool.bury(self.pool.members[generation], how, **told)

    def ask(self, first: int) -> Asked:
        """Somebody asks for a call."""
        asked = Asked(Calls(first, 0, 0, 1, 1, 1, None, []), lambda member: None)
        with self.pool.lock:
            ticket = Ticket(asked, None, (0, first), is_repeatable=True, most_deaths=3)
            self.pool.ledger.open(ticket)
            self.issue()
        return asked

    def issue(self) -> None:
        """Send what may be sent; under the lock."""
        self.pool.ledger.issue(self.now, self.pool._send)

    def answer(self, generation: int, number: int) -> None:
        """An actor answers."""
        found = self.pool.ledger.came(generation, number, self.now)
        assert found is not None
        if found[1]:
            found[0].payload.finish(None)

    def learn(self, generation: int) -> None:
        """Have an actor answer until it is known how long a call takes."""
        for number in range(1, 31):
            self.ask(100 + number)
            self.now += 0.1
            self.answer(generation, number)

    def tick(self, seconds: float) -> None:
        """Look for what is late, and who hangs, some time later."""
        self.now += seconds
        with self.pool.lock:
            self.launcher.replace_stuck(self.now)
            self.pool.ledger.late(self.now)
            self.issue()


@pytest.fixture
def fake(request: pytest.FixtureRequest) -> Iterator[Fake]:
    with closing(Fake(request.param)) as made:
        yield made


@pytest.mark.parametrize("fake", [2], indirect=True)
def test_who_hangs_is_ended_also_when_it_is_not_needed_any_more(fake: Fake) -> None:
    fake.join(2, Line())
    fake.ask(0)
    fake.join(1, Line())
    fake.learn(1)
    fake.tick(10.0)
    handle = fake.launcher.actors[1].handle
    # The youngest goes, when it has answered: which it never does.
    fake.scale(1)
    assert fake.pool.members[2].state is State.RETIRED and handle not in fake.killed
    fake.answer(1, 31)
    fake.tick(0.25)
    assert handle in fake.killed and list(fake.pool.members) == [1]
    # Nothing has gone wrong.
    assert fake.pool.counts().restarts == 0


@pytest.mark.parametrize("fake", [3], indirect=True)
def test_a_driver_that_nobody_reaches_is_named_where_its_limit_is_first(
    fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    """The actors themselves would say it after 20 s."""
    made = fake.launcher
    made._room_s = 10.0
    made.cluster.room = lambda: ("the cluster has CPU", True)  # type: ignore[method-assign]
    made.look_for_room(0.0, 6.0)
    assert "no actor of the fetch function has started: the cluster has CPU" in caplog.text
    made.ports = MagicMock(address="tcp://192.0.2.1:5000")
    for actor, host in zip(made.actors, "ba", strict=False):
        actor.members[0].host = host
    made.look_for_room(0.0, 10.0)
    told = "no actor has reached this process at tcp://192.0.2.1:5000; tried from a, b; "
    assert fake.pool.failure.startswith(f"{told}waited 10 s: open this host's ports")


class Noted(Line):
    """A line whose actor has begun so many calls, by the number of a ticket."""

    def __init__(self, begun: dict[int, int]) -> None:
        super().__init__()
        self._begun = begun

    def num_begun(self, number: int, place: int, most_calls: int) -> int:
        return self._begun.get(number, 0)


@pytest.mark.parametrize("fake", [2], indirect=True)
def test_whoever_had_a_ticket_first_is_asked_by_its_own_number(fake: Fake) -> None:
    """A ticket that was issued again has another number at the second actor."""
    fake.join(2, Noted({1: 1}))
    asked = fake.ask(0)
    fake.join(1, Noted({31: 1}))
    fake.learn(1)
    fake.tick(10.0)
    fake.bury(2, 1)
    with pytest.raises(Lost) as lost:
        asked.result()
    assert (lost.value.num_begun, lost.value.num_deaths) == (1, 2)


@pytest.mark.parametrize("fake", [40], indirect=True)
def test_a_host_that_ends_with_many_actors_is_no_fault_of_theirs(fake: Fake) -> None:
    """None of them had answered yet."""
    for told in ({"is_node": True}, {}):
        generations = list(fake.pool.members)[: MOST_STILLBORN + 1]
        for generation in generations:
            fake.join(generation, Line())
        fake.bury(*generations, **told)
        assert ("ended one after the other" in fake.pool.failure) != bool(told)


# ---- how many


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
    assert ledger._FED == verdict.STARVING
