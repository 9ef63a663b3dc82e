"""The consumer's I/O thread: it connects, receives, tells what was used, and connects again."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from feeder.devices.host import HostQueue
from feeder.errors import (
    AuthError,
    ClosedError,
    ConnectTimeout,
    FeedError,
    ProtocolError,
    RemoteError,
)
from feeder.protocol import messages as say
from feeder.protocol.coding import decode, encode
from feeder.protocol.session import CONSUMER, Session
from feeder.transport.faults import point
from feeder.transport.plane import Plane
from feeder.transport.reading import Reading
from feeder.transport.remote import RemotePlace, error_of
from feeder.transport.waker import Waker
from feeder.transport.wire import Wire, boot_id, wait_for

logger = logging.getLogger("feeder")

_FAREWELL_S = 1.0
"""How long a server may take to say goodbye."""

_TURN_S = 0.25
"""How long one of several addresses is tried before the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a consumer asks for."""

    addresses: tuple[str, ...]
    """Where servers may be; tried in turn."""
    feed: str
    """Name of the feed; empty is the only one."""
    queue: int
    """Number of the queue."""
    credit: int
    """Batches that may be under way; 0 goes by their size."""
    hold: int
    """Batches that the user may keep beside them."""
    rejoins: bool
    """Whether this consumer goes on alone, wherever the others stand."""
    takes_over: bool
    """Whether to take the queue from a consumer that lives."""
    plane: Literal["auto", "shared", "frames"]
    """How batches are to come."""
    checksum: Literal["auto", "off", "sampled", "full"]
    """How they are checked."""
    timeout_s: float
    """How long a server may take to answer at first."""
    reconnect_s: float
    """How long a server may be away later."""
    who: str
    """This consumer, in words for messages."""


class Receiver:
    """The I/O thread's state. What is public is shared with the user's thread."""

    def __init__(self, wish: Wish, connect: Callable[[str], Wire], token: bytes | None) -> None:
        self.wish = wish
        self._connect = connect
        self._token = token
        self._rejoins = wish.rejoins
        self._session = Session(CONSUMER)
        self._wire: Wire | None = None
        self._consumer = secrets.token_bytes(16)
        self._attempt = 0
        # Of the lease in force.
        self._generation = b""
        self._turn = 0
        self._turn_ends = math.inf
        self._give_up_at = time.monotonic() + wish.timeout_s
        self._broken_at = -1
        # Queues that the feed waits for, and those that it need not wait for any more.
        self._waiting: tuple[int, ...] = ()
        self._ended: tuple[int, ...] = ()
        self._asked: deque[Callable[[], None]] = deque()
        self._over = self._leaving = self._resting = self._has_ended = False
        self.waker = Waker()
        """Wakes the I/O thread."""
        self.inbox = self._make_inbox()
        """Batches received and not taken yet."""
        self.received = 0
        """Batches received since the start."""
        self.handed = 0
        """Batches handed to the user since the start; the user's thread counts it."""
        self.reading: Reading | None = None
        """The lease, or the last one."""
        self.num_opened = 0
        """How often a server has given the queue."""
        self.failure: FeedError | None = None
        """Why nothing more will come."""
        self.answers: dict[int, bytes | None] = {}
        """Snapshots that were asked for, by request."""
        self.changed = threading.Condition()
        """Notified when `num_opened`, `failure` or `answers` change."""

    def _make_inbox(self) -> HostQueue:
        return HostQueue(2**62, self._describe_wait)

    def _describe_wait(self) -> str:
        if self._waiting:
            return f"the feed waits for a consumer on queue {', '.join(map(str, self._waiting))}"
        if self._session.state == "streaming":
            return "the server has none yet"
        return f"no server at {', '.join(self.wish.addresses)} ({self._session.state})"

    # ---- asked by the user's thread

    def ask(self, what: Callable[[], None]) -> None:
        """Have something done by the I/O thread; from any thread."""
        self._asked.append(what)
        self.waker.wake()

    def stop(self) -> None:
        """Say goodbye, and wait for the server's; done by the I/O thread."""
        if self._leaving or self.reading is None or not self._holds_lease:
            self._over = True
            return
        self._leaving = True
        self._give_up_at = time.monotonic() + _FAREWELL_S
        self.reading.leave(self.handed)

    def ask_snapshot(self, request: int, handed: int) -> None:
        """Ask for the state after so many batches; done by the I/O thread."""
        reading = self.reading if self._session.state in ("streaming", "ended") else None
        if reading is None or not reading.ask_snapshot(request, handed):
            self._answer(request, None)

    def reopen(self, token: bytes) -> None:
        """Start elsewhere, before any batch was handed out; done by the I/O thread."""
        holds_lease, reading = self._holds_lease, self.reading
        self.inbox, self.received = self._make_inbox(), 0
        self._token, self._rejoins, self._has_ended = token, self.wish.rejoins, False
        self._drop_plane()
        if holds_lease and reading is not None:
            reading.leave(0)
            self._session = Session(CONSUMER, "connecting")
            self._open()
        else:
            # What was asked is on its way: ask anew, over another connection.
            self._close_wire()

    @property
    def _holds_lease(self) -> bool:
        return self._wire is not None and self._session.state in (
            "attaching", "streaming", "ended", "failed"
        )  # fmt: skip

    @property
    def _is_told_of(self) -> bool:
        """Whether the server wants to know what is used."""
        return not self._leaving and self._session.state in ("streaming", "ended")

    def _answer(self, request: int, data: bytes | None) -> None:
        with self.changed:
            self.answers[request] = data
            self.changed.notify_all()

    # ---- the thread

    def run(self) -> None:
        """Thread body."""
        failure: FeedError = ClosedError("the consumer is closed")
        try:
            while not self._over:
                self._step()
        except Exception as error:
            logger.exception("the consumer's I/O thread failed")
            failure = RemoteError(f"the consumer failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._over = True
        self._close_wire()
        self._drop_plane()
        self.inbox.finish(failure)
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()

    def _step(self) -> None:
        """Wait for something, and do what there is to do."""
        if self._wire is None and not self._resting:
            self._begin()
        timeout_s = max(0.0, self._look_again_at() - time.monotonic())
        wire = self._wire
        if wire is None:
            wait_for(self.waker, timeout_s)
        else:
            ready = wire.poll(timeout_s)
            if ready.messages:
                self._receive(wire)
            if ready.trouble and wire is self._wire:
                self._on_trouble(wire)
        self.waker.clear()
        if self._is_told_of and self.reading is not None:
            self.reading.tell(self.handed)
        while self._asked:
            self._asked.popleft()()
        self._look_at_clock()

    def _look_again_at(self) -> float:
        renew_at = self.reading.renew_at if self.reading and self._holds_lease else math.inf
        return min(self._give_up_at, self._turn_ends, renew_at)

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if now >= self._give_up_at:
            if self._leaving:
                self._over = True
                return
            limit = self.wish.reconnect_s if self.num_opened else self.wish.timeout_s
            self._fail(
                ConnectTimeout(
                    f"no answer from {', '.join(self.wish.addresses)} within {limit} s; does "
                    "`feeder serve` run there?"
                )
            )
        elif now >= self._turn_ends:
            self._turn_ends = math.inf
            if self._session.state in ("connecting", "opening"):
                self._close_wire()
        if self.reading is not None and self._holds_lease and now >= self.reading.renew_at:
            self.reading.tell(self.handed, renew=True)

    # ---- the connection

    def _begin(self) -> None:
        """Try the next address."""
        addresses = self.wish.addresses
        address = addresses[self._turn % len(addresses)]
        self._turn += 1
        self._session = Session(CONSUMER)
        self._session.on("connect")
        self._wire = self._connect(address)
        self._wire.wake_with(self.waker)
        if len(addresses) > 1:
            self._turn_ends = time.monotonic() + _TURN_S
        self._open()

    def _open(self) -> None:
        """Ask for the queue."""
        wish, reading = self.wish, self.reading
        point("consumer.before_open")
        self._generation = b""
        self._attempt += 1
        self._session.on("Open")
        self._say(
            say.Open(
                version=say.PROTOCOL_VERSION,
                feed=wish.feed,
                queue=wish.queue,
                token=self._token,
                credit=wish.credit,
                hold=wish.hold,
                fingerprint=reading.identity.id.fingerprint if reading else None,
                intent="rejoin" if self._rejoins else "start",
                takeover=wish.takes_over,
                consumer=self._consumer,
                attempt=self._attempt,
                ended=self._ended,
                who=wish.who,
                boot_id=boot_id() if wish.plane != "frames" else "",
                checksum=wish.checksum,
            )
        )

    def _say(self, message: say.Message) -> None:
        if self._wire is not None:
            self._wire.send(encode(message))

    def _on_trouble(self, wire: Wire) -> None:
        error = wire.trouble()
        if isinstance(error, AuthError):
            self._fail(error)
        elif error is not None:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        """The connection is gone: look for a server again, where there is more to come."""
        if self._leaving:
            self._over = True
            return
        state = self._session.state
        self._close_wire()
        self._drop_plane()
        if state in ("failed", "refused"):
            self._rest()
        elif state == "ended":
            # Another server would wait for this queue if it did not learn that it has ended.
            self._rejoins = True
        elif self.num_opened:
            point("consumer.lost")
            logger.warning("consumer: %s; looking for a server", why)
            self._give_up_at = time.monotonic() + self.wish.reconnect_s
            self._rejoins = True

    def _fail(self, error: FeedError) -> None:
        """Nothing more will come."""
        self.inbox.finish(error)
        with self.changed:
            self.failure = error
            self.changed.notify_all()
        if not self._holds_lease:
            self._close_wire()
            self._rest()

    def _rest(self) -> None:
        """There is nobody to talk to any more."""
        self._resting = True
        self._turn_ends = self._give_up_at = math.inf

    def _close_wire(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _drop_plane(self) -> None:
        if self._wire is not None:
            self._wire.unwatch()
        if self.reading is not None:
            self.reading.plane.close()

    # ---- what the server says

    def _receive(self, wire: Wire) -> None:
        try:
            for data, frames in wire.receive():
                message = decode(data, from_consumer=False)
                if self._leaving:
                    self._over = self._over or isinstance(message, say.Farewell)
                    continue
                if self._is_of_old(message):
                    continue
                self._session.on(type(message).__name__)
                _HANDLERS[type(message)](self, message, frames)
                if self._wire is not wire:
                    return
        except ProtocolError as error:
            if self._broken_at == self.received:
                self._fail(error)
            else:
                # Once more: what was broken on its way comes again.
                self._broken_at = self.received
                self._lose(str(error))

    def _is_of_old(self, message: say.Message) -> bool:
        """Whether it speaks of a lease that is over."""
        generation = getattr(message, "generation", b"")
        return (
            bool(generation)
            and not isinstance(message, say.Opened | say.Fault)
            and (generation != self._generation)
        )

    def _on_opened(self, opened: say.Opened, frames: list[Any]) -> None:
        plane = Plane(opened, self.wish.plane, self.wish.checksum, self.waker.wake)
        self._turn_ends = self._give_up_at = math.inf
        self._waiting = ()
        self._generation = opened.generation
        reading = Reading(opened, plane, self.received, self._say)
        if self.reading is not None:
            reading.columns = self.reading.columns
        if plane.connection is not None and self._wire is not None:
            self._wire.watch(plane.connection)
        point("consumer.opened")
        self._session.on("Attached")
        reading.begin()
        if self._token is None:
            self._token = opened.token
        if self.num_opened:
            logger.info("consumer: a server is there again")
        with self.changed:
            self.reading = reading
            self.num_opened += 1
            self.changed.notify_all()

    def _on_spec(self, spec: say.Spec, frames: list[Any]) -> None:
        if self.reading is not None:
            self.reading.learn(spec)

    def _on_arena(self, arena: say.Arena, frames: list[Any]) -> None:
        assert self.reading is not None
        self.reading.plane.add_arena(arena)
        point("consumer.mapped")

    def _on_batches(self, message: say.Batches, frames: list[Any]) -> None:
        assert self.reading is not None
        batches = self.reading.read(message, frames)
        point("consumer.received")
        self._token = message.headers[-1].token
        self.received += len(batches)
        self._waiting = ()
        self.inbox.put(batches)
        point("consumer.put")

    def _on_waiting(self, message: say.Waiting, frames: list[Any]) -> None:
        self._waiting, self._ended = message.queues, message.ended

    def _on_state(self, message: say.State, frames: list[Any]) -> None:
        self._answer(message.request, message.data)

    def _on_end(self, message: say.End, frames: list[Any]) -> None:
        assert self.reading is not None
        self._token = message.token
        self._has_ended = True
        place: Any = RemotePlace(self.reading.identity, message.token)
        self.inbox.finish(place)
        point("consumer.end")

    def _on_fault(self, message: say.Fault, frames: list[Any]) -> None:
        if message.generation in (b"", self._generation):
            self._fail(error_of(message))

    def _on_farewell(self, message: say.Farewell, frames: list[Any]) -> None:
        if self._has_ended:
            self._close_wire()
            self._rest()
            return
        self._lose(f"the server stopped: {message.reason}")

    def _on_progress(self, message: say.Progress, frames: list[Any]) -> None:
        logger.info("consumer: replay, %d of %d", message.done, message.total)


_HANDLERS: dict[type[say.Message], Callable[[Receiver, Any, list[Any]], None]] = {
    say.Opened: Receiver._on_opened,
    say.Spec: Receiver._on_spec,
    say.Arena: Receiver._on_arena,
    say.Batches: Receiver._on_batches,
    say.Waiting: Receiver._on_waiting,
    say.State: Receiver._on_state,
    say.End: Receiver._on_end,
    say.Fault: Receiver._on_fault,
    say.Farewell: Receiver._on_farewell,
    say.Progress: Receiver._on_progress,
}
