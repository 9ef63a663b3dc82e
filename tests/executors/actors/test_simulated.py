"""A thousand actors for an hour, simulated, with time that is only counted: the ledger's rules, and
a served feed behind them whose batches are those of one thread."""

from __future__ import annotations

from itertools import count

import pytest

import parts
from simulation.faults import Fault
from simulation.fleet import Fleet, Workers
from simulation.hour import Hour, feed_of, from_one_thread, plan_of, rough, watch
from simulation.simulate import simulated
from simulation.stream import rows_of
from simulation.world import BEGIN, World

pytestmark = pytest.mark.process


class Desk:
    """Asks for one call more whenever one was answered."""

    def __init__(self, workers: Workers, seed: int) -> None:
        self.world = World(seed, most_events=10**8)
        self._fleet = Fleet(workers, "desk", self._came)
        self._numbers = count()
        self.answered: dict[int, int] = {}
        """By number, how often its answer came."""
        self._fleet.start()
        for _ in range(2 * workers.num):
            self._ask()

    def _ask(self) -> None:
        number = next(self._numbers)
        self._fleet.ask(number, (number,))

    def _came(self, number: int) -> None:
        self.answered[number] = self.answered.get(number, 0) + 1
        self._ask()

    def run(self, seconds: float) -> int:
        """Let it run; returns how many calls were answered."""
        self.world.run(lambda: False, BEGIN + seconds)
        return len(self.answered)


@pytest.mark.timeout(240)
def test_deaths_and_slow_calls_cost_little() -> None:
    num, seconds = (1000, 3600.0) if parts.is_full else (200, 1200.0)
    calm = Desk(Workers(num), 1).run(seconds)
    desk = Desk(rough(num, seconds), 2)
    found = desk.run(seconds)
    print(f"{num} actors, {seconds:.0f} s: {calm} calls, {found} with deaths and slow calls")
    # None twice, and none left out but those that are under way.
    assert set(desk.answered.values()) == {1}
    missing = sorted(set(range(max(desk.answered))) - desk.answered.keys())
    assert len(missing) <= 2 * num
    assert found >= 0.95 * calm


def served(
    num: int, trainers: int, seconds: float, *, epochs: int = 1, faults: tuple[Fault, ...] = ()
) -> Hour:
    """A served feed whose actors are slow and die; what it gives is compared with one thread."""
    plan = plan_of(rough(num, seconds), trainers, seconds, epochs=epochs, faults=faults)
    # Each trainer of the simulation compares what it is handed with these.
    assert from_one_thread(plan.feed) == rows_of(plan.feed)
    with simulated():
        return watch(plan)


@pytest.mark.parametrize(("num", "threads"), [(2, 4), (100, 164), (1000, 1125)])
def test_so_many_calls_are_ahead(num: int, threads: int) -> None:
    assert feed_of(num, 64, 1).threads == threads


def test_trainers_are_handed_what_one_thread_makes() -> None:
    found = served(1000, 64, 150.0)
    print(found)
    assert found.violation == ""
    assert found.killed > 300 and found.slow > 100


def test_servers_and_trainers_die_beside_actors() -> None:
    faults = tuple(
        Fault(10.0 + 12 * i, kind, i % 5, 0.5, 0.5)
        for i, kind in enumerate(("kill trainer", "kill server", "roll back", "kill server"))
    )
    found = served(40, 5, 120.0, epochs=3, faults=faults)
    print(found)
    assert found.violation == ""
    assert found.killed > 5 and found.slow
