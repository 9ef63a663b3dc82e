"""Those who look at a server and take nothing from it: monitors, and threads of this process."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError

from feeder.errors import ClosedError, FeedError
from feeder.observe.figures import (
    Condition,
    ConsumerFigures,
    FeedFigures,
    Figures,
    QueueFigures,
    ServiceFigures,
    State,
    make_feed,
    make_figures,
    to_json,
)
from feeder.service.net.sockets import Peer
from feeder.service.protocol import messages as say
from feeder.service.protocol.receipts import Receipts
from feeder.service.protocol.session import SERVER, Session
from feeder.service.server.group import Desk
from feeder.service.server.lease import Lease

# ---- The figures of a served feed, read by the server's I/O thread.


def show(desk: Desk, now: float) -> FeedFigures:
    """What a feed has done, and who reads it."""
    feed, run = desk.feed, desk.feed.run
    failure = _failure(desk)
    missing = () if failure is not None else tuple(desk.seats.missing())
    condition = Condition(
        state=_state(desk, failure),
        failure=failure,
        missing=missing,
        started_at=feed.started_at,
        asked_at=feed.account.asked_at,
    )
    return make_feed(
        feed.recipe.config,
        0,
        condition,
        feed.counted,
        None if run is None else run.pipeline.budget,
        [_queue(desk, number, now) for number in range(desk.num_queues)],
        now,
        blocked_s=feed.slots.waited.seconds(now),
        service=_service(desk),
    )


def _failure(desk: Desk) -> FeedError | None:
    feed = desk.feed
    endings = [] if feed.run is None else [outbox.result for outbox in feed.run.outboxes]
    found = [feed.failure, *endings]
    return next((error for error in found if isinstance(error, FeedError)), None)


def _state(desk: Desk, failure: FeedError | None) -> State:
    if failure is not None:
        return "failed"
    if desk.acknowledged:
        return "ended"
    return "waiting" if desk.feed.run is None else "running"


def _service(desk: Desk) -> ServiceFigures:
    account = desk.feed.account
    return ServiceFigures(
        opened=account.opened,
        reopened=account.reopened,
        fenced=account.fenced,
        expired=account.expired,
        rewinds=max(0, account.begun - 1),
        arena_bytes=desk.feed.slots.num_bytes,
    )


def _queue(desk: Desk, number: int, now: float) -> QueueFigures:
    account, lease, run = desk.feed.account.queues[number], desk.leases[number], desk.feed.run
    in_flight = 0 if lease is None else lease.sequence - lease.used
    return QueueFigures(
        queue=number,
        device=desk.feed.recipe.config.devices[number],
        batches=account.used.batches,
        rows=account.used.rows,
        bytes=account.used.bytes,
        waiting=in_flight + (0 if run is None else len(run.outboxes[number])),
        capacity=desk.feed.slots.num_slots(number),
        wait_s=account.wait_s(now),
        starved_s=account.starved.seconds(now),
        checked_s=account.most_checked_s,
        corrupt=account.corrupt,
        consumer=None if lease is None else _consumer(desk, lease, now),
    )


def _consumer(desk: Desk, lease: Lease, now: float) -> ConsumerFigures:
    plane = "" if not lease.has_attached else "shared" if lease.shared else "frames"
    return ConsumerFigures(
        who=lease.who,
        plane=plane,
        state=lease.session.state,
        credit=lease.credit,
        in_flight=lease.sequence - lease.used,
        silent_s=max(0.0, now - (lease.expires - desk.lease_s)),
    )


_FRESH_S = 0.05
"""Figures are made anew at most so often, however many look."""


class Watching:
    """Belongs to the server's I/O thread, but for `ask`."""

    def __init__(self, desks: dict[str, Desk]) -> None:
        self._desks = desks
        self._sessions: dict[Peer, tuple[Session, Receipts]] = {}
        self._asked: deque[Future[Figures]] = deque()
        self._made_at = -math.inf
        self._figures: Figures | None = None
        self._data: bytes | None = None
        self._closed = False

    def ask(self) -> Future[Figures]:
        """The figures, once the I/O thread has been woken; from any thread."""
        future: Future[Figures] = Future()
        self._asked.append(future)
        if self._closed:
            self.close()
        return future

    def answer(self) -> None:
        """Give the figures to threads that have asked."""
        while self._asked:
            future = self._asked.popleft()
            # Who asked may have given up.
            with contextlib.suppress(InvalidStateError):
                future.set_result(self.figures(time.monotonic()))

    def close(self) -> None:
        """Whoever asks now or later is told that the server is closed."""
        self._closed = True
        while self._asked:
            with contextlib.suppress(IndexError, InvalidStateError):
                self._asked.popleft().set_exception(ClosedError("the server is closed"))

    def figures(self, now: float) -> Figures:
        """What all feeds have done."""
        if self._figures is None or now - self._made_at >= _FRESH_S:
            feeds = [show(desk, now) for desk in self._desks.values()]
            self._figures, self._made_at = make_figures(feeds, now), now
            self._data = None
        return self._figures

    # ---- monitors

    def knows(self, peer: Peer | None) -> bool:
        """Whether a peer is a monitor."""
        return peer in self._sessions

    def hear(self, peer: Peer, message: say.Message) -> say.Seen:
        """The answer to a monitor. Raises `ProtocolError` where it says anything but `Look`,
        or has not read the last answer."""
        if peer not in self._sessions:
            self._sessions[peer] = Session(SERVER), Receipts()
        session, answers = self._sessions[peer]
        session.on(type(message).__name__)
        assert isinstance(message, say.Look)  # The session's states see to that.
        answers.check(message.receipt)
        session.on("Seen")
        figures = self.figures(time.monotonic())
        self._data = self._data or to_json(figures)
        return say.Seen(data=self._data, receipt=answers.make())

    def forget(self, peer: Peer) -> None:
        """A peer is gone, or has been sent away."""
        self._sessions.pop(peer, None)
