"""Kills actors, the node that they are on, and the drivers of their feeds, on a Ray cluster.

A leg is one stream, as in `chaos/executors.py`, and its trainers are drivers. The cluster has two
nodes on this host. One of them is killed at random, with all of its actors, and another one comes
in its place. After each driver no actor is left.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from chaos.crew import Wrong
from chaos.executors import Legs, Trainer, run_legs
from executors.actors.cluster import small_cluster
from lineage import descendants, ends_of

_NODE = {"num_cpus": 2}
_NODES_A_LEG = 2
"""Nodes that are killed in a leg at most: a new one takes seconds to come."""


class ActorLegs(Legs):
    """Streams on actors, one after the other, and what was killed in them."""

    _run_on: ClassVar[dict[str, Any]] = {"on_actors": True}

    def __init__(self, seed: int, cluster: Any, nodes_a_leg: int = _NODES_A_LEG) -> None:
        super().__init__(seed)
        self._cluster, self._nodes_a_leg = cluster, nodes_a_leg
        self._node = self._add_node() if nodes_a_leg else None
        self._left = 0
        self.num_nodes = 0
        # Of a cluster that others have used: actors of a node that was killed end when they notice.
        self._others = set(_actors())

    @property
    def num_kills(self) -> int:
        return super().num_kills + self.num_nodes

    def told(self) -> str:
        return (
            f"{self.num_processes} actors, {self.num_nodes} nodes and {self.num_trainers} drivers"
        )

    def run_leg(self) -> None:
        self._left = self._nodes_a_leg
        super().run_leg()

    def _on_batch(self, num: int) -> None:
        # Late ones come too: their node is gone when their driver asks for actors.
        if self._left and self._dice.random() < 0.08:
            self._left -= 1
            self.num_nodes += 1
            self._cluster.remove_node(self._node, allow_graceful=False)
            self._node = self._add_node()

    def _add_node(self) -> Any:
        return self._cluster.add_node(include_dashboard=False, **_NODE)

    def _check(self, trainer: Trainer, shared: set[str]) -> None:
        with ends_of(set(_actors()) - self._others) as ends:
            try:
                ends.wait()
            except AssertionError as error:
                raise Wrong(f"left behind: {error}") from None


def _actors() -> list[int]:
    """The actors of feeds among the processes that come from this one."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            if b"FeederActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def strike_actors(num_kills: int, seed: int) -> int:
    """Run legs until so many have been killed; returns the exit status."""
    with small_cluster(_NODE, connects=False) as cluster:
        os.environ["RAY_ADDRESS"] = cluster.address
        legs = ActorLegs(seed, cluster)
        return run_legs(legs, num_kills)
