"""Every interleaving of one served feed's events, breadth first, until no new state is found.

The feed is that of `simulation.model`: the real membership in a model of trainers, connections and
slots. Trainers, the server and connections may die, consumers may hang, and the whole job may be
put back to an older checkpoint, each so many times as `Limits` says.

Checked in each state:

- holders: a queue has one holder, and the group and the membership agree on who has one
- rows: a trainer is handed its own batches in order, each once
- positions: the server's idea of a consumer's next batch is the consumer's
- stored: the position that a server would store is not ahead of a trainer
- slots: each slot is free, holds a batch to be sent, or is under way under a lease
- waits: once faults stop, every trainer can still come to its end
- table: nothing happens to a member that the table has no move for

A state is a tuple: the faults that are left, the number of the server's state, and that of each
trainer's. What one piece does next is found by the real code once for each state of that piece, and
from then on looked up. No interleaving is left out, and a state is known by the numbers themselves
and not by a hash: nothing is taken on trust here.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

from feeder.service.protocol import membership as ms
from simulation.model import FAULTS, Limits, Standing, Trainer, Trainers, View, Violation
from simulation.model_server import Server, Servers

State = tuple[Any, ...]


class Register:
    """Gives everything that is equal the same number, from 0 on."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._things: list[Any] = []

    def __call__(self, thing: Any, key: Hashable = None) -> int:
        number = self._numbers.setdefault(thing if key is None else key, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def __getitem__(self, number: int) -> Any:
        return self._things[number]


class Table(dict[tuple[int, ...], Any]):
    """What a function says of numbers, found once for each; also that it breaks an invariant."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, key: tuple[int, ...]) -> Any:
        try:
            found = self._function(*key)
        except Violation as error:
            found = error
        self[key] = found
        return found


class Event(NamedTuple):
    """Something that may happen in some states."""

    name: str
    fault: str
    after: tuple[int, ...]
    """The trainers of which one must be done; nothing: it may always happen."""
    at_round: int
    call: int
    trainer: int | Violation = 0
    """The trainer after it, where it is one of a trainer's moves."""


class Space:
    """The states of a feed and the steps between them. The numbers that it gives are its own."""

    def __init__(self, trainers: Trainers, servers: Servers) -> None:
        self._trainers, self._servers = trainers, servers
        self.num_seats = trainers.limits.num_seats
        seats = range(self.num_seats)
        self._calls, self._deeds = Register(), Register()
        self._views, self._standings = Register(), Register()
        self._deeds(())
        self._safety = self._deeds((("note_safety",),))
        self._server = Register()
        self._server(None)
        self._trainer = [Register() for _ in seats]
        # What the real code says, once for each.
        self._choices = Table(self._find_choices)
        self._answer = Table(self._find_answer)
        self._moves = [Table(partial(self._find_moves, seat)) for seat in seats]
        self._seen = [Table(partial(self._find_view, seat)) for seat in seats]
        self._stands = [Table(partial(self._find_standing, seat)) for seat in seats]
        self._checks = [Table(partial(self._find_problem, seat)) for seat in seats]
        self._done = [Table(partial(self._find_trainer, seat)) for seat in seats]

    def _number_server(self, server: Server | None) -> int:
        return self._server(server, server and server.key())

    def _number_trainer(self, one: Trainer) -> int:
        return self._trainer[one.seat](one, one.key())

    def _find_choices(self, server: int) -> list[Event]:
        return [
            Event(name, fault, (), at_round, self._calls(call))
            for name, call, fault, at_round in self._servers.choices(self._server[server])
        ]

    def _find_moves(self, seat: int, trainer: int, view: int) -> list[Event]:
        moves = self._trainers.moves(self._trainer[seat][trainer], self._views[view])
        return [
            Event(
                name, fault, after, -1, self._calls(call),
                one if isinstance(one, Violation) else self._number_trainer(one),
            )
            for name, one, call, fault, after in moves
        ]  # fmt: skip

    def _find_view(self, seat: int, server: int) -> int:
        up = self._server[server]
        return self._views(View() if up is None else up.view(seat))

    def _find_standing(self, seat: int, server: int) -> int:
        up = self._server[server]
        return self._standings(Standing(None, math.inf) if up is None else up.standing(seat))

    def _find_problem(self, seat: int, standing: int, trainer: int) -> None:
        self._trainers.check(self._trainer[seat][trainer], self._standings[standing])

    def _find_trainer(self, seat: int, trainer: int, deeds: int) -> int:
        new = self._trainers.after(self._trainer[seat][trainer], self._deeds[deeds])
        return self._number_trainer(new)

    def _find_answer(self, server: int, call: int) -> tuple[int, list[int]]:
        new, deeds = self._servers.after(self._server[server], self._calls[call])
        return self._number_server(new), [self._deeds(tuple(one)) for one in deeds]

    # ---- states

    def first(self) -> State:
        """The state before anything has happened."""
        left = tuple(getattr(self._trainers.limits, fault) for fault in FAULTS)
        trainers = [
            self._number_trainer(self._trainers.first(seat, is_safe=not any(left)))
            for seat in range(self.num_seats)
        ]
        return left, self._number_server(self._servers.first()), *trainers

    def is_over(self, state: State) -> bool:
        """Whether every trainer has had everything."""
        return all(one.state == "done" for one in self._all(state[2:]))

    def problem(self, state: State) -> Violation | None:
        """The first invariant that does not hold in a state."""
        _, server, *trainers = state
        for stands, checks, one in zip(self._stands, self._checks, trainers, strict=True):
            standing = stands[server,]
            wrong = standing if isinstance(standing, Violation) else checks[standing, one]
            if wrong is not None:
                return wrong
        return None

    def steps(self, state: State) -> Iterator[tuple[str, State | Violation]]:
        """All that may follow on a state: what happens, and the next state, or what it breaks."""
        left, server, *trainers = state
        for event in self._choices[server,]:
            if self._may(event, left, trainers):
                yield event.name, self._follow(event, left, server, trainers.copy())
        for seat, one in enumerate(trainers):
            for event in self._moves[seat][one, self._seen[seat][server,]]:
                if self._may(event, left, trainers):
                    after = [*trainers[:seat], event.trainer, *trainers[seat + 1 :]]
                    yield event.name, self._follow(event, left, server, after)

    def _may(self, event: Event, left: tuple[int, ...], trainers: list[int]) -> bool:
        """Whether an event may happen there."""
        if event.fault and not left[FAULTS.index(event.fault)]:
            return False
        if event.after and not any(
            self._trainer[seat][trainers[seat]].state == "done" for seat in event.after
        ):
            return False
        if event.at_round < 0:
            return True
        used = [one.used for one in self._all(trainers)]
        return max(used) > 0 and event.at_round in (0, min(used))

    def _all(self, trainers: Any) -> Iterator[Trainer]:
        return (self._trainer[seat][one] for seat, one in enumerate(trainers))

    def _follow(
        self, event: Event, left: tuple[int, ...], server: int, trainers: list[Any]
    ) -> State | Violation:
        if isinstance(event.trainer, Violation):
            return event.trainer
        answer = self._answer[server, event.call]
        if isinstance(answer, Violation):
            return answer
        is_last = False
        if event.fault:
            left = tuple([n - (one == event.fault) for n, one in zip(left, FAULTS, strict=True)])
            # Trainers are told when the last fault that there can be has come.
            is_last = not any(left)
        for seat, deed in enumerate(answer[1]):
            for deeds in filter(None, (deed, is_last and self._safety)):
                trainers[seat] = self._done[seat][trainers[seat], deeds]
                if isinstance(trainers[seat], Violation):
                    return trainers[seat]
        return left, answer[0], *trainers


# ---- the search


class Found(NamedTuple):
    """What a search has found."""

    states: int
    events: int
    closed: bool
    """Whether no state is left that was not looked at."""
    violation: str
    trace: list[str]
    """What led to it."""


def explore(
    limits: Limits,
    membership: Callable[..., ms.Membership] = ms.Membership,
    most: float = math.inf,
    report: Callable[[int, int], None] | None = None,
) -> Found:
    """Look at all states, breadth first, until there are `most` of them."""
    return Search(Space(Trainers(limits), Servers(limits, membership))).run(most, report)


class Search:
    """A search for states in which an invariant does not hold."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._numbers: dict[State, int] = {}
        """The states in the order in which they were found, so with the fewest events first."""
        self._came: list[tuple[int, str]] = []
        """Of each the state that it was found from, and what happened there."""
        self._before: list[list[int]] = []
        """Of each those that lead to it without a fault."""
        self._num_events = 0

    def run(self, most: float, report: Callable[[int, int], None] | None) -> Found:
        """Look at all states until there are `most` of them."""
        level = [self._space.first()]
        self._add(level[0], -1, "")
        while level and len(self._numbers) < most:
            new: list[State] = []
            for state in level:
                if (wrong := self._look_at(state, new)) is not None:
                    return wrong
            for state in new:
                if (problem := self._space.problem(state)) is not None:
                    return self._breaks(problem, self._numbers[state])
            level = new
            if report is not None:
                report(len(self._numbers), len(level))
        stuck = None if level else self._without_end()
        if stuck is not None:
            why = "waits: somebody waits for ever, whatever happens but faults"
            return self._breaks(why, stuck, closed=True)
        return Found(len(self._numbers), self._num_events, not level, "", [])

    def _add(self, state: State, source: int, name: str) -> None:
        self._numbers[state] = len(self._came)
        self._came.append((source, name))
        self._before.append([])

    def _look_at(self, state: State, new: list[State]) -> Found | None:
        """Find what follows on a state; returns what is wrong there."""
        here = self._numbers[state]
        for name, to in self._space.steps(state):
            self._num_events += 1
            if isinstance(to, Violation):
                return self._breaks(to, here, name)
            if to not in self._numbers:
                self._add(to, here, name)
                new.append(to)
            if to[0] == state[0]:
                self._before[self._numbers[to]].append(here)
        return None

    def _without_end(self) -> int | None:
        """A state from which no end is reached without faults; None where there is none."""
        reaches = [self._space.is_over(state) for state in self._numbers]
        new = [number for number, is_over in enumerate(reaches) if is_over]
        while new:
            for one in self._before[new.pop()]:
                if not reaches[one]:
                    reaches[one] = True
                    new.append(one)
        return next((number for number, leads in enumerate(reaches) if not leads), None)

    def _breaks(self, problem: object, state: int, *names: str, closed: bool = False) -> Found:
        trace = [*names]
        while state:
            state, name = self._came[state]
            trace.insert(0, name)
        return Found(len(self._numbers), self._num_events, closed, str(problem), trace)


def main() -> int:
    """Explore as the arguments say; 1 where a violation was found."""
    parser = argparse.ArgumentParser(prog="scripts/nightly explore", description=__doc__)
    for name, value in Limits()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--most", type=float, default=math.inf, help="states at the most")
    wish = vars(parser.parse_args())
    for name in ("queues", "batches", "replicas"):
        if wish[name] < 1:
            parser.error(f"--{name} is {wish[name]}, expected at least 1")
    most = wish.pop("most")
    began = time.monotonic()

    def report(number: int, new: int) -> None:
        took = time.monotonic() - began
        print(f"{number} states, {new} of them new, {took:.0f} s", file=sys.stderr)

    found = explore(Limits(**wish), most=most, report=report)
    for name in found.trace:
        print(f"  {name}")
    print(
        f"{found.states} states, {found.events} events, "
        f"{'closed' if found.closed else 'not closed'}, "
        f"{'1 violation: ' + found.violation if found.violation else '0 violations'}, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if found.violation else 0


if __name__ == "__main__":
    sys.exit(main())
