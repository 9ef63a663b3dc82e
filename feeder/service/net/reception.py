"""What comes to a server's ROUTER, a bounded number of frames at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import zmq

from feeder.service.net.security import Socket

_FRAMES_AT_ONCE = 1024
_FRAMES_PER_MESSAGE = 4
"""What is done with a message costs about as much as reading so many frames."""


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


class Reception:
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
