"""The server's I/O thread: it owns every socket and hands each message to its consumer group."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
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
from feeder.service.protocol import messages as say
from feeder.service.protocol.coding import decode, encode
from feeder.service.ratelimited_log import RateLimitedLog
from feeder.service.server.delivery import Lease, make_fault
from feeder.service.server.editing import Change
from feeder.service.server.figures import Monitors
from feeder.service.server.group import ConsumerGroup
from feeder.state import codec
from feeder.state.fingerprint import epochs_in_words, in_words
from feeder.waking import Waker

# ---- When a server ends by itself: a rule without sockets and clock.


class ExitCondition:
    """Whether a server is over by itself: with `exit_when="acknowledged"`, once the users of every
    queue of every feed have been handed everything, or once a feed has failed and everybody who is
    connected knows. Owned by the I/O thread; any thread may read `failure` after the server's end.
    """

    def __init__(self, groups: Mapping[str, ConsumerGroup], exit_when: str) -> None:
        self._groups = groups
        self._ends = exit_when == "acknowledged"
        self.is_over = False
        """Whether consumers have had everything that they can have."""
        self.failure: FeedError | None = None
        """Why it is over before everything was used."""

    def update(self) -> None:
        """Find out whether the server is over now."""
        if not self._ends:
            return
        groups = self._groups.values()
        if all(group.acknowledged for group in groups):
            self.is_over = True
            return
        told = [group.feed.reported for group in groups]
        # A position that does not fit is the failure of the consumer that brought it, and ends
        # nothing.
        failures = [error for error in told if error and not isinstance(error, ResumeError)]
        # Queues that nobody holds are not waited for: after a failure a trainer that was to come
        # for them may never come, and batches that cannot be made would be waited for in silence.
        leases = [lease for group in groups for lease in group.leases]
        if failures and all(lease.is_settled for lease in leases):
            self.is_over, self.failure = True, failures[0]


# ---- Which consumers are on this host, and which of those are gone. A consumer that is killed is
# known at once by its unix connection and its pidfd; ZeroMQ tells nothing of that kind.


class LocalPeers:
    """The unix connections of this host's consumers, in the server's poll. Owned by the I/O
    thread."""

    def __init__(self, listener: DescriptorListener, poller: zmq.Poller) -> None:
        self._listener = listener
        self._poller = poller
        # Offered and not presented yet: a nonce says to which peer a unix connection belongs.
        self._nonces: dict[bytes, Peer] = {}
        # Connections and processes by their descriptors, which are readable once they are gone.
        self._watched: dict[int, tuple[Peer, DescriptorConnection]] = {}
        poller.register(listener.fileno(), zmq.POLLIN)

    def offer(self, peer: Peer, kernel: str) -> say.Offer | None:
        """Where a consumer may fetch descriptors; None if it runs under another kernel."""
        # The boot id names the kernel: two containers of one host share memory, whatever their
        # names are.
        if not kernel or kernel != boot_id():
            return None
        nonce = os.urandom(NONCE_BYTES)
        self._nonces[nonce] = peer
        self._listener.expect(nonce)
        return say.Offer(path=self._listener.path, nonce=nonce)

    def admit(self) -> list[tuple[Peer, DescriptorConnection]]:
        """The connections that have presented a nonce since the last call, each with its peer."""
        # Once to accept a connection, once to read what it has presented by then.
        new = [*self._listener.on_readable(), *self._listener.on_readable()]
        found = [(self._nonces.pop(connection.nonce), connection) for connection in new]
        for peer, connection in found:
            for descriptor in (connection.fileno(), connection.pidfd):
                if descriptor is not None:
                    self._watched[descriptor] = peer, connection
                    self._poller.register(descriptor, zmq.POLLIN)
        return found

    def gone(self, ready: dict[Any, int]) -> list[Peer]:
        """The peers that are gone, of those whose descriptors a poll found readable."""
        # In the order of the poll, each once: a set's order differs from process to process.
        peers: dict[Peer, None] = {}
        for descriptor in ready:
            peer, connection = self._watched.get(descriptor, (None, None))
            # Asked again, since the number may belong to another connection than when the poll
            # returned: descriptors are reused at once.
            if peer is not None and connection is not None and connection.is_gone():
                peers[peer] = None
        return list(peers)

    def has_news(self, ready: dict[Any, int]) -> bool:
        """Whether a poll found somebody at the unix socket."""
        return self._listener.fileno() in ready

    def forget(self, peer: Peer) -> None:
        """Stop watching a peer whose lease is over. Its connection must still be open: a closed
        descriptor cannot be taken off the poll any more."""
        for nonce in [nonce for nonce, owner in self._nonces.items() if owner == peer]:
            del self._nonces[nonce]
            self._listener.withdraw(nonce)
        for descriptor, (owner, _) in list(self._watched.items()):
            if owner == peer:
                del self._watched[descriptor]
                self._poller.unregister(descriptor)

    def expire(self, now: float) -> float:
        """Hang up on connections that presented no nonce in time; returns when to look again."""
        self._listener.expire(now)
        deadline = self._listener.deadline
        return math.inf if deadline is None else deadline

    def close(self) -> None:
        """Hang up on everybody that is left."""
        for _, connection in self._watched.values():
            connection.close()
        self._watched.clear()


logger = logging.getLogger("feeder")

# `Waiting` goes out when something changes; this repeats it for changes that come with time alone,
# such as a lease that has run out.
_TELL_S = 5.0
_TURNS_FOR_LAST_WORDS = 16
"""Turns of reading, at most, before those who are gone lose their queues: in each, ZeroMQ takes the
next message of everybody who has sent one."""


Question = say.Open | say.Look | say.Edit
"""What is answered once those who are gone have lost their queues."""


class ServerLoop:
    """The body of the I/O thread, and all that it knows of peers.

    Owned by that thread. Other threads may call `stop`, `waker.wake` and `monitors.ask`, and
    `close` once the thread has ended.
    """

    def __init__(
        self, groups: dict[str, ConsumerGroup], listeners: list[Listener],
        descriptors: DescriptorListener, waker: Waker, *, exit_when: str,
    ) -> None:  # fmt: skip
        self._groups = groups
        for group in groups.values():
            group.delivery.send = self.send
        self._listeners = listeners
        self.waker = waker
        # Which lease a connection speaks for. The group may have ended it already.
        self._leases: dict[Peer, tuple[ConsumerGroup, Lease]] = {}
        self._stopping: str | None = None
        self._log = RateLimitedLog()
        most_bytes = [listener.most_bytes for listener in listeners]
        self._guard = ConnectionGuard(self._log, self._is_served, self._note_gone, most_bytes)
        # Peers whose connections are dead, and which may have left messages behind; and questions,
        # which are answered once those have lost their queues.
        self._gone: dict[Peer, None] = {}
        self._questions: list[tuple[Peer, Question, GuardedPeer]] = []
        self._num_late = 0  # Turns in a row in which not all had been read.
        self._tell_at = time.monotonic() + _TELL_S
        self._expires_at = math.inf
        self._poller = zmq.Poller()
        for listener in listeners:
            self._poller.register(listener.router, zmq.POLLIN)
            self._poller.register(listener.monitor, zmq.POLLIN)
        self._poller.register(waker.fileno(), zmq.POLLIN)
        self._local_peers = LocalPeers(descriptors, self._poller)
        self.monitors = Monitors(groups)
        """Those who look at the figures."""
        self.exit_condition = ExitCondition(groups, exit_when)
        """Whether the server ends by itself."""

    def stop(self, reason: str) -> None:
        """Ask the thread to end; from any thread."""
        self._stopping = reason
        self.waker.wake()

    def run(self) -> None:
        """Thread body."""
        try:
            while self._stopping is None and not self.exit_condition.is_over:
                self._step(self._timeout())
            # Once more without waiting: what consumers said until now is heard, so that what they
            # used is in the checkpoint that is stored at the end.
            self._step(0)
        except Exception as error:
            logger.exception("the server's I/O thread failed")
            self._stopping = f"it failed: {type(error).__name__}: {error}"
            self.exit_condition.failure = RemoteError(
                f"the server failed: {type(error).__name__}: {error}"
            )
        finally:
            self._farewell()
            self.monitors.close()
            self._guard.close()

    def _step(self, timeout_ms: int) -> None:
        # Taken before the poll. Leases run out at this time, and everything that came before it is
        # heard first: a server that was held up itself takes nobody for hung.
        now = time.monotonic()
        ready = dict(self._poller.poll(timeout_ms))
        if self.waker.fileno() in ready:
            self.waker.clear()
            self.monitors.answer_threads()  # Whoever asks wakes this thread.
        for i, listener in enumerate(self._listeners):
            if listener.monitor in ready:
                self._look_at_events(i, listener)
        if self._local_peers.has_news(ready):
            self._admit()
        for i, listener in enumerate(self._listeners):
            # What somebody said who is known to be gone is there, though the poll may not say so.
            if listener.router in ready or (self._gone and listener.reader.is_behind):
                self._receive(i, listener)
        self._lose_gone(ready)
        self._answer_questions()
        for group in self._groups.values():
            group.pump()
        self._look_at_clock(now)

    def _lose_gone(self, ready: dict[Any, int]) -> None:
        """End the leases of those who are gone, after their last messages: what a consumer said
        before it died counts, also if it lies behind those of many others."""
        # Asked after the messages: one that has said goodbye is not watched any more. Until then
        # the next poll finds it again.
        killed = self._local_peers.gone(ready)
        is_behind = bool(self._gone or killed) and any(
            one.reader.is_behind for one in self._listeners
        )
        # Somebody who floods the server does not put it off for ever.
        self._num_late = self._num_late + 1 if is_behind else 0
        if self._num_late % _TURNS_FOR_LAST_WORDS == 0:
            gone, self._gone = self._gone, {}
            self._questions = [one for one in self._questions if one[0] not in gone]
            for peer in (*gone, *killed):
                self.monitors.forget(peer)
                self._lose(peer)

    def _answer_questions(self) -> None:
        """Answer those who ask for a queue or for figures, once those before them have lost
        theirs."""
        if not self._gone:
            questions, self._questions = self._questions, []
            for peer, message, guarded in questions:
                self._take(self._greet, peer, message, guarded)

    def _timeout(self) -> int:
        if self._gone:
            return 0
        nearest = min(self._expires_at, self._tell_at if self._leases else math.inf)
        return -1 if nearest == math.inf else max(0, math.ceil((nearest - time.monotonic()) * 1000))

    def _look_at_clock(self, now: float) -> None:
        """Do what is due at `now`; whoever spoke before then has been heard."""
        deadlines = [group.expire(now) for group in self._groups.values()]
        self._expires_at = min(self._local_peers.expire(now), self._guard.check(now), *deadlines)
        if now >= self._tell_at:
            self._tell_at = now + _TELL_S
            for group in self._groups.values():
                group.tell_waiting()
        self.exit_condition.update()

    # ---- sending

    def send(self, peer: Peer, message: say.Message, frames: Sequence[Any]) -> bool:
        """Send a message; False if the peer is gone, or does not read what it asked for."""
        # The sockets never wait: with ROUTER_MANDATORY a full or missing peer is an error.
        data = encode(message)
        router = self._listeners[peer.router].router
        try:
            router.send(peer.identity, zmq.SNDMORE)
            # Only the frames of batches are worth ZeroMQ's way without a copy.
            router.send(data, zmq.SNDMORE if frames else 0)
            if frames:
                router.send_multipart(frames, copy=False)
        except zmq.ZMQError as error:
            # That it is gone is its ordinary end, or is told as a loss.
            if error.errno != zmq.EHOSTUNREACH:
                self._log.warn("a consumer is not sent to: %s", str(error))
            return False
        return True

    # ---- receiving

    def _receive(self, number: int, listener: Listener) -> None:
        for identity, frame, _, num in listener.reader.read_messages():
            peer = Peer(number, identity)
            self._take(self._handle, peer, frame, num)

    def _take(self, handle: Callable[..., None], peer: Peer, *said: Any) -> None:
        """Handle what a peer has said; an error is the peer's."""
        try:
            handle(peer, *said)
        except FeedError as error:
            self._refuse(peer, error)
        except Exception as error:
            # A defect of feeder: it ends this lease, and the others are served all the same.
            self._log.fail("a consumer's message could not be handled: %s", error)
            self._refuse(peer, RemoteError(f"{type(error).__name__}: {error}"))

    def _handle(self, peer: Peer, frame: Any, num_frames: int) -> None:
        if num_frames != 1:
            raise ProtocolError(f"a message of {num_frames} frames, expected 1")
        guarded = self._guard.note_message(key := (peer.router, frame.get(zmq.SRCFD)))
        message = decode(frame.buffer, from_consumer=True)
        if isinstance(message, Question) or guarded is None:
            # Events lie in a socket of their own. Those before this message must be known first:
            # the descriptor may belong to another connection by now.
            self._look_at_events(peer.router, self._listeners[peer.router])
            guarded = self._guard.note_message(key)
        if isinstance(message, Question):
            # If it is gone already, it would hold a queue for a whole lease.
            if guarded is not None:
                self._guard.bind_peer(guarded, peer)
                self._questions.append((peer, message, guarded))
        # The last words of one who is gone count, though another may have its descriptor by now.
        elif peer in self._leases or (guarded is not None and guarded.num_opens):
            self._hear(peer, message)
        elif guarded is not None and guarded.peer in (None, peer):
            raise ProtocolError(f"{type(message).__name__} came from one that did not say Open")

    def _hear(self, peer: Peer, message: Any) -> None:
        group, lease = self._leases.get(peer, (None, None))
        generation: bytes = message.generation
        # Connections prove nothing, generations do: what belongs to an earlier lease is dropped.
        is_over = lease is None or lease.generation != generation or not lease.has_lease
        if isinstance(message, say.Bye):
            # Before the lease ends: then the unix connection hangs up, and the peer with it.
            self.send(peer, say.Farewell(generation=generation, reason="goodbye"), ())
        if is_over or group is None or lease is None:
            return
        # `ConsumerGroup.attach` moves the session itself, once it has admitted the connection.
        if not isinstance(message, say.Attached):
            lease.session.on(type(message).__name__)
        match message:
            case say.Attached():
                # The consumer connected to the unix socket before it sent this, so it can be
                # admitted now, whatever order the poll found them in.
                self._admit()
                group.attach(lease, message)
                point("server.attached")
            case say.Used():
                group.use(lease, message)
                point("server.used")
            case say.Snapshot():
                group.snapshot(lease, message)
            case say.Bye():
                self._forget(peer)
                group.leave(lease)

    def _greet(self, peer: Peer, message: say.Message, guarded: GuardedPeer) -> None:
        if not isinstance(message, say.Open) and guarded.num_opens:
            raise ProtocolError("a consumer asks as a monitor does")
        if isinstance(message, say.Open) and not self.monitors.knows(peer):
            self._open(peer, message, guarded)
        elif isinstance(message, say.Edit):
            self._edit(peer, message)
        else:
            self.send(peer, self.monitors.answer_monitor(peer, message), ())

    def _open(self, peer: Peer, message: say.Open, guarded: GuardedPeer) -> None:
        if peer in self._leases:
            if self._leases[peer][1].has_lease:
                raise ProtocolError("a consumer that has a queue asks for one")
            self._lose(peer)
        # Counted before anything can fail: a refused question costs the server as much.
        guarded.num_opens += 1
        if guarded.num_opens > say.MAX_OPENS:
            raise ProtocolError(f"a queue was asked for {say.MAX_OPENS} times; connect anew")
        point("server.open")
        group = self._find(message.feed)
        factory = group.feed.factory
        try:
            lease = group.open(peer, message)
        except FeedError as error:
            # They go out with the error: who had the queue before learns what is another now.
            vars(error).update(
                queues=group.num_queues, replicas=group.replicas,
                epochs=epochs_in_words(factory.config.stream.epochs),
                settings=in_words(factory.positions.fingerprint),
            )  # fmt: skip
            raise
        self._leases[peer] = group, lease
        answer = say.Opened(
            generation=lease.generation,
            credit=lease.credit,
            shared=self._local_peers.offer(peer, message.boot_id),
            lease_s=group.membership.lease_s,
            length=num_batches(factory.config, lease.queue),
            name=factory.name,
            number=0,
            fingerprint=codec.pack(factory.positions.fingerprint),
            epochs=factory.config.stream.epochs,
            token=group.start_token(lease),
            writable=factory.config.run.writable,
            replicas=factory.replicas,
        )
        lease.session.on("Opened")
        if not self.send(peer, answer, ()):
            # It died before its question was read. Its hang-up was an event without a lease then,
            # and is not told again.
            self._lose(peer)
        point("server.opened")
        group.tell_waiting()

    def _edit(self, peer: Peer, message: say.Edit) -> None:
        session, _ = self.monitors.hear(peer, message)
        group = self._find(message.feed)
        sizes = {"batch_size": message.batch_size, "global_batch_size": message.global_batch_size}
        change = Change(
            {name: Fraction(weight) for name, weight in message.weights},
            {name: size for name, size in sizes.items() if size is not None}, message.seed,
        )  # fmt: skip
        step = group.edit(change, message.why)
        session.on("Edited")
        self.send(peer, say.Edited(feed=group.feed.name, step=step), ())

    def _find(self, name: str) -> ConsumerGroup:
        if name in self._groups:
            return self._groups[name]
        if not name and len(self._groups) == 1:
            return next(iter(self._groups.values()))
        raise ConfigError(
            f"feed is {name!r}, expected one of {sorted(self._groups)!r}; name it with feed="
        )

    def _refuse(self, peer: Peer, error: FeedError) -> None:
        """Send a peer the error in what it said, and end its lease, if it has one."""
        # Consumers that have the addresses of all servers of a stream look for theirs.
        if not hasattr(error, "elsewhere"):
            self._log.warn("a consumer is refused: %s", str(error))
        _, lease = self._leases.get(peer, (None, None))
        generation = b"" if lease is None else lease.known_generation
        self.monitors.forget(peer)
        self.send(peer, make_fault(generation, error, None), ())
        self._lose(peer)

    def _is_served(self, peer: Peer) -> bool:
        """Whether a peer holds a queue or is a monitor."""
        found = self._leases.get(peer)
        return self.monitors.knows(peer) if found is None else found[1].has_lease

    def _forget(self, peer: Peer) -> None:
        self._leases.pop(peer, None)
        self._local_peers.forget(peer)

    # ---- connections

    def _look_at_events(self, number: int, listener: Listener) -> None:
        while (event := read_event(listener.monitor)) is not None:
            self._guard.on_event(number, event)
            if event.kind in (zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                              zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):  # fmt: skip
                self._log.warn("a peer was not let in: %s", event.kind.name)

    def _note_gone(self, peer: Peer) -> None:
        self._gone[peer] = None

    def _admit(self) -> None:
        """Give unix connections that have presented a nonce to their leases."""
        for peer, connection in self._local_peers.admit():
            found = self._leases.get(peer)
            if found is not None:
                found[1].connection = connection
            else:
                self._local_peers.forget(peer)
                connection.close()

    def _lose(self, peer: Peer) -> None:
        """End the lease of a peer whose connection is dead."""
        found = self._leases.get(peer)
        if found is not None:
            # Before it is closed: closed descriptors cannot be taken off a poll any more.
            self._forget(peer)
            group, lease = found
            group.lose(lease)
            if lease.connection is not None:
                lease.connection.close()

    def _farewell(self) -> None:
        message = say.Farewell(generation=b"", reason=self._stopping or "all is done")
        for peer in list(self._leases):
            self.send(peer, message, ())

    def close(self) -> None:
        """Hang up on everybody. Called after the ZeroMQ sockets are closed, so that what was sent
        last arrives before the hang-up."""
        self._local_peers.close()
