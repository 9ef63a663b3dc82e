"""The actors of a cluster: started, met, scaled and ended for a pool.

One thread receives what all of them say, and looks every now and then whether there are as many as
the stream needs. Ray's threads leave word for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from feeder.errors import ConfigError
from feeder.executors.actor import HELLO, Greeting, Invitation
from feeder.executors.cluster import Cluster, load_ray
from feeder.executors.ledger import Scaling, Seen
from feeder.executors.lines import Framed, Mapped
from feeder.executors.options import RayActors
from feeder.executors.pool import Launcher, Member, Pool, State
from feeder.executors.ports import Ports, memory_of
from feeder.executors.processes import ProcessExecution, ProcessExecutor
from feeder.executors.wire import Wire, decode, encode
from feeder.workers.fetch.threads import ThreadGroup
from feeder.workers.stats import StreamStats
from feeder.workers.stream.spec import RunSpec, StreamSpec

logger = logging.getLogger("feeder")

_QUICK_S = 0.02
"""To send tickets to another host and back takes a twentieth of it (2026-11-25)."""

_MOST_UNMADE = 4
"""Of so many actors in a row none came to say hello: what hinders them is no accident."""

_ROOM_TOLD_S, _ROOM_S = 5.0, 60.0
"""After so long without one actor it is logged that they wait for room, and then it is an error. A
cluster that grows on demand takes less than a minute for a host that stands by (2026-11-25)."""

_TICK_S = 0.25
"""How often it is looked whether tickets are late, and whether there is room."""

_JOIN_S = 10.0
"""How long the receiving thread may take to end."""

DATA = "FEEDER_RAY_DATA"
"""The variable that says by which way chunks come: "mapped", which is the default, by shared memory
on one host and otherwise by frames; or "frames" everywhere."""


class _Actor:
    """An actor, and its processes. Owner: the pool's lock."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.members: list[_Process] = []
        self.state = State.COMING
        """Of its processes one came first; if it is retired, it ends with the last of them."""


class _Process(Member):
    """A process of an actor, which has one or several. Owner: the pool's lock."""

    def __init__(self, generation: int, actor: _Actor) -> None:
        super().__init__(generation)
        self.actor = actor
        self.host = ""
        self.node = ""
        self.public = b""
        self.asked_at = time.monotonic()

    @property
    def name(self) -> str:
        return f"actor {self.generation} (process {self.pid} on {self.place})"

    @property
    def place(self) -> str:
        """Its node: a host may have several."""
        return f"{self.host}/{self.node[:6]}" if self.node else "no node yet"


class Actors(Launcher):
    """Starts actors by Ray. What is received belongs to the receiving thread, all else to the
    pool's lock."""

    kind, kinds = "actor", "actors"
    quick_s = _QUICK_S
    repeats = True

    def __init__(self, options: RayActors, *, patience_s: float) -> None:
        self._options = options
        self.cluster = Cluster(options)
        """Ray."""
        self._room_s = min(_ROOM_S, patience_s)
        self.actors: list[_Actor] = []
        # Processes of each actor.
        self._per = 1
        self._num_unmade = 0
        self._scaling = Scaling(1, 1)
        self._stats: StreamStats | None = None
        # How long the last actor took to come; None until one has.
        self._start_s = 0.0
        self._buffers: Any = None
        # Since when there has been no actor; None while there is one.
        self._alone_since: float | None = None
        self._has_told = False
        self._ticked_at = 0.0
        self._told: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._posts: deque[list[bytes]] = deque()
        self._threads = ThreadGroup()
        self._receiver: int | None = None
        self.ports: Ports | None = None
        """Where they come in."""

    # ---- life

    def watch(self, stats: StreamStats) -> None:
        self._stats = stats

    def start(self, num: int) -> None:
        self.cluster.check()
        assert self.pool.load is not None
        self._buffers = _bytes_of(self.pool.load()[1])
        self._per = min(self._options.per_actor, num)
        most = -(-num // self._per)
        self._scaling = Scaling(min(self._options.fewest, most), most)
        way = os.environ.get(DATA, "mapped")
        if way not in ("mapped", "frames"):
            raise ConfigError(f"{DATA} is {way!r}, expected mapped or frames")
        self.ports = Ports(self.cluster.host(), way)
        self._alone_since = self._ticked_at = time.monotonic()
        self._threads.start("feeder actors", self._run, self.ports)
        with self.pool.lock:
            self.fill_up()

    def interrupt(self) -> None:
        self._wake()

    def close(self) -> None:
        self._threads.close(_JOIN_S)
        with self.pool.lock:
            for actor in self.actors:
                actor.state = State.RETIRED
            ports, self.ports = self.ports, None
        if ports is not None:
            ports.close()
        self._buffers = None

    def _wake(self) -> None:
        ports = self.ports
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

    # ---- the receiving thread

    def _run(self, ports: Ports) -> None:
        """Thread body: receive until the pool is closed."""
        self._receiver = threading.get_ident()
        try:
            while not self.pool.is_closed:
                self._receive(ports)
        except Exception as error:
            # Else who waits for an answer would wait until the timeout.
            logger.exception("the thread that hears actors failed")
            with self.pool.lock:
                self.pool.fail_all(f"the thread that hears actors failed: {error!r}")
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
                    if (member := self.pool.members.get(what)) is not None:
                        self.pool.hear(member)
        while self._told:
            call, args = self._told.popleft()
            call(*args)
        self._tick(time.monotonic())
        while self._posts:
            ports.send(self._posts.popleft())

    def _tick(self, now: float) -> None:
        pool = self.pool
        with pool.lock:
            if now - self._ticked_at < _TICK_S:
                return
            self._ticked_at = now
            # Before others are late: a ticket that was issued again is with its second actor now.
            self.replace_stuck(now)
            pool.ledger.late(now)
            pool.issue()
            self._scale(now)
            since = self._alone_since
        self.look_for_room(since, now)

    def replace_stuck(self, now: float) -> None:
        """Whoever hangs in a call that another one makes, or has made, is of no use; under the
        lock."""
        # Its answer is wanted where answers are compared.
        if self.pool.debug:
            return
        for generation in self.pool.ledger.stuck(now, self._start_s):
            self.pool.bury(
                self.pool.members[generation],
                "hangs in a call that another one makes",
                is_node=True,
            )

    def look_for_room(self, since: float | None, now: float) -> None:
        """Tell what is missing if there is no actor."""
        if since is None or self.pool.failure:
            return
        is_late, is_over = now - since >= _ROOM_TOLD_S, now - since >= self._room_s
        if not is_over and (not is_late or self._has_told):
            return
        why, help_ = self._what_is_missing()
        if is_over:
            with self.pool.lock:
                self.pool.fail_all(f"{why}; waited {now - since:.0f} s: {help_}")
        else:
            self._has_told = True
            logger.warning("%s; waiting", why)

    def _what_is_missing(self) -> tuple[str, str]:
        """Why no actor is ready, and what helps."""
        with self.pool.lock:
            # They were told where to come, and have not.
            coming = [one for actor in self.actors for one in actor.members if one.host]
            far = {one.host for one in coming if one.state is State.COMING}
            address = "" if self.ports is None else self.ports.address
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

    # ---- how many; under the lock

    def _scale(self, now: float) -> None:
        if self._stats is None:
            return
        pool = self.pool
        # Of actors: these come and go.
        seen = Seen(
            at=now, starved_s=self._stats.chunks.seconds(now),
            busy_s=pool.ledger.busy_s / self._per, ready=len(pool.ledger.generations) / self._per,
        )  # fmt: skip
        if self._scaling.look(seen):
            self.fill_up()

    def fill_up(self) -> None:
        """Have as many actors as there are to be, and their processes."""
        pool = self.pool
        if not pool.ledger.generations and self._alone_since is None:
            self._alone_since = time.monotonic()
        actors = [actor for actor in self.actors if actor.state is not State.RETIRED]
        try:
            for _ in range(self._scaling.wanted - len(actors)):
                actors.append(_Actor(self.cluster.start()))
                self.actors.append(actors[-1])
            for actor in actors:
                for _ in range(self._per - len(actor.members)):
                    self._add_to(actor)
        except Exception as error:
            pool.fail_all(f"no actor could be started: {error}")
            return
        for actor in self._surplus(actors):
            actor.state = State.RETIRED
            for member in list(actor.members):
                pool.retire(member)

    def _surplus(self, actors: list[_Actor]) -> list[_Actor]:
        """Who goes where there are too many: first those that are not ready, then the youngest."""
        num = len(actors) - self._scaling.wanted
        if num <= 0:
            return []
        # The state of a worker that can only be replayed stays where it is.
        free = [
            actor
            for actor in reversed(actors)
            if self.pool.moves
            or not any(self.pool.ledger.has_homes(one.generation) for one in actor.members)
        ]
        return sorted(free, key=lambda actor: any(map(_has_come, actor.members)))[:num]

    def _add_to(self, actor: _Actor) -> None:
        """Ask an actor for one more process."""
        member = _Process(self.pool.next_generation(), actor)
        generation = member.generation
        self.pool.members[generation] = member
        actor.members.append(member)
        self.cluster.hello(
            actor.handle, generation,
            lambda found, error: self.tell(self._on_hello, generation, found, error),
        )  # fmt: skip

    # ---- what happens

    def _member(self, generation: int) -> _Process | None:
        """A process that has not gone."""
        member = self.pool.members.get(generation)
        assert member is None or isinstance(member, _Process)
        return member

    def _on_hello(
        self, generation: int, found: Greeting | None, error: BaseException | None
    ) -> None:
        pool = self.pool
        with pool.lock:
            member, ports = self._member(generation), self.ports
            if member is None or ports is None or pool.is_closed:
                return
            if found is None:
                # Each of its processes is told of it.
                self._num_unmade += member.actor.state is not State.GONE
                member.actor.state = State.GONE
                how, is_node = self.cluster.how(error)
                if self._num_unmade >= _MOST_UNMADE and not is_node:
                    pool.fail_all(f"no actor could be started: the last one {how}")
                pool.bury(member, how, is_node=is_node)
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
        with self.pool.lock:
            member = self._member(generation)
            if member is None or member.state is not State.COMING or self.ports is None:
                wire.close()
                return
            assert self.pool.load is not None
            line = Mapped(wire, *self.pool.load())
            self.ports.add(wire, generation)
            self._is_ready(member, line)

    def _on_frames(self, identity: bytes, who: str, frames: list[Any]) -> None:
        """Something came by ZeroMQ, from the actor whose key it is."""
        member = self._member(int(who) if who.isdecimal() else -1)
        if member is None:
            return  # Fenced: another actor has its place.
        try:
            if member.state is not State.COMING:
                message = decode(frames[0].buffer)
                self.pool.heard(member, message, [memory_of(frame) for frame in frames[1:]])
                return
            if bytes(frames[0]) != HELLO.pack(member.generation):
                raise ValueError("expected a hello")
            with self.pool.lock:
                assert self.pool.load is not None
                # It comes before every ticket.
                self._posts.append([identity, encode(self.pool.load()[0]), self._buffers])
                self._is_ready(member, Framed(self.post, identity))
        except (ValueError, OSError) as error:
            self.pool.cannot_read(member, error)

    def _is_ready(self, member: _Process, line: Mapped | Framed) -> None:
        """An actor may be asked; under the lock."""
        self._alone_since, self._has_told = None, False
        if member.actor.state is State.COMING:
            # Later processes of it come sooner.
            member.actor.state = State.READY
            self._start_s = time.monotonic() - member.asked_at
        self.pool.join(member, line)
        self.pool.issue()

    def _on_end(self, generation: int, error: BaseException | None, how: str | None = None) -> None:
        """An actor has ended, or has left; or its process, which has ended as `how` says."""
        pool = self.pool
        with pool.lock:
            member = self._member(generation)
            if member is None:
                return
            told, is_node = self.cluster.how(error)
            cause = getattr(error, "cause", None)
            is_lost = isinstance(cause, ConnectionError)
            if is_lost and not pool.ledger.generations:
                pool.fail_all(f"no actor reaches this process: {cause}")
            # Where an actor says itself what went wrong, it lives.
            if error is not None and cause is None:
                member.actor.state = State.GONE
            pool.bury(member, how or told, is_node=is_node)

    def hung_up(self, member: Member) -> None:
        # If the process has ended, Ray says how. A process that has left hangs up first.
        if self.ports is not None:
            self.ports.remove(member.generation)
        member.line.close()

    def end(self, member: Member) -> str:
        assert isinstance(member, _Process)
        if self.ports is not None:
            self.ports.allowed.pop(member.public, None)
            self.ports.remove(member.generation)
        member.line.close()
        actor = member.actor
        actor.members.remove(member)
        is_last = actor.state is State.RETIRED and not actor.members
        if not (actor.state is State.GONE or is_last or self._per == 1):
            self.cluster.end(actor.handle, member.generation)
            return ""
        if actor in self.actors:
            self.actors.remove(actor)
        self.cluster.kill(actor.handle)
        return ""

    # ---- what is told

    def look(self, member: Member) -> str:
        assert isinstance(member, _Process)
        return self.cluster.stack(member.actor.handle, member.generation)

    def nobody(self) -> str:
        return f"no actor of the fetch function is free: {self.cluster.room()[0]}"


def _has_come(member: Member) -> bool:
    return member.state is State.READY


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

    def _make_pool(self) -> Pool:
        options, spec = self._executor.options, self._given
        assert isinstance(options, RayActors)
        launcher = Actors(options, patience_s=self.run.timeout_s / 2)
        return Pool(launcher, moves=spec.pure or spec.seekable, debug=self.run.debug)
