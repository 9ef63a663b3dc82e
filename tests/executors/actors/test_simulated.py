"""A thousand actors for an hour, simulated: the ledger's rules, with time that is only counted."""

from __future__ import annotations

import heapq
import random
from collections import deque
from itertools import count
from typing import Any

import pytest

import parts
from feeder.executors.ledger import Ledger, Ticket

CALL_S, START_S, TICK_S = 10.0, 1.2, 0.25
SLOW_SHARE, SLOW_TIMES = 0.01, 50
KILLED_SHARE, MINUTE_S = 0.1, 60.0


class Fleet:
    """Actors that make calls in virtual time; some calls are slow, some actors are killed."""

    def __init__(self, num: int, seed: int, *, slow: float, killed: float) -> None:
        self._dice = random.Random(seed)
        self._slow, self._killed, self._num = slow, killed, num
        self._ledger = Ledger(moves=True)
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = count()
        self._generations = count(1)
        self._next = count()
        self._now = 0.0
        # What each actor has to do, one after the other.
        self._queues: dict[int, deque[tuple[int, float]]] = {}
        self.answered: dict[int, int] = {}
        """By index, how often its first answer came."""

    def run(self, seconds: float) -> int:
        """Let it run; returns how many calls were answered."""
        for _ in range(self._num):
            self._after(0.0, "start")
        for _ in range(2 * self._num):
            self._ask(next(self._next))
        self._after(TICK_S, "tick")
        self._after(MINUTE_S, "minute")
        while self._events[0][0] < seconds:
            self._now, _, kind, what = heapq.heappop(self._events)
            getattr(self, f"_on_{kind}")(what)
        return len(self.answered)

    def _after(self, seconds: float, kind: str, what: Any = None) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), kind, what))

    def _ask(self, index: int) -> None:
        self._ledger.open(Ticket(index, None, (index,), is_repeatable=True))

    def _send(self, ticket: Ticket, generation: int, number: int) -> None:
        is_slow = self._dice.random() < self._slow
        took = CALL_S * self._dice.uniform(0.9, 1.1) * (SLOW_TIMES if is_slow else 1)
        queue = self._queues[generation]
        queue.append((number, took))
        if len(queue) == 1:
            self._after(took, "done", generation)

    def _on_start(self, _: Any) -> None:
        generation = next(self._generations)
        self._queues[generation] = deque()
        self._ledger.add(generation)
        self._ledger.issue(self._now, self._send)

    def _on_done(self, generation: int) -> None:
        queue = self._queues.get(generation)
        if queue is None:
            return  # It was killed.
        number, _ = queue.popleft()
        found = self._ledger.came(generation, number, self._now)
        assert found is not None
        ticket, is_first = found
        if is_first:
            self.answered[ticket.payload] = self.answered.get(ticket.payload, 0) + 1
            self._ask(next(self._next))
        if queue:
            self._after(queue[0][1], "done", generation)
        self._ledger.issue(self._now, self._send)

    def _kill(self, generation: int) -> None:
        del self._queues[generation]
        for ticket, _ in self._ledger.remove(generation):
            self._ask(ticket.payload)
        self._after(START_S, "start")

    def _on_tick(self, _: Any) -> None:
        self._ledger.late(self._now)
        for generation in self._ledger.stuck(self._now, START_S):
            self._kill(generation)
        self._ledger.issue(self._now, self._send)
        self._after(TICK_S, "tick")

    def _on_minute(self, _: Any) -> None:
        alive = list(self._queues)
        for generation in self._dice.sample(alive, int(len(alive) * self._killed)):
            self._kill(generation)
        self._ledger.issue(self._now, self._send)
        self._after(MINUTE_S, "minute")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_deaths_and_slow_calls_cost_little() -> None:
    num, seconds = (1000, 3600.0) if parts.is_full else (200, 1200.0)
    calm = Fleet(num, 1, slow=0.0, killed=0.0).run(seconds)
    fleet = Fleet(num, 2, slow=SLOW_SHARE, killed=KILLED_SHARE)
    rough = fleet.run(seconds)
    print(f"{num} actors, {seconds:.0f} s: {calm} calls, {rough} with deaths and slow calls")
    # None twice, and none left out but those that are under way.
    assert set(fleet.answered.values()) == {1}
    missing = sorted(set(range(max(fleet.answered))) - fleet.answered.keys())
    assert len(missing) <= 2 * num
    assert rough >= 0.93 * calm
