"""A consumer's connection to one server: a DEALER, its events, and what else ends its poll."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq

from feeder.errors import ConfigError, FeedError, TransportError
from feeder.service.net.addresses import Address
from feeder.service.net.kernel import SocketRef, received_by, unread_by
from feeder.service.net.security import (
    Security,
    connect,
    has_message,
    read_event,
    refusal_of,
    unwatch,
    watch,
)
from feeder.waking import Readable
from feeder.workers import forks

_MAX_CREDIT = 1024
"""As many messages a DEALER holds: the largest credit that a consumer may ask for."""

_MESSAGES_AT_ONCE = 64
"""Messages that are taken before the thread looks at its other work: each may hold many batches,
and the server must be told of used ones meanwhile."""


class Ready(NamedTuple):
    """What a poll found."""

    messages: bool
    """Whether messages have come."""
    trouble: bool
    """Whether `Connection.trouble` has something to say."""


class Connection:
    """One connection to a server, which ZeroMQ tries to make until it stands.

    Owned by the thread that made it: ZeroMQ's sockets may be used by one thread alone. The
    connection proves nothing: what came over it is judged by generations and numbers, and its end
    only says when to look for a server again.
    """

    def __init__(self, security: Security, address: Address, max_message_bytes: int) -> None:
        self.connected_at: float | None = None
        """When a server finished the handshake (monotonic clock); None before."""
        self.reached_at: float | None = None
        """When somebody first accepted the connection (monotonic clock); None before."""
        self._num_refused, self._is_tried_again = 0, False
        # The system's socket and where it leads: a forked child closes its copy by these.
        self._socket: tuple[SocketRef, str] | None = None
        self._received: int | None = None
        self.is_own = False
        """Whether the connection leads to itself, so that nobody listens there."""
        self._address, self._most_bytes = address, security.most_request_bytes(address)
        # How many refusals are believed. With keys a server that is being killed looks like one
        # that refuses, so it takes two; without keys such an end says nothing at all.
        self._needed = 2 if security.encrypts(address) else math.inf
        self._dealer = security.make_dealer(
            _MAX_CREDIT, max_message_bytes=max_message_bytes, curve=security.encrypts(address)
        )
        self._monitor = watch(self._dealer)
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._watched: Readable | None = None
        self._hung_up = False
        forks.call_in_child(self.abandon_in_child)
        connect(self._dealer, address)

    def wake_with(self, waker: Readable) -> None:
        """End a poll when the waker is woken."""
        self._poller.register(waker.fileno(), zmq.POLLIN)

    def watch(self, attachment: Readable | None) -> None:
        """Count the end of the connection for descriptors, if there is one, as trouble of this
        one."""
        if attachment is None:
            return
        self._watched = attachment
        # POLLERR alone, which a hang-up sets too: arenas that arrive there are read when the
        # message that announces them has come.
        self._poller.register(attachment.fileno(), zmq.POLLERR)

    def unwatch(self) -> None:
        """Take the connection for descriptors out: it is closed on purpose soon."""
        watched, self._watched = self._watched, None
        if watched is not None:
            self._poller.unregister(watched.fileno())
            self._hung_up = False

    def poll(self, timeout_s: float) -> Ready:
        """Wait for anything to happen, at most so long."""
        # Rounded up: rounded down, the last millisecond of a wait would be spent spinning.
        timeout = None if timeout_s == math.inf else math.ceil(timeout_s * 1000)
        ready = dict(self._poller.poll(timeout))
        if self._watched is not None and self._watched.fileno() in ready:
            self._hung_up = True
        return Ready(self._dealer in ready, self._monitor in ready or self._hung_up)

    def why_too_long(self, num_bytes: int) -> str | None:
        """Return why no server there takes a message of so many bytes; None where it does."""
        if num_bytes <= self._most_bytes:
            return None
        return (
            f"{self._address}: a position with leftover rows makes a message of {num_bytes} "
            f"bytes, and a server without keys takes at most {self._most_bytes}; use a unix "
            "socket or keys, or resume from a token"
        )

    def send(self, data: bytes) -> None:
        """Send a message when the connection stands; `ConfigError` where no server takes it."""
        if (why := self.why_too_long(len(data))) is not None:
            raise ConfigError(why)
        # A full socket means a server that has read nothing for long: the lease ends by time, and
        # what is not sent now would be told to nobody.
        with contextlib.suppress(zmq.Again):
            self._dealer.send(data)

    def receive(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yield the messages that are there: the first frame's bytes, and the frames after it. To
        be called when a poll has found some."""
        for _ in range(_MESSAGES_AT_ONCE):
            # Not copied: batches in frames are views of these frames.
            try:
                first, *frames = self._dealer.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            yield first.buffer, frames
            if not has_message(self._dealer):
                return

    def trouble(self) -> FeedError | None:
        """Return what is wrong with the connection, if anything."""
        while (event := read_event(self._monitor)) is not None:
            if event.kind == zmq.EVENT_CONNECTED:
                # The first time counts: a forwarder with nobody behind it accepts again and again,
                # and each time would prolong the turn of its address.
                self.reached_at = self.reached_at or time.monotonic()
                self._socket = SocketRef.at(event.value), event.endpoint
                # When the system chooses as this end's port the one that is connected to, TCP
                # connects a socket to itself. Nobody listens there, or it would have the port.
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
                # A server that is being killed also ends a handshake without a word, so that alone
                # is believed only when it comes again.
                silent = event.kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                self._num_refused += 1
                self._is_tried_again = silent
                if not silent or self._num_refused >= self._needed:
                    return error
        return TransportError("the server is gone") if self._hung_up else None

    def has_moved(self) -> bool:
        """Whether bytes have come since the last call, or lie there unread, as of a message that
        takes long on a slow link."""
        before, self._received = self._received, None
        # ZeroMQ may have closed it by now, and its number be another's: then nothing is lost.
        with contextlib.suppress(OSError):
            if self._socket is not None:
                with self._socket[0].open() as sock:
                    self._received = received_by(sock)
                    if unread_by(sock):
                        return True
        return None not in (before, self._received) and before != self._received

    def leads_to_itself(self) -> bool:
        """Whether what came is this end's own: what it sends may be there before the event of its
        connecting is read."""
        return self.is_own or (self.trouble() is not None and self.is_own)

    def abandon_in_child(self) -> None:
        """In a forked child: close its copy, which would outlive a parent that is killed."""
        if self._socket is not None:
            sock, endpoint = self._socket
            sock.close(endpoint)

    def close(self) -> None:
        """End the connection; what has not gone out is lost."""
        forks.call_no_more(self)
        # The monitor first: see `security.watch`.
        unwatch(self._dealer, self._monitor)
        self._dealer.close(linger=0)
