"""The network of a world: connections that delay, break and lose, and what sockets are to the code.

A `Link` is one connection: a consumer has it in the place of its `Connection`, and a server finds
its messages at its `Router`. Within a link messages keep their order; between links they do not.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from feeder.errors import ConnectTimeout, FeedError, TransportError
from feeder.service.memory.fdpass import Given, OwnLimitError
from feeder.service.net.connection import Ready
from feeder.service.net.guard import ConnectionGuard
from feeder.service.net.listener import Received
from feeder.service.net.security import Event
from feeder.service.protocol import messages as say
from feeder.service.protocol.coding import decode
from simulation.world import World

if TYPE_CHECKING:
    from simulation.server import ServerProcess
    from simulation.trainer import TrainerProcess

RECONNECT_S = 0.1
"""How often ZeroMQ tries an address where nobody listens."""


class Waker:
    """Stands for `feeder.waking.Waker`."""

    def __init__(self) -> None:
        self.number = next(World.current.numbers)
        self.is_awake = False
        self.notify: Callable[[], None] = lambda: None

    def fileno(self) -> int:
        return self.number

    def silence(self) -> None:
        self.notify = lambda: None

    def wake(self) -> None:
        self.is_awake = True
        self.notify()

    def clear(self) -> None:
        self.is_awake = False


class Poller:
    """Stands for `zmq.Poller`: `find` says what is ready."""

    def __init__(self) -> None:
        self.find: Callable[[], list[tuple[Any, int]]] = list

    def register(self, socket: Any, flags: int = 0) -> None:
        pass

    def unregister(self, socket: Any) -> None:
        pass

    def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        return self.find()


class Guard(ConnectionGuard):
    """The real guard of connections, which measures none."""

    def check(self, now: float) -> float:
        return math.inf


class Frame:
    """A frame as ZeroMQ gives it."""

    __slots__ = ("buffer", "number")

    def __init__(self, data: Any, number: int = -1) -> None:
        self.buffer = memoryview(data)
        self.number = number

    def get(self, option: int) -> int:
        """The descriptor of the connection that it came over (SRCFD)."""
        return self.number


class Router:
    """A server's ROUTER, its reader and its monitor in one."""

    def __init__(self) -> None:
        self.links: dict[bytes, Link] = {}
        self.inbox: deque[Received] = deque()
        self.events: deque[Event] = deque()
        self._begun: list[Any] | None = None

    def send(self, part: Any, flags: int = 0) -> None:
        """Send a part of a message, as the server does, the consumer's identity first."""
        self._send([part], flags)

    def send_multipart(self, parts: Sequence[Any], flags: int = 0, *, copy: bool = True) -> None:
        """Send the last parts of a message."""
        self._send(parts, flags)

    def _send(self, parts: Sequence[Any], flags: int) -> None:
        if self._begun is None:
            self._link(parts[0])
        begun = [*(self._begun or ()), *parts]
        self._begun = begun if flags & zmq.SNDMORE else None
        if self._begun is None:
            identity, data, *frames = begun
            self._link(identity).send_down(data, frames)

    def _link(self, identity: bytes) -> Link:
        link = self.links.get(identity)
        if link is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        return link

    @property
    def is_behind(self) -> bool:
        """Whether there are messages that have not been read."""
        return bool(self.inbox)

    def read_messages(self) -> Iterator[Received]:
        inbox = self.inbox
        while inbox:
            yield inbox.popleft()


class Link:
    """One connection of a consumer; its interface is that of `feeder.service.net.connection`."""

    def __init__(self, trainer: TrainerProcess, address: str, number: int) -> None:
        self.world = world = World.current
        self.name = f"{trainer.name}/{number}"
        self._trainer = trainer
        self._address = address
        self._draws = world.draws(self.name)
        self.connected_at: float | None = None
        self.reached_at: float | None = None
        self.is_own = False
        self._server: ServerProcess | None = None
        self.identity = self.name.encode()
        self.number = next(world.numbers)
        self._unsent: list[bytes] = []
        self.inbox: deque[tuple[Any, list[Any]]] = deque()
        self._has_news = self._hung_up = self.is_closed = False
        self._trouble: FeedError | None = None
        self._attachment: Attachment | None = None
        # In each direction: when the last message arrives, and when the connection ends.
        self._up_at = self._down_at = 0.0
        self._up_ends = self._down_ends = math.inf
        self.slow_s = 0.0
        """Seconds that each message takes longer."""
        self._try()

    # ---- the consumer's end

    def wake_with(self, waker: Any) -> None:
        pass

    def watch(self, attachment: Any) -> None:
        self._attachment = attachment
        if attachment is not None:
            attachment.watcher = self
            self._hung_up = attachment.pair.is_dead_below

    def unwatch(self) -> None:
        if self._attachment is not None:
            self._attachment.watcher = None
        self._attachment, self._hung_up = None, False

    def hang_up(self) -> None:
        """The server's end of the unix connection is gone."""
        self._hung_up = True
        self._trainer.notify()

    def poll(self, timeout_s: float) -> Ready:
        return Ready(bool(self.inbox), self._has_news or self._hung_up)

    def why_too_long(self, num_bytes: int) -> str | None:
        return None

    def leads_to_itself(self) -> bool:
        return self.is_own

    def has_moved(self) -> bool:
        return False

    def send(self, data: bytes) -> None:
        if self._server is None:
            self._unsent.append(data)
        else:
            self._send_up(data)

    def receive(self) -> Iterator[tuple[Any, list[Any]]]:
        for _ in range(64):
            if not self.inbox:
                return
            yield self.inbox.popleft()

    def trouble(self) -> FeedError | None:
        self._has_news = False
        if self._trouble is not None:
            return self._trouble
        return TransportError("the server is gone") if self._hung_up else None

    def close(self) -> None:
        """The consumer closes it: what has not gone out may be lost."""
        if not self.is_closed:
            self.is_closed = True
            self.inbox.clear()
            self._end_up()

    @property
    def has_no_memory(self) -> bool:
        """Whether its consumer cannot map memory."""
        return self._trainer.has_no_memory

    # ---- the way

    def _delay(self) -> float:
        return self.slow_s + self._trainer.job.plan.delay_s * self._draws.random() ** 3

    def _try(self) -> None:
        if self.is_closed:
            return
        server = self.world.servers.get(self._address)
        if server is None or self._trainer.is_cut_off:
            self.world.after(RECONNECT_S * (1 + self._draws.random()), self._try)
        elif server.is_paused:
            # The system accepts, and the handshake waits.
            self._reached()
            self.world.after(RECONNECT_S, self._try)
        else:
            self._reached()
            self.world.after(self._delay(), self._open, server)

    def _reached(self) -> None:
        if self.reached_at is None:
            self.reached_at, self._has_news = self.world.now, True
            self._trainer.notify()

    def _open(self, server: ServerProcess) -> None:
        if self.is_closed:
            return
        if server.is_dead:
            return self._try()
        self._server, self.connected_at = server, self.world.now
        self._has_news = True
        self._trainer.notify()
        server.router.links[self.identity] = self
        server.tell(Event(zmq.Event.ACCEPTED, self.number, self._address))
        if self._trainer.breaks_early:
            # Just after it was asked: the question is still on its way.
            self._trainer.breaks_early, self.slow_s = False, 0.05 * self._draws.random()
            self.world.after(0.0005, self.break_off)
        if self._trainer.breaks_late and self._trainer.has_all and self._draws.random() < 0.5:
            # It has nothing more to do, and is gone about when it has asked.
            gone_s = 3 * self._trainer.job.plan.delay_s * self._draws.random()
            self.world.after(gone_s, self._trainer.leave)
        for data in self._unsent:
            self._send_up(data)
        self._unsent.clear()

    def _send_up(self, data: bytes) -> None:
        self._up_at = max(self._up_at, self.world.now + self._delay())
        self.world.at(self._up_at, self._arrive_above, data)

    def _arrive_above(self, data: bytes) -> None:
        server = self._server
        assert server is not None
        if self.world.now <= self._up_ends and not server.is_dead:
            if self._trainer.is_dead and isinstance(decode(data, from_consumer=True), say.Open):
                # It holds the queue until the server knows that the connection is gone.
                self._trainer.rank.may_be_fenced = True
            frame: Any = Frame(data, self.number)
            server.router.inbox.append(Received(self.identity, frame, frame, 1))
            server.notify()

    def send_down(self, data: bytes, frames: list[Any]) -> None:
        """The server sends a message."""
        late_s = self._trainer.lacks_start_s
        if late_s and isinstance(decode(data, from_consumer=False), say.Spec):
            self._trainer.lacks_start_s = 0.0
            self.break_off(late_s, late_s)
        self._down_at = max(self._down_at, self.world.now + self._delay())
        self.world.at(self._down_at, self._arrive_below, data, frames)

    def _arrive_below(self, data: bytes, frames: list[Any]) -> None:
        if self.world.now <= self._down_ends and not self.is_closed:
            # Read when they leave the server's memory, which is as late as may be.
            self.inbox.append((memoryview(data), [Frame(bytes(frame)) for frame in frames]))
            self._trainer.notify()

    # ---- its ends

    def break_off(self, up_s: float = 0.0, down_s: float = 0.0) -> None:
        """It breaks: the server learns of that so many seconds later, and the consumer."""
        # What broke before stays broken.
        self._down_ends = min(self._down_ends, self.world.now + self._draws.random() * 0.001)
        self.world.after(down_s + 0.001, self._break_below)
        self._end_up(up_s)

    def _break_below(self) -> None:
        if not self.is_closed and self._trouble is None:
            self._trouble = TransportError(f"the connection to {self._address} broke")
            self._has_news = True
            self._trainer.notify()

    def _end_up(self, later_s: float = 0.0) -> None:
        """Nothing more arrives at the server, but for what is about to."""
        server = self._server
        if server is None or self._up_ends < math.inf:
            return
        # Whole messages are lost, the last ones; sometimes none.
        rest = max(0.0, self._up_at - self.world.now)
        kept = 1.0 if self._draws.random() < 0.5 else self._draws.random()
        self._up_ends = self.world.now + rest * kept
        ends = self._up_ends + self._delay() + later_s
        self.world.at(ends, self._end_above, server)

    def _end_above(self, server: ServerProcess) -> None:
        if server.router.links.pop(self.identity, None) is not None:
            server.tell(Event(zmq.Event.DISCONNECTED, self.number, self._address))

    def lose_server(self, *, is_killed: bool) -> None:
        """The server's process is gone; where it is not killed, all that it has sent arrives."""
        now = self.world.now
        rest = max(0.0, self._down_at - now)
        ends = now + rest * (self._draws.random() if is_killed else 1.0)
        self._down_ends = min(self._down_ends, ends)
        self._up_ends = now
        self.world.at(ends + self._delay(), self._break_below)


# ---- unix connections, for descriptors


class Pair:
    """A unix connection that a consumer has made to a server."""

    def __init__(self, server: ServerProcess, nonce: bytes) -> None:
        self.server = server
        self.nonce = nonce
        self.number = next(World.current.numbers)
        self.given: deque[Given] = deque()
        self.is_dead_above = self.is_dead_below = False
        """Whether the consumer's end is gone, as the server sees it; the server's, as the consumer
        does."""
        self.below: Attachment

    def end_above(self) -> None:
        """The consumer's end is gone."""
        if not self.is_dead_above:
            self.is_dead_above = True
            self.drop()
            if not self.server.is_dead:
                self.server.gone.add(self.number)
                self.server.notify()

    def drop(self) -> None:
        """Close the descriptors that nobody has taken."""
        while self.given:
            os.close(self.given.popleft().descriptor)

    def end_below(self) -> None:
        """The server's end is gone."""
        if not self.is_dead_below:
            self.is_dead_below = True
            watcher = self.below.watcher
            if watcher is not None:
                World.current.after(0.0002, watcher.hang_up)


class Attachment:
    """The consumer's end."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.watcher: Link | None = None
        pair.below = self

    def fileno(self) -> int:
        return self.pair.number

    def receive(self) -> Given:
        watcher = self.watcher
        if watcher is not None and watcher.has_no_memory:
            raise OwnLimitError("this process can map no memory")
        if self.pair.given:
            return self.pair.given.popleft()
        if self.pair.is_dead_below:
            raise TransportError("the server hung up")
        raise ConnectTimeout("no shared memory came in time")

    def close(self) -> None:
        World.current.after(0.0002, self.pair.end_above)


class DescriptorConnection:
    """The server's end."""

    pidfd = None

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.nonce = pair.nonce
        self.is_closed = False

    def fileno(self) -> int:
        return self.pair.number

    def is_gone(self) -> bool:
        return self.pair.is_dead_above

    def send_descriptor(
        self, descriptor: int, number: int, slot_bytes: int, num_slots: int
    ) -> None:
        if self.pair.is_dead_above:
            raise OSError("the consumer is gone")
        self.pair.given.append(Given(os.dup(descriptor), number, slot_bytes, num_slots))

    def close(self) -> None:
        self.pair.server.gone.discard(self.pair.number)
        self.pair.end_below()


class DescriptorListener:
    """The server's unix socket."""

    deadline = math.inf

    def __init__(self, path: str) -> None:
        self.path = path
        self.number = next(World.current.numbers)
        self.waiting: list[Pair] = []
        self.pairs: list[Pair] = []
        self._nonces: set[bytes] = set()

    def fileno(self) -> int:
        return self.number

    def expect(self, nonce: bytes) -> None:
        self._nonces.add(nonce)

    def withdraw(self, nonce: bytes) -> None:
        self._nonces.discard(nonce)

    def expire(self, now: float) -> None:
        pass

    def close(self) -> None:
        for pair in self.pairs:
            pair.drop()

    def on_readable(self) -> list[DescriptorConnection]:
        waiting, self.waiting = self.waiting, []
        found = []
        for pair in waiting:
            if pair.nonce in self._nonces:
                self._nonces.discard(pair.nonce)
                found.append(DescriptorConnection(pair))
            else:
                pair.end_below()
        return found


def attach(path: str, nonce: bytes, timeout_s: float) -> Attachment:
    """Stands for `feeder.service.memory.fdpass.attach`."""
    server = World.current.unix.get(path)
    if server is None:
        raise TransportError(f"cannot attach to {path!r}: nobody listens")
    pair = Pair(server, nonce)
    server.descriptors.waiting.append(pair)
    server.descriptors.pairs.append(pair)
    server.notify()
    return Attachment(pair)
