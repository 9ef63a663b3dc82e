"""Connections as a server's descriptors: who takes too long, sends too much, or is one too many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import zmq

from feeder.service.net.kernel import SocketInspector, SocketRef, are_few_left
from feeder.service.net.listener import Peer
from feeder.service.net.security import Event
from feeder.service.ratelimited_log import RateLimitedLog

Key = tuple[int, int]
"""A ROUTER's number, and the descriptor of one of its connections."""

_LIMIT_S = 5.0
"""For so long a peer may ask for nothing: it asks for a queue as soon as it is connected."""
_AGAIN_S = 1.0
"""A server that was held up itself looks once more after so long: what came meanwhile is read."""
_SLOWEST_BYTES = 64 * 1024
"""A position that comes over a slow link has a second more for each so many bytes of it."""

_CHECK_S, _CHECK_CLOSELY_S = 0.25, 0.1
"""How often they are looked at, and where some may be in the middle of a message."""
_SLACK_BYTES = 64 * 1024
"""What a peer may send beside a message as long as may be before one has come."""
_STRANGERS_BYTES = 16 * 1024 * 1024
"""What all who hold no queue may have sent so, or four times what one may: a frame of two bytes
takes 64 in ZeroMQ."""
_UNREAD_S, _UNREAD_CHECKS, _QUIET_CHECKS = 2.0, 3, 4
"""Of a unix socket nobody counts the bytes: it is seen at so many looks that some lie there, for
so long, and no message has come of them. The slower a peer is, the more seldom that is seen: so
who has said nothing at so many looks is looked at closely."""

_MOST_STRANGERS = 4096
"""Peers that hold no queue."""


@dataclass(slots=True)
class GuardedPeer:
    """One connection."""

    socket: SocketRef
    endpoint: str
    most_bytes: int
    """How long a message may be."""
    since: float
    """Since when it has been a stranger."""
    late_at: float | None = None
    """When it was first seen to have been one for too long."""
    has_spoken: bool = False
    """Whether a message has come ever."""
    was_heard: bool = False
    """Whether a message has come since it was last looked at."""
    is_counted: bool = True
    """Whether the system counts its bytes."""
    base: int = 0
    """What it had sent when it was last looked at after a message."""
    num_bytes: int = 0
    """What it has sent since."""
    num_quiet: int = 0
    """How often it was looked at since then, where nobody counts the bytes."""
    num_unread: int = 0
    """At how many of those looks some lay there unread."""
    unread_since: float = 0.0
    """When they did so first."""
    peer: Peer | None = None
    """Who has asked for something over it."""
    num_opens: int = 0
    """How often it has asked for a queue."""

    def measure(self, inspector: SocketInspector, now: float) -> bool:
        """Find out what it has sent since; whether it may be in the middle of a message."""
        received = inspector.received(self.socket) if self.is_counted else None
        self.is_counted = received is not None
        if self.was_heard:
            self.was_heard, self.base, self.num_bytes = False, received or 0, 0
            self.num_quiet = self.num_unread = 0
            return False
        if received is None:
            if inspector.unread(self.socket):
                self.unread_since = self.unread_since if self.num_unread else now
                self.num_unread += 1
            self.num_quiet += 1
            return self.num_quiet > _QUIET_CHECKS
        before, self.num_bytes = self.num_bytes, received - self.base
        return self.num_bytes > before


class ConnectionGuard:
    """All connections of a server. Belongs to the I/O thread.

    ZeroMQ bounds a frame, but neither how many make a message nor how long one takes, and hands
    over whole messages alone: of a peer that goes on for ever nothing is known but its descriptor.
    Where a unix socket's listener finds no descriptor for a newcomer libzmq ends the process: so
    some are kept free. `is_served` says whether a peer holds a queue or looks on; `lose` is told
    who is gone; `most_bytes` is how long a message to each ROUTER may be.
    """

    def __init__(
        self, log: RateLimitedLog, is_served: Callable[[Peer], bool], lose: Callable[[Peer], None],
        most_bytes: list[int],
    ) -> None:  # fmt: skip
        self._log = log
        self._serves = is_served
        self._lose = lose
        self._most_bytes = most_bytes
        # Those who hold no queue, in the order in which they came to be so, and the others.
        self._strangers: dict[Key, GuardedPeer] = {}
        self._served: dict[Key, GuardedPeer] = {}
        # How many have come since the last look where few descriptors were left.
        self._num_short = 0
        self._check_at = math.inf
        self._inspector = SocketInspector()

    def on_event(self, router: int, event: Event) -> None:
        """Something has happened to a connection of a router."""
        key, now = (router, event.value), time.monotonic()
        if event.kind not in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED):
            return
        guarded = self._served.pop(key, None) or self._strangers.pop(key, None)
        if guarded is not None and guarded.peer is not None:
            self._lose(guarded.peer)
        elif guarded is not None and not guarded.has_spoken:
            self._log.warn("a peer at %s left before it had asked for anything", event.endpoint)
        if event.kind == zmq.EVENT_ACCEPTED:
            most = self._most_bytes[router]
            self._strangers[key] = GuardedPeer(SocketRef.at(event.value), event.endpoint, most, now)
            self._check_at = min(self._check_at, now + _CHECK_CLOSELY_S)
            self._num_short += are_few_left(event.value)

    def note_message(self, key: Key) -> GuardedPeer | None:
        """A whole message has come over a connection; None where that is not known, or gone."""
        guarded = self._served.get(key) or self._strangers.get(key)
        if guarded is not None:
            guarded.was_heard = guarded.has_spoken = True
        return guarded

    def bind_peer(self, guarded: GuardedPeer, peer: Peer) -> None:
        """A peer asks for something over a connection: when that breaks, it is lost. One that was
        there before it is gone: its last words were read when another had its descriptor."""
        before = guarded.peer
        if before != peer:
            guarded.peer, guarded.num_opens = peer, 0
            if before is not None:
                self._lose(before)

    def check(self, now: float) -> float:
        """Hang up on whoever has to be; when to look again. What came until `now` was read, and
        all events: an inode was right, or its connection is known to be gone."""
        self._make_room()
        if now >= self._check_at:
            self._sort(now)
            everybody = list(chain(self._strangers.items(), self._served.items()))
            is_restless = [self._check(key, guarded, now) for key, guarded in everybody]
            self._bound_strangers()
            self._check_at = now + (_CHECK_CLOSELY_S if any(is_restless) else _CHECK_S)
        if not self._strangers and not self._served:
            self._check_at = math.inf
        return self._check_at

    def close(self) -> None:
        """No connection is looked at any more."""
        self._inspector.close()

    def _is_served(self, guarded: GuardedPeer) -> bool:
        return guarded.peer is not None and self._serves(guarded.peer)

    def _sort(self, now: float) -> None:
        for key in [key for key, c in self._strangers.items() if self._is_served(c)]:
            self._served[key] = self._strangers.pop(key)
        for key in [key for key, c in self._served.items() if not self._is_served(c)]:
            guarded = self._strangers[key] = self._served.pop(key)
            guarded.since, guarded.late_at = now, None

    def _check(self, key: Key, guarded: GuardedPeer, now: float) -> bool:
        """Look at one; whether to look again soon."""
        is_talking = guarded.measure(self._inspector, now)
        if guarded.num_bytes > guarded.most_bytes + _SLACK_BYTES:
            self._hang_up(key, f"it sent {guarded.num_bytes} bytes that are no whole message")
        elif guarded.num_unread >= _UNREAD_CHECKS and now >= guarded.unread_since + _UNREAD_S:
            self._hang_up(key, f"it did not end a message in {_UNREAD_S:.1f} s")
        elif key in self._strangers and self._is_late(guarded, now):
            self._hang_up(key, f"it asked for nothing in {now - guarded.since:.1f} s")
        return is_talking

    def _is_late(self, guarded: GuardedPeer, now: float) -> bool:
        if now < guarded.since + _LIMIT_S + guarded.num_bytes / _SLOWEST_BYTES:
            guarded.late_at = None
            return False
        if guarded.late_at is None:
            guarded.late_at = now
        return now >= guarded.late_at + _AGAIN_S

    def _bound_strangers(self) -> None:
        """Where strangers have sent too much in all, hang up on those who have sent most."""
        for router, most in enumerate(self._most_bytes):
            sent = {key: c.num_bytes for key, c in self._strangers.items() if key[0] == router}
            over = sum(sent.values()) - max(_STRANGERS_BYTES, 4 * most)
            for key in sorted(sent, key=sent.__getitem__, reverse=True):
                if over <= 0:
                    break
                over -= sent[key]
                self._hang_up(key, f"strangers sent {sum(sent.values())} bytes in all")

    def _make_room(self) -> None:
        """Where there are too many strangers, hang up on those who have been here for longest;
        where few descriptors are left, on one for each who came."""
        num, self._num_short = self._num_short, 0
        while self._strangers and (num > 0 or len(self._strangers) > _MOST_STRANGERS):
            oldest, guarded = next(iter(self._strangers.items()))
            if self._is_served(guarded):
                self._served[oldest] = self._strangers.pop(oldest)
            else:
                self._hang_up(oldest, f"{len(self._strangers)} peers hold no queue")
                num -= 1

    def _hang_up(self, key: Key, why: str) -> None:
        guarded = self._strangers.pop(key, None) or self._served.pop(key)
        self._inspector.hang_up(guarded.socket)
        self._log.warn("a peer was hung up on: %s", f"{why} (at {guarded.endpoint})")
        if guarded.peer is not None:
            self._lose(guarded.peer)
