"""What a consumer and a server say to each other, as the consumer sees it.

The state of the conversation without its connection: the I/O thread owns both.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from feeder.devices.one_shot_event import OneShotEvent
from feeder.errors import FeedError, ProtocolError, RemoteError, ResumeError, TransportError
from feeder.service.client.data_path import DataPath
from feeder.service.client.inbox import Inbox
from feeder.service.client.lease import ClientLease
from feeder.service.client.options import ConsumerOptions
from feeder.service.client.remote import RemotePosition, columns_in, error_of
from feeder.service.faults import point
from feeder.service.memory.fdpass import Attachment
from feeder.service.protocol import messages as say
from feeder.service.protocol.session import CONSUMER, Session

# ---- What a user's thread asks a server, by way of the I/O thread.


class SnapshotRequest:
    """A snapshot that is wanted. The I/O thread answers, and the user's thread waits, which may be
    interrupted: not so at a `Future` (see `OneShotEvent`)."""

    def __init__(self) -> None:
        self._bell = OneShotEvent()
        self._answer: bytes | RemoteError | None = None
        self.given_up = False
        """Whether nobody waits any more."""

    def answer(self, answer: bytes | RemoteError) -> None:
        """The first one counts."""
        if self._answer is None:
            self._answer = answer
        self._bell.ring()

    def refuse(self, why: str) -> None:
        """There is no snapshot."""
        self.answer(RemoteError(f"no snapshot: {why}; use state_dict()"))

    def result(self, timeout_s: float) -> bytes:
        """Wait for the snapshot's bytes. Raises `RemoteError` where there is none."""
        if not self._bell.wait(timeout_s):
            self.given_up = True
            self.refuse(f"no answer within {timeout_s:g} s")
        answer = self._answer
        assert answer is not None
        if isinstance(answer, RemoteError):
            raise answer
        return answer


logger = logging.getLogger("feeder")

_BESIDE_BYTES = 2048
"""What a question for a queue holds beside a position, about."""
_UNKNOWN = (
    "the server does not know the leftover rows here, or they are more than 256 MiB; take a batch "
    "and ask again"
)


class ClientSession:
    """Who this consumer is to the server, where it stands, and what it was told."""

    def __init__(
        self,
        wish: ConsumerOptions,
        token: bytes | None,
        inbox: Inbox,
        wake: Callable[[], None],
        tell: Callable[[say.Message], None],
        why_too_long: Callable[[int], str | None],
    ) -> None:
        self._wish = wish
        self._inbox = inbox
        self._wake = wake
        self._tell = tell
        self._why_too_long = why_too_long
        self._has_warned = self._has_run = False
        # Where the next batch comes from: after the last one that came, else at the token.
        self._last: Any = None
        self._token = token
        self._has_position = token is not None or wish.rejoins
        self._consumer = secrets.token_bytes(16)
        self._attempt = self._num_opens = 0
        self._generation = self._receipt = b""  # Of the lease in force.
        # Queues that the feed waits for, and those that it need not wait for any more.
        self._waiting: tuple[int, ...] = ()
        self._ended: tuple[int, ...] = ()
        # Snapshots that are wanted, and the one that has been asked for.
        self._questions: deque[SnapshotRequest] = deque()
        self._asked: SnapshotRequest | None = None
        # Whether the server answers: not where it has ended the lease, or the connection is gone.
        self._is_answered = False
        self._session = Session(CONSUMER)
        self.rejoins = wish.rejoins
        """Whether this consumer goes on alone, wherever the others stand."""
        self.has_ended = False
        """Whether all batches have come."""

    @property
    def state(self) -> str:
        """The session's state."""
        return self._session.state

    @property
    def holds_lease(self) -> bool:
        """Whether the server has given the queue."""
        return self.state in ("attaching", "streaming", "ended", "failed")

    @property
    def connection(self) -> Attachment | None:
        """The unix connection to the server, where there is one."""
        reading = self._inbox.reading
        return None if reading is None else reading.plane.connection

    @property
    def waits_for_others(self) -> bool:
        """Whether the server gives nothing for want of other consumers."""
        return bool(self._waiting) and self.state == "streaming"

    def describe_wait(self) -> str:
        """What a user who waits for a batch is told."""
        if self._waiting:
            return f"the feed waits for a consumer on queue {', '.join(map(str, self._waiting))}"
        if self.state == "streaming":
            return "the server has none yet"
        return f"no server at {', '.join(self._wish.addresses)} ({self.state})"

    # ---- said by this side

    def begin(self) -> None:
        """Ask for the queue over a new connection."""
        self._session = Session(CONSUMER)
        self._session.on("connect")
        self._asked, self._num_opens = None, 0
        self._open()

    def restart(self, number: int, token: bytes) -> bool:
        """Start elsewhere, before a batch was handed out; False where that takes a connection."""
        self._inbox.clear(number)
        self._last, self._token, self._has_position = None, token, True
        self.rejoins, self._has_run, self.has_ended = self._wish.rejoins, False, False
        self._ended = ()
        return self._open_anew("another state was loaded")

    def come_back(self) -> None:
        """Ask the next server as one that goes on within its run; where the feed has not run for
        this consumer, as far as it knows, as one that starts with all others still."""
        self.rejoins |= bool(self._has_run or self.has_ended or self._ended)

    def comes_back_after(self, error: FeedError) -> bool:
        """Whether it was refused as the others have gone on meanwhile, and asks again as above."""
        is_late = isinstance(error, ResumeError) and self._inbox.has_opened and not self.rejoins
        if not is_late or self._num_opens >= say.MAX_OPENS:
            return False
        self.rejoins, self._session = True, Session(CONSUMER, "connecting")
        self._open()
        return True

    def do_without_shared(self, why: str) -> bool:
        """Go on with frames: shared memory cannot be taken here. False where that takes another
        connection."""
        logger.info("consumer: frames, because %s", why)
        self._wish = replace(self._wish, plane="frames", why_frames=why[:500])
        self.rejoins = True
        return self._open_anew("the server was asked for frames")

    def _open_anew(self, why: str) -> bool:
        """Leave the lease, and ask for the queue over the same connection; False where what was
        asked before is still on its way."""
        reading = self._inbox.reading
        if not self.holds_lease or reading is None or self._num_opens >= say.MAX_OPENS:
            return False
        reading.leave(self._inbox.handed)
        reading.plane.close()
        self.drop_questions(why)
        self._asked = None
        self._session = Session(CONSUMER, "connecting")
        self._open()
        return True

    def _open(self) -> None:
        point("consumer.before_open")
        self._generation, self._is_answered = b"", True
        self._attempt += 1
        self._num_opens += 1
        self._session.on("Open")
        self._tell(
            self._wish.ask(
                token=self._token if self._last is None else self._last.token,
                rejoins=self.rejoins,
                undecided=not (self._has_position or self._inbox.begun or self._inbox.received),
                # Once: later another may hold the queue by right.
                takes_over=self._wish.takes_over and not self._inbox.num_opened,
                consumer=self._consumer,
                attempt=self._attempt,
                ended=self._ended,
            )
        )

    def ask_snapshot(self, question: SnapshotRequest) -> None:
        """Ask for the state after what has been handed out, once the answer before has come."""
        self._questions.append(question)
        self._ask()

    def _ask(self) -> None:
        inbox, reading = self._inbox, self._inbox.reading
        while self._questions and self._asked is None:
            question = self._questions.popleft()
            if question.given_up:
                continue
            if not self._is_answered or self.state not in ("streaming", "ended", "failed"):
                question.refuse(str(inbox.failure or self.describe_wait()))
            elif reading is None or not reading.ask_snapshot(inbox.handed, self._receipt):
                question.refuse(_UNKNOWN)
            else:
                self._asked = question

    def drop_questions(self, why: str) -> None:
        """Nobody answers any more, though an answer may still be on its way."""
        self._is_answered = False
        for question in (*self._questions, self._asked):
            if question is not None:
                question.refuse(why)
        self._questions.clear()

    # ---- said by the server

    def hear(self, message: say.Message, frames: list[Any]) -> FeedError | None:
        """Take a message. Returns an error that ends the stream, a `TransportError` where the
        server stops; raises `ProtocolError` where it is none that may come now."""
        if self._is_of_old(message):
            return None
        self._session.on(type(message).__name__)
        match message:
            case say.Batches():
                self._take_batches(message, frames)
            case say.Opened():
                self._take_lease(message)
            case say.Spec():
                self._has_run = True
                self._reading.learn(message)
            case say.Arena():
                self._reading.plane.add_arena(message)
                point("consumer.mapped")
            case say.Waiting():
                self._waiting, self._ended = message.queues, message.ended
            case say.State():
                self._take_state(message)
            case say.End():
                self._take_end(message)
            case say.Fault():
                error = error_of(message)
                if message.sequence is None:
                    # It takes no batch's place: the lease is over.
                    self.drop_questions(str(error))
                return error
            case say.Farewell():
                return TransportError(f"the server stopped: {message.reason}")
        return None

    @property
    def _reading(self) -> ClientLease:
        reading = self._inbox.reading
        assert reading is not None  # The session's states see to that.
        return reading

    def _is_of_old(self, message: say.Message) -> bool:
        """Whether it speaks of a lease that is over."""
        generation = getattr(message, "generation", b"")
        if not generation or isinstance(message, say.Opened):
            return False
        return bool(generation != self._generation)

    def _take_lease(self, opened: say.Opened) -> None:
        inbox = self._inbox
        plane = DataPath(opened, self._wish, self._wake, inbox.tally, inbox.landing)
        self._waiting, self._receipt = (), b""
        self._generation = opened.generation
        reading = ClientLease(opened, plane, inbox.received, self._tell, inbox.report)
        before = None if inbox.reading is None else inbox.reading.columns
        reading.columns = before or columns_in(self._token, opened.name)
        # Once: a later server is asked for what comes after all that has been received.
        # Once: a later server is asked for what comes after all that has been received.
        start = inbox.start or RemotePosition(reading.identity, opened.token).state(reading.columns)
        point("consumer.opened")
        self._session.on("Attached")
        reading.begin()
        if self._token is None:
            self._token = opened.token
        if inbox.num_opened:
            logger.info("consumer: a server is there again")
        inbox.open(reading, start)

    def _take_batches(self, message: say.Batches, frames: list[Any]) -> None:
        batches = self._reading.read(message, frames)
        point("consumer.received")
        self._last = batches[-1].place
        if message.groups[-1].tokens:
            self._check_fits(message.groups[-1].tokens)
        self._waiting = ()
        self._inbox.received += len(batches)
        self._inbox.batches.put(batches)
        point("consumer.put")

    def _check_fits(self, tokens: tuple[bytes, ...]) -> None:
        """Warn once where another server could not be told a position, with its leftover rows."""
        why = self._why_too_long(len(tokens[-1]) + _BESIDE_BYTES)
        if why is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("consumer: it could not go on when this server is lost: %s", why)

    def _take_state(self, message: say.State) -> None:
        question, self._asked = self._asked, None
        if question is None:
            raise ProtocolError("a snapshot came that was not asked for")
        self._receipt = message.receipt
        if message.data is None:
            question.refuse(_UNKNOWN)
        else:
            question.answer(message.data)
        self._ask()

    def _take_end(self, message: say.End) -> None:
        self._last, self._token = None, message.token
        self.has_ended = True
        place: Any = RemotePosition(self._reading.identity, message.token)
        self._inbox.batches.finish(place)
        point("consumer.end")
