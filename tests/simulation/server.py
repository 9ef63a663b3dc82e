"""A server's process: the real I/O loop, group, membership and delivery, turn by turn."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import zmq

from feeder.errors import FeedError, ProtocolError
from feeder.service.net.security import Event
from feeder.service.protocol import messages as say
from feeder.service.protocol.membership import RETURN_S
from feeder.service.server.delivery import Lease
from feeder.service.server.factory import FeedFactory
from feeder.service.server.group import ConsumerGroup
from feeder.service.server.io_loop import ServerLoop
from feeder.service.server.run import Request, ServedFeed
from simulation.faults import Plan
from simulation.network import DescriptorListener, Router, Waker
from simulation.process import Process
from simulation.stream import Slots
from simulation.world import Violation

if TYPE_CHECKING:
    from simulation.fleet import Fleet


def next_event(monitor: Router) -> Event | None:
    """Stands for `feeder.service.net.security.read_event`."""
    return monitor.events.popleft() if monitor.events else None


class Log:
    """Stands for the log of what peers do wrong: two kinds of lines are defects."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def warn(self, text: str, what: str | None) -> None:
        self._server.note(text % what)

    def fail(self, text: str, error: Exception) -> None:
        raise Violation(f"errors: {text % error!r}") from error


class ServerProcess(Process):
    """One server: it lives, may be stopped and continued, and dies once."""

    def __init__(self, plan: Plan, factory: FeedFactory, number: int, address: str) -> None:
        super().__init__(f"server {number}")
        world = self.world
        self.plan, self.address = plan, address
        self._makes_at = math.inf
        self._num_runs = 0
        self._late: deque[Any] = deque()
        self.fleets: list[Fleet] = []
        """The actors of each of its runs, the last one's at the end."""
        self.gone: set[int] = set()
        """Descriptors of consumers that have hung up."""
        self.router = Router()
        self.descriptors = DescriptorListener(f"{address}.{number}.arenas")
        self.waker = Waker()
        self.waker.notify = self.notify
        slots = Slots(self, factory)
        self.feed = ServedFeed(factory, slots, self.waker.wake)
        self.feed.start_run = self._start_run  # type: ignore[method-assign]
        self.slots = slots
        self.known_ended: set[int] = set()
        """Seats of which it has said that they had ended, since the job was put back."""
        self.closes_in_send = False
        """Whether it is closed by another thread while its I/O thread sends a batch, after which
        others and the end are to be sent."""
        self._halted_since: float | None = None
        run_id = world.urandom(16)
        self.group = ConsumerGroup(self.feed, run_id, plan.lease_s)
        router = self.router
        listener: Any = SimpleNamespace(
            router=router, monitor=router.events, reader=router, most_bytes=2**20, addresses=[]
        )
        listener.monitor = router
        descriptors: Any = self.descriptors
        waker: Any = self.waker
        self.loop = ServerLoop(
            {factory.name: self.group}, [listener], descriptors, waker, exit_when=plan.exit_when
        )
        self.group.delivery.send = self._send
        self.loop._refuse = self._refuse  # type: ignore[method-assign]
        log: Any = Log(self)
        self.loop._log = self.loop._guard._log = log
        poller: Any = self.loop._poller
        poller.find = self._ready
        self.is_over = False
        """Whether it has ended by itself."""
        self.at_end: Callable[[], None] = lambda: None
        """Called when it does."""
        world.servers[address] = self
        world.unix[self.descriptors.path] = self
        self.notify()

    def note(self, what: str) -> None:
        if self.world.history is not None:
            self.world.note(self.name, what)

    def next_run(self) -> int:
        """The number of the next run of the feed."""
        self._num_runs += 1
        return self._num_runs

    def num_slots(self, queue: int, slot_bytes: int) -> int:
        return self.group.num_slots(queue, slot_bytes)

    def _send(self, peer: Any, message: say.Message, frames: Any) -> bool:
        if self.world.history is not None:
            link = self.router.links.get(peer.identity)
            to = peer.identity.decode() if link is None else link.name
            self.note(f"says {told(message)} to {to}")
        is_sent = self.loop.send(peer, message, frames)
        if self.closes_in_send and isinstance(message, say.Batches):
            run = self.feed.run
            if run is not None and any(len(one) and one.result for one in run.outboxes):
                # A call to the system, in which other threads run.
                self.note("is closed meanwhile")
                self.feed.close()
                self.loop._stopping = "it was closed"
        return is_sent

    def _refuse(self, peer: Any, error: FeedError) -> None:
        # An older question that comes late is the one mistake that nobody has made.
        if isinstance(error, ProtocolError) and "after a later one" not in str(error):
            raise Violation(f"errors: {self.name} cannot take what it hears: {error}")
        ServerLoop._refuse(self.loop, peer, error)

    # ---- turns

    def tell(self, event: Event) -> None:
        """Something has happened to one of its connections."""
        if not self.is_dead:
            self.router.events.append(event)
            self.notify()

    def _step(self) -> None:
        loop = self.loop
        try:
            loop._step(0)
        except Exception as error:
            raise Violation(f"errors: {self.name} failed: {error!r}") from error
        if loop._stopping is not None:
            return self.close()
        self._check_records()
        self._check_waits()
        if self.feed.has_work:
            self._make_by(self.world.now)
        if loop.exit_condition.is_over:
            self.is_over = True
            self.note("ends by itself")
            self.at_end()
            return self.close()
        timeout = loop._timeout()
        if timeout >= 0:
            self._turn_by(self.world.now + timeout / 1000)

    def _ready(self) -> list[tuple[Any, int]]:
        found: list[tuple[Any, int]] = [(number, zmq.POLLIN) for number in sorted(self.gone)]
        if self.router.inbox or self.router.events:
            # One object stands for the ROUTER and its monitor.
            found.append((self.router, zmq.POLLIN))
        if self.waker.is_awake:
            found.append((self.waker.number, zmq.POLLIN))
        if self.descriptors.waiting:
            found.append((self.descriptors.number, zmq.POLLIN))
        return found

    def _make_by(self, when: float) -> None:
        if when < self._makes_at:
            self._makes_at = when
            wait = self.plan.make_s * self._draws.random()
            self.world.at(when + wait, self.turn_of, self._make)

    def _make(self) -> None:
        """A turn of the maker."""
        self._makes_at = math.inf
        if not self.feed.has_work:
            return
        wait_s = self.feed.rewinds_in(self.world.now)
        if wait_s and self.feed._asked is not None:
            return self._make_by(self.world.now + wait_s)
        self.note("makes a run" if self.feed._asked else "ends a run")
        self.feed.make_next()

    def turn_of(self, do: Any) -> None:
        """A turn of one of its threads, which waits while the process is stopped."""
        if self.is_dead:
            return
        if self.is_paused:
            self._late.append(do)
        else:
            do()

    # ---- what happens to it

    def pause(self) -> None:
        self.is_paused = True

    def go_on(self) -> None:
        self.is_paused = False
        late, self._late = self._late, deque()
        for do in late:
            self.world.after(0.0, self.turn_of, do)
        self.notify()

    def kill(self, *, is_killed: bool = True) -> None:
        """SIGKILL."""
        self._leave()
        for link in [*self.router.links.values()]:
            link.lose_server(is_killed=is_killed)
        for pair in self.descriptors.pairs:
            # After what was sent, where it is closed.
            wait_s = 0.0 if is_killed else 2 * self.plan.delay_s
            self.world.after(wait_s, pair.end_below)

    def close(self) -> None:
        """It ends as `Server.close` does."""
        if self.loop._stopping is None:
            if not self.is_over:
                self.feed.close()
                self.loop._stopping = "it was closed"
            self.loop._step(0)
        self.loop._farewell()
        self.kill(is_killed=False)

    def _leave(self) -> None:
        self.is_dead = True
        for fleet in self.fleets:
            fleet.close()
        if self.world.servers.get(self.address) is self:
            del self.world.servers[self.address]
        self.world.unix.pop(self.descriptors.path, None)

    # ---- what holds

    def _check_records(self) -> None:
        """A seat has the record of the consumer that holds it, or one that says that nobody does;
        and who speaks for a lease that is over holds none."""
        records = self.group.membership.members
        for member in records:
            if member.has_lease != isinstance(member, Lease):
                raise Violation(f"holders: {member.name} is {member.state}, by a {type(member)}")
        for _, lease in self.loop._leases.values():
            if lease.has_lease != (records[lease.seat] is lease):
                raise Violation(f"holders: {lease.name} is {lease.state}, and not by its record")

    def _check_waits(self) -> None:
        """The feed waits for nobody who is there, and for nobody at all for longer than it says."""
        feed = self.group.membership
        here = [member for member in feed.members if member.has_lease]
        missing, ended = feed.news()
        # A trainer that starts anew trains with all queues: then a past end says nothing.
        if not any(member.starts for member in feed.members):
            if self.known_ended.intersection(missing):
                raise Violation(f"waits: {self.name} waits for {missing}, who had had everything")
            self.known_ended.update(ended)
            self._check_holders(missing)
        is_held = all(member.has_attached and member.lives for member in here)
        comes_back = all(member.rejoins for member in here)
        if not (feed._is_halted and here and is_held and (comes_back or not missing)):
            self._halted_since = None
            return
        since = self._halted_since = self._halted_since or self.world.now
        most_s = min(RETURN_S, feed.lease_s) if missing else 0.0
        if self.world.now > since + most_s + 0.1:
            raise Violation(
                f"waits: {self.name} has waited for {missing} for {self.world.now - since:.1f} s"
            )

    def _check_holders(self, missing: tuple[int, ...]) -> None:
        """Where nobody starts, the feed waits for no consumer with which it has run."""
        for member in self.group.membership.members:
            if member.seat in missing and member.lives and member.has_run:
                raise Violation(f"waits: {self.name} waits for {member.who}, with whom it has run")

    def _start_run(self, request: Request) -> None:
        feed = self.group.membership
        # Where the feed runs with a consumer, that its queue had ended before is forgotten.
        self.known_ended.difference_update(
            one.seat for one in feed.members if one.has_lease and not one.finished
        )
        # Who hangs before it can take batches is not counted on.
        counted = [one for one in feed.members if one.has_attached or one.lives]
        starting = [one.seat for one in counted if not one.rejoins]
        if starting and feed.missing():
            raise Violation(f"waits: {self.name} begins without {feed.missing()}: {starting} start")
        ServedFeed.start_run(self.feed, request)

    def check_slots(self) -> None:
        """At the end, when nobody has a lease: all slots are free."""
        self.feed.stop_run()
        old = self.feed._old
        if old is not None:
            old.join(0.0)
        self.slots.reopen()
        if self.slots.num_leased:
            raise Violation(f"slots: {self.slots.num_leased} of {self.name} are never free again")


def told(message: Any) -> str:
    """A message in few words."""
    name = type(message).__name__
    parts = []
    for key in ("queue", "intent", "sequence", "pending", "slots", "queues", "ended", "text",
                "attempt", "undecided", "takeover", "begun", "reason"):  # fmt: skip
        value = getattr(message, key, None)
        if value not in (None, "", (), False):
            parts.append(f"{key}={value!r}"[:90])
    if isinstance(message, say.Batches):
        parts += [f"step {group.step}+{len(group.slots)}" for group in message.groups]
    return f"{name}({', '.join(parts)})"
