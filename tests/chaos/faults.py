"""What the campaign does to processes, and its plan: drawn from a seed, points dealt evenly."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from feeder.service.faults import POINTS

TRANSPORTS = ("shared", "ipc", "tcp")
"""Shared memory, and frames over a unix socket and over TCP."""

SHARED_ONLY = ("server.arena", "server.released", "consumer.mapped")
"""Points that only batches in shared memory come to."""

AT_END = ("server.before_end", "server.ended", "consumer.end")
"""Points that are come to at the end of the stream."""

_OFTEN = {
    "server.put": 40, "server.before_send": 40, "server.sent": 40, "server.used": 40,
    "server.released": 40, "consumer.received": 40, "consumer.put": 40, "consumer.handed": 60,
    "consumer.before_used": 40, "consumer.used": 40, "server.open": 3, "server.opened": 3,
    "server.attached": 3, "server.arena": 3, "server.before_end": 3, "server.ended": 3,
}  # fmt: skip
"""How often a process comes to a point soon after its start, at least; once where not named."""

BLOWS = {
    "kill server": 4, "kill trainer": 4, "kill both": 3, "kill all": 2, "kill everything": 2,
    "stop server": 1, "stop trainer": 2, "stop both": 1, "usurp trainer": 1,
}  # fmt: skip
"""Faults at random times and their weights: one trainer, all trainers, all and the server."""


class Fault(NamedTuple):
    """One fault of the plan."""

    name: str
    """One of `BLOWS`, or a point."""
    queue: int
    """The trainer that it strikes, where it strikes one."""
    wait_s: float
    """How long after the last one it comes."""
    how: Literal["", "stop"] = ""
    """Whether a point stops the process, or kills it."""
    count: int = 1
    """At which time of coming to the point."""

    @property
    def is_point(self) -> bool:
        return self.name in POINTS

    @property
    def of_server(self) -> bool:
        """Whether it is a point of the server's."""
        return self.name.startswith("server.")

    @property
    def setting(self) -> str:
        """What the process is told by its environment."""
        return ":".join(filter(None, (self.name, str(self.count), self.how)))


class Plan:
    """Draws faults: points in turn, each as often as the others, blows by their weights; or `only`
    those named."""

    def __init__(self, dice: random.Random, only: Sequence[str] = ()) -> None:
        self._dice = dice
        self._only = only
        self._hits = {(point, t): 0 for point in POINTS for t in TRANSPORTS if fits(point, t)}

    def leg(self, transport: str, num_faults: int) -> Iterator[Fault]:
        """Yield the faults of one leg; the last is one at the end of the stream."""
        dice = self._dice
        if self._only:
            yield from (self._strike(dice.choice(self._only)) for _ in range(num_faults))
            return
        for _ in range(num_faults - 1):
            if dice.random() < 0.5:
                yield self._strike(self._deal(transport, at_end=False))
            else:
                (name,) = dice.choices(list(BLOWS), list(BLOWS.values()))
                yield self._strike(name)
        yield self._strike(self._deal(transport, at_end=True))

    def _deal(self, transport: str, *, at_end: bool) -> str:
        """Return the point that was dealt the least often, anywhere and then on this transport."""
        dice = self._dice
        dealt = [
            (sum(self._hits.get((point, t), 0) for t in TRANSPORTS), hits, dice.random(), point)
            for (point, where), hits in self._hits.items()
            if where == transport and (point in AT_END) == at_end
        ]
        point = min(dealt)[-1]
        self._hits[point, transport] += 1
        return point

    def _strike(self, name: str) -> Fault:
        dice = self._dice
        return Fault(
            name,
            queue=dice.randrange(3),
            wait_s=dice.choice((0.0, 0.02, 0.1)) * dice.random() * 2,
            how="stop" if dice.random() < 0.2 else "",
            count=dice.randint(1, _OFTEN.get(name, 1)),
        )


def fits(point: str, transport: str) -> bool:
    """Whether a transport comes to a point."""
    return transport == "shared" or point not in SHARED_ONLY
