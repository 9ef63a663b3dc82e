"""The guard of a server's connections: which take too long, send too much, or are too many."""

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
"""How long a peer may ask for nothing. A consumer asks as soon as it is connected, so this is
ample; each silent peer costs descriptors and memory meanwhile."""
_AGAIN_S = 1.0
"""A peer that is late is looked at once more after so long: a server that was held up itself may
not have read yet what the peer has sent."""
_SLOWEST_BYTES = 64 * 1024
"""A peer that sends has a second more for each so many bytes: a position of 31 MB over a link of 2
MB/s was hung up on for ever by a fixed time."""

_CHECK_S, _CHECK_CLOSELY_S = 0.25, 0.1
"""How often connections are checked, and how often while one may be in the middle of a message. At
full speed a peer with a queue sends some hundred megabytes between two checks."""
_SLACK_BYTES = 64 * 1024
"""What a peer may send beyond the longest message before it is hung up on: frames' heads, keys'
overhead, and what arrives while it is being looked at."""
_STRANGERS_BYTES = 16 * 1024 * 1024
"""What all strangers together may have sent without a whole message, or four times what one may. A
frame of two bytes takes 64 in ZeroMQ, so this is half a gigabyte of memory at worst."""
_UNREAD_S, _UNREAD_CHECKS, _QUIET_CHECKS = 2.0, 3, 4
"""Nobody counts the bytes of a unix socket. Its peer is hung up on when at three checks bytes lay
there unread, over two seconds, and no message has come. The slower a peer sends, the more seldom
bytes are seen: so a peer that was quiet at more than four checks is checked closely."""

_MOST_STRANGERS = 4096
"""Peers without a queue that are kept at once; beyond them the oldest is hung up on."""


@dataclass(slots=True)
class GuardedPeer:
    """One connection, as the guard knows it. Owned by the server's I/O thread."""

    socket: SocketRef
    endpoint: str
    most_bytes: int
    """The longest message that it may send."""
    since: float
    """When it became a stranger, a peer without a queue."""
    late_at: float | None = None
    """When it was first seen to be late; None while it is not."""
    has_spoken: bool = False
    """Whether a message has ever come."""
    was_heard: bool = False
    """Whether a message has come since the last check."""
    is_counted: bool = True
    """Whether the kernel counts its bytes; false for unix sockets."""
    base: int = 0
    """Bytes it had sent at the first check after its last message."""
    num_bytes: int = 0
    """Bytes it has sent since then."""
    num_quiet: int = 0
    """Checks since its last message, where nobody counts the bytes."""
    num_unread: int = 0
    """At how many of those checks bytes lay there unread."""
    unread_since: float = 0.0
    """When bytes were first seen unread."""
    peer: Peer | None = None
    """The peer that has asked for something over it."""
    num_opens: int = 0
    """How often that peer has asked for a queue."""

    def measure(self, inspector: SocketInspector, now: float) -> bool:
        """Update the counts; returns whether it may be in the middle of a message."""
        received = inspector.received(self.socket) if self.is_counted else None
        self.is_counted = received is not None
        # A whole message has come: what was sent up to here is accounted for.
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
        # Bytes that still come without a message: it is in the middle of one.
        before, self.num_bytes = self.num_bytes, received - self.base
        return self.num_bytes > before


class ConnectionGuard:
    """All connections of a server, and the rules by which it hangs up on them.

    Owned by the server's I/O thread. ZeroMQ bounds a frame, but neither the number of frames in a
    message nor the time that one takes, and it hands over whole messages alone: of a peer that
    never ends its message nothing is known but its descriptor. Where libzmq finds no descriptor for
    a newcomer at a unix socket it ends the process, so some are kept free.

    `is_served` says whether a peer holds a queue or is a monitor; `lose` is called with a peer that
    is gone; `most_bytes` has the longest message of each ROUTER.
    """

    def __init__(
        self, log: RateLimitedLog, is_served: Callable[[Peer], bool], lose: Callable[[Peer], None],
        most_bytes: list[int],
    ) -> None:  # fmt: skip
        self._log = log
        self._serves = is_served
        self._lose = lose
        self._most_bytes = most_bytes
        # Peers without a queue, oldest first (a dictionary keeps its order), and the others.
        self._strangers: dict[Key, GuardedPeer] = {}
        self._served: dict[Key, GuardedPeer] = {}
        # How many peers have come since the last check, at moments when few descriptors were left.
        self._num_short = 0
        self._check_at = math.inf
        self._inspector = SocketInspector()

    def on_event(self, router: int, event: Event) -> None:
        """Take an event of a connection of a ROUTER."""
        key, now = (router, event.value), time.monotonic()
        if event.kind not in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED):
            return
        # Either event ends what was known by this descriptor: a new connection may have its number.
        guarded = self._served.pop(key, None) or self._strangers.pop(key, None)
        if guarded is not None and guarded.peer is not None:
            self._lose(guarded.peer)
        # Said in the log, at most once a second: a scan or a wrong key shows here and nowhere else.
        elif guarded is not None and not guarded.has_spoken:
            self._log.warn("a peer at %s left before it had asked for anything", event.endpoint)
        if event.kind == zmq.EVENT_ACCEPTED:
            most = self._most_bytes[router]
            self._strangers[key] = GuardedPeer(SocketRef.at(event.value), event.endpoint, most, now)
            # A newcomer may flood at once, so the next check comes soon.
            self._check_at = min(self._check_at, now + _CHECK_CLOSELY_S)
            self._num_short += are_few_left(event.value)

    def note_message(self, key: Key) -> GuardedPeer | None:
        """Note a whole message of a connection; returns it, or None where it is gone or not
        known."""
        guarded = self._served.get(key) or self._strangers.get(key)
        if guarded is not None:
            guarded.was_heard = guarded.has_spoken = True
        return guarded

    def bind_peer(self, guarded: GuardedPeer, peer: Peer) -> None:
        """Tie a peer to the connection that it asks over: when that breaks, the peer is lost."""
        # A peer that was tied to it before is gone: its last message was read when another
        # connection had its descriptor already.
        before = guarded.peer
        if before != peer:
            guarded.peer, guarded.num_opens = peer, 0
            if before is not None:
                self._lose(before)

    def check(self, now: float) -> float:
        """Hang up on connections that break the rules; returns when to check again.

        To be called when all that came until `now` has been read, events too: then an inode is
        right, or its connection is known to be gone.
        """
        self._make_room()
        if now >= self._check_at:
            self._sort(now)
            everybody = list(chain(self._strangers.items(), self._served.items()))
            is_restless = [self._check(key, guarded, now) for key, guarded in everybody]
            self._bound_strangers()
            self._check_at = now + (_CHECK_CLOSELY_S if any(is_restless) else _CHECK_S)
        # Without connections the loop sleeps until an event.
        if not self._strangers and not self._served:
            self._check_at = math.inf
        return self._check_at

    def close(self) -> None:
        """Check no connection any more."""
        self._inspector.close()

    def _is_served(self, guarded: GuardedPeer) -> bool:
        return guarded.peer is not None and self._serves(guarded.peer)

    def _sort(self, now: float) -> None:
        """Move connections between strangers and served, as their peers got or lost a queue."""
        for key in [key for key, c in self._strangers.items() if self._is_served(c)]:
            self._served[key] = self._strangers.pop(key)
        for key in [key for key, c in self._served.items() if not self._is_served(c)]:
            guarded = self._strangers[key] = self._served.pop(key)
            # Its time as a stranger begins now: it may ask for a queue again.
            guarded.since, guarded.late_at = now, None

    def _check(self, key: Key, guarded: GuardedPeer, now: float) -> bool:
        """Check one connection; returns whether to check again soon."""
        is_talking = guarded.measure(self._inspector, now)
        # Served peers may be silent for as long as they like: their leases have limits of their
        # own.
        if guarded.num_bytes > guarded.most_bytes + _SLACK_BYTES:
            self._hang_up(key, f"it sent {guarded.num_bytes} bytes that are no whole message")
        elif guarded.num_unread >= _UNREAD_CHECKS and now >= guarded.unread_since + _UNREAD_S:
            self._hang_up(key, f"it did not end a message in {_UNREAD_S:.1f} s")
        elif key in self._strangers and self._is_late(guarded, now):
            self._hang_up(key, f"it asked for nothing in {now - guarded.since:.1f} s")
        return is_talking

    def _is_late(self, guarded: GuardedPeer, now: float) -> bool:
        """Whether a stranger has asked for nothing for too long, at two checks."""
        if now < guarded.since + _LIMIT_S + guarded.num_bytes / _SLOWEST_BYTES:
            guarded.late_at = None
            return False
        if guarded.late_at is None:
            guarded.late_at = now
        return now >= guarded.late_at + _AGAIN_S

    def _bound_strangers(self) -> None:
        """Where strangers have sent too much in all, hang up on those that have sent most."""
        for router, most in enumerate(self._most_bytes):
            sent = {key: c.num_bytes for key, c in self._strangers.items() if key[0] == router}
            # Per ROUTER: peers over TCP must not cost a user's own, at a unix socket, their place.
            over = sum(sent.values()) - max(_STRANGERS_BYTES, 4 * most)
            for key in sorted(sent, key=sent.__getitem__, reverse=True):
                if over <= 0:
                    break
                over -= sent[key]
                self._hang_up(key, f"strangers sent {sum(sent.values())} bytes in all")

    def _make_room(self) -> None:
        """Hang up on the oldest strangers where there are too many of them.

        Where few descriptors are left, on one for each that came.
        """
        num, self._num_short = self._num_short, 0
        while self._strangers and (num > 0 or len(self._strangers) > _MOST_STRANGERS):
            oldest, guarded = next(iter(self._strangers.items()))
            # It may have got its queue since the last sorting.
            if self._is_served(guarded):
                self._served[oldest] = self._strangers.pop(oldest)
            else:
                self._hang_up(oldest, f"{len(self._strangers)} peers hold no queue")
                num -= 1

    def _hang_up(self, key: Key, why: str) -> None:
        guarded = self._strangers.pop(key, None) or self._served.pop(key)
        # Forgotten above, so the event of its end finds nothing; its peer is lost here and now.
        self._inspector.hang_up(guarded.socket)
        self._log.warn("a peer was hung up on: %s", f"{why} (at {guarded.endpoint})")
        if guarded.peer is not None:
            self._lose(guarded.peer)
