"""The client session: what this consumer is to the server, and what each message changes.

It knows no socket and no clock: the I/O loop connects, and hands messages in and out.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from feeder.errors import FeedError, ProtocolError, RemoteError, ResumeError, TransportError
from feeder.service.client.inbox import Inbox
from feeder.service.client.lease import ClientLease, DataPath
from feeder.service.client.options import ConsumerOptions
from feeder.service.client.remote import RemotePosition, columns_in, error_of, identity_of
from feeder.service.faults import point
from feeder.service.memory.fdpass import Attachment
from feeder.service.protocol import messages as say
from feeder.service.protocol.seats import seat_names
from feeder.service.protocol.session import CONSUMER, Session
from feeder.waking import OneShotEvent


class SnapshotRequest:
    """A user's question for a snapshot: the I/O thread answers it, and the user's thread waits.

    The I/O thread owns the answer, but for a wait that is given up. A `Future` will not do: its
    wait, when interrupted, may release a lock that another thread holds (see `OneShotEvent`).
    """

    def __init__(self) -> None:
        self._event = OneShotEvent()
        self._answer: bytes | RemoteError | None = None
        self.given_up = False
        """Whether nobody waits for the answer any more."""

    def answer(self, answer: bytes | RemoteError) -> None:
        """Give the answer; the first one counts."""
        # The waiter may have given up just now, and has its own answer then.
        if self._answer is None:
            self._answer = answer
        self._event.ring()

    def refuse(self, why: str) -> None:
        """Answer that there is no snapshot."""
        self.answer(RemoteError(f"no snapshot: {why}; use state_dict()"))

    def result(self, timeout_s: float) -> bytes:
        """Wait for the snapshot's bytes; `RemoteError` where there is none. The user's thread's."""
        if not self._event.wait(timeout_s):
            # Told to the I/O thread first, which then need not send the question at all.
            self.given_up = True
            self.refuse(f"no answer within {timeout_s:g} s")
        answer = self._answer
        assert answer is not None
        if isinstance(answer, RemoteError):
            raise answer
        return answer


logger = logging.getLogger("feeder")

_BESIDE_BYTES = 2048
"""What the message that asks for a queue holds beside the position, rounded up."""
_UNKNOWN = (
    "the server does not know the leftover rows here, or they are more than 256 MiB; take a batch "
    "and ask again"
)


class ClientSession:
    """The state of the conversation with a server: the lease, the position, the questions asked.

    Owned by the I/O thread. `describe_wait` and `state` are read by any thread: each field they
    look at is replaced as a whole. The legal messages are those of the protocol's table
    (`feeder.service.protocol.session`), which `handle` consults before anything else.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        token: bytes | None,
        inbox: Inbox,
        wake: Callable[[], None],
        send: Callable[[say.Message], None],
        why_too_long: Callable[[int], str | None],
    ) -> None:
        self._options = options
        self._inbox = inbox
        self._wake = wake
        self._send = send
        self._why_too_long = why_too_long
        # Warnings that were given: each is given once.
        self._warned: set[str] = set()
        # Where the next batch comes from: after the last one that came, else at the token. The last
        # one *received* and not the last handed out: those between wait here and stay valid.
        self._last: Any = None
        self._token = token
        # Whether the user has said where to begin; else a state may yet be loaded.
        self._has_position = token is not None or options.rejoins
        # How many rounds are left out at the token: once, as the server's answer says it from then
        # on.
        self._skip = options.skip
        # Names this consumer to servers, with a count of its questions: a connection proves
        # nothing, and an older question may arrive after a newer one.
        self._consumer = os.urandom(16)
        self._attempt = self._num_opens = 0
        # Of the lease in force: its fencing token, and the receipt of the last snapshot.
        self._generation = self._receipt = b""
        # How the first server dealt the feed since a state was last loaded; later ones must, too.
        self._dealt: dict[str, Any] = {}
        # Seats that the feed waits for, and seats that have had everything. A new server cannot
        # know the latter, as their trainers may be gone: consumers tell it.
        self._waiting: tuple[int, ...] = ()
        self._ended: tuple[int, ...] = ()
        # Snapshots that users wait for, and the one that the server was asked for. One at a time:
        # each question must bring the receipt of the answer before it.
        self._requests: deque[SnapshotRequest] = deque()
        self._pending: SnapshotRequest | None = None
        # False where the server has ended the lease or the connection is gone: a question would
        # have no answer then, and is refused at once.
        self._is_answered = False
        self._protocol = Session(CONSUMER)
        self.rejoins = options.rejoins
        """Whether this consumer comes back alone, wherever the other queues stand."""
        # What the feed has been to this consumer: it has not run for it yet, it has, or all batches
        # have come.
        self._course: Literal["new", "run", "over"] = "new"

    @property
    def state(self) -> str:
        """The state of the protocol."""
        return self._protocol.state

    @property
    def has_ended(self) -> bool:
        """Whether all batches have come; the user may still hold some."""
        return self._course == "over"

    @property
    def holds_lease(self) -> bool:
        """Whether the server has given the queue and not taken it back."""
        return self.state in ("attaching", "streaming", "ended", "failed")

    @property
    def attachment(self) -> Attachment | None:
        """The unix connection for descriptors, where there is one."""
        lease = self._inbox.lease
        return None if lease is None else lease.data_path.attachment

    @property
    def waits_for_others(self) -> bool:
        """Whether the server sends nothing because other queues have no consumer."""
        return bool(self._waiting) and self.state == "streaming"

    def describe_wait(self) -> str:
        """Say what a user who waits for a batch is waiting for. From any thread."""
        if self._waiting:
            replicas = 1 if (lease := self._inbox.lease) is None else lease.opened.replicas
            return f"the feed waits for a consumer on {seat_names(self._waiting, replicas)}"
        if self.state == "streaming":
            return "the server has none yet"
        return f"no server at {', '.join(self._options.addresses)} ({self.state})"

    # ---- said by this side

    def open(self) -> None:
        """Ask for the queue over a new connection."""
        # Nothing carries over: what an older connection still brings is not read.
        self._protocol = Session(CONSUMER)
        self._protocol.on("connect")
        self._num_opens = 0
        self._send_open()

    def restart(self, number: int, token: bytes) -> bool:
        """Start at another position; False where that takes a new connection.

        Only before a batch was handed out: afterwards a user would see the stream jump.
        """
        self._inbox.clear(number)
        self._last, self._token, self._has_position = None, token, True
        self._skip = self._options.skip
        self.rejoins, self._course = self._options.rejoins, "new"
        self._ended, self._dealt = (), {}
        return self._open_anew("another state was loaded")

    def prepare_rejoin(self) -> None:
        """Decide how the next server is asked: as one that comes back, or still as one that starts.

        A consumer for which the feed has not run yet starts with all others, and is waited for. If
        it came back instead, nobody would wait long for the queues that are still missing.
        """
        self.rejoins |= self._course != "new" or bool(self._ended)

    def rejoins_after(self, error: FeedError) -> bool:
        """Ask again as one that comes back, where a start was refused because the others went on.

        Returns whether it has asked; else the error is the user's.
        """
        # Once it was given the queue its position is right: only the intent was out of date.
        is_late = isinstance(error, ResumeError) and self._inbox.has_opened and not self.rejoins
        if not is_late or self._num_opens >= say.MAX_OPENS:
            return False
        self.rejoins, self._protocol = True, Session(CONSUMER, "connecting")
        self._send_open()
        return True

    def do_without_shared(self, why: str) -> bool:
        """Go on with frames, as memory cannot be mapped here; False if that takes a connection."""
        # For good: the limit of this process that stands in the way will stand there later too.
        logger.info("consumer: frames, because %s", why)
        self._options = self._options._replace(plane="frames", why_frames=why[:500])
        self.rejoins = True
        return self._open_anew("the server was asked for frames")

    def _open_anew(self, why: str) -> bool:
        """Leave the lease and ask for the queue over the same connection; False if that cannot be.

        It cannot while an earlier question is open, nor more often than a server lets one
        connection ask.
        """
        lease = self._inbox.lease
        if not self.holds_lease or lease is None or self._num_opens >= say.MAX_OPENS:
            return False
        lease.say_bye(self._inbox.handed)
        lease.data_path.close()
        self.refuse_requests(why)
        self._protocol = Session(CONSUMER, "connecting")
        self._send_open()
        return True

    def _send_open(self) -> None:
        point("consumer.before_open")
        self._generation, self._is_answered = b"", True
        self._attempt += 1
        self._num_opens += 1
        self._protocol.on("Open")
        self._send(
            self._options.open_message(
                token=self._token if self._last is None else self._last.token,
                skip=self._skip if self._last is None else 0,
                rejoins=self.rejoins,
                # The user may yet load a state: the feed need not begin for this consumer. Once the
                # user waits for a batch, or any has come, this is where it starts.
                undecided=not (self._has_position or self._inbox.begun or self._inbox.received),
                # Once: later another may hold the queue by right.
                takes_over=self._options.takes_over and not self._inbox.num_opened,
                consumer=self._consumer,
                attempt=self._attempt,
                ended=self._ended,
            )
        )

    def request_snapshot(self, request: SnapshotRequest) -> None:
        """Ask for the state after what has been handed out, once earlier questions are answered."""
        self._requests.append(request)
        self._send_requests()

    def _send_requests(self) -> None:
        """Send the oldest question that somebody waits for, and refuse those without an answer."""
        inbox, lease = self._inbox, self._inbox.lease
        while self._requests and self._pending is None:
            request = self._requests.popleft()
            if request.given_up:
                continue
            if not self._is_answered or self.state not in ("streaming", "ended", "failed"):
                request.refuse(str(inbox.failure or self.describe_wait()))
            elif lease is None or not lease.ask_snapshot(inbox.handed, self._receipt):
                request.refuse(_UNKNOWN)
            else:
                self._pending = request

    def refuse_requests(self, why: str) -> None:
        """Refuse all questions: the server answers no more."""
        self._is_answered = False
        for request in (*self._requests, self._pending):
            if request is not None:
                request.refuse(why)
        self._requests.clear()
        # Later questions would wait for its answer, which never comes, instead of being refused.
        self._pending = None

    # ---- said by the server

    def handle(self, message: say.Message, frames: list[Any]) -> FeedError | None:
        """Take a message.

        Returns an error that ends the stream, or a `TransportError` where the server stops. Raises
        `ProtocolError` where the message may not come now, and `ResumeError` where the server deals
        the feed to other queues than before.
        """
        if self._is_stale(message):
            return None
        was_asking = self.state == "opening"
        self._protocol.on(type(message).__name__)
        match message:
            case say.Batches():
                self._take_batches(message, frames)
            case say.Opened():
                self._take_lease(message)
            case say.Spec():
                # The columns come when the feed begins, so this consumer was part of a start.
                self._warn_of_uneven()
                self._course = "over" if self.has_ended else "run"
                self._lease.set_spec(message)
            case say.Arena():
                self._lease.data_path.add_arena(message)
                point("consumer.mapped")
            case say.Waiting():
                self._waiting, self._ended = message.queues, message.ended
            case say.State():
                self._take_state(message)
            case say.End():
                self._take_end(message)
            case say.Fault():
                return self._take_fault(message, was_asking=was_asking)
            case say.Farewell():
                return TransportError(f"the server stopped: {message.reason}")
        return None

    @property
    def _lease(self) -> ClientLease:
        lease = self._inbox.lease
        assert lease is not None  # The session's states see to that.
        return lease

    def _is_stale(self, message: say.Message) -> bool:
        """Whether a message is of a lease that is over; errors may cross a question, too."""
        generation = getattr(message, "generation", b"")
        if not generation or isinstance(message, say.Opened):
            return False
        return bool(generation != self._generation)

    def _take_lease(self, opened: say.Opened) -> None:
        inbox, identity = self._inbox, identity_of(opened)
        dealing = None if identity.began is None else identity.began.dealing
        dealt = {"queues": None if dealing is None else dealing.num, "replicas": opened.replicas}
        self._check_dealing(dealt)
        # Made first, since it may raise: the inbox still has the lease before then.
        data_path = DataPath(opened, self._options, self._wake, inbox.stats, inbox.landing)
        self._waiting, self._receipt = (), b""
        self._generation = opened.generation
        lease = ClientLease(
            opened, identity, data_path, inbox.received, self._send, inbox.report
        )  # fmt: skip
        # Before the first batch the server declares no columns; the last lease or the position may.
        before = None if inbox.lease is None else inbox.lease.columns
        lease.columns = before or columns_in(self._token, opened.name)
        # Kept from the first time: later servers are asked for what comes after all that has been
        # received, which is not where the user stands.
        start = inbox.start or RemotePosition(lease.identity, opened.token).state(lease.columns)
        point("consumer.opened")
        self._protocol.on("Attached")
        lease.say_ready()
        # Where it began is known now, so a later server can be asked for the same. Also where the
        # user gave a position: that may lie in the middle of a round, and the server's does not.
        if self._last is None and not self.has_ended:
            self._token, self._skip = opened.token, 0
        if inbox.num_opened:
            logger.info("consumer: a server is there again")
        self._dealt = self._dealt or dealt
        inbox.set_lease(lease, start)

    def _check_dealing(self, now: Mapping[str, Any]) -> None:
        """Raise `ResumeError` where the server that is there again deals the feed to another number
        of queues, or of trainers for each.

        Also before the first batch: this consumer is one of so many trainers, and has told its user
        how many batches there are for it. Not where it has had everything: the position that it
        comes with is the end, however the feed is dealt.
        """
        found = [
            f"{name}: {then} then, {now[name]} now" for name, then in self._dealt.items()
            if then is not None and now.get(name, then) not in (then, None)
        ]  # fmt: skip
        if found and not self.has_ended:
            raise ResumeError(
                "the server was replaced by one that deals the feed to another number of trainers "
                f"({'; '.join(found)}): this trainer would get batches that are not its own; "
                "restart all trainers from a checkpoint"
            )

    def _take_fault(self, fault: say.Fault, *, was_asking: bool) -> FeedError:
        if was_asking:
            # What it is refused for may follow from that.
            self._check_dealing(fault.fields)
        error = error_of(fault)
        if fault.sequence is None:
            # It takes no batch's place, so the lease is over. An error in a batch's place leaves
            # the lease: the user of a failed feed may still ask for a snapshot.
            self.refuse_requests(str(error))
        return error

    def _is_new(self, warning: str) -> bool:
        """Whether a warning was not given before."""
        is_new = warning not in self._warned
        self._warned.add(warning)
        return is_new

    def _warn_of_uneven(self) -> None:
        """Warn once where trainers that wait for each other at each batch may wait for ever."""
        if self._lease.identity.may_be_uneven and self._is_new("uneven"):
            logger.warning(
                "feed %r: its queues get unequal numbers of batches where the last round is not "
                "complete, and a trainer that waits for all others then waits for ever; "
                "last_round='drop' or 'pad' gives each queue as many", self._lease.identity.name,
            )  # fmt: skip

    def _take_batches(self, message: say.Batches, frames: list[Any]) -> None:
        batches = self._lease.take_batches(message, frames)
        point("consumer.received")
        # The next server is asked for what comes after these.
        self._last = batches[-1].place
        if message.groups[-1].tokens:
            self._check_fits(message.groups[-1].tokens)
        self._waiting = ()
        self._inbox.received += len(batches)
        self._inbox.batches.put(batches)
        point("consumer.put")

    def _check_fits(self, tokens: tuple[bytes, ...]) -> None:
        """Warn once where a position with its leftover rows is too long to ask another server."""
        why = self._why_too_long(len(tokens[-1]) + _BESIDE_BYTES)
        if why is not None and self._is_new("too long"):
            logger.warning("consumer: it could not go on when this server is lost: %s", why)

    def _take_state(self, message: say.State) -> None:
        # The states allow an answer at any time; that there was a question is checked here.
        request, self._pending = self._pending, None
        if request is None:
            raise ProtocolError("a snapshot came that was not asked for")
        self._receipt = message.receipt
        if message.data is None:
            request.refuse(_UNKNOWN)
        else:
            request.answer(message.data)
        self._send_requests()

    def _take_end(self, message: say.End) -> None:
        # The end has a position of its own: who comes back with it is sent nothing more.
        self._last, self._token = None, message.token
        self._course = "over"
        position: Any = RemotePosition(self._lease.identity, message.token)
        self._inbox.batches.finish(position)
        point("consumer.end")
