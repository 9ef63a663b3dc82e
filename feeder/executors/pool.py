"""The pool of a stream: its processes, who asks them, and what becomes of a process that ends.

Any fetcher thread asks and waits; whoever holds the lock sends what may be sent. `ledger.py`
decides which process gets which ticket. A launcher starts and ends the processes: `forking.py`
those of this host, `actors.py` the actors of a cluster.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any

from feeder.errors import ClosedError
from feeder.executors.ledger import Ledger, Ticket
from feeder.executors.lines import Line, Mapped, log, say, unpacked
from feeder.executors.wire import END, Calls, HungUp, Load, Logged, Made, Said
from feeder.workers.errors import CallLost
from feeder.workers.stats import ExecutorCounts, StreamStats
from feeder.workers.stream.digests import digest_chunk

logger = logging.getLogger("feeder")

MOST_STILLBORN = 32
"""A function whose loading ends the process would be loaded for ever. A machine that kills what
needs memory may take several in a row."""

_LOOK_S = 1.0
"""How long who asks for a stack waits for the pool's lock: the stream has come to its end."""

_END = -1
"""Among digests: the epoch has ended here."""


class State(Enum):
    """What a process is for the pool."""

    COMING = 0
    """It was asked for, and has no line yet."""
    READY = 1
    """It gets tickets."""
    RETIRED = 2
    """It gets no more, and ends when it has answered those that it has."""
    GONE = 3
    """It has ended, or is fenced: nothing that it says counts."""


_NEXT = {
    State.COMING: {State.READY, State.GONE},
    State.READY: {State.RETIRED, State.GONE},
    State.RETIRED: {State.GONE},
    State.GONE: set[State](),
}


class Member:
    """A process of a pool. Owner: the pool's lock."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        """Counted through all that have been asked for."""
        self.state = State.COMING
        self.line = Line()
        """From the time when it is ready."""
        self.pid = 0
        self.has_answered = False
        """Whether it has come so far."""
        self.num_calls = 0
        """Calls that it has made, and those that tickets without an answer allow it."""

    @property
    def name(self) -> str:
        """For people."""
        return f"process {self.pid}"

    @property
    def place(self) -> str:
        """Where it is, for people; empty where that is this host."""
        return ""


class Lost(Exception):
    """So many processes as may have ended in one call of a ticket, or all that had it; says how the
    last one ended."""

    def __init__(self, how: str, num_begun: int, num_deaths: int) -> None:
        super().__init__(how)
        self.num_begun = num_begun
        """How many calls of the ticket had begun, with the one in which they ended."""
        self.num_deaths = num_deaths


class Asked:
    """What a fetcher thread has asked, and waits for. Woken under the pool's lock."""

    def __init__(self, message: Any, prepare: Callable[[Member], None]) -> None:
        self.message = message
        self.prepare = prepare
        self.digests: list[int] | None = None
        self.reads: Member | None = None
        """The process whose answers this thread is to read, since its ticket is the oldest."""
        self.is_finished = False
        self._answer: Any = None
        self._error: BaseException | None = None
        self._wakes = threading.Lock()
        self._wakes.acquire()

    def read_from(self, member: Member) -> None:
        """It is this thread's turn."""
        self.reads = member
        self._wake()

    def finish(self, answer: Any, error: BaseException | None = None) -> None:
        """It is answered, once."""
        self._answer, self._error = answer, error
        self.is_finished = True
        self._wake()

    def _wake(self) -> None:
        if self._wakes.locked():
            self._wakes.release()

    def wait(self) -> None:
        """Until it is answered, or it is this thread's turn to read."""
        self._wakes.acquire()

    def result(self) -> Any:
        """The answer; raises what it came to."""
        if self._error is not None:
            raise self._error
        return self._answer


class Launcher:
    """What pools differ in: how processes are started and ended, and how their lines are made. All
    is called under the pool's lock, but for what says otherwise."""

    pool: Pool
    """Whose launcher it is."""
    kind = "process"
    kinds = "processes"
    quick_s = 0.0
    """An answer within this time is a quick one, and its process gets its next ticket ahead."""
    askers_read = False
    """Whether who asks reads; otherwise a thread of the launcher's own calls `Pool.hear`."""
    repeats = False
    """Whether a late ticket goes to a second process."""
    most_calls: int | None = None
    """A process is replaced after so many calls."""
    most_stillborn = MOST_STILLBORN
    """So many processes may end one after the other before one of them has answered."""

    def start(self, num: int) -> None:
        """Have so many processes at most, in the background. Without the lock. Raises
        `ConfigError`."""

    def watch(self, stats: StreamStats) -> None:
        """What the stream counts. Without the lock."""

    def start_one(self) -> bool:
        """A ticket waits that one more process would answer: start it, if there may be one that is
        ready at once; whether it was started."""
        return False

    def fill_up(self) -> None:
        """A process has gone: see to others."""

    def end(self, member: Member) -> str:
        """End a process, and hang up; how it ended, where that is found out now."""
        raise NotImplementedError

    def hung_up(self, member: Member) -> None:
        """A process has hung up."""
        self.pool.bury(member)

    def look(self, member: Member) -> str:
        """The Python stacks of a process; empty where there are none to be had."""
        raise NotImplementedError

    def nobody(self) -> str:
        """Why no process has a ticket, for people. Without the lock."""
        return ""

    def interrupt(self) -> None:
        """Whoever holds the lock may wait for a process to be started: no longer. Without it."""

    def close(self) -> None:
        """End all but the processes, which are ended next. Without the lock."""


class Pool:
    """The processes of one stream.

    Any fetcher thread asks; the lock guards the ledger, the members and what is sent. Whoever
    starts and closes the feed starts and closes the pool.

    `moves`: whether workers may go to another process while theirs lives. `debug`: two processes
    that had the same ticket must have given the same.
    """

    def __init__(self, launcher: Launcher, *, moves: bool, debug: bool = False) -> None:
        self.launcher = launcher
        launcher.pool = self
        self.moves = moves
        self.debug = debug
        self.lock = threading.Lock()
        self.ledger = Ledger(moves=moves, quick_s=launcher.quick_s)
        self.members: dict[int, Member] = {}
        """By generation: all that have not gone."""
        self.num_ready = 0
        self.load: Callable[[], tuple[Load, int]] | None = None
        """What each process is told first, and a descriptor that comes along."""
        self.is_closed = False
        self.failure = ""
        """Why there is no going on."""
        # By the thread that waits.
        self._asked: dict[int, Ticket] = {}
        self._num_started = self._num_stillborn = self._num_deaths = 0

    # ---- life

    def start(self, num: int, load: Callable[[], tuple[Load, int]]) -> None:
        """Have so many processes at most, in the background. Raises `ConfigError`."""
        self.load = load
        self.launcher.start(num)

    def interrupt(self) -> None:
        """Who waits for an answer gets a `ClosedError`."""
        self.is_closed = True
        self.launcher.interrupt()
        with self.lock:
            for member in self.members.values():
                member.line.hang_up()
            for ticket in list(self._asked.values()):
                self._fail(ticket, ClosedError("the feed is stopped"))

    def close(self) -> None:
        """End all processes; when no thread asks any more."""
        self.interrupt()
        self.launcher.close()
        with self.lock:
            for member in list(self.members.values()):
                self.let_go(member)

    # ---- tickets

    def ask(
        self,
        message: Any,
        home: Hashable | None,
        prepare: Callable[[Member], None],
        most_deaths: int = 1,
    ) -> Any:
        """Have a ticket answered by the process of a worker, or by any: a `Made` with arrays for
        chunks, or an `Answered`.

        Raises:
            Lost: each process that had it ended in one of its calls, or `most_deaths` did so.
            ClosedError: the pool is closed.
            CallLost: there can be no process.
        """
        ident = threading.get_ident()
        asked = Asked(message, prepare)
        are_calls = isinstance(message, Calls)
        turn = (message.epoch, message.first) if are_calls else (-1, -1)
        is_repeatable = self.launcher.repeats and home is None and are_calls
        ticket = Ticket(asked, home, turn, is_repeatable=is_repeatable, most_deaths=most_deaths)
        with self.lock:
            if self.is_closed or self.load is None:
                raise ClosedError("the feed is not running")
            if self.failure:
                raise CallLost(self.failure)
            self._asked[ident] = ticket
            self.ledger.open(ticket)
            self.issue()
        try:
            while not asked.is_finished:
                asked.wait()
                while asked.reads is not None and not asked.is_finished and self.hear(asked.reads):
                    pass
        except BaseException:
            self._abandon(ticket)
            raise
        finally:
            # Without the lock, which a thousand threads want: whoever looks at all takes a copy.
            self._asked.pop(ident, None)
        return asked.result()

    def _abandon(self, ticket: Ticket) -> None:
        """Who waits was interrupted: the rest of an answer must not be taken for the next one, nor
        may a worker have gone on."""
        with self.lock:
            ticket.is_done = True
            for generation in list(ticket.attempts):
                if (member := self.members.get(generation)) is not None:
                    self.let_go(member)
            self._go_on()

    def issue(self) -> None:
        """Send what may be sent; under the lock."""
        now = time.monotonic()
        is_more = True
        while is_more:
            is_more = self.ledger.is_short and self.launcher.start_one()
            self.ledger.issue(now, self._send)

    def _send(self, ticket: Ticket, generation: int, number: int) -> None:
        member, asked = self.members[generation], ticket.payload
        asked.prepare(member)
        asked.message.number = number
        if isinstance(asked.message, Calls):
            self._allow(member, asked.message)
        member.line.send(asked.message)
        self._give_turn(member)

    def _allow(self, member: Member, calls: Calls) -> None:
        """Have a ticket's calls be no more than its process may make."""
        most = self.launcher.most_calls
        if most is not None:
            # Half of what is left: another ticket may be under way at the same time.
            left = most - member.num_calls
            calls.most_calls = min(calls.most_calls, max(1, left // 2))
            if calls.most_calls >= left:
                self.retire(member)
        member.num_calls += calls.most_calls

    def _give_turn(self, member: Member) -> None:
        """If askers read, have the asker of a process's oldest ticket do so."""
        if self.launcher.askers_read:
            head = self.ledger.head(member.generation)
            if head is not None:
                head.payload.read_from(member)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        """A ticket comes to nothing, unless it has come to something already."""
        if not ticket.is_done:
            ticket.is_done = True
            ticket.payload.finish(None, error)

    def fail_all(self, why: str) -> None:
        """There is no going on; under the lock."""
        if not self.failure:
            self.failure = why
        for ticket in list(self._asked.values()):
            self._fail(ticket, CallLost(why))

    # ---- what is heard: by one thread at a time for each process

    def hear(self, member: Member) -> bool:
        """Receive a message of a process on this host; whether another one may follow before its
        next ticket is answered."""
        line = member.line
        assert isinstance(line, Mapped)
        try:
            message, descriptors = line.wire.receive()
            return not self.heard(member, message, descriptors)
        except HungUp:
            with self.lock:
                if not self.is_closed and member.state is not State.GONE:
                    self.launcher.hung_up(member)
        except (ValueError, OSError) as error:
            self.cannot_read(member, error)
        return False

    def cannot_read(self, member: Member, error: Exception) -> None:
        """What a process has sent cannot be read, so its oldest ticket comes to nothing."""
        with self.lock:
            if self.is_closed or member.state is State.GONE:
                return
            head = self.ledger.head(member.generation)
            if head is not None and head.attempts == {member.generation}:
                self._fail(head, CallLost(f"the answer of {member.name} cannot be read: {error}"))
            self.bury(member, f"sent what cannot be read: {error}")

    def heard(self, member: Member, message: Any, parts: list[Any]) -> bool:
        """A message came, with descriptors or frames; whether it was an answer. Raises `ValueError`
        or `OSError` where it cannot be read."""
        if isinstance(message, Said):
            say(message.is_error, message.text)
            return False
        if isinstance(message, Logged):
            log(message.record)
            return False
        failure: Exception | None = None
        if isinstance(message, Made):
            # Also what is dropped below: it may tell of types of arrays that come again.
            try:
                message = unpacked(member.line, message, parts)
            except (ValueError, OSError):
                raise
            except Exception as raised:
                # Such as a class that only the process has.
                failure = raised
        with self.lock:
            self._came(member, message, failure)
        return True

    def _came(self, member: Member, message: Any, failure: Exception | None) -> None:
        found = self.ledger.came(member.generation, message.number, time.monotonic())
        if found is None:
            self._give_turn(member)
            return
        ticket, is_first = found
        member.has_answered = True
        self._num_stillborn = 0
        if isinstance(message, Made):
            member.num_calls += message.num_calls - ticket.payload.message.most_calls
            if self.debug and failure is None:
                self._compare(ticket, message, member)
        if is_first:
            ticket.payload.finish(message, failure)
        if failure is not None:
            # A worker's state there is not what is known of it here.
            self.bury(member, f"sent what cannot be read: {failure!r}")
        elif member.state is State.RETIRED and self.ledger.is_idle(member.generation):
            self.let_go(member)
        self.issue()
        self._give_turn(member)

    def _compare(self, ticket: Ticket, made: Made, member: Member) -> None:
        """Two processes that had the same ticket must have given the same (debug switch)."""
        if not ticket.is_repeatable:
            return
        given = _digests(made)
        before = ticket.payload.digests
        if before is None:
            ticket.payload.digests = given
            return
        # One may have come further within its millisecond, and a call may raise now and then.
        if any(one != other for one, other in zip(before, given, strict=False)):
            call = ticket.payload.message
            self.fail_all(
                f"fetch function is not deterministic: calls from {call.first} on of epoch "
                f"{call.epoch} gave other rows in {member.name} than in another "
                f"{self.launcher.kind}"
            )

    # ---- processes come and go; under the lock

    def next_generation(self) -> int:
        """A process is asked for."""
        self._num_started += 1
        return self._num_started

    def move(self, member: Member, state: State) -> None:
        """A process is something else from now on."""
        assert state in _NEXT[member.state], (member.state, state)
        self.num_ready += (state is State.READY) - (member.state is State.READY)
        member.state = state

    def join(self, member: Member, line: Line) -> None:
        """A process may be asked."""
        self.members[member.generation] = member
        member.line = line
        self.move(member, State.READY)
        self.ledger.add(member.generation)

    def retire(self, member: Member) -> None:
        """A process gets no more tickets, and ends when it has answered."""
        if member.state is State.READY:
            self.move(member, State.RETIRED)
            self.ledger.retire(member.generation)
        if self.ledger.is_idle(member.generation):
            self.let_go(member)

    def let_go(self, member: Member) -> None:
        """A process is not needed any more: end it. Tickets that it has are asked again."""
        how = self.launcher.end(member)
        self._remove(member, how or "was ended", lambda *which: 0)

    def bury(self, member: Member, how: str = "", *, is_node: bool = False) -> None:
        """A process is dead, or is taken for it; `how` is empty where the launcher finds that out.
        `is_node`: its host has ended, and no call is to blame."""
        is_retired = member.state is State.RETIRED
        line = member.line

        def begun(ticket: Ticket, number: int, place: int) -> int:
            message = ticket.payload.message
            if is_node or not isinstance(message, Calls):
                return 0
            return line.num_begun(number, place, message.most_calls)

        told = self.launcher.end(member)
        how = how or told
        if not self.is_closed:
            self._num_deaths += not is_retired
            # Of a host that has ended, all end at once, and none is to blame.
            self._num_stillborn += not (member.has_answered or is_node)
            logger.warning("%s of the fetch function %s", member.name, how)
        self._remove(member, how, begun)
        most = self.launcher.most_stillborn
        if self._num_stillborn > most:
            self.fail_all(
                f"{most} {self.launcher.kinds} ended one after the other before one of them had "
                f"answered; the last one, {member.name}, {how}"
            )
        self._go_on()

    def _go_on(self) -> None:
        """Have others in the place of those that have gone."""
        if not (self.is_closed or self.failure):
            self.launcher.fill_up()
            self.issue()

    def _remove(self, member: Member, how: str, begun: Callable[[Ticket, int, int], int]) -> None:
        """Fence a process; what it was asked is asked again, or is lost."""
        self.move(member, State.GONE)
        self.members.pop(member.generation, None)
        where = f" on {member.place}" if member.place else ""
        for ticket, num_begun, num_deaths in self.ledger.remove(member.generation, begun):
            if num_begun:
                self._fail(
                    ticket, Lost(f"process {member.pid}{where} {how}", num_begun, num_deaths)
                )
            else:
                # It ended before it came to these calls, and not for them.
                self.ledger.open(ticket)

    # ---- what is told

    def stack(self, ident: int | None) -> str:
        """Where the process is that a thread waits for."""
        # Whoever has the lock may wait for a process to be started.
        if not self.lock.acquire(timeout=_LOOK_S):
            return f"no {self.launcher.kind} of the fetch function has started yet"
        try:
            ticket = self._asked.get(ident or 0)
            if ticket is None:
                return ""
            for generation in ticket.attempts:
                if (member := self.members.get(generation)) is not None:
                    return f"{member.name}{self._call_of(member)}:\n{self.launcher.look(member)}"
        finally:
            self.lock.release()
        return self.launcher.nobody()

    def _call_of(self, member: Member) -> str:
        """Which call a process is at, where that is known."""
        number, begun = member.line.progress()
        # The thread's own ticket may stand behind the one whose call does not return.
        ticket = self.ledger.find(member.generation, number)
        # Quick calls are asked for together, so it may be one after the first.
        return f", call {ticket.payload.message.first + begun - 1}" if ticket and begun else ""

    def counts(self) -> ExecutorCounts:
        """The processes that are ready, where they are, and those that have ended."""
        with self.lock:
            ready = self._ready()
            nodes = Counter(member.place for member in ready if member.place)
            return ExecutorCounts(
                processes=len(ready),
                busy=self.ledger.num_busy,
                restarts=self._num_deaths,
                bytes=sum([member.line.blocks.num_bytes for member in ready]),
                kind=self.launcher.kinds,
                nodes=tuple(sorted(nodes.items())),
            )

    def pids(self) -> list[int]:
        """The process ids of those that are ready."""
        with self.lock:
            return [member.pid for member in self._ready()]

    def _ready(self) -> list[Member]:
        return [self.members[generation] for generation in self.ledger.generations]


def _digests(made: Made) -> list[int]:
    """A digest of each chunk, and of the end of the epoch; of a chunk that is no tuple of arrays
    none can be told."""
    chunks: Any = made.chunks
    found = [digest_chunk(chunk) if isinstance(chunk, tuple) else 0 for chunk in chunks]
    return [*found, _END] if made.outcome == END else found
