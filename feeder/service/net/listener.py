"""A server's listeners: a ROUTER for each kind of address, and the messages that come to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from feeder.service.net.addresses import Address
from feeder.service.net.security import Security, Socket, bind, has_message, watch

_MAX_CREDIT = 1024
"""The largest credit of a consumer, so as many messages a ROUTER queues for a peer."""

_FRAMES_AT_ONCE = 1024
"""Frames that are read in one turn. A message of 550,000 frames of two bytes each kept the server
from all others for seconds when it was read at once."""
_FRAMES_PER_MESSAGE = 4
"""What is done with a message costs about as much as reading so many frames."""


class Peer(NamedTuple):
    """Where a message came from and its answers go. Immutable; names a connection, not a
    consumer."""

    router: int
    """The number of the server's ROUTER."""
    identity: bytes
    """The routing id that this ROUTER gave the connection."""


class Received(NamedTuple):
    """A message, or the part of it that has been read."""

    identity: bytes
    """The routing id of its sender."""
    frame: zmq.Frame
    """Its first frame."""
    last: zmq.Frame
    """The last frame that has been read."""
    num: int
    """How many frames have been read."""


class FrameReader:
    """Reads the messages of one ROUTER, a bounded number of frames in each turn.

    ZeroMQ puts as many frames into a message as its sender likes. Consumers' messages have one;
    further frames are read and dropped, so that the message can be refused. Owned by the server's
    I/O thread.
    """

    def __init__(self, router: Socket) -> None:
        self._router = router
        # A message of which frames are left to read: the next turn goes on with it.
        self._begun: Received | None = None

    @property
    def is_behind(self) -> bool:
        """Whether there are messages that have not been read."""
        return self._begun is not None or has_message(self._router)

    def read_messages(self) -> Iterator[Received]:
        """Yield the messages that are there, for as long as one turn may take. To be called when a
        poll has found some."""
        receive, left = self._router.recv, _FRAMES_AT_ONCE
        while left > 0:
            if self._begun is None:
                try:
                    identity = receive(zmq.DONTWAIT)
                except zmq.Again:
                    return
                # ZeroMQ hands over whole messages, so the frames after the first are there too.
                first = receive(zmq.DONTWAIT, copy=False)
                self._begun = Received(identity, first, first, 1)
            identity, first, last, num = self._begun
            # Only the last frame is kept, to ask it whether more follow.
            while last.more and left > 0:
                last = receive(zmq.DONTWAIT, copy=False)
                num, left = num + 1, left - 1
            self._begun = Received(identity, first, last, num)
            if not last.more:
                received, self._begun = self._begun, None
                # Messages of one frame count too: a flood of them ends the turn as well.
                left -= _FRAMES_PER_MESSAGE
                yield received
                if not has_message(self._router):
                    return


@dataclass(slots=True, kw_only=True)
class Listener:
    """One ROUTER, its monitor, and the addresses that it is bound to. Owned by the I/O thread."""

    router: Socket
    monitor: Socket
    addresses: list[Address]
    most_bytes: int
    """The longest frame that it takes."""
    reader: FrameReader = field(init=False)
    """Reads what comes to it."""

    def __post_init__(self) -> None:
        self.reader = FrameReader(self.router)


def open_listeners(security: Security, addresses: Sequence[Address]) -> list[Listener]:
    """Listen at all addresses; `ConfigError` where the system refuses.

    A ROUTER speaks one mechanism and takes frames of one length, so each kind of address has its
    own: with keys, a unix socket, and TCP without keys, whose peers nobody knows.
    """
    listeners: list[Listener] = []
    for kind in ((False, "ipc"), (False, "tcp"), (True, "tcp")):
        chosen = [a for a in addresses if (security.encrypts(a), a.scheme) == kind]
        # A kind that nobody listens at needs no ROUTER: each costs descriptors and a turn of the
        # loop.
        if chosen:
            most_bytes = security.most_request_bytes(chosen[0])
            router = security.make_router(_MAX_CREDIT, curve=kind[0], max_message_bytes=most_bytes)
            monitor = watch(router)
            # Watched before it is bound: the guard must know of every connection from the first on.
            bound = [bind(router, address) for address in chosen]
            listeners.append(
                Listener(router=router, monitor=monitor, addresses=bound, most_bytes=most_bytes)
            )
    return listeners
