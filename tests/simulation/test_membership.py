"""The membership of a feed in all interleavings of its events, and its table as it is drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from feeder.errors import ProtocolError
from feeder.service.protocol import membership as ms
from feeder.service.protocol.member import TABLE, Member, Move, State
from feeder.service.protocol.membership import Membership
from planted.bug import BUGS, planted
from simulation.diagram import draw
from simulation.explore import Limits, explore

pytestmark = pytest.mark.served

README = Path(ms.__file__).parent / "README.md"
NO_FAULT = Limits(batches=2, deaths=0, servers=0, rollbacks=0)
ONE_DEATH = NO_FAULT._replace(batches=3, deaths=1)
SHARED = NO_FAULT._replace(queues=1, replicas=2)
LONGER = Limits(batches=5, deaths=1, servers=0, rollbacks=0)


def test_nothing_breaks_where_one_trainer_dies() -> None:
    found = explore(ONE_DEATH)
    assert (found.closed, found.violation) == (True, "")
    assert found.states > 10_000


@pytest.mark.parametrize("fault", ["servers", "rollbacks", "hangs", "breaks"])
def test_nor_where_anything_else_happens(fault: str) -> None:
    found = explore(NO_FAULT._replace(**{fault: 1}))
    assert (found.closed, found.violation) == (True, ""), found.trace
    assert found.states > 5_000


@pytest.mark.parametrize("fault", ["deaths", "hangs", "rollbacks"])
def test_nor_where_two_trainers_share_a_queue(fault: str) -> None:
    found = explore(SHARED._replace(**{fault: 1}))
    assert (found.closed, found.violation) == (True, ""), found.trace
    assert found.states > 4_000


# ---- each invariant fails where the code is wrong


class KeepsOldHolder(Membership):
    """Who takes a queue over does not send its holder away."""

    def handle(self, event: Any, now: float) -> list[Any]:
        done = super().handle(event, now)
        return [one for one in done if not isinstance(one, ms.SendAway)]


class KeepsLeases(Membership):
    """The lease of a consumer that dies does not end, so its slots are never free again."""

    def handle(self, event: Any, now: float) -> list[Any]:
        done = super().handle(event, now)
        died = isinstance(event, ms.Died)
        return [one for one in done if not (died and isinstance(one, ms.EndLease))]


class AttachesTwice(Membership):
    """A consumer that can take batches is taken for one that could not."""

    def handle(self, event: Any, now: float) -> list[Any]:
        done = super().handle(event, now)
        return done + super().handle(event, now) if isinstance(event, ms.Attaches) else done


class NeverLooksAgain(Membership):
    """A consumer that is gone while the others wait changes nothing for them."""

    def _look_again(self, now: float) -> list[Any]:
        return []


class TakesReplicasForOne(Membership):
    """The replicas of a queue go on where the first one of them does."""

    def first_steps(self, steps: dict[int, int]) -> list[float]:
        first = super().first_steps(steps)
        return [max(first[seat - seat % self.replicas], first[seat]) for seat in range(len(first))]


@pytest.mark.parametrize(
    ("bug", "invariant", "limits"),
    [
        (KeepsOldHolder, "holders", NO_FAULT._replace(breaks=1)),
        ("begins at the newest", "rows", LONGER),
        ("what was sent is forgotten", "positions", LONGER),
        ("what was sent is stored", "stored", LONGER),
        (KeepsLeases, "holders|slots", ONE_DEATH),
        (NeverLooksAgain, "waits", NO_FAULT._replace(hangs=1)),
        (AttachesTwice, "table", NO_FAULT),
        (TakesReplicasForOne, "rows", SHARED._replace(deaths=1)),
    ],
)
def test_an_invariant_fails_where_a_bug_is_planted(
    bug: str | type[Membership], invariant: str, limits: Limits
) -> None:
    if isinstance(bug, str):
        with planted(BUGS[bug]):
            found = explore(limits)
    else:
        found = explore(limits, bug)
    assert re.match(invariant, found.violation), found
    assert found.trace


# ---- the table


def test_the_diagram_is_the_table() -> None:
    drawn = re.findall(r"```mermaid\n(stateDiagram.*?)```", README.read_text(), re.DOTALL)
    assert drawn == [draw()]


def test_every_state_is_reached_and_the_seat_may_be_asked_for_once_nobody_holds_it() -> None:
    reached, open_ = set[State](), [State.ABSENT]
    while open_:
        state = open_.pop()
        if state not in reached:
            reached.add(state)
            open_ += TABLE[state].values()
    assert reached == set(State) == set(TABLE)
    held = [state for state in State if Member(seat=0, queue=0, name="", state=state).has_lease]
    assert all((Move.ASKS in moves) == (state not in held) for state, moves in TABLE.items())
    assert all({Move.DIES, Move.LEAVES} <= {*TABLE[state]} for state in held)


def test_what_the_table_has_no_move_for_is_refused_and_changes_nothing() -> None:
    feed = Membership(1, 30.0)
    feed.handle(ms.Asks(0, "me"), 0.0)
    feed.handle(ms.Attaches(0), 0.0)
    with pytest.raises(ProtocolError, match="attaches while streaming"):
        feed.handle(ms.Attaches(0), 0.0)
    assert feed.members[0].state is State.STREAMING
