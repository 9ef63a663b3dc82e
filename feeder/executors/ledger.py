"""Which actor has which ticket, and how many actors a stream needs: rules without a thread, a
socket or a clock.

A ticket is a bundle of calls. It is issued to an actor, and issued again to another one where the
first takes far longer than others do; after a death whoever asked asks again. The first answer that
comes from an actor which is not fenced is the ticket's; every later one is dropped.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from itertools import count
from typing import Any, NamedTuple

_LEAST_ANSWERS = 20
"""So many answers say how long a ticket takes."""

_LATE_TIMES, _LEAST_LATE_S = 3.0, 0.05
"""A ticket is issued again after so many times what 99 of 100 tickets take, and not before so long:
what is done twice takes an actor from other tickets."""

_FIRST_TIMES = 3.0
"""An actor hangs in its first ticket after so many times what half of the first ones took: the
function and its libraries are loaded then, which may take seconds."""

_MOST_ATTEMPTS = 3
"""So many actors may have a ticket at the same time. Of 1,000 actors with a slow call in a hundred,
in each minute or two one is slow with what another one has been slow with, and with two the merge
waits for these. More would be held by a call that takes long wherever it is made (2026-11-26)."""

_REMEMBERED = 512
"""Answers that say how long a ticket takes."""

_COUNTED_EVERY = 32
"""After so many answers it is reckoned again: to sort 512 numbers takes 30 us."""


class Ticket:
    """A bundle of calls, from the time when it is asked for. Owner: the ledger's.

    `home`: the worker that it is a ticket of, whose tickets go where its state is; None where any
    actor will do. `turn`: the stream needs the smallest first. `is_repeatable`: two actors may
    have it at the same time. `most_deaths`: after so many in one of its calls it is not issued
    again, and nobody waits for those that have it.
    """

    def __init__(
        self,
        payload: Any,
        home: Hashable | None,
        turn: tuple[int, ...],
        *,
        is_repeatable: bool,
        most_deaths: int = 1,
    ) -> None:
        self.payload = payload
        self.home = home
        self.turn = turn
        self.is_repeatable = is_repeatable
        self.most_deaths = most_deaths
        self.attempts: set[int] = set()
        """Generations of the actors that have it."""
        self.sent_at = 0.0
        """When it was last sent to one."""
        self.num_again = 0
        """How often it was issued again because it was late."""
        self.is_done = False
        """Whether an answer came."""
        self.is_waiting = False
        """Whether it waits to be issued."""
        self.deaths: list[int] = []
        """For each actor that ended in one of its calls, how many of them that had begun."""


class Loss(NamedTuple):
    """A ticket that came to nothing, since actors ended."""

    ticket: Ticket
    num_begun: int
    """How many of its calls were begun where one ended; 0 where no call is to blame."""
    num_deaths: int
    """How many actors ended in that call."""


class _Actor:
    """What the ledger knows of an actor. Guarded as the ledger is."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        # By number, in the order in which they were sent: ticket, and when.
        self.open: dict[int, tuple[Ticket, float]] = {}
        self.num_tickets = 0
        self.heard_at = 0.0
        self.is_quick = False
        self.is_retired = False
        self.is_busy = False
        self.num_homes = 0

    def head_since(self) -> float | None:
        """Since when it has been at its oldest ticket."""
        for _, sent_at in self.open.values():
            return max(sent_at, self.heard_at)
        return None


class Ledger:
    """Tickets and actors. Owner: the lock of the pool, which brings the time along.

    An actor's generation is the number under which it was started: a later one in the same place
    is another actor. One that was removed is fenced: its answers are strangers'.

    `moves`: whether workers may go to another actor while theirs lives. `quick_s`: an answer within
    this time is a quick one, and its actor gets its next ticket ahead.
    """

    def __init__(self, *, moves: bool, quick_s: float) -> None:
        self._moves = moves
        self._quick_s = quick_s
        self._actors: dict[int, _Actor] = {}
        # Those that may be sent a ticket: without one, and with one that they answer quickly. A
        # dict is a set that keeps its order.
        self._idle: dict[int, None] = {}
        self._ahead: dict[int, None] = {}
        self._num_opened = count()
        self._waiting: list[tuple[tuple[int, ...], int, Ticket]] = []
        self._homeless: list[Ticket] = []
        self._homes: dict[Hashable, int] = {}
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._num_came = 0
        self._late_s: float | None = None
        # How long the first tickets of actors took.
        self._first_took: deque[float] = deque(maxlen=_REMEMBERED)
        # Whether the last ticket that was late was so by its actor: another one took as long as is
        # usual. Else its calls are slow by themselves, and to end the actor would be no help.
        self._is_by_actor = False
        self.num_busy = 0
        """Actors that have something to do."""
        self.num_again = 0
        """Tickets that were issued again because they were late."""

    # ---- actors

    def add(self, generation: int) -> None:
        """An actor is ready."""
        self._actors[generation] = _Actor(generation)
        self._file(self._actors[generation])

    def remove(
        self, generation: int, begun: Callable[[Ticket, int, int], int] = lambda *which: 0
    ) -> list[Loss]:
        """An actor is dead, or fenced. Returns the tickets that nobody else has, and those in which
        as many actors have ended as may.

        ``begun(ticket, number, place)``: how many of a ticket's calls the actor had begun. `number`
        is that under which the ticket was sent to this one, `place` its place in the actor's queue:
        0 is the one that it was at.
        """
        actor = self._actors.pop(generation, None)
        if actor is None:
            return []
        self._idle.pop(generation, None)
        self._ahead.pop(generation, None)
        self.num_busy -= actor.is_busy
        lost = []
        for place, (number, (ticket, _)) in enumerate(actor.open.items()):
            ticket.attempts.discard(generation)
            if ticket.is_done:
                continue
            if num_begun := begun(ticket, number, place):
                ticket.deaths.append(num_begun)
            # An actor that is not to blame may be the last one of several.
            at = ticket.deaths[-1] if ticket.deaths else 0
            num = ticket.deaths.count(at)
            # A late ticket is issued again and again, so there may always be one that has it.
            if not (ticket.attempts or ticket.is_waiting) or num >= ticket.most_deaths:
                lost.append(Loss(ticket, at, num))
        return lost

    def retire(self, generation: int) -> None:
        """Send an actor no more tickets; workers leave it where they may."""
        actor = self._actors[generation]
        actor.is_retired = True
        self._file(actor)

    def is_idle(self, generation: int) -> bool:
        """Whether an actor has no ticket."""
        actor = self._actors.get(generation)
        return actor is None or not actor.open

    def has_homes(self, generation: int) -> bool:
        """Whether a worker's state is in an actor."""
        return generation in self._homes.values()

    @property
    def generations(self) -> list[int]:
        """The actors that are ready, oldest first."""
        return list(self._actors)

    @property
    def is_short(self) -> bool:
        """Whether a ticket waits that one more actor would be given."""
        if self._waiting and not self._idle:
            return True
        homes = (self._actors.get(self._homes.get(one.home, -1)) for one in self._homeless)
        return any(home is None or home.is_retired for home in homes)

    # ---- tickets

    def head(self, generation: int) -> Ticket | None:
        """The oldest ticket of an actor: the one that it is at."""
        actor = self._actors.get(generation)
        return None if actor is None else next((one for one, _ in actor.open.values()), None)

    def find(self, generation: int, number: int) -> Ticket | None:
        """The ticket that was sent to an actor under a number; None where it has none such."""
        actor = self._actors.get(generation)
        found = None if actor is None else actor.open.get(number)
        return None if found is None else found[0]

    def open(self, ticket: Ticket) -> None:
        """Somebody asks."""
        if ticket.home is None:
            self._wait(ticket)
        else:
            self._homeless.append(ticket)

    def issue(self, now: float, send: Callable[[Ticket, int, int], None]) -> None:
        """Send what may be sent: calls ``send(ticket, generation, number)``."""
        while self._homeless and self._actors:
            ticket = self._homeless.pop()
            if not ticket.is_done:
                self._give(ticket, self._home_of(ticket.home), now, send)
        later = []
        while self._waiting and (self._idle or self._ahead):
            entry = heapq.heappop(self._waiting)
            ticket = entry[-1]
            if ticket.is_done:
                continue
            actor = self._free_actor(ticket)
            if actor is None:
                later.append(entry)  # Those that have room have it already.
                continue
            ticket.is_waiting = False
            self._give(ticket, actor, now, send)
        for entry in later:
            heapq.heappush(self._waiting, entry)

    def came(self, generation: int, number: int, now: float) -> tuple[Ticket, bool] | None:
        """An answer came: its ticket, and whether it is the first. None where it is a fenced
        actor's, or nobody has asked for it."""
        actor = self._actors.get(generation)
        found = None if actor is None else actor.open.get(number)
        if actor is None or found is None:
            return None
        ticket, _ = found
        since = actor.head_since()
        took = 0.0 if since is None else now - since
        del actor.open[number]
        is_start, actor.heard_at = not actor.heard_at, now
        actor.is_quick = took < self._quick_s
        self._file(actor)
        ticket.attempts.discard(generation)
        is_first, ticket.is_done = not ticket.is_done, True
        if is_first and ticket.num_again and self._late_s is not None:
            self._is_by_actor = took < self._late_s
        # The function is loaded in an actor's first ticket, which takes longer than any later one.
        if is_start:
            self._first_took.append(took)
        elif is_first:
            self._learn(took)
        return ticket, is_first

    def late(self, now: float) -> None:
        """Have tickets of actors that are far slower than others issued again."""
        if self._late_s is None:
            return
        for actor in self._actors.values():
            since = actor.head_since()
            if since is None or now - since < self._late_s:
                continue
            for ticket, _ in actor.open.values():
                num = len(ticket.attempts)
                is_old = now - ticket.sent_at >= self._late_s
                is_due = num == 1 or (num < _MOST_ATTEMPTS and is_old)
                if ticket.is_repeatable and is_due and not (ticket.is_waiting or ticket.is_done):
                    self.num_again += 1
                    ticket.num_again += 1
                    self._wait(ticket)

    def stuck(self, now: float, start_s: float) -> list[int]:
        """Actors that are at a ticket which another one has answered, or is likely to answer
        earlier, and have been for longer than a new actor takes to come, `start_s`."""
        if self._late_s is None:
            return []
        found = []
        least_s = max(self._late_s, start_s)
        # One that was slow by itself is not the measure, or nobody would hang for long.
        usual_s = sorted(self._first_took)[len(self._first_took) // 2]
        least_first_s = max(least_s, _FIRST_TIMES * usual_s)
        # Of those that have one ticket the one that has been at it longest: another one answers it.
        latest: dict[Ticket, tuple[float, int]] = {}
        for generation, actor in self._actors.items():
            since = actor.head_since()
            if since is None or now - since < (least_s if actor.heard_at else least_first_s):
                continue
            ticket, _ = next(iter(actor.open.values()))
            if ticket.is_done:
                found.append(generation)
            elif self._is_better_off(ticket):
                mine = since, generation
                latest[ticket] = min(mine, latest.get(ticket, mine))
        return found + [generation for _, generation in latest.values()]

    def _is_better_off(self, ticket: Ticket) -> bool:
        """Whether the late one of the actors that have a ticket can be ended before it is answered.
        Once for each ticket: else calls that take this long by themselves would never end."""
        return self._is_by_actor and ticket.num_again == 1 and len(ticket.attempts) == 2

    @property
    def late_s(self) -> float | None:
        """After how long a ticket is late; None while that is not known."""
        return self._late_s

    def _wait(self, ticket: Ticket) -> None:
        ticket.is_waiting = True
        heapq.heappush(self._waiting, (ticket.turn, next(self._num_opened), ticket))

    def _give(
        self, ticket: Ticket, actor: _Actor, now: float, send: Callable[[Ticket, int, int], None]
    ) -> None:
        actor.num_tickets += 1
        actor.open[actor.num_tickets] = ticket, now
        ticket.attempts.add(actor.generation)
        ticket.sent_at = now
        self._file(actor)
        send(ticket, actor.generation, actor.num_tickets)

    def _free_actor(self, ticket: Ticket) -> _Actor | None:
        """One with room; the first of those without a ticket."""
        for group in (self._idle, self._ahead):
            for generation in group:
                if generation not in ticket.attempts:
                    return self._actors[generation]
        return None

    def _home_of(self, worker: Hashable) -> _Actor:
        """The actor of a worker: the one that has its state, else the one with the fewest."""
        home = self._actors.get(self._homes.get(worker, -1))
        others = [one for one in self._actors.values() if not one.is_retired]
        least = min(others or self._actors.values(), key=lambda one: one.num_homes)
        if home is not None:
            # One more than the least is even enough: else it would go to and fro.
            is_crowded = self._moves and home.num_homes > least.num_homes + 1
            if not (home.is_retired or is_crowded):
                return home
            home.num_homes -= 1
        least.num_homes += 1
        self._homes[worker] = least.generation
        return least

    def _file(self, actor: _Actor) -> None:
        """Note whether an actor may be sent a ticket."""
        generation, load = actor.generation, len(actor.open)
        # Counted, and not looked for: it is asked at each answer, and there may be thousands.
        self.num_busy += bool(load) - actor.is_busy
        actor.is_busy = bool(load)
        self._idle.pop(generation, None)
        self._ahead.pop(generation, None)
        if actor.is_retired:
            return
        if not load:
            self._idle[generation] = None
        elif load == 1 and actor.is_quick:
            self._ahead[generation] = None

    def _learn(self, took: float) -> None:
        self._took.append(took)
        self._num_came += 1
        if len(self._took) >= _LEAST_ANSWERS and (
            self._late_s is None or self._num_came % _COUNTED_EVERY == 0
        ):
            usual = sorted(self._took)[int(0.99 * (len(self._took) - 1))]
            self._late_s = max(_LEAST_LATE_S, _LATE_TIMES * usual)


# ---- How many

# The verdict's rule in numbers: a feed whose merge waits for chunks while all actors have work is
# fetch-bound and takes more; one whose actors are idle, while nobody waits for chunks, gives some
# back.

_EVERY_S = 1.0
"""How often it is looked: a new actor takes about a second to come."""

_STARVED = 0.3
"""The share of its time for which the merge waits for chunks, from which on there are too few."""

_FED = 0.05
"""Up to this share there may be too many: the same share from which on a trainer starves for the
verdict."""

_AT_WORK, _IDLE = 0.8, 0.5
"""The share of their time for which actors have tickets: below the first the bound on what is
buffered holds the feed up, and more actors would wait too. Below the second some have nothing to
do."""

_PATIENCE = 5
"""So many looks in a row that say "fewer" make one actor go: a trainer may have stopped for a
checkpoint. More come at the first look, since somebody waits."""


class Seen(NamedTuple):
    """What is known at one moment; seconds are counted from the start on."""

    at: float
    starved_s: float
    """For how long the merge has waited for chunks."""
    busy_s: float
    """For how long actors have had tickets, added up over them."""
    ready: float
    """Actors that may be asked."""


class Scaling:
    """The number of actors that is wanted, between two ends. Owner: the pool's lock."""

    def __init__(self, fewest: int, most: int) -> None:
        self._fewest, self._most = fewest, most
        self.wanted = fewest
        """How many there are to be."""
        self._last: Seen | None = None
        self._num_idle = 0

    def look(self, seen: Seen) -> bool:
        """Decide anew where it is time; whether the number is another one."""
        last = self._last
        if self._fewest == self._most:
            return False
        if last is not None and seen.at - last.at < _EVERY_S:
            return False
        self._last = seen
        if last is None or not seen.ready:
            return False
        seconds = seen.at - last.at
        starved = (seen.starved_s - last.starved_s) / seconds
        at_work = (seen.busy_s - last.busy_s) / seconds / seen.ready
        before = self.wanted
        if starved >= _STARVED and at_work >= _AT_WORK:
            self._num_idle = 0
            # Those that were asked for come first: what they change is not seen yet.
            if seen.ready >= self.wanted:
                self.wanted = min(self._most, self.wanted + max(1, self.wanted // 2))
        elif starved <= _FED and at_work <= _IDLE:
            self._num_idle += 1
            if self._num_idle >= _PATIENCE:
                self.wanted = max(self._fewest, self.wanted - 1)
        else:
            self._num_idle = 0
        return self.wanted != before
