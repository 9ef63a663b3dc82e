"""Connections over which nothing has come yet that a server understands."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time

import zmq

from feeder.transport.quiet import QuietLog
from feeder.transport.security import Event

_LIMIT_S = 5.0
"""For so long a peer may have said nothing: it asks for a queue as soon as it is connected."""

_AGAIN_S = 1.0
"""A server that was held up itself looks once more after so long: what came meanwhile is read."""


class Strangers:
    """Peers that have connected and asked for nothing, who are hung up on after a time.

    ZeroMQ bounds a frame, but neither how many make a message nor how long one takes, and hands
    over whole messages alone: of a peer that goes on for ever nothing is known but its descriptor.
    Belongs to the I/O thread.
    """

    def __init__(self, log: QuietLog) -> None:
        self._log = log
        # By router and descriptor: the inode, when it is too late, and whether that was so.
        self._waiting: dict[tuple[int, int], tuple[int, float, bool]] = {}

    def hear(self, router: int, event: Event) -> None:
        """Something has happened to a connection of a router."""
        key = router, event.value
        if event.kind == zmq.EVENT_ACCEPTED:
            self._waiting[key] = _inode(event.value), time.monotonic() + _LIMIT_S, False
        elif event.kind == zmq.EVENT_DISCONNECTED and self._waiting.pop(key, None) is not None:
            self._log.warn(
                "a peer at %s left, or was sent away, before it had asked for anything",
                event.endpoint,
            )

    def knows(self, router: int, descriptor: int) -> None:
        """It has asked for something."""
        self._waiting.pop((router, descriptor), None)

    def expire(self, now: float) -> float:
        """Hang up on those who took too long; when to look again."""
        for key, (inode, due, was_late) in list(self._waiting.items()):
            if due > now:
                continue
            if was_late:
                _hang_up(key[1], inode)
            self._waiting[key] = inode, math.inf if was_late else now + _AGAIN_S, True
        return min((due for _, due, _ in self._waiting.values()), default=math.inf)


def _inode(descriptor: int) -> int:
    """What tells a socket from one that has its number later; -1 where it is gone again."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return -1


def _hang_up(descriptor: int, inode: int) -> None:
    """Shut a socket of ZeroMQ's down, which then closes it, if it is still that one."""
    with contextlib.suppress(OSError):
        own = os.dup(descriptor)
        with socket.socket(fileno=own) as sock:
            if _inode(own) == inode:
                sock.shutdown(socket.SHUT_RDWR)
