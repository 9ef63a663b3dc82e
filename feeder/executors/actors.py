"""The actors of an executor as the driver sees them: started, asked, buried, replaced.

One thread receives what all of them say. Fetcher threads ask and wait; whoever holds the lock
sends what may be sent. `ledger.py` decides which actor gets which ticket, `scaling.py` how many
actors there are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from feeder.errors import ClosedError, ConfigError
from feeder.executors.actor import HELLO, Greeting, Invitation
from feeder.executors.blocks import map_shared
from feeder.executors.cluster import Cluster, load_ray
from feeder.executors.ledger import Ledger, Scaling, Seen, Ticket
from feeder.executors.options import RayActors
from feeder.executors.pool import MOST_STILLBORN, Ended, Lost, log, say, unpacked
from feeder.executors.ports import Framed, Line, Mapped, Ports, memory_of
from feeder.executors.processes import ProcessExecution, ProcessExecutor
from feeder.executors.wire import (
    END,
    PROGRESS_BYTES,
    Calls,
    HungUp,
    Load,
    Logged,
    Made,
    Said,
    Wire,
    decode,
    encode,
)
from feeder.workers.errors import CallLost
from feeder.workers.fetch.threads import ThreadGroup
from feeder.workers.spec import RunSpec, StreamSpec
from feeder.workers.stats import ExecutorCounts, StreamStats
from feeder.workers.stream.digests import digest_chunk

logger = logging.getLogger("feeder")

_MOST_UNMADE = 4
"""Of so many actors in a row none came to say hello: what hinders them is no accident."""

_ROOM_TOLD_S, _ROOM_S = 5.0, 60.0
"""After so long without one actor it is logged that they wait for room, and then it is an error. A
cluster that grows on demand takes less than a minute for a host that stands by (2026-11-25)."""

_TICK_S = 0.25
"""How often it is looked whether tickets are late, and whether there is room."""

_JOIN_S = 10.0
"""How long the receiving thread may take to end."""

_END = -1
"""Among digests: the epoch has ended here."""

DATA = "FEEDER_RAY_DATA"
"""The variable that says by which way chunks come: "mapped", which is the default, by shared memory
on one host and otherwise by frames; or "frames" everywhere."""


class _Asked:
    """What a fetcher thread has asked, and waits for."""

    def __init__(self, message: Any, prepare: Callable[[Any], None]) -> None:
        self.message = message
        self.prepare = prepare
        self.digests: list[int] | None = None
        self._answer: Any = None
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def finish(self, answer: Any, error: BaseException | None = None) -> None:
        """It is answered, once."""
        self._answer, self._error = answer, error
        self._done.release()

    def wait(self) -> Any:
        """The answer; raises what it came to."""
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self._answer


class _Actor:
    """An actor, and its processes. Owner: the pool's lock."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.members: list[_Member] = []
        self.is_retired = False
        self.has_come = False


class _Member:
    """A process of an actor, which has one or several. Owner: the pool's lock."""

    def __init__(self, generation: int, actor: _Actor) -> None:
        self.generation = generation
        self.number = generation
        """As `_Worker` knows it: its state is in this one."""
        self.actor = actor
        self.pid = 0
        self.host = ""
        self.node = ""
        self.public = b""
        self.line: Line | None = None
        self.has_answered = False
        self.asked_at = time.monotonic()

    @property
    def name(self) -> str:
        """For people."""
        return f"actor {self.generation} (process {self.pid} on {self.place})"

    @property
    def place(self) -> str:
        """Its node, for people: a host may have several."""
        return f"{self.host}/{self.node[:6]}" if self.node else "no node yet"


class ActorPool:
    """The actors of one stream.

    Any fetcher thread asks. The lock guards the ledger, the members and what is sent; the receiving
    thread owns the sockets. Whoever starts and closes the feed starts and closes the pool.
    """

    def __init__(self, options: RayActors, *, moves: bool, debug: bool, patience_s: float) -> None:
        self._options = options
        self.cluster = Cluster(options)
        """Ray."""
        self._debug = debug
        self._room_s = min(_ROOM_S, patience_s)
        self._moves = moves
        self._lock = threading.Lock()
        self._ledger = Ledger(moves=moves)
        self._actors: list[_Actor] = []
        # Their processes, by generation.
        self._members: dict[int, _Member] = {}
        # Processes of each actor.
        self._per = 1
        self._asked: dict[int, Ticket] = {}
        self._num_started = 0
        self._num_stillborn = self._num_unmade = 0
        self._num_deaths = 0
        self._scaling = Scaling(1, 1)
        self._stats: StreamStats | None = None
        # How long the last actor took to come.
        self._start_s = 0.0
        self._failure = ""
        self._is_closed = False
        self._load: Callable[[], tuple[Load, int]] | None = None
        self._buffers: Any = None
        # Since when there has been no actor; None while there is one.
        self._alone_since: float | None = None
        self._has_told = False
        self._busy_s, self._busy_at, self._ticked_at = 0.0, 0.0, 0.0
        self._told: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._posts: deque[list[bytes]] = deque()
        self._threads = ThreadGroup()
        self._receiver: int | None = None
        self._ports: Ports | None = None

    # ---- life

    def watch(self, stats: StreamStats) -> None:
        """What the stream counts says how many actors it needs."""
        self._stats = stats

    def start(self, num: int, load: Callable[[], tuple[Load, int]]) -> None:
        """Start actors with so many processes at most, in the background. Raises `ConfigError`."""
        self.cluster.check()
        self._load = load
        _, descriptor = load()
        self._buffers = _bytes_of(descriptor)
        self._per = min(self._options.per_actor, num)
        most = -(-num // self._per)
        self._scaling = Scaling(min(self._options.fewest, most), most)
        way = os.environ.get(DATA, "mapped")
        if way not in ("mapped", "frames"):
            raise ConfigError(f"{DATA} is {way!r}, expected mapped or frames")
        self._ports = Ports(self.cluster.host(), way)
        self._alone_since = self._busy_at = self._ticked_at = time.monotonic()
        self._threads.start("feeder actors", self._run, self._ports)
        with self._lock:
            self._fill_up()

    def interrupt(self) -> None:
        """Who waits for an answer gets a `ClosedError`."""
        with self._lock:
            self._is_closed = True
            for ticket in list(self._asked.values()):
                self._fail(ticket, ClosedError("the feed is stopped"))
        self._wake()

    def close(self) -> None:
        """End all actors."""
        self.interrupt()
        self._threads.close(_JOIN_S)
        with self._lock:
            for actor in self._actors:
                actor.is_retired = True
            for member in list(self._members.values()):
                self._let_go(member)
            ports, self._ports = self._ports, None
        if ports is not None:
            ports.close()
        self._buffers = None

    def _wake(self) -> None:
        ports = self._ports
        if ports is not None:
            ports.wake()

    def tell(self, what: Callable[..., None], *args: Any) -> None:
        """Have the receiving thread call something. Any thread, also those of Ray."""
        self._told.append((what, args))
        self._wake()

    def post(self, parts: list[bytes]) -> None:
        """Have the receiving thread send frames."""
        self._posts.append(parts)
        # That thread looks there before it waits.
        if threading.get_ident() != self._receiver:
            self._wake()

    # ---- tickets

    def ask(
        self, message: Any, place: int | None, prepare: Callable[[Any], None], most_deaths: int = 1
    ) -> Any:
        """Have a ticket answered by the actor of a worker, or by any: a `Made` with arrays for
        chunks, or an `Answered`.

        Raises:
            Lost: each actor that had it ended before it answered, or `most_deaths` did so.
            ClosedError: the pool is closed.
            CallLost: there can be no actor.
        """
        ident = threading.get_ident()
        asked = _Asked(message, prepare)
        are_calls = isinstance(message, Calls)
        turn = (message.epoch, message.first) if are_calls else (-1, -1)
        ticket = Ticket(
            asked, place, turn, is_repeatable=place is None and are_calls, most_deaths=most_deaths
        )
        with self._lock:
            self._check()
            self._asked[ident] = ticket
            self._ledger.open(ticket)
            self._issue()
        try:
            return asked.wait()
        finally:
            # Without the lock, which a thousand threads want: whoever looks at all takes a copy.
            self._asked.pop(ident, None)

    def _check(self) -> None:
        if self._is_closed or self._ports is None:
            raise ClosedError("the feed is not running")
        if self._failure:
            raise CallLost(self._failure)

    def _issue(self) -> None:
        now = time.monotonic()
        self._note_busy(now)
        self._ledger.issue(now, self._send)

    def _note_busy(self, now: float) -> None:
        self._busy_s += self._ledger.num_busy * (now - self._busy_at)
        self._busy_at = now

    def _send(self, ticket: Ticket, generation: int, number: int) -> None:
        member, asked = self._members[generation], ticket.payload
        assert member.line is not None
        asked.prepare(member)
        asked.message.number = number
        member.line.send(asked.message)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        """A ticket comes to nothing, where it has not come to something."""
        if not ticket.is_done:
            ticket.is_done = True
            ticket.payload.finish(None, error)

    def _fail_all(self, why: str) -> None:
        """There is no going on; under the lock."""
        if not self._failure:
            self._failure = why
        for ticket in list(self._asked.values()):
            self._fail(ticket, CallLost(why))

    # ---- the receiving thread

    def _run(self, ports: Ports) -> None:
        """Thread body: receive until the pool is closed."""
        self._receiver = threading.get_ident()
        try:
            while not self._is_closed:
                self._receive(ports)
        except Exception as error:
            # Else who waits for an answer would wait until the timeout.
            logger.exception("the thread that hears actors failed")
            with self._lock:
                self._fail_all(f"the thread that hears actors failed: {error!r}")
        finally:
            ports.drop_sockets()

    def _receive(self, ports: Ports) -> None:
        for kind, what in ports.wait(_TICK_S):
            match kind:
                case "frames":
                    self._on_frames(*what)
                case "caller":
                    self._on_caller(*what)
                case "line":
                    self._on_line(what)
        while self._told:
            call, args = self._told.popleft()
            call(*args)
        self._tick(time.monotonic())
        while self._posts:
            ports.send(self._posts.popleft())

    def _tick(self, now: float) -> None:
        with self._lock:
            if now - self._ticked_at < _TICK_S:
                return
            self._ticked_at = now
            # Before others are late: a ticket that was issued again is with its second actor now.
            self._replace_stuck(now)
            self._ledger.late(now)
            self._issue()
            self._scale(now)
            since = self._alone_since
        self._look_for_room(since, now)

    def _replace_stuck(self, now: float) -> None:
        """Whoever hangs in a call that another one makes, or has made, is of no use; under the
        lock."""
        # Its answer is wanted where answers are compared.
        if self._debug:
            return
        for generation in self._ledger.stuck(now, self._start_s):
            member = self._members[generation]
            self._bury(member, "hangs in a call that another one makes", True)

    def _look_for_room(self, since: float | None, now: float) -> None:
        if since is None or self._failure:
            return
        is_late, is_over = now - since >= _ROOM_TOLD_S, now - since >= self._room_s
        if not is_over and (not is_late or self._has_told):
            return
        why, help_ = self._what_is_missing()
        if is_over:
            with self._lock:
                self._fail_all(f"{why}; waited {now - since:.0f} s: {help_}")
        else:
            self._has_told = True
            logger.warning("%s; waiting", why)

    def _what_is_missing(self) -> tuple[str, str]:
        """Why no actor is ready, and what helps."""
        with self._lock:
            # They were told where to come, and have not.
            far = {m.host for m in self._members.values() if m.host and m.line is None}
            address = "" if self._ports is None else self._ports.address
        if far:
            hosts = ", ".join(sorted(far))
            return f"no actor has reached this process at {address}; tried from {hosts}", (
                "open this host's ports to the cluster's hosts"
            )
        # Without the lock: the cluster may take its time to say.
        told, is_enough = self.cluster.room()
        if is_enough:
            return f"no actor of the fetch function has started: {told}", (
                "see in Ray's logs what it waits for, or raise timeout where a start takes long"
            )
        return f"no actor of the fetch function has room: {told}", (
            "add hosts, or ask for less by num_cpus and resources"
        )

    def _scale(self, now: float) -> None:
        if self._stats is None:
            return
        seen = Seen(
            at=now, starved_s=self._stats.chunks.seconds(now), busy_s=self._busy_s,
            ready=len(self._ledger.generations),
        )  # fmt: skip
        # Of actors: these come and go.
        seen = seen._replace(busy_s=seen.busy_s / self._per, ready=seen.ready / self._per)
        if self._scaling.look(seen):
            self._fill_up()

    def _fill_up(self) -> None:
        """Have as many actors as there are to be, and their processes; under the lock."""
        actors = [actor for actor in self._actors if not actor.is_retired]
        try:
            for _ in range(self._scaling.wanted - len(actors)):
                actors.append(_Actor(self.cluster.start()))
                self._actors.append(actors[-1])
            for actor in actors:
                for _ in range(self._per - len(actor.members)):
                    self._add_to(actor)
        except Exception as error:
            self._fail_all(f"no actor could be started: {error}")
            return
        for actor in self._surplus(actors):
            actor.is_retired = True
            for member in list(actor.members):
                if member.line is None or self._ledger.is_idle(member.generation):
                    self._let_go(member)
                else:
                    self._ledger.retire(member.generation)

    def _surplus(self, actors: list[_Actor]) -> list[_Actor]:
        """Who goes where there are too many: first those that are not ready, then the youngest."""
        num = len(actors) - self._scaling.wanted
        if num <= 0:
            return []
        # The state of a worker that can only be replayed stays where it is.
        free = [
            actor
            for actor in reversed(actors)
            if self._moves
            or not any(self._ledger.has_homes(member.generation) for member in actor.members)
        ]
        return sorted(free, key=lambda one: any(member.line for member in one.members))[:num]

    def _add_to(self, actor: _Actor) -> None:
        """Ask an actor for a process."""
        self._num_started += 1
        generation = self._num_started
        member = self._members[generation] = _Member(generation, actor)
        actor.members.append(member)
        self.cluster.hello(
            actor.handle, generation,
            lambda found, error: self.tell(self._on_hello, generation, found, error),
        )  # fmt: skip

    # ---- what happens

    def _on_hello(
        self, generation: int, found: Greeting | None, error: BaseException | None
    ) -> None:
        with self._lock:
            member, ports = self._members.get(generation), self._ports
            if member is None or ports is None or self._is_closed:
                return
            if found is None:
                # Each of its processes is told of it.
                self._num_unmade += member.actor in self._actors
                how, is_node = self.cluster.how(error)
                if self._num_unmade >= _MOST_UNMADE and not is_node:
                    self._fail_all(f"no actor could be started: the last one {how}")
                self._bury(member, how, is_node, is_actor=True)
                return
            self._num_unmade = 0
            member.pid, member.host, member.node = found.pid, found.host, found.node
            member.public = found.public
            ports.allowed[member.public] = generation
            invitation = Invitation(generation, ports.name, ports.address, ports.public)
            self.cluster.serve(
                member.actor.handle, invitation,
                lambda how, error: self.tell(self._on_end, generation, error, how),
            )  # fmt: skip

    def _on_caller(self, generation: int, wire: Wire) -> None:
        """An actor on this host has come."""
        with self._lock:
            member = self._members.get(generation)
            if member is None or member.line is not None or self._ports is None:
                wire.close()
                return
            assert self._load is not None
            load, descriptor = self._load()
            page = os.memfd_create("feeder-progress", os.MFD_CLOEXEC)
            try:
                os.ftruncate(page, PROGRESS_BYTES)
                member.line = Mapped(wire, map_shared(page, PROGRESS_BYTES))
                with contextlib.suppress(HungUp):
                    wire.send(load, [descriptor, page])
            finally:
                os.close(page)
            self._ports.add(wire, generation)
            self._is_ready(member)

    def _on_line(self, generation: int) -> None:
        """Something came from an actor on this host."""
        member = self._members.get(generation)
        if member is None or not isinstance(member.line, Mapped):
            return
        try:
            message, descriptors = member.line.wire.receive()
            self._came(member, message, descriptors, [])
        except (HungUp, ValueError, OSError) as error:
            with self._lock:
                ports = self._ports
                if ports is not None:
                    ports.remove(generation)
                # Ray says how it ended, where it has; one that has left hangs up first.
                if isinstance(error, HungUp):
                    member.line.close()
                    return
                self._bury(member, f"sent what cannot be read: {error}", False)

    def _on_frames(self, identity: bytes, who: str, frames: list[Any]) -> None:
        """Something came by ZeroMQ, from the actor whose key it is."""
        member = self._members.get(int(who) if who.isdecimal() else -1)
        if member is None:
            return  # Fenced: another actor has its place.
        try:
            if member.line is None:
                if bytes(frames[0]) != HELLO.pack(member.generation):
                    raise ValueError("expected a hello")
                with self._lock:
                    member.line = Framed(self.post, identity)
                    assert self._load is not None
                    # It comes before every ticket.
                    self._posts.append([identity, encode(self._load()[0]), self._buffers])
                    self._is_ready(member)
                return
            message = decode(frames[0].buffer)
            self._came(member, message, [], [memory_of(frame) for frame in frames[1:]])
        except ValueError as error:
            with self._lock:
                self._bury(member, f"sent what cannot be read: {error}", False)

    def _is_ready(self, member: _Member) -> None:
        """An actor may be asked; under the lock."""
        now = time.monotonic()
        self._alone_since, self._has_told = None, False
        if not member.actor.has_come:
            # Later processes of it come sooner.
            member.actor.has_come = True
            self._start_s = now - member.asked_at
        self._note_busy(now)
        self._ledger.add(member.generation)
        self._issue()

    def _came(
        self, member: _Member, message: Any, descriptors: list[int], arrays: list[Any]
    ) -> None:
        if isinstance(message, Said):
            say(message.is_error, message.text)
            return
        if isinstance(message, Logged):
            log(message.record)
            return
        assert member.line is not None
        failure: BaseException | None = None
        if isinstance(message, Made):
            blocks = member.line.blocks
            for (number, _), array in zip(message.blocks, arrays, strict=False):
                blocks.hold(number, array)
            if not member.line.is_mapped:
                message.dropped = [number for number, _ in message.blocks]
            # Also what is dropped below: it may tell of types of arrays that come again.
            try:
                message = unpacked(blocks, message, descriptors)
            except Exception as raised:
                # Such as a class that only the actor has.
                failure = raised
        now = time.monotonic()
        with self._lock:
            self._note_busy(now)
            found = self._ledger.came(member.generation, message.number, now)
            if found is None:
                return
            member.has_answered = True
            self._num_stillborn = 0
            ticket, is_first = found
            if self._debug and isinstance(message, Made) and failure is None:
                self._compare(ticket, message, member)
            if is_first:
                ticket.payload.finish(message, failure)
            self._ledger.issue(now, self._send)
            if member.actor.is_retired and self._ledger.is_idle(member.generation):
                self._let_go(member)

    def _compare(self, ticket: Ticket, made: Made, member: _Member) -> None:
        """Two actors that had the same ticket must have given the same (debug switch)."""
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
            self._fail_all(
                f"fetch function is not deterministic: calls from {call.first} on of epoch "
                f"{call.epoch} gave other rows in {member.name} than in another actor"
            )

    def _on_end(self, generation: int, error: BaseException | None, how: str | None = None) -> None:
        """An actor has ended, or has left; or its process, which has ended as `how` says."""
        with self._lock:
            member = self._members.get(generation)
            if member is None:
                return
            told, is_node = self.cluster.how(error)
            cause = getattr(error, "cause", None)
            is_lost = isinstance(cause, ConnectionError)
            if is_lost and not self._ledger.generations:
                self._fail_all(f"no actor reaches this process: {cause}")
            # Where an actor says itself what went wrong, it lives.
            self._bury(member, how or told, is_node, is_actor=error is not None and cause is None)

    def _bury(self, member: _Member, how: str, is_node: bool, is_actor: bool = False) -> None:
        """A process is dead, or is taken for it; under the lock. `is_node`: no call is to blame.
        `is_actor`: its actor is dead too."""
        line = member.line

        def begun(ticket: Ticket, number: int, place: int) -> int:
            message = ticket.payload.message
            if is_node or line is None or not isinstance(message, Calls):
                return 0
            return line.num_begun(number, place, message.most_calls)

        del self._members[member.generation]
        now = time.monotonic()
        self._note_busy(now)
        lost = self._ledger.remove(member.generation, begun)
        if not self._is_closed:
            self._num_deaths += not member.actor.is_retired
            # Of a host that has ended, all actors end at once, and none is to blame.
            self._num_stillborn += not (member.has_answered or is_node)
            logger.warning("%s of the fetch function %s", member.name, how)
        ended = Ended(member.pid, f"on {member.place} {how}")
        for ticket, num_begun, num_deaths in lost:
            self._fail(ticket, Lost(ended, num_begun, num_deaths))
        self._drop(member, is_actor)
        if self._num_stillborn > MOST_STILLBORN:
            self._fail_all(
                f"{MOST_STILLBORN} actors ended one after the other before one of them had "
                f"answered; the last one, {member.name}, {how}"
            )
        if not self._ledger.generations and self._alone_since is None:
            self._alone_since = now
        if not (self._is_closed or self._failure):
            self._fill_up()
            self._issue()

    def _let_go(self, member: _Member) -> None:
        """An actor is not needed any more; under the lock."""
        self._members.pop(member.generation, None)
        self._ledger.remove(member.generation)
        self._drop(member)

    def _drop(self, member: _Member, is_actor: bool = False) -> None:
        if self._ports is not None:
            self._ports.allowed.pop(member.public, None)
            self._ports.remove(member.generation)
        if member.line is not None:
            member.line.close()
        actor = member.actor
        actor.members.remove(member)
        is_last = actor.is_retired and not actor.members
        if not (is_actor or is_last or self._per == 1):
            self.cluster.end(actor.handle, member.generation)
            return
        if actor in self._actors:
            self._actors.remove(actor)
        self.cluster.kill(actor.handle)

    # ---- what is told

    def stack(self, ident: int | None) -> str:
        """Where the actor is that a thread waits for."""
        with self._lock:
            ticket = self._asked.get(ident or 0)
            if ticket is None:
                return ""
            member = next(
                (self._members[one] for one in ticket.attempts if one in self._members), None
            )
        if member is None:
            return f"no actor of the fetch function is free: {self.cluster.room()[0]}"
        return f"{member.name}:\n{self.cluster.stack(member.actor.handle, member.generation)}"

    def counts(self) -> ExecutorCounts:
        """The actors that are ready, those that have ended, and where they are."""
        with self._lock:
            ready = [self._members[one] for one in self._ledger.generations]
            nodes = Counter(member.place for member in ready)
            return ExecutorCounts(
                processes=len(ready),
                busy=self._ledger.num_busy,
                restarts=self._num_deaths,
                bytes=sum([member.line.blocks.num_bytes for member in ready if member.line]),
                kind="actors",
                nodes=tuple(sorted(nodes.items())),
            )

    def pids(self) -> list[int]:
        """The process ids of the actors that are ready."""
        with self._lock:
            return [self._members[one].pid for one in self._ledger.generations]


def _digests(made: Made) -> list[int]:
    """A digest of each chunk, and of the end of the epoch; of a chunk that is no tuple of arrays
    none can be told."""
    chunks: Any = made.chunks
    found = [digest_chunk(chunk) if isinstance(chunk, tuple) else 0 for chunk in chunks]
    return [*found, _END] if made.outcome == END else found


def _bytes_of(descriptor: int) -> bytes:
    """What lies in a memfd."""
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0)


# ---- What a feed is run on


class RayExecutor(ProcessExecutor):
    """Runs the fetch function of one feed in actors, new ones for each of its streams. Frozen.

    Raises `ConfigError` where the function cannot be sent, and where there is no Ray.
    """

    def __init__(self, options: RayActors, fetch: Any) -> None:
        super().__init__(options, fetch)
        load_ray()

    def begin(self, spec: StreamSpec, run: RunSpec) -> RayExecution:
        return RayExecution(self, spec, run)


class RayExecution(ProcessExecution):
    """The fetch function of one stream, in actors. Fetcher threads call it."""

    is_far = True

    def _make_pool(self) -> ActorPool:
        options, spec = self._executor.options, self._given
        assert isinstance(options, RayActors)
        return ActorPool(
            options, moves=spec.pure or spec.seekable, debug=self.run.debug,
            patience_s=self.run.timeout_s / 2,
        )  # fmt: skip

    def _places(self) -> int:
        # Each worker may be in any actor, and is in one at a time.
        return self._given.num_workers

    def watch(self, stats: StreamStats) -> None:
        assert isinstance(self._pool, ActorPool)
        self._pool.watch(stats)
