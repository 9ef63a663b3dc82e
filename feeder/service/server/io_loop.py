"""The server's I/O thread: it owns every socket, and hands what consumers say to the desks."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from feeder.errors import ConfigError, FeedError, ProtocolError, RemoteError, ResumeError
from feeder.feeds.length import num_batches
from feeder.service.faults import point
from feeder.service.memory.fdpass import NONCE_BYTES, DescriptorConnection, DescriptorListener
from feeder.service.net.guard import ConnectionGuard, GuardedPeer
from feeder.service.net.kernel import boot_id
from feeder.service.net.listener import Listener, Peer
from feeder.service.net.security import read_event
from feeder.service.net.waker import Waker
from feeder.service.protocol import messages as say
from feeder.service.protocol.coding import decode, encode
from feeder.service.ratelimited_log import RateLimitedLog
from feeder.service.server.delivery import make_fault
from feeder.service.server.figures import Watching
from feeder.service.server.group import Desk
from feeder.service.server.lease import Lease
from feeder.state import codec

# ---- When a server ends by itself. Rules: no sockets, no clock.


class Ending:
    """Whether a server is over: with `exit_when="acknowledged"` when every queue of every feed has
    had everything. Where a feed has failed, nobody is waited for who is not there: the trainer
    that was told may have been the one to come for other queues, too."""

    def __init__(self, desks: Mapping[str, Desk], exit_when: str) -> None:
        self._desks = desks
        self._ends = exit_when == "acknowledged"
        self.is_over = False
        """Whether consumers have had all that they can have."""
        self.failure: FeedError | None = None
        """Why it is over before everything was used."""

    def look(self) -> None:
        """Find out whether it is over now."""
        if not self._ends:
            return
        desks = self._desks.values()
        if all(desk.acknowledged for desk in desks):
            self.is_over = True
            return
        told = [desk.feed.told for desk in desks]
        # A position that does not fit is the failure of who brought it.
        failures = [error for error in told if error and not isinstance(error, ResumeError)]
        leases = [lease for desk in desks for lease in desk.leases if lease is not None]
        if failures and all(lease.is_settled for lease in leases):
            self.is_over, self.failure = True, failures[0]


# ---- Which consumers are on the server's host, over unix sockets, and which of them are gone.


class LocalPeers:
    """The unix connections of consumers, in the server's poll. Belongs to the I/O thread."""

    def __init__(self, listener: DescriptorListener, poller: zmq.Poller) -> None:
        self._listener = listener
        self._poller = poller
        self._nonces: dict[bytes, Peer] = {}
        # Connections and processes, by their descriptors: readable when they are gone.
        self._watched: dict[int, tuple[Peer, DescriptorConnection]] = {}
        poller.register(listener.fileno(), zmq.POLLIN)

    def offer(self, peer: Peer, kernel: str) -> say.Offer | None:
        """Where a consumer on a kernel may fetch descriptors; None where that is another's."""
        if not kernel or kernel != boot_id():
            return None
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces[nonce] = peer
        self._listener.expect(nonce)
        return say.Offer(path=self._listener.path, nonce=nonce)

    def admit(self) -> list[tuple[Peer, DescriptorConnection]]:
        """The connections that have said whose they are since last asked."""
        # Once to accept a connection, once to read what it has presented by then.
        new = [*self._listener.on_readable(), *self._listener.on_readable()]
        found = [(self._nonces.pop(connection.nonce), connection) for connection in new]
        for peer, connection in found:
            for descriptor in (connection.fileno(), connection.pidfd):
                if descriptor is not None:
                    self._watched[descriptor] = peer, connection
                    self._poller.register(descriptor, zmq.POLLIN)
        return found

    def gone(self, ready: dict[Any, int]) -> set[Peer]:
        """Of those whose descriptors a poll found, the peers that are gone."""
        peers = set()
        for descriptor in ready:
            peer, connection = self._watched.get(descriptor, (None, None))
            # Asked, since the number may be another connection's than when the poll returned.
            if peer is not None and connection is not None and connection.is_gone():
                peers.add(peer)
        return peers

    def has_news(self, ready: dict[Any, int]) -> bool:
        """Whether a poll found somebody who comes."""
        return self._listener.fileno() in ready

    def forget(self, peer: Peer) -> None:
        """A peer's lease is over: look at it no more. Before its connection is closed."""
        for nonce in [nonce for nonce, owner in self._nonces.items() if owner == peer]:
            del self._nonces[nonce]
            self._listener.withdraw(nonce)
        for descriptor, (owner, _) in list(self._watched.items()):
            if owner == peer:
                del self._watched[descriptor]
                self._poller.unregister(descriptor)

    def expire(self, now: float) -> float:
        """Send those away who took too long to say who they are; when to look again."""
        self._listener.expire(now)
        deadline = self._listener.deadline
        return math.inf if deadline is None else deadline

    def close(self) -> None:
        """Hang up on everybody who is left."""
        for _, connection in self._watched.values():
            connection.close()
        self._watched.clear()


logger = logging.getLogger("feeder")

_TELL_S = 5.0


class ServerLoop:
    """What the I/O thread knows. Its own thread alone touches it, but for `waker` and `stop`."""

    def __init__(
        self, desks: dict[str, Desk], doors: list[Listener], listener: DescriptorListener,
        waker: Waker, *, exit_when: str,
    ) -> None:  # fmt: skip
        self._desks = desks
        self._doors = doors
        self.waker = waker
        self._leases: dict[Peer, tuple[Desk, Lease]] = {}
        self._stopping: str | None = None
        self._log = RateLimitedLog()
        most_bytes = [door.most_bytes for door in doors]
        self._callers = ConnectionGuard(self._log, self._is_served, self._on_gone, most_bytes)
        self._tell_at = time.monotonic() + _TELL_S
        self._expires_at = math.inf
        self._poller = zmq.Poller()
        for door in doors:
            self._poller.register(door.router, zmq.POLLIN)
            self._poller.register(door.monitor, zmq.POLLIN)
        self._poller.register(waker.fileno(), zmq.POLLIN)
        self._presence = LocalPeers(listener, self._poller)
        self.watching = Watching(desks)
        """Those who only look."""
        self.ending = Ending(desks, exit_when)
        """Whether it ends by itself."""

    def stop(self, reason: str) -> None:
        """Ask the thread to end; from any thread."""
        self._stopping = reason
        self.waker.wake()

    def run(self) -> None:
        """Thread body."""
        try:
            while self._stopping is None and not self.ending.is_over:
                self._step(self._timeout())
            self._step(0)  # What was said until now is heard: what was used is stored.
        except Exception as error:
            logger.exception("the server's I/O thread failed")
            self._stopping = f"it failed: {type(error).__name__}: {error}"
            self.ending.failure = RemoteError(f"the server failed: {type(error).__name__}: {error}")
        finally:
            self._farewell()
            self.watching.close()
            self._callers.close()

    def _step(self, timeout_ms: int) -> None:
        now = time.monotonic()
        ready = dict(self._poller.poll(timeout_ms))
        if self.waker.fileno() in ready:
            self.waker.clear()
        self.watching.answer()
        for i, door in enumerate(self._doors):
            if door.router in ready:
                self._receive(i, door)
            if door.monitor in ready:
                self._look_at_events(i, door)
        if self._presence.has_news(ready):
            self._admit()
        for peer in self._presence.gone(ready):
            self._lose(peer)
        for desk in self._desks.values():
            desk.pump()
        self._look_at_clock(now)

    def _timeout(self) -> int:
        nearest = min(self._expires_at, self._tell_at if self._leases else math.inf)
        return -1 if nearest == math.inf else max(0, math.ceil((nearest - time.monotonic()) * 1000))

    def _look_at_clock(self, now: float) -> None:
        """Do what is due at `now`: whoever spoke up to then must have been heard."""
        deadlines = [desk.expire(now) for desk in self._desks.values()]
        self._expires_at = min(self._presence.expire(now), self._callers.check(now), *deadlines)
        if now >= self._tell_at:
            self._tell_at = now + _TELL_S
            for desk in self._desks.values():
                desk.tell_waiting()
        self.ending.look()

    # ---- sending

    def send(self, peer: Peer, message: say.Message, frames: Sequence[Any]) -> bool:
        """Send a message; False where the peer is gone, or does not take what it asked for."""
        parts = [peer.identity, encode(message)]
        router = self._doors[peer.router].router
        try:
            if frames:
                router.send_multipart(parts, zmq.SNDMORE)
                router.send_multipart(frames, copy=False)
            else:
                router.send_multipart(parts)
        except zmq.ZMQError as error:
            self._log.warn("a consumer is not sent to: %s", str(error))
            return False
        return True

    # ---- receiving

    def _receive(self, number: int, door: Listener) -> None:
        for identity, frame, _, num in door.reader.read_messages():
            peer = Peer(number, identity)
            try:
                if num != 1:
                    raise ProtocolError(f"a message of {num} frames, expected 1")
                self._handle(peer, frame)
            except FeedError as error:
                self._refuse(peer, error)
            except Exception as error:
                # A bug of ours: the other consumers are served all the same.
                self._log.fail("a consumer's message could not be handled: %s", error)
                self._refuse(peer, RemoteError(f"{type(error).__name__}: {error}"))

    def _handle(self, peer: Peer, frame: Any) -> None:
        caller = self._callers.note_message(key := (peer.router, frame.get(zmq.SRCFD)))
        message = decode(frame.buffer, from_consumer=True)
        asks = isinstance(message, say.Open | say.Look)
        if asks or caller is None:
            # What has happened until it came must be known: its descriptor may be another's now.
            self._look_at_events(peer.router, self._doors[peer.router])
            caller = self._callers.note_message(key)
        if caller is None:
            return  # It is gone itself, and would hold a queue for as long as a lease lasts.
        if asks:
            self._callers.bind_peer(caller, peer)
            self._greet(peer, message, caller)
            return
        if caller.num_opens == 0:
            raise ProtocolError(f"{type(message).__name__} came from one that did not say Open")
        desk, lease = self._leases.get(peer, (None, None))
        generation: bytes = message.generation  # type: ignore[attr-defined]
        is_over = lease is None or lease.generation != generation or lease.is_over
        if isinstance(message, say.Bye):
            # First: when the lease ends the unix connection hangs up, and the peer with it.
            self.send(peer, say.Farewell(generation=generation, reason="goodbye"), ())
        if is_over or desk is None or lease is None:
            return
        if not isinstance(message, say.Attached):
            lease.session.on(type(message).__name__)
        match message:
            case say.Attached():
                # The unix socket was connected before this was sent.
                self._admit()
                desk.attach(lease, message)
                point("server.attached")
            case say.Used():
                desk.use(lease, message)
                point("server.used")
            case say.Snapshot():
                desk.snapshot(lease, message)
            case say.Bye():
                self._forget(peer)
                desk.leave(lease)

    def _greet(self, peer: Peer, message: say.Message, caller: GuardedPeer) -> None:
        if isinstance(message, say.Look) and caller.num_opens:
            raise ProtocolError("a consumer asks as a monitor does")
        if isinstance(message, say.Open) and not self.watching.knows(peer):
            self._open(peer, message, caller)
        else:
            self.send(peer, self.watching.hear(peer, message), ())

    def _open(self, peer: Peer, message: say.Open, caller: GuardedPeer) -> None:
        if peer in self._leases:
            if not self._leases[peer][1].is_over:
                raise ProtocolError("a consumer that has a queue asks for one")
            self._lose(peer)
        caller.num_opens += 1
        if caller.num_opens > say.MAX_OPENS:
            raise ProtocolError(f"a queue was asked for {say.MAX_OPENS} times; connect anew")
        point("server.open")
        desk = self._find(message.feed)
        lease = desk.open(peer, message)
        self._leases[peer] = desk, lease
        recipe = desk.feed.recipe
        answer = say.Opened(
            generation=lease.generation,
            credit=lease.credit,
            shared=self._presence.offer(peer, message.boot_id),
            lease_s=desk.lease_s,
            length=num_batches(recipe.config, lease.queue),
            name=recipe.name,
            number=0,
            fingerprint=codec.pack(recipe.positions.fingerprint),
            epochs=recipe.config.stream.epochs,
            token=desk.start_token(lease.queue),
            writable=recipe.config.run.writable,
        )
        lease.session.on("Opened")
        if not self.send(peer, answer, ()):
            self._lose(peer)  # It died before it was heard, and that was told too early.
        point("server.opened")
        desk.tell_waiting()

    def _find(self, name: str) -> Desk:
        if name in self._desks:
            return self._desks[name]
        if not name and len(self._desks) == 1:
            return next(iter(self._desks.values()))
        raise ConfigError(
            f"feed is {name!r}, expected one of {sorted(self._desks)!r}; name it with feed="
        )

    def _refuse(self, peer: Peer, error: FeedError) -> None:
        """Tell a peer what is wrong with what it said; a lease that it has ends."""
        self._log.warn("a consumer is refused: %s", str(error))
        _, lease = self._leases.get(peer, (None, None))
        generation = b"" if lease is None else lease.told_generation
        self.watching.forget(peer)
        self.send(peer, make_fault(generation, error, None), ())
        self._lose(peer)

    def _is_served(self, peer: Peer) -> bool:
        """Whether a peer holds a queue, or looks on."""
        found = self._leases.get(peer)
        return self.watching.knows(peer) if found is None else not found[1].is_over

    def _forget(self, peer: Peer) -> None:
        self._leases.pop(peer, None)
        self._presence.forget(peer)

    # ---- connections

    def _look_at_events(self, number: int, door: Listener) -> None:
        while (event := read_event(door.monitor)) is not None:
            self._callers.on_event(number, event)
            if event.kind in (zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                              zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):  # fmt: skip
                self._log.warn("a peer was not let in: %s", event.kind.name)

    def _on_gone(self, peer: Peer) -> None:
        self.watching.forget(peer)
        self._lose(peer)

    def _admit(self) -> None:
        """Take the unix connections that have said whose they are."""
        for peer, connection in self._presence.admit():
            found = self._leases.get(peer)
            if found is not None:
                found[1].connection = connection
            else:
                self._presence.forget(peer)
                connection.close()

    def _lose(self, peer: Peer) -> None:
        """A peer's connection is dead."""
        found = self._leases.get(peer)
        if found is not None:
            # First: descriptors that are closed cannot be taken off a poll any more.
            self._forget(peer)
            desk, lease = found
            desk.lose(lease)
            if lease.connection is not None:
                lease.connection.close()

    def _farewell(self) -> None:
        message = say.Farewell(generation=b"", reason=self._stopping or "all is done")
        for peer in list(self._leases):
            self.send(peer, message, ())

    def close(self) -> None:
        """Hang up on everybody, when its sockets are closed: what was said last comes first."""
        self._presence.close()
