"""That the exploration leaves nothing out: what it does not tell apart, and what it takes at once,
change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simulation.explore import Search, Space
from simulation.model import Limits, Move, Standing, Trainer, Trainers, View, Violation
from simulation.model_server import Server, Servers

pytestmark = pytest.mark.nightly

NO_FAULT = Limits(batches=2, deaths=0, servers=0, rollbacks=0)
FAULTS = ["deaths", "servers", "rollbacks", "hangs"]


def one(fault: str) -> Limits:
    """The limits with one fault of a kind."""
    return NO_FAULT._replace(**{fault: 1})


def search(trainers: Trainers, kind: type[Space] = Space) -> Space:
    """Look at all states; returns what was found out on the way."""
    space = kind(trainers, Servers(trainers.limits))
    found = Search(space).run(float("inf"), None)
    assert (found.closed, found.violation) == (True, ""), found.trace
    return space


# ---- what is not told apart


class Twins(Space):
    """Keeps everything that was given a number which another thing has, too."""

    def __init__(self, *args: Any) -> None:
        self.servers: dict[int, dict[str, Server]] = {}
        self.trainers: dict[tuple[int, int], dict[str, Trainer]] = {}
        super().__init__(*args)

    def _number_server(self, server: Server | None) -> int:
        number = super()._number_server(server)
        if server is not None:
            words = repr((server, server.members, server.waits))
            self.servers.setdefault(number, {})[words] = server
        return number

    def _number_trainer(self, one: Trainer) -> int:
        number = super()._number_trainer(one)
        self.trainers.setdefault((one.seat, number), {})[repr(one)] = one
        return number


def outcome(do: Callable[..., Any], *given: Any) -> Any:
    """What came of something, as far as anything is told apart."""
    try:
        return told(do(*given))
    except Violation as error:
        return str(error)


def told(thing: Any) -> Any:
    if isinstance(thing, Server | Trainer):
        return thing.key()
    if isinstance(thing, Move | list | tuple):
        return [told(one) for one in thing]
    return str(thing) if isinstance(thing, Violation) else thing


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_told_apart_does_the_same(fault: str) -> None:
    """For all that was met, in all that was met beside it: then no state was left out."""
    space = search(Trainers(one(fault)), Twins)
    assert isinstance(space, Twins)
    num_twins = 0

    def compare(twins: dict[str, Any], do: Callable[..., Any], *given: Any) -> None:
        nonlocal num_twins
        first, *others = [outcome(do, twin, *given) for twin in twins.values()]
        assert others == [first] * len(others)
        num_twins += len(others)

    for seat in range(space.num_seats):
        for number, view in space._moves[seat]:
            compare(space.trainers[seat, number], moves, space, space._views[view])
        for number, deeds in space._done[seat]:
            compare(space.trainers[seat, number], space._trainers.after, space._deeds[deeds])
        for standing, number in space._checks[seat]:
            compare(space.trainers[seat, number], check, space, space._standings[standing])
    for server, call in space._answer:
        if server:
            compare(space.servers[server], space._servers.after, space._calls[call])
    for twins in space.servers.values():
        compare(twins, choices_and_views, space)
    assert num_twins > 100


def moves(trainer: Trainer, space: Space, view: View) -> list[Move]:
    return [*space._trainers.moves(trainer, view)]


def check(trainer: Trainer, space: Space, standing: Standing) -> None:
    space._trainers.check(trainer, standing)


def choices_and_views(server: Server, space: Space) -> list[Any]:
    seats = range(space.num_seats)
    seen = [*map(server.view, seats), *map(server.standing, seats)]
    return [*space._servers.choices(server), *seen]


# ---- what is taken at once


class TakesNothing(Trainers):
    """Every step of a trainer has a time of its own."""

    def settle(self, one: Trainer) -> None:
        pass


@pytest.mark.parametrize(
    "limits",
    [
        one("deaths"),
        one("hangs"),
        one("servers")._replace(batches=1),
        one("rollbacks")._replace(batches=1),
        NO_FAULT._replace(queues=3),
    ],
)
def test_what_is_taken_at_once_leaves_no_state_of_a_server_out(limits: Limits) -> None:
    reached = [
        {server.key() for server in search(trainers)._server._things if server is not None}
        for trainers in (Trainers(limits), TakesNothing(limits))
    ]
    assert reached[0] == reached[1]
