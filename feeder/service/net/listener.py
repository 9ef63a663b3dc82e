"""Where a server is reached: its ROUTERs, and the messages that come to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from feeder.service.net.addresses import Address
from feeder.service.net.kernel import raise_limit
from feeder.service.net.security import Security, Socket, bind, watch

_MAX_CREDIT = 1024

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

    def read_messages(self) -> Iterator[Received]:
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


@dataclass(slots=True, kw_only=True)
class Listener:
    """One ROUTER, its monitor, and the addresses that it is bound to."""

    router: Socket
    monitor: Socket
    addresses: list[Address]
    most_bytes: int
    """The longest frame that it takes."""
    reader: FrameReader = field(init=False)
    """What comes to it."""

    def __post_init__(self) -> None:
        self.reader = FrameReader(self.router)


def open_listeners(security: Security, addresses: Sequence[Address]) -> list[Listener]:
    """Listen at all addresses. Raises `ConfigError` where the system refuses."""
    raise_limit()
    listeners: list[Listener] = []
    for kind in ((False, "ipc"), (False, "tcp"), (True, "tcp")):
        chosen = [a for a in addresses if (security.encrypts(a), a.scheme) == kind]
        if chosen:
            most_bytes = security.most_request_bytes(chosen[0])
            router = security.make_router(_MAX_CREDIT, curve=kind[0], max_message_bytes=most_bytes)
            monitor = watch(router)
            bound = [bind(router, address) for address in chosen]
            listeners.append(
                Listener(router=router, monitor=monitor, addresses=bound, most_bytes=most_bytes)
            )
    return listeners
