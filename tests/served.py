"""A served feed in one thread, on virtual time: servers, consumers and the network between them.

`serving` and `reading` look like those of `conformance.served`, and what they give is the real
thing: `feeder.connect` makes the consumer, and the server's I/O loop, group, membership and
delivery are those of `feeder.serve`. Stand-ins of `simulation` take the place of sockets, threads
and clocks. Where the test would wait, for a batch or for a snapshot, the world goes on instead,
event by event, until that has come: a lease of 30 s takes no time, and nothing happens by chance.

    with serving(factory, queues=2, lease=3) as server, reading(server, queue=0) as left:
        steps = Aside(lambda: [batch.step for batch in left])   # in turns with the test
        pass_time(3.1)
        server.kill()

Tests that use it ask for the fixture `world` (`tests/feeder/service/conftest.py`). Fetch functions
are pure here: `fetch(call)`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import feeder
from feeder import waking
from feeder.errors import ConfigError
from feeder.service.client import connect as connecting
from feeder.service.client import consumer as consumers
from feeder.service.client.io_loop import ClientLoop
from feeder.service.server.factory import begin_at, make_coordinator, make_feed_factories
from feeder.service.server.part import read_queues
from simulation.faults import Plan
from simulation.network import Link
from simulation.process import Process
from simulation.server import ServerProcess
from simulation.simulate import stand_ins
from simulation.stream import Feed
from simulation.world import World, real_time, virtual_time

MOST_S = 600.0
"""Seconds of virtual time after which nothing is waited for any more."""


class Parked(NamedTuple):
    """A thread that waits for its turn."""

    may_go_on: Callable[[], bool]
    turn: threading.Event


class Scene:
    """What is on the stage of one test. One thread of several goes on at a time: the one that is in
    none of `_parked`; so nothing here needs a lock."""

    def __init__(self) -> None:
        self.world = World("a test", most_events=10**6)
        self.servers: list[Server] = []
        self.consumers: list[ConsumerProcess] = []
        self.plan = Plan(seed="a test", feed=Feed(1, 1, 1, 1, 1, "keep"), delay_s=0.001)
        self._parked: list[Parked] = []

    def wait(self, is_there: Callable[[], bool], seconds: float = MOST_S) -> bool:
        """Let the world go on, and others who can, until something is there or the time is up."""
        ends = self.world.now + seconds
        while not is_there():
            other = next((one for one in self._parked if one.may_go_on()), None)
            if other is not None:
                self._give_way(other, lambda: is_there() or self.world.now >= ends)
            elif min(self.world.next_at, ends) < ends:
                self.world.step()
            else:
                self.world.now = ends
                assert seconds < MOST_S, "it was waited for in vain"
                return False
        return True

    def _give_way(self, other: Parked, may_go_on: Callable[[], bool]) -> None:
        mine = Parked(may_go_on, threading.Event())
        self._parked.append(mine)
        self._parked.remove(other)
        other.turn.set()
        mine.turn.wait()

    def begin(self, body: Callable[[], None]) -> threading.Thread:
        """Run something in a thread of its own, which has the first turn."""
        first = Parked(lambda: True, threading.Event())

        def run() -> None:
            first.turn.wait()
            body()
            # Somebody has to go on: who can, or else who waits longest, and has the world go on.
            rest = [one for one in self._parked if one.may_go_on()] or self._parked
            rest[0].turn.set()
            self._parked.remove(rest[0])

        thread = threading.Thread(target=run)
        thread.start()
        self._parked.append(first)
        self._give_way(first, lambda: True)
        return thread

    def close(self) -> None:
        """All are gone, as by SIGKILL."""
        for consumer in self.consumers:
            consumer.kill()
        for server in self.servers:
            if not server.is_dead:
                server.kill()
            server.let_go()
        # Whoever holds the scene must not hold their memory.
        self.servers.clear()
        self.consumers.clear()


class ConsumerProcess(Process):
    """The process that a consumer is in: the turns of its I/O thread."""

    is_cut_off = breaks_early = breaks_late = has_all = has_no_memory = False
    lacks_start_s = 0.0

    def __init__(self, loop: ClientLoop) -> None:
        scene = here()
        super().__init__(f"consumer {len(scene.consumers)}")
        self.loop = loop
        self.job = SimpleNamespace(plan=scene.plan)
        self.rank = SimpleNamespace()
        self.links: list[Link] = []
        loop._connect = self._connect  # type: ignore[assignment]
        loop.waker.notify = self.notify  # type: ignore[attr-defined]
        scene.consumers.append(self)
        self.notify()

    def _connect(self, address: str) -> Link:
        self.links.append(Link(self, address, len(self.links)))  # type: ignore[arg-type]
        return self.links[-1]

    @property
    def is_over(self) -> bool:
        """Whether its I/O thread has ended."""
        return self.is_dead

    def _step(self) -> None:
        loop = self.loop
        try:
            loop._step()
        except ConfigError as error:
            return self._finish(error)
        if loop.machine.state == "over":
            return self._finish(feeder.ClosedError("the consumer is closed"))
        nearest = loop.machine.next_deadline
        if nearest < math.inf:
            self._turn_by(max(nearest, self.world.now + 0.0005))

    def _finish(self, failure: feeder.FeedError) -> None:
        """The end of `ClientLoop.run`."""
        self.is_dead = True
        self.loop._end(failure)

    def pause(self) -> None:
        """SIGSTOP."""
        self.is_paused = True

    def go_on(self) -> None:
        """SIGCONT."""
        self.is_paused = False
        self.notify()

    def kill(self) -> None:
        """SIGKILL: the server is told nothing."""
        if not self.is_dead:
            self.is_dead = True
            for link in self.links:
                link.close()
            lease = self.loop.inbox.lease
            if lease is not None:
                lease.close()
            self.loop._ending = feeder.ClosedError("the consumer was killed")


class Threads:
    """Stands for the `ThreadGroup` of a consumer."""

    def start(self, name: str, run: Any, *args: Any) -> None:
        self._process = ConsumerProcess(run.__self__)

    def close(self, seconds: float) -> None:
        here().wait(lambda: self._process.is_dead, seconds + 1.0)


class Server(ServerProcess):
    """A server of one feed."""

    def __init__(self, feeds: Any, address: str, settings: dict[str, Any]) -> None:
        scene = here()
        is_factory = callable(feeds)
        coordinator = make_coordinator(feeds) if is_factory else feeds
        queues, part = read_queues(settings.pop("queues", None))
        (factory,) = make_feed_factories(
            coordinator, feeds if is_factory else None, queues, settings.pop("replicas", 1),
            part=part,
        )  # fmt: skip
        begin_at([factory], settings.pop("resume", None), None, settings.pop("skip", 0))
        plan = scene.plan
        super().__init__(
            Plan(
                seed=plan.seed, feed=plan.feed, delay_s=plan.delay_s,
                lease_s=settings.pop("lease", 30.0), exit_when=settings.pop("exit_when", "never"),
            ),
            factory, len(scene.servers), address,
        )  # fmt: skip
        assert not settings, f"nobody knows {settings}"
        self.queues = {factory.name: len(factory.config.devices)}
        self.addresses = [address]
        scene.servers.append(self)

    def close(self) -> None:
        if not self.is_dead:
            super().close()

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended by itself."""
        return here().wait(lambda: self.is_dead, seconds)

    @property
    def failure(self) -> Any:
        """Why it has ended by itself."""
        return self.loop.exit_condition.failure

    def let_go(self) -> None:
        """Free the memory, and what others have not taken of it."""
        self.feed.stop_run()
        old, self.feed._old = self.feed._old, None
        if old is not None:
            old.join(0.0)
        self.slots.drop()
        self.descriptors.close()


class Aside:
    """A function that runs in turns with the test, whose result or error is asked for later."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self.is_over = False
        self._thread = here().begin(partial(self._run, function))

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self._result = function()
        except BaseException as error:
            self._error = error
        self.is_over = True

    def result(self) -> Any:
        """Wait for the function and return what it did, or raise what it did."""
        here().wait(lambda: self.is_over)
        self._thread.join(10.0)
        if self._error is not None:
            raise self._error
        return self._result


_scenes: list[Scene] = []


def here() -> Scene:
    """The scene of the test that runs."""
    return _scenes[-1]


def pass_time(seconds: float) -> None:
    """Let so many seconds go by."""
    ends = here().world.now + seconds
    here().wait(lambda: here().world.now >= ends, seconds)


def wait_until(is_there: Callable[[], bool]) -> None:
    """Let the world go on until something is so."""
    here().wait(is_there)


@contextmanager
def serving(feeds: Any, address: str = "", **settings: Any) -> Iterator[Server]:
    """Serve one feed for as long as the context lasts: `queues`, `replicas`, `lease`, `exit_when`,
    `resume` and `skip` are those of `feeder.serve`."""
    server = Server(feeds, address or f"ipc:///virtual/{len(here().servers)}", settings)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def reading(*servers: Server | str, **settings: Any) -> Iterator[feeder.Consumer]:
    """Connect to servers, or to addresses, for as long as the context lasts."""
    addresses = [one if isinstance(one, str) else one.address for one in servers]
    with feeder.connect(addresses, **settings) as consumer:
        yield consumer


def process_of(consumer: feeder.Consumer) -> ConsumerProcess:
    """The process that a consumer is in."""
    return next(one for one in here().consumers if one.loop is consumer._loop)


@contextmanager
def outside() -> Iterator[None]:
    """Meanwhile threads and clocks are real ones: for feeds in this process."""
    with real_time(), patch.object(waking.OneShotEvent, "wait", _WAIT):
        yield


_WAIT = waking.OneShotEvent.wait


@contextmanager
def one_thread() -> Iterator[Scene]:
    """Everything is served in one thread and on virtual time."""

    def wait(event: waking.OneShotEvent, seconds: float = -1) -> bool:
        here().wait(lambda: not event._lock.locked(), MOST_S if seconds < 0 else seconds)
        return event._lock.acquire(blocking=False)

    security: Any = lambda keys: SimpleNamespace(close=lambda: None)  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(virtual_time())
        stack.enter_context(stand_ins())
        stack.enter_context(patch.object(waking.OneShotEvent, "wait", wait))
        stack.enter_context(patch.object(consumers, "ThreadGroup", Threads))
        stack.enter_context(patch.object(connecting, "Security", security))
        scene = Scene()
        _scenes.append(scene)
        try:
            yield scene
            # What the test has begun it has waited for.
            scene.close()
        finally:
            _scenes.pop()
            World("no more")
