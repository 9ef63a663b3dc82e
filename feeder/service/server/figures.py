"""Those who look at a server and take nothing from it: monitors, and threads of this process."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError

from feeder.errors import ClosedError
from feeder.observe.figures import Figures, to_json
from feeder.observe.making import make_figures
from feeder.service.protocol import messages as say
from feeder.service.protocol.receipts import Receipts
from feeder.service.protocol.session import SERVER, Session
from feeder.service.server.group import Desk
from feeder.service.server.lease import Peer
from feeder.service.server.showing import show

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
