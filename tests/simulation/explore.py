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

A state is a tuple of numbers: of the faults that are left, of the server's state, and of each
trainer's. What one piece does next is found by the real code once for each state of that piece,
and from then on looked up for millions of states at a time. No interleaving is left out, and
a state is known by the numbers themselves and not by a hash: nothing is taken on trust here.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from feeder.service.protocol import membership as ms
from simulation.model import (
    FAULTS,
    NO_CALL,
    Limits,
    Server,
    Servers,
    Standing,
    Trainer,
    Trainers,
    View,
    Violation,
)

Numbers = np.ndarray[Any, np.dtype[np.int64]]

PART = 1 << 18
"""States that are looked at together: a bound on memory."""


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

    def __len__(self) -> int:
        return len(self._things)


class Rows:
    """Rows of numbers, of which there are more and more."""

    def __init__(self, width: int) -> None:
        self._rows = np.empty((64, width), np.int64)
        self.num = 0

    def append(self, *row: int) -> int:
        """Add a row; returns its number."""
        if self.num == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self.num] = row
        self.num += 1
        return self.num - 1

    def __getitem__(self, at: Any) -> Numbers:
        return self._rows[at]


class Table:
    """A function of whole numbers that is called once for each, and looked up for many at a time.

    `function` gets what `split` joined.
    """

    def __init__(self, function: Callable[[int, int], int]) -> None:
        self._function = function
        self._keys = np.empty(0, np.int64)
        self._values = np.empty(0, np.int64)

    def __call__(self, first: Numbers, second: Numbers) -> Numbers:
        keys = (first << 32) | second
        at = np.searchsorted(self._keys, keys)
        is_new = at == len(self._keys)
        is_new[~is_new] = self._keys[at[~is_new]] != keys[~is_new]
        if is_new.any():
            new = np.unique(keys[is_new])
            values = [self._function(key >> 32, key & 0xFFFFFFFF) for key in new.tolist()]
            where = np.searchsorted(self._keys, new)
            self._keys = np.insert(self._keys, where, new)
            self._values = np.insert(self._values, where, values)
            at = np.searchsorted(self._keys, keys)
        return self._values[at]


class Full(Exception):
    """A part of a state has grown too large a number for its bits."""


class Packing:
    """A state as one number: its parts one after the other, each in so many bits.

    `largest` are the largest numbers so far of each part; what is left of 63 bits is shared out.
    States are in the same order in each packing.
    """

    def __init__(self, largest: list[int]) -> None:
        bits = [number.bit_length() for number in largest]
        spare = 63 - sum(bits)
        if spare < 0:
            raise OverflowError("a state has more than 63 bits")
        # The first part, the faults that are left, does not grow.
        share, more = divmod(spare, len(bits) - 1)
        self._widths = [bits[0], bits[1] + share + more, *(one + share for one in bits[2:])]

    def pack(self, parts: list[Numbers]) -> Numbers:
        """The states of these parts."""
        packed = np.zeros_like(parts[0])
        for part, width in zip(parts, self._widths, strict=True):
            if part.size and int(part.max()) >> width:
                raise Full
            packed = (packed << width) | part
        return packed

    def unpack(self, packed: Numbers) -> list[Numbers]:
        """The parts of these states."""
        parts = []
        for width in reversed(self._widths):
            parts.append(packed & ((1 << width) - 1))
            packed = packed >> width
        return parts[::-1]


class Steps(NamedTuple):
    """What follows on some states."""

    source: Numbers
    """For each step the state that it leads from, as its number among those that were asked for."""
    event: Numbers
    """The number of the event."""
    to: Numbers
    """The state that it leads to; below 0 it breaks invariant `problems[-1 - to]`."""


class Space:
    """The states of a feed and the steps between them. The numbers that it gives are its own."""

    def __init__(self, trainers: Trainers, servers: Servers) -> None:
        limits = trainers.limits
        self._trainers, self._servers = trainers, servers
        self.num_seats = limits.num_seats
        bases = [getattr(limits, fault) + 1 for fault in FAULTS]
        self._bases = np.array([1, *bases])
        # Faults that are left are one number: so much less is left after a fault of each kind.
        self._weights = np.array([0, *(math.prod(bases[:i]) for i in range(len(bases)))])
        self._left = math.prod(bases) - 1
        self.problems = Register()
        self._names, self._calls, self._deeds = Register(), Register(), Register()
        self._views, self._standings = Register(), Register()
        self._calls(NO_CALL)
        self._deeds(())
        self._safety = self._deeds((("note_safety",),))
        self._server = Register()
        self._server(None)
        self._trainer = [Register() for _ in range(self.num_seats)]
        # Of each trainer's state, how many batches were used, and whether it is done.
        self._about = [Rows(2) for _ in range(self.num_seats)]
        # An event: name, fault, the trainers of which one must be done, round, call, trainer.
        self._events = Rows(6)
        self._lists = Rows(2)
        self._choices = Table(self._find_choices)
        self._moves = [Table(self._finder(self._find_moves, i)) for i in range(self.num_seats)]
        self._seen = [Table(self._finder(self._find_view, i)) for i in range(self.num_seats)]
        self._stands = [Table(self._finder(self._find_standing, i)) for i in range(self.num_seats)]
        self._checks = [Table(self._finder(self._find_problem, i)) for i in range(self.num_seats)]
        self._done = [Table(self._finder(self._find_trainer, i)) for i in range(self.num_seats)]
        self._packing = Packing(self._largest)
        # An answer: the server's state after it, the deeds to each trainer.
        self._answers = Rows(1 + self.num_seats)
        self._answer = Table(self._find_answer)

    @staticmethod
    def _finder(function: Callable[[int, int, int], int], seat: int) -> Callable[[int, int], int]:
        return lambda first, second: function(seat, first, second)

    # ---- what the real code says, once for each

    def _number_server(self, server: Server | None) -> int:
        return self._server(server, server and server.key())

    def _number_trainer(self, one: Trainer | Violation) -> int:
        if isinstance(one, Violation):
            return -1 - self.problems(str(one))
        numbers, about = self._trainer[one.seat], self._about[one.seat]
        number = numbers(one, one.key())
        if number == about.num:
            about.append(one.used, one.state == "done")
        return number

    def _note(self, first: int) -> int:
        return self._lists.append(first, self._events.num - first)

    def _add(
        self, name: str, fault: str, after: tuple[int, ...], at_round: int, call: Any, trainer: int
    ) -> None:  # fmt: skip
        self._events.append(
            self._names(name), FAULTS.index(fault) + 1 if fault else 0,
            sum(1 << seat for seat in after), at_round, self._calls(call), trainer,
        )  # fmt: skip

    def _find_choices(self, server: int, _: int) -> int:
        first = self._events.num
        for name, call, fault, at_round in self._servers.choices(self._server[server]):
            self._add(name, fault, (), at_round, call, 0)
        return self._note(first)

    def _find_moves(self, seat: int, trainer: int, view: int) -> int:
        first = self._events.num
        moves = self._trainers.moves(self._trainer[seat][trainer], self._views[view])
        for name, one, call, fault, after in moves:
            self._add(name, fault, after, -1, call, self._number_trainer(one))
        return self._note(first)

    def _find_view(self, seat: int, server: int, _: int) -> int:
        up = self._server[server]
        return self._views(View() if up is None else up.view(seat))

    def _find_standing(self, seat: int, server: int, _: int) -> int:
        up = self._server[server]
        try:
            return self._standings(Standing(None, math.inf) if up is None else up.standing(seat))
        except Violation as error:
            return -1 - self.problems(str(error))

    def _find_problem(self, seat: int, standing: int, trainer: int) -> int:
        try:
            self._trainers.check(self._trainer[seat][trainer], self._standings[standing])
        except Violation as error:
            return -1 - self.problems(str(error))
        return 0

    def _find_trainer(self, seat: int, trainer: int, deeds: int) -> int:
        try:
            new = self._trainers.after(self._trainer[seat][trainer], self._deeds[deeds])
        except Violation as error:
            return -1 - self.problems(str(error))
        return self._number_trainer(new)

    def _find_answer(self, server: int, call: int) -> int:
        try:
            new, deeds = self._servers.after(self._server[server], self._calls[call])
        except Violation as error:
            problem = -1 - self.problems(str(error))
            return self._answers.append(problem, *[0] * self.num_seats)
        numbers = [self._deeds(tuple(one)) for one in deeds]
        return self._answers.append(self._number_server(new), *numbers)

    # ---- many states at a time

    @property
    def _largest(self) -> list[int]:
        return [self._left, len(self._server), *map(len, self._trainer)]

    def pack_anew(self) -> Callable[[Numbers], Numbers]:
        """Give larger numbers room; returns what changes the states that there are."""
        old, new = self._packing, Packing(self._largest)
        self._packing = new
        return lambda states: new.pack(old.unpack(states))

    def first(self) -> Numbers:
        """The state before anything has happened."""
        server = self._number_server(self._servers.first())
        trainers = [
            self._number_trainer(self._trainers.first(seat, is_safe=self._left == 0))
            for seat in range(self.num_seats)
        ]
        return self._packing.pack([np.array([i]) for i in (self._left, server, *trainers)])

    def name(self, event: int) -> str:
        """What happens."""
        return str(self._names[int(self._events[event][0])])

    def left(self, states: Numbers) -> Numbers:
        """The number of the faults that are left. It never grows, and only faults change it."""
        return self._packing.unpack(states)[0]

    def are_over(self, states: Numbers) -> Any:
        """Whether every trainer has had everything, for each state."""
        _, _, *trainers = self._packing.unpack(states)
        return np.all([self._about[i][one, 1] for i, one in enumerate(trainers)], axis=0)

    def problem(self, states: Numbers) -> tuple[int, str] | None:
        """The first of these states in which an invariant does not hold, and why."""
        _, server, *trainers = self._packing.unpack(states)
        worst = np.zeros_like(server)
        for i, one in enumerate(trainers):
            standing = self._stands[i](server, np.zeros_like(server))
            worst = np.minimum(worst, standing)
            worst = np.minimum(worst, self._checks[i](np.maximum(standing, 0), one))
        at = int(np.argmin(worst))
        return None if worst[at] == 0 else (at, self.problems[-1 - int(worst[at])])

    def steps(self, states: Numbers) -> Iterator[Steps]:
        """All that may follow on these states."""
        parts = self._packing.unpack(states)
        _, server, *trainers = parts
        nothing = np.zeros_like(server)
        yield self._follow(parts, self._choices(server, nothing), None)
        for seat, one in enumerate(trainers):
            view = self._seen[seat](server, nothing)
            yield self._follow(parts, self._moves[seat](one, view), seat)

    def _follow(self, parts: list[Numbers], lists: Numbers, seat: int | None) -> Steps:
        first, num = self._lists[lists].T
        source = np.repeat(np.arange(len(lists)), num)
        event = np.arange(len(source)) + np.repeat(first - (np.cumsum(num) - num), num)
        may = self._may(parts, source, event)
        source, event = source[may], event[may]
        left, server, *trainers = (part[source] for part in parts)
        _, fault, _, _, call, trainer = self._events[event].T
        if seat is not None:
            trainers[seat] = trainer
        server, *deeds = self._answers[self._answer(server, call)].T
        broken = np.minimum(server, 0)
        for i, (done, deed) in enumerate(zip(self._done, deeds, strict=True)):
            changes = (deed > 0) & (trainers[i] >= 0)
            after = trainers[i].copy()
            after[changes] = done(trainers[i][changes], deed[changes])
            broken = np.minimum(broken, after)
            trainers[i] = after
        left = left - self._weights[fault]
        # Trainers are told when the last fault that there can be has come.
        last = (fault > 0) & (left == 0) & (broken == 0)
        for i, done in enumerate(self._done):
            trainers[i][last] = done(trainers[i][last], np.full(last.sum(), self._safety))
        whole = [np.maximum(part, 0) for part in (server, *trainers)]
        to = self._packing.pack([left, *whole])
        return Steps(source, event, np.where(broken < 0, broken, to))

    def _may(self, parts: list[Numbers], source: Numbers, event: Numbers) -> Any:
        """Whether each event may happen there."""
        left, _, *trainers = parts
        _, fault, after, at_round, _, _ = self._events[event].T
        may = (fault == 0) | (left[source] // self._weights[fault].clip(1) % self._bases[fault] > 0)
        about = [self._about[i][one] for i, one in enumerate(trainers)]
        are_done = sum(one[:, 1] << i for i, one in enumerate(about))
        may &= (after == 0) | ((after & are_done[source]) > 0)
        used = np.array([one[:, 0] for one in about])
        least, has_begun = used.min(axis=0)[source], used.max(axis=0)[source] > 0
        return may & ((at_round < 0) | (has_begun & ((at_round == 0) | (at_round == least))))


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
        # The states by how many events lead to them, at the least.
        self.levels = [space.first()]
        self.seen = self.levels[0]
        self._num_events = 0

    def run(self, most: float, report: Callable[[int, int], None] | None) -> Found:
        """Look at all states until there are `most` of them."""
        while len(self.levels[-1]) and len(self.seen) < most:
            try:
                broken = self._look_further()
            except Full:
                pack = self._space.pack_anew()
                self.seen, self.levels = pack(self.seen), [pack(level) for level in self.levels]
                continue
            if broken is not None:
                return broken
            if report is not None:
                report(len(self.seen), len(self.levels[-1]))
        if len(self.levels[-1]):
            return Found(len(self.seen), self._num_events, False, "", [])
        stuck = self._without_end()
        if stuck is not None:
            why = "waits: somebody waits for ever, whatever happens but faults"
            return self._breaks(why, stuck, closed=True)
        return Found(len(self.seen), self._num_events, True, "", [])

    def _look_further(self) -> Found | None:
        """Find all states that follow on the last level; returns what is wrong there."""
        found, num_events = [], 0
        for part in _parts(self.levels[-1]):
            for steps in self._space.steps(part):
                num_events += len(steps.to)
                broken = np.flatnonzero(steps.to < 0)
                if len(broken):
                    at = broken[0]
                    problem = self._space.problems[-1 - int(steps.to[at])]
                    return self._breaks(problem, part[steps.source[at]], int(steps.event[at]))
                found.append(_apart_from(self.seen, np.unique(steps.to)))
        new = np.unique(np.concatenate(found))
        self._num_events += num_events
        self.levels.append(new)
        self.seen = np.insert(self.seen, np.searchsorted(self.seen, new), new)
        wrong = self._space.problem(new) if len(new) else None
        return None if wrong is None else self._breaks(wrong[1], new[wrong[0]])

    def _without_end(self) -> int | None:
        """A state from which no end is reached without faults; None where there is none.

        Most steps lead to the next level. So levels are looked at from the last to the first, again
        and again, but only where no end was found yet.
        """
        reaches = self._space.are_over(self.seen)
        levels = self.levels[::-1]
        num = -1
        while num != (num := sum(map(len, levels))):
            levels = [self._lead_on(level, reaches) for level in levels]
        return None if not num else int(next(level[0] for level in levels if len(level)))

    def _lead_on(self, level: Numbers, reaches: Any) -> Numbers:
        """Note which states lead to one that reaches an end; returns the others."""
        others = [level[:0]]
        for part in _parts(level):
            here = np.searchsorted(self.seen, part)
            left = self._space.left(part)
            for steps in self._space.steps(part):
                calm = self._space.left(steps.to) == left[steps.source]
                leads = reaches[np.searchsorted(self.seen, steps.to[calm])]
                reaches[here[steps.source[calm][leads]]] = True
            others.append(part[~reaches[here]])
        return np.concatenate(others)

    def _breaks(self, problem: str, state: int, *events: int, closed: bool = False) -> Found:
        trace = [*self._trace(int(state)), *map(self._space.name, events)]
        return Found(len(self.seen), self._num_events, closed, problem, trace)

    def _trace(self, state: int) -> list[str]:
        """One of the shortest ways to a state."""
        names: list[str] = []
        depth = next(i for i, level in enumerate(self.levels) if np.isin(state, level))
        for level in self.levels[:depth][::-1]:
            state, name = self._before(state, level)
            names.append(name)
        return names[::-1]

    def _before(self, state: int, level: Numbers) -> tuple[int, str]:
        for part in _parts(level):
            for steps in self._space.steps(part):
                hits = np.flatnonzero(steps.to == state)
                if len(hits):
                    event = int(steps.event[hits[0]])
                    return int(part[steps.source[hits[0]]]), self._space.name(event)
        raise LookupError("no state leads there")


def _apart_from(seen: Numbers, states: Numbers) -> Numbers:
    """The states that are not among those in `seen`, which are in order."""
    at = np.searchsorted(seen, states).clip(max=len(seen) - 1)
    return states[seen[at] != states]


def _parts(states: Numbers) -> Iterator[Numbers]:
    for first in range(0, len(states), PART):
        yield states[first : first + PART]


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
