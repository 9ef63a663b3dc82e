"""A consumer's connection to one server: the DEALER, its events, and what else wakes the thread."""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import zmq

from feeder.errors import ConfigError, FeedError, TransportError
from feeder.service.memory import forking
from feeder.service.net.addresses import Address
from feeder.service.net.kernel import SocketInspector, raise_limit
from feeder.service.net.security import (
    Security,
    Socket,
    bind,
    connect,
    meaning,
    read_event,
    unwatch,
    watch,
)

# ---- What comes to a server's ROUTER, a bounded number of frames at a time.


_FRAMES_AT_ONCE = 1024
_FRAMES_PER_MESSAGE = 4
"""What is done with a message costs about as much as reading so many frames."""


class Peer(NamedTuple):
    """Where a message came from, and where the answers go."""

    router: int
    """Which of the server's ROUTERs."""
    identity: bytes
    """The routing id that this ROUTER gave the connection."""


class Received(NamedTuple):
    """A message."""

    identity: bytes
    """Whom it came from."""
    frame: zmq.Frame
    """Its first frame."""
    last: zmq.Frame
    """The last that has been read."""
    num: int
    """How many have been."""


class FrameReader:
    """The messages of one ROUTER. ZeroMQ collects as many frames in a message as its sender likes,
    two bytes each: they are dropped here, a part at each turn. Belongs to the I/O thread."""

    def __init__(self, router: Socket) -> None:
        self._router = router
        self._begun: Received | None = None

    def read(self) -> Iterator[Received]:
        """The messages that are there, for as long as one turn may take."""
        receive, left = self._router.recv, _FRAMES_AT_ONCE
        while left > 0:
            if self._begun is None:
                if not int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    return
                identity = receive(zmq.DONTWAIT)
                first = receive(zmq.DONTWAIT, copy=False)
                self._begun = Received(identity, first, first, 1)
            identity, first, last, num = self._begun
            while last.more and left > 0:
                last = receive(zmq.DONTWAIT, copy=False)
                num, left = num + 1, left - 1
            self._begun = Received(identity, first, last, num)
            if not last.more:
                received, self._begun = self._begun, None
                left -= _FRAMES_PER_MESSAGE
                yield received


_MESSAGES_AT_ONCE = 64


class Ready(NamedTuple):
    """What a poll found."""

    messages: bool
    trouble: bool


class Readable(Protocol):
    """Anything with a descriptor."""

    def fileno(self) -> int:
        """The descriptor."""


@cache
def boot_id() -> str:
    """What tells this boot of this kernel from any other; empty where the kernel has no such
    thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def wait_for(waker: Readable, timeout_s: float) -> None:
    """Wait until the waker is woken, at most so long."""
    poll = select.poll()  # select() takes no descriptor above 1023.
    poll.register(waker, select.POLLIN)
    poll.poll(None if timeout_s == math.inf else math.ceil(1000 * timeout_s))


class Connection:
    """One connection, which ZeroMQ tries to make until it stands. Belongs to one thread."""

    def __init__(self, security: Security, address: Address, max_message_bytes: int) -> None:
        self.connected_at: float | None = None
        """Since when (monotonic clock) a server is there; None while none is known to be."""
        self.reached_at: float | None = None
        """Since when somebody listens there."""
        self._num_refused, self._is_tried_again = 0, False
        self._connection: tuple[SocketInspector, str] | None = None
        self.is_own = False
        """Whether it leads to itself: nobody listens there."""
        self._address, self._most_bytes = address, security.most_request_bytes(address)
        self._needed = 2 if security.encrypts(address) else math.inf
        self._dealer = security.make_dealer(
            1024, max_message_bytes=max_message_bytes, curve=security.encrypts(address)
        )
        self._monitor = watch(self._dealer)
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._watched: Readable | None = None
        self._hung_up = False
        forking.enter(self)
        connect(self._dealer, address)

    def wake_with(self, waker: Readable) -> None:
        """Let a poll return when the waker is woken."""
        self._poller.register(waker.fileno(), zmq.POLLIN)

    def watch(self, connection: Readable | None) -> None:
        """Let the end of another connection to the server be trouble."""
        if connection is None:
            return
        self._watched = connection
        self._poller.register(connection.fileno(), zmq.POLLERR)

    def unwatch(self) -> None:
        """The other connection will be closed, on purpose."""
        watched, self._watched = self._watched, None
        if watched is not None:
            self._poller.unregister(watched.fileno())
            self._hung_up = False

    def poll(self, timeout_s: float) -> Ready:
        """Wait for anything, at most so long."""
        timeout = None if timeout_s == math.inf else math.ceil(timeout_s * 1000)
        ready = dict(self._poller.poll(timeout))
        if self._watched is not None and self._watched.fileno() in ready:
            self._hung_up = True
        return Ready(self._dealer in ready, self._monitor in ready or self._hung_up)

    def why_too_long(self, num_bytes: int) -> str | None:
        """Why no server there takes a message of so many bytes; None where it does."""
        if num_bytes <= self._most_bytes:
            return None
        return (
            f"{self._address}: a position with leftover rows makes a message of {num_bytes} "
            f"bytes, and a server without keys takes at most {self._most_bytes}; use a unix "
            "socket or keys, or resume from a token"
        )

    def send(self, data: bytes) -> None:
        """Send a message, sooner or later. Raises `ConfigError` where no server takes it."""
        if (why := self.why_too_long(len(data))) is not None:
            raise ConfigError(why)
        with contextlib.suppress(zmq.Again):
            self._dealer.send(data)

    def receive(self) -> Iterator[tuple[Any, list[Any]]]:
        """The messages that are there: the first frame's bytes, and the frames after it."""
        for _ in range(_MESSAGES_AT_ONCE):
            if not int(self._dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            first, *frames = self._dealer.recv_multipart(zmq.DONTWAIT, copy=False)
            yield first.buffer, frames

    def trouble(self) -> FeedError | None:
        """What is wrong with the connection, if anything."""
        while (event := read_event(self._monitor)) is not None:
            if event.kind == zmq.EVENT_CONNECTED:
                # The first time: a forwarder with nobody behind it lets in again and again.
                self.reached_at = self.reached_at or time.monotonic()
                self._connection = SocketInspector.at(event.value), event.endpoint
                if self._connection[0].reset_if_own():
                    self.is_own = True
                    return TransportError(f"nobody listens at {event.endpoint}")
            elif event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected_at = time.monotonic()
            elif event.kind == zmq.EVENT_DISCONNECTED:
                if self.connected_at is not None:
                    return TransportError(f"the connection to {event.endpoint} broke")
                if not self._is_tried_again:
                    # ZeroMQ does not connect again to what does not speak as it does.
                    return TransportError(f"what listens at {event.endpoint} is no server")
                self._is_tried_again = False
            elif self.connected_at is None and (error := meaning(event)) is not None:
                # A server that is being killed ends a handshake without a word too.
                silent = event.kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                self._num_refused += 1
                self._is_tried_again = silent
                if not silent or self._num_refused >= self._needed:
                    return error
        return TransportError("the server is gone") if self._hung_up else None

    def fork(self) -> None:
        """In a forked child: else the connection would not break when the parent is killed."""
        if self._connection is not None:
            connection, endpoint = self._connection
            connection.close(endpoint)

    def close(self) -> None:
        """End the connection; what has not gone out is lost."""
        forking.leave(self)
        unwatch(self._dealer, self._monitor)
        self._dealer.close(linger=0)


# ---- Where a server is reached: a ROUTER for each kind of address that it listens at.


_MAX_CREDIT = 1024


@dataclass(slots=True, kw_only=True)
class Listener:
    """One ROUTER, its monitor, and the addresses that it is bound to."""

    router: Socket
    monitor: Socket
    addresses: list[Address]
    most_bytes: int
    """The longest frame that it takes."""
    reception: FrameReader = field(init=False)
    """What comes to it."""

    def __post_init__(self) -> None:
        self.reception = FrameReader(self.router)


def open_doors(security: Security, addresses: Sequence[Address]) -> list[Listener]:
    """Listen at all addresses. Raises `ConfigError` where the system refuses."""
    raise_limit()
    doors: list[Listener] = []
    for kind in ((False, "ipc"), (False, "tcp"), (True, "tcp")):
        chosen = [a for a in addresses if (security.encrypts(a), a.scheme) == kind]
        if chosen:
            most_bytes = security.most_request_bytes(chosen[0])
            router = security.make_router(_MAX_CREDIT, curve=kind[0], max_message_bytes=most_bytes)
            monitor = watch(router)
            bound = [bind(router, address) for address in chosen]
            doors.append(
                Listener(router=router, monitor=monitor, addresses=bound, most_bytes=most_bytes)
            )
    return doors


# ---- Waking the thread that polls, from any other thread.


class Waker:
    """A descriptor that becomes readable when somebody calls `wake`.

    Finalisers of arrays call `wake`, from any thread and perhaps inside the garbage collector, and
    long after what they wake has been closed. So the descriptor is closed when the last reference
    to the waker is gone and not before: a number closed earlier could be another file's by then.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = self._is_silent = False

    def fileno(self) -> int:
        """What to poll."""
        return self._descriptor

    def silence(self) -> None:
        """In a forked child: wake nobody, since the number may become a file's."""
        self._is_silent = True

    def wake(self) -> None:
        """Make the descriptor readable."""
        if not self._awake and not self._is_silent:
            self._awake = True
            os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """To be called before looking for what there is to do."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)
        self._awake = False

    def __del__(self) -> None:
        os.close(self._descriptor)
