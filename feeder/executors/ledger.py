"""Which process has which ticket, and how many actors a stream needs: rules without a thread, a
socket or a clock.

A ticket is a bundle of calls. It is issued to a process, and issued again to another one where the
first takes far longer than others do; after a death whoever asked asks again. The first answer that
comes from a process which is not fenced is the ticket's; every later one is dropped.
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
what is done twice takes a process from other tickets."""

_FIRST_TIMES = 3.0
"""A process hangs in its first ticket after so many times what half of the first ones took: the
function and its libraries are loaded then, which may take seconds."""

_MOST_ATTEMPTS = 3
"""So many may have a ticket at the same time. Of 1,000 actors with a slow call in a hundred, in
each minute or two one is slow with what another one has been slow with, and with two the merge
waits for these. More would be held by a call that takes long wherever it is made (2026-11-26)."""

_REMEMBERED = 512
"""Answers that say how long a ticket takes."""

_COUNTED_EVERY = 32
"""After so many answers it is reckoned again: to sort 512 numbers takes 30 us."""


class Ticket:
    """A bundle of calls, from the time when it is asked for. Owner: the ledger's.

    `home`: the worker that it is a ticket of, whose tickets go where its state is; None where any
    process will do. `turn`: the stream needs the smallest first. `is_repeatable`: two processes may
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
        """Generations of the processes that have it."""
        self.sent_at = 0.0
        """When it was last sent to one."""
        self.num_again = 0
        """How often it was issued again because it was late."""
        self.is_done = False
        """Whether an answer came."""
        self.is_waiting = False
        """Whether it waits to be issued."""
        self.deaths: list[int] = []
        """For each process that ended in one of its calls, how many of them that had begun."""


Send = Callable[[Ticket, int, int], None]
"""``send(ticket, generation, number)``."""


class Loss(NamedTuple):
    """A ticket that came to nothing, since processes ended."""

    ticket: Ticket
    num_begun: int
    """How many of its calls were begun where one ended; 0 where no call is to blame."""
    num_deaths: int
    """How many processes ended in that call."""


class _Process:
    """What the ledger knows of a process. Guarded as the ledger is."""

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
    """Tickets and processes. Owner: the lock of the pool, which brings the time along.

    A process's generation is the number under which it was started: a later one in the same place
    is another process. One that was removed is fenced: its answers are strangers'.

    `moves`: whether workers may go to another process while theirs lives. `quick_s`: an answer
    within this time is a quick one, and its process gets its next ticket ahead.
    """

    def __init__(self, *, moves: bool, quick_s: float) -> None:
        self._moves = moves
        self._quick_s = quick_s
        self._processes: dict[int, _Process] = {}
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
        # How long the first tickets of processes took.
        self._first_took: deque[float] = deque(maxlen=_REMEMBERED)
        # Whether the last ticket that was late was so by its process: another one took as long as
        # is usual. Else its calls are slow by themselves, and to end the process is no help.
        self._is_by_process = False
        self.num_busy = 0
        """Processes that have something to do."""
        self.busy_s = 0.0
        """For how long processes have had something to do, added up over them, up to `_now`."""
        self._now = 0.0
        self.num_again = 0
        """Tickets that were issued again because they were late."""

    # ---- processes

    def add(self, generation: int) -> None:
        """A process is ready."""
        self._processes[generation] = _Process(generation)
        self._file(self._processes[generation])

    def remove(
        self, generation: int, begun: Callable[[Ticket, int, int], int] = lambda *which: 0
    ) -> list[Loss]:
        """A process is dead, or fenced. Returns the tickets that nobody else has, and those in
        which as many processes have ended as may.

        ``begun(ticket, number, place)``: how many of a ticket's calls the process had begun.
        `number` is that under which the ticket was sent to this one, `place` its place in the queue
        of the process: 0 is the one that it was at.
        """
        process = self._processes.pop(generation, None)
        if process is None:
            return []
        self._idle.pop(generation, None)
        self._ahead.pop(generation, None)
        self.num_busy -= process.is_busy
        lost = []
        for place, (number, (ticket, _)) in enumerate(process.open.items()):
            ticket.attempts.discard(generation)
            if ticket.is_done:
                continue
            if num_begun := begun(ticket, number, place):
                ticket.deaths.append(num_begun)
            # A process that is not to blame may be the last one of several.
            at = ticket.deaths[-1] if ticket.deaths else 0
            num = ticket.deaths.count(at)
            # A late ticket is issued again and again, so there may always be one that has it.
            if not (ticket.attempts or ticket.is_waiting) or num >= ticket.most_deaths:
                lost.append(Loss(ticket, at, num))
        return lost

    def retire(self, generation: int) -> None:
        """Send a process no more tickets; workers leave it where they may."""
        process = self._processes[generation]
        process.is_retired = True
        self._file(process)

    def is_idle(self, generation: int) -> bool:
        """Whether a process has no ticket."""
        process = self._processes.get(generation)
        return process is None or not process.open

    def has_homes(self, generation: int) -> bool:
        """Whether a worker's state is in a process."""
        return generation in self._homes.values()

    @property
    def generations(self) -> list[int]:
        """The processes that are ready, oldest first."""
        return list(self._processes)

    @property
    def is_short(self) -> bool:
        """Whether a ticket waits that one more process would be given."""
        if self._waiting and not self._idle:
            return True
        homes = (self._processes.get(self._homes.get(one.home, -1)) for one in self._homeless)
        return any(home is None or home.is_retired for home in homes)

    # ---- tickets

    def head(self, generation: int) -> Ticket | None:
        """The oldest ticket of a process: the one that it is at."""
        process = self._processes.get(generation)
        return None if process is None else next((one for one, _ in process.open.values()), None)

    def find(self, generation: int, number: int) -> Ticket | None:
        """The ticket that was sent to a process under a number; None where it has none such."""
        process = self._processes.get(generation)
        found = None if process is None else process.open.get(number)
        return None if found is None else found[0]

    def open(self, ticket: Ticket) -> None:
        """Somebody asks."""
        if ticket.home is None:
            self._wait(ticket)
        else:
            self._homeless.append(ticket)

    def issue(self, now: float, send: Send) -> None:
        """Send what may be sent."""
        self._pass_to(now)
        while self._homeless and self._processes:
            ticket = self._homeless.pop()
            if not ticket.is_done:
                self._give(ticket, self._home_of(ticket.home), now, send)
        later = []
        while self._waiting and (self._idle or self._ahead):
            entry = heapq.heappop(self._waiting)
            ticket = entry[-1]
            if ticket.is_done:
                continue
            process = self._free_process(ticket)
            if process is None:
                later.append(entry)  # Those that have room have it already.
                continue
            ticket.is_waiting = False
            self._give(ticket, process, now, send)
        for entry in later:
            heapq.heappush(self._waiting, entry)

    def came(self, generation: int, number: int, now: float) -> tuple[Ticket, bool] | None:
        """An answer came: its ticket, and whether it is the first. None where it is a fenced
        process's, or nobody has asked for it."""
        self._pass_to(now)
        process = self._processes.get(generation)
        found = None if process is None else process.open.get(number)
        if process is None or found is None:
            return None
        ticket, _ = found
        since = process.head_since()
        took = 0.0 if since is None else now - since
        del process.open[number]
        is_start, process.heard_at = not process.heard_at, now
        process.is_quick = took < self._quick_s
        self._file(process)
        ticket.attempts.discard(generation)
        is_first, ticket.is_done = not ticket.is_done, True
        if is_first and ticket.num_again and self._late_s is not None:
            self._is_by_process = took < self._late_s
        # The function is loaded in a process's first ticket, which takes longer than any later one.
        if is_start:
            self._first_took.append(took)
        elif is_first:
            self._learn(took)
        return ticket, is_first

    def late(self, now: float) -> None:
        """Have tickets of processes that are far slower than others issued again."""
        if self._late_s is None:
            return
        for process in self._processes.values():
            since = process.head_since()
            if since is None or now - since < self._late_s:
                continue
            for ticket, _ in process.open.values():
                num = len(ticket.attempts)
                is_old = now - ticket.sent_at >= self._late_s
                is_due = num == 1 or (num < _MOST_ATTEMPTS and is_old)
                if ticket.is_repeatable and is_due and not (ticket.is_waiting or ticket.is_done):
                    self.num_again += 1
                    ticket.num_again += 1
                    self._wait(ticket)

    def stuck(self, now: float, start_s: float) -> list[int]:
        """Processes that are at a ticket which another one has answered, or is likely to answer
        earlier, and have been for longer than a new process takes to come, `start_s`."""
        if self._late_s is None:
            return []
        found = []
        least_s = max(self._late_s, start_s)
        # One that was slow by itself is not the measure, or nobody would hang for long.
        usual_s = sorted(self._first_took)[len(self._first_took) // 2]
        least_first_s = max(least_s, _FIRST_TIMES * usual_s)
        # Of those that have one ticket the one that has been at it longest: another one answers it.
        latest: dict[Ticket, tuple[float, int]] = {}
        for generation, process in self._processes.items():
            since = process.head_since()
            if since is None or now - since < (least_s if process.heard_at else least_first_s):
                continue
            ticket, _ = next(iter(process.open.values()))
            if ticket.is_done:
                found.append(generation)
            elif self._is_better_off(ticket):
                mine = since, generation
                latest[ticket] = min(mine, latest.get(ticket, mine))
        return found + [generation for _, generation in latest.values()]

    def _is_better_off(self, ticket: Ticket) -> bool:
        """Whether the late one of those that have a ticket can be ended before it is answered. Once
        for each ticket: else calls that take this long by themselves would never end."""
        return self._is_by_process and ticket.num_again == 1 and len(ticket.attempts) == 2

    @property
    def late_s(self) -> float | None:
        """After how long a ticket is late; None while that is not known."""
        return self._late_s

    def _pass_to(self, now: float) -> None:
        self.busy_s += self.num_busy * (now - self._now)
        self._now = now

    def _wait(self, ticket: Ticket) -> None:
        ticket.is_waiting = True
        heapq.heappush(self._waiting, (ticket.turn, next(self._num_opened), ticket))

    def _give(self, ticket: Ticket, process: _Process, now: float, send: Send) -> None:
        process.num_tickets += 1
        process.open[process.num_tickets] = ticket, now
        ticket.attempts.add(process.generation)
        ticket.sent_at = now
        self._file(process)
        send(ticket, process.generation, process.num_tickets)

    def _free_process(self, ticket: Ticket) -> _Process | None:
        """One with room; the first of those without a ticket."""
        for group in (self._idle, self._ahead):
            for generation in group:
                if generation not in ticket.attempts:
                    return self._processes[generation]
        return None

    def _home_of(self, worker: Hashable) -> _Process:
        """The process of a worker: the one that has its state, else the one with the fewest."""
        home = self._processes.get(self._homes.get(worker, -1))
        others = [one for one in self._processes.values() if not one.is_retired]
        least = min(others or self._processes.values(), key=lambda one: one.num_homes)
        if home is not None:
            # One more than the least is even enough: else it would go to and fro.
            is_crowded = self._moves and home.num_homes > least.num_homes + 1
            if not (home.is_retired or is_crowded):
                return home
            home.num_homes -= 1
        least.num_homes += 1
        self._homes[worker] = least.generation
        return least

    def _file(self, process: _Process) -> None:
        """Note whether a process may be sent a ticket."""
        generation, load = process.generation, len(process.open)
        # Counted, and not looked for: it is asked at each answer, and there may be thousands.
        self.num_busy += bool(load) - process.is_busy
        process.is_busy = bool(load)
        self._idle.pop(generation, None)
        self._ahead.pop(generation, None)
        if process.is_retired:
            return
        if not load:
            self._idle[generation] = None
        elif load == 1 and process.is_quick:
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
