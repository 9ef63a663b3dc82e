"""A consumer's connection to one server: the DEALER, its events, and what else wakes its thread."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq

from feeder.errors import ConfigError, FeedError, TransportError
from feeder.service.memory import forking
from feeder.service.net.addresses import Address
from feeder.service.net.kernel import SocketRef
from feeder.service.net.security import Security, connect, read_event, refusal_of, unwatch, watch
from feeder.service.net.waker import Readable

_MESSAGES_AT_ONCE = 64


class Ready(NamedTuple):
    """What a poll found."""

    messages: bool
    trouble: bool


class Connection:
    """One connection, which ZeroMQ tries to make until it stands. Belongs to one thread."""

    def __init__(self, security: Security, address: Address, max_message_bytes: int) -> None:
        self.connected_at: float | None = None
        """Since when (monotonic clock) a server is there; None while none is known to be."""
        self.reached_at: float | None = None
        """Since when somebody listens there."""
        self._num_refused, self._is_tried_again = 0, False
        self._socket: tuple[SocketRef, str] | None = None
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
        forking.register_owner(self)
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
                self._socket = SocketRef.at(event.value), event.endpoint
                if self._socket[0].reset_if_own():
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
            elif self.connected_at is None and (error := refusal_of(event)) is not None:
                # A server that is being killed ends a handshake without a word too.
                silent = event.kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                self._num_refused += 1
                self._is_tried_again = silent
                if not silent or self._num_refused >= self._needed:
                    return error
        return TransportError("the server is gone") if self._hung_up else None

    def abandon_in_child(self) -> None:
        """In a forked child: else the connection would not break when the parent is killed."""
        if self._socket is not None:
            sock, endpoint = self._socket
            sock.close(endpoint)

    def close(self) -> None:
        """End the connection; what has not gone out is lost."""
        forking.unregister_owner(self)
        unwatch(self._dealer, self._monitor)
        self._dealer.close(linger=0)
