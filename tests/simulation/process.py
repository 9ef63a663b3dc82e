"""A process of a world: the turns of its I/O loop, one for each time at which something is due."""

from __future__ import annotations

import math

from simulation.world import World


class Process:
    """One process, which may be stopped and continued, and dies once."""

    def __init__(self, name: str) -> None:
        self.world = World.current
        self.name = name
        self._draws = self.world.draws(name)
        self.is_paused = self.is_dead = False
        self._turn_at = math.inf

    def notify(self) -> None:
        """Something is there to be looked at."""
        self._turn_by(self.world.now + 0.0001 * self._draws.random())

    def _turn_by(self, when: float) -> None:
        if when < self._turn_at and not self.is_dead:
            self._turn_at = when
            self.world.at(when, self._turn, when)

    def _turn(self, when: float) -> None:
        if self.is_dead or when != self._turn_at:
            return
        self._turn_at = math.inf
        if not self.is_paused:  # Else `go_on` looks again.
            self._step()

    def _step(self) -> None:
        """One turn of the loop."""
        raise NotImplementedError
