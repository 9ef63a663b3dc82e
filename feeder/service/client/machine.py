"""What a consumer is to its servers, from the first question to the goodbye: a pure state machine
without socket, thread, clock or log.

Its state, moved by the table `LIFE`, says alone whether it holds its queue or looks for a server,
how it asks there (as one that starts, or as one that comes back), and what the loss of a connection
leads to. Flags for these would have many combinations, of which few can be. Beside it, a `Session`
says which message may come over the connection at hand.

The shell (`io_loop.py`) tells what happens, and at which `Moment`. Each call returns instructions,
which the shell carries out in order.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

from feeder.errors import (
    AuthError,
    ConnectTimeout,
    FeedError,
    ProtocolError,
    RemoteError,
    ResumeError,
    TransportError,
)
from feeder.service.client.failover import Failover
from feeder.service.client.remote import Identity, RemotePosition, error_of, identity_of
from feeder.service.memory.fdpass import OwnLimitError
from feeder.service.protocol import messages as say
from feeder.service.protocol.seats import seat_names
from feeder.service.protocol.session import CONSUMER, Session, Table
from feeder.state.fingerprint import differences_in_words, epochs_in_words, in_words
from feeder.state.snapshot import HISTORY

_TELL_S = 0.5
"""The server is told at least so often: it shows each trainer's waits, and between two messages it
takes a consumer that has used all it was sent for one that waits."""
_LEAST_SILENT_S = 2.0
"""A server may be silent for a lease's time, and for so long in any case: on a loaded host its
thread may be late by a second."""
_FAREWELL_S = 1.0
"""How long a consumer that has used everything looks for a server to tell that, and how long the
server may take to answer a goodbye. Its answer shows that what was used last has arrived, so that
the server's checkpoint has it; a hung server must not hold up the trainer's exit."""
_UNKNOWN = (
    "the server does not know the leftover rows here, or they are more than 256 MiB; take a batch "
    "and ask again"
)

_MOST_SPOILED = ((ProtocolError, 1), (TransportError, 10))
"""How often a server may send what cannot be taken, with no batch in between: otherwise the feed
begins anew for all queues, again and again. What was changed on its way comes right the second
time, or memory or a fetch function is at fault. A server that gave no memory may just have been
killed: its successor will. Any other error would be the same at any server."""


class ConsumerOptions(NamedTuple):
    """The arguments of `feeder.connect`, checked. Immutable, so any thread may read them."""

    addresses: tuple[str, ...]
    feed: str
    queue: int
    replica: int
    credit: int
    hold: int
    skip: int
    rejoins: bool
    takes_over: bool
    plane: Literal["auto", "shared", "frames"]
    checksum: Literal["auto", "off", "sampled", "full"]
    writable: bool
    timeout_s: float
    reconnect_s: float
    who: str
    """Name of this consumer, for messages to people: nothing depends on the text."""
    why_frames: str = "frames were asked for"
    """Why batches come in frames, if `plane` is "frames"; the server shows it."""


_STOPS = {"stops": "over"}
_WANTS = {"loads": "starting", "reloads": "returning", "gives up": "idle", **_STOPS}
_HOLDS = {"fails": "failed", "expelled": "expelled", "closes": "leaving", **_WANTS}


def _lost(state: str, alone: str = "") -> dict[str, str]:
    return {"lost": state, "returns": alone or state}


LIFE: Table = {
    # It looks for a server: to start with all others, who wait for it,
    "starting": {"given": "joined", **_lost("starting", "returning"), **_WANTS},
    # to go on in a run, alone,
    "returning": {"given": "running", **_lost("returning"), **_WANTS},
    # all batches have come: to tell how many of them were used,
    "reporting": {"given": "ended", **_lost("reporting"), "closes": "closing", **_WANTS},
    # and the same once the user has had them all, and has closed it.
    "closing": {"given": "leaving", **_lost("closing"), "gives up": "over", **_STOPS},
    # It holds its queue, and the feed has not run with it;
    "joined": {"begins": "running", "ends": "ended", **_lost("starting", "returning"), **_HOLDS},
    # it has;
    "running": {"begins": "running", "ends": "ended", **_lost("returning"), **_HOLDS},
    # all batches have come;
    "ended": {"begins": "ended", "ends": "ended", **_lost("reporting"), **_HOLDS},
    # an error has come in the place of a batch, and snapshots may still be had;
    "failed": {**_lost("idle"), **_HOLDS},
    # the server has ended the lease, and answers nothing.
    "expelled": {**_lost("idle"), **_HOLDS, "fails": "expelled"},
    # No server is wanted: the stream has ended or failed.
    "idle": _WANTS,
    # Goodbye is said, and not answered.
    "leaving": {**_lost("over"), "gives up": "over", **_STOPS},
    "over": _STOPS,
}
"""The states of a consumer, and where each move leads.

- given: a server gives the queue; begins, ends, fails: the feed, as the server says it
- expelled: the server ends the lease
- lost: the connection is gone; returns: a server is looked for to go on alone
- loads, reloads: another position, to start there with all others, or alone
- gives up: no server is wanted any more; closes: there is something to tell; stops: at once
"""

SEEKS = {"starting", "returning", "reporting", "closing"}
SERVED = {"joined", "running", "ended"}
HOLDS = {*SERVED, "failed", "expelled"}
ANSWERED = {*SERVED, "failed"}
HAS_ALL = {"reporting", "closing", "ended"}


class Moment(NamedTuple):
    """When something happens, and what this consumer's user has had by then."""

    now: float
    """By a monotonic clock."""
    received: int
    """Batches received since the start, or since a state was loaded."""
    handed: int
    """How many of these the user was handed."""
    begun: bool
    """Whether the user has asked for a batch."""


class Do(Enum):
    """What the shell is to do: the name of a function of its own, which has these arguments."""

    CONNECT = "begin_connection"  # To an address.
    DISCONNECT = "end_connection"  # And that for the memory of the lease.
    END_LEASE = "end_lease"  # The latter alone: the same connection is to serve the next lease.
    SEND = "send"  # A message.
    TELL_USED = "tell_used"  # And the slots that are free, also without news.
    JOIN = "join"  # Make the way of the batches of a lease, then call `joined`.
    TAKE = "take"  # Columns, an arena or batches, and frames; then, for batches, call `took`.
    FINISH = "finish"  # After the batches that have come the user gets this: the end, or an error.
    DROP = "drop"  # Let go of what nobody has taken: the user is gone.
    ANSWER = "answer"  # A question for a snapshot: its bytes, or an error.
    LOOK = "look"  # Whether bytes have come since the last look; then call `note_sign`.
    NOTE_LOST = "note_lost"  # It was served until now, and looks for a server; why.


Instructions = list[tuple[Any, ...]]


class ClientMachine:
    """The state of one consumer towards all servers that it finds, one after the other.

    Owned by the consumer's I/O thread. Any thread may call `describe_wait`: the fields that it
    reads are replaced as a whole. `consumer` names it to servers: 16 random bytes. `boot_id` is
    that of its kernel: equal ones mean that descriptors can be passed.
    """

    def __init__(
        self, options: ConsumerOptions, token: bytes | None, consumer: bytes, boot_id: str,
        now: float,
    ) -> None:  # fmt: skip
        self.options = options
        """What was asked for; `plane` becomes "frames" once memory cannot be mapped here."""
        self._life = Session(LIFE, "returning" if options.rejoins else "starting")
        self._protocol = Session(CONSUMER)
        self._failover = Failover(options.addresses)
        # How often messages could not be taken since the last batch, by `_MOST_SPOILED`.
        self._spoiled: Counter[int] = Counter()
        # Where the next batch comes from: after the last one *received*, as those that were not
        # handed out stay valid; before the first one at the token, with so many rounds left out.
        self._last: RemotePosition | None = None
        self._token, self._skip = token, options.skip
        # Whether the user has said where to begin; otherwise a state may yet be loaded.
        self._has_position = token is not None or options.rejoins
        # Questions are counted, those over this connection too: a connection proves nothing, and an
        # older question may arrive after a newer one.
        self._consumer, self._boot_id = consumer, boot_id
        self._attempt = self._num_opens = 0
        # Whether any server has given the queue. Then a takeover is used up, as another may hold
        # the queue by right later, and a refusal of this client is a passing one.
        self._is_known = False
        # How the first server dealt the feed since a state was last loaded; later ones must, too.
        self._dealt: dict[str, Any] = {}
        # Seats that the feed waits for, and seats that have had everything. A new server cannot
        # know the latter, as their trainers may be gone: consumers tell it.
        self._waiting: tuple[int, ...] = ()
        self._ended: tuple[int, ...] = ()
        # What this server said of them last: it says so again only to show that it lives.
        self._said: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        # For how long it has answered no renewal. Time in which this thread did not run is not in
        # it: a process that was stopped finds answers only after it has looked.
        self._silent_s = 0.0
        # The lease in force, otherwise the last one: its fencing token, and how many batches were
        # received before it. Its numbers begin at 0, so that batches of an older lease cannot pass
        # for its own.
        self._opened: say.Opened | None = None
        self._identity: Any = None
        self._generation, self._base = b"", 0
        # What its server was told: batches used, and whether the user has asked for one.
        self._told, self._told_begun = -1, False
        # Users' questions for snapshots, and the one that the server was asked. One at a time: each
        # must bring the receipt of the answer before it.
        self._questions: deque[Any] = deque()
        self._asked: Any = None
        self._receipt = b""
        self._failure: FeedError | None = None
        # When the lease is renewed, when a server that lacks others is left, when a search ends.
        self._renew_at = self._move_on_at = math.inf
        self._wait_at_most(options.timeout_s, now)

    # ---- what is asked by others

    @property
    def state(self) -> str:
        """The state, a key of `LIFE`."""
        return self._life.state

    @property
    def waits_for_others(self) -> bool:
        """Whether the server sends nothing because other queues have no consumer."""
        return bool(self._waiting) and self._protocol.state == "streaming"

    def describe_wait(self) -> str:
        """Say what a user who waits for a batch is waiting for. From any thread."""
        if self._waiting:
            replicas = 1 if (opened := self._opened) is None else opened.replicas
            return f"the feed waits for a consumer on {seat_names(self._waiting, replicas)}"
        if (state := self._protocol.state) == "streaming":
            if self._is_late:
                return self._describe_silence()
            return "the server answers and has none yet: `feeder top` says what holds it up"
        return f"no server at {', '.join(self.options.addresses)} ({state})"

    @property
    def _is_late(self) -> bool:
        """Whether the server should have answered a renewal by now."""
        opened = self._opened
        return opened is not None and self._silent_s > opened.lease_s / say.ANSWERS + 2 * _TELL_S

    def _describe_silence(self) -> str:
        return (
            f"the server has been silent for {self._silent_s:.0f} s: it is stopped or overloaded, "
            "or the network to it is cut"
        )

    @property
    def next_deadline(self) -> float:
        """When `seek` or `tick` has something to do, if nothing else happens before."""
        turn_at = math.inf
        if self.state in SEEKS:
            turn_at = self._failover.turn_ends_at if self._has_connection else self._failover.try_at
        renew_at = self._renew_at if self.state in HOLDS else math.inf
        return min(self._give_up_at, turn_at, renew_at, self._move_on_at)

    # ---- time

    def seek(self, at: Moment) -> Instructions:
        """Ask the next server, if it is time to."""
        if self.state not in SEEKS or self._has_connection or at.now < self._failover.try_at:
            return []
        # Nothing carries over: what an older connection still brings is not read.
        self._protocol = Session(CONSUMER)
        self._protocol.on("connect")
        self._num_opens = 0
        return [(Do.CONNECT, self._failover.next_address(at.now)), *self._ask(at)]

    def tick(self, at: Moment) -> Instructions:
        """Do what is due."""
        if at.now >= self._give_up_at:
            return self._give_up()
        done: Instructions = []
        # A turn ends a search, never a lease.
        if self.state in SEEKS and self._has_connection and at.now >= self._failover.turn_ends_at:
            done += self._disconnect()
        if self.state in HOLDS and at.now >= self._renew_at:
            if self._has_been_silent():
                return done + self._lose(self._describe_silence(), at)
            done += [*self.tell_used(at, renews=True), (Do.LOOK,)]
        return done + self._leave_where_others_lack(at)

    def _has_been_silent(self) -> bool:
        """Count the time since the last renewal, which was not answered; returns whether a server
        that is to answer has been silent for too long."""
        assert self._opened is not None
        self._silent_s += _renewal_s(self._opened)
        return self.state in SERVED and self._silent_s > max(self._opened.lease_s, _LEAST_SILENT_S)

    def note_sign(self) -> None:
        """Bytes have come: the server lives, though its message has not come yet as a whole."""
        self._silent_s = 0.0

    def _leave_where_others_lack(self, at: Moment) -> Instructions:
        """Leave a server that has long lacked other consumers: they may be at another address."""
        opened = self._opened
        if opened is None or self.state not in HOLDS or not self.waits_for_others:
            self._move_on_at = math.inf
        elif self._move_on_at == math.inf:
            self._move_on_at = at.now + self._failover.patience_s(opened.lease_s)
        elif at.now >= self._move_on_at:
            self._move_on_at = math.inf
            self._failover.move_on()
            why = f"{self.describe_wait()}, who may be at another address"
            return [*self._say_bye(at), *self._lose(why, at)]
        return []

    def _give_up(self) -> Instructions:
        """End what has taken too long: a goodbye, or the search for a server."""
        if self.state in ("closing", "leaving"):
            return self.stop()
        where = ", ".join(self.options.addresses)
        why = f"no answer from {where} within {self._limit_s} s; does `feeder serve` run there?"
        # A refusal says more than that nobody answered.
        refusal = self._failover.refusal
        if self._is_known or not isinstance(refusal, AuthError):
            told = why if refusal is None else f"{why}; {refusal}"
            return self._fail(ConnectTimeout(told))
        return self._fail(refusal)

    def _wait_at_most(self, limit_s: float, now: float) -> None:
        self._limit_s, self._give_up_at = limit_s, now + limit_s

    # ---- the connection

    @property
    def _has_connection(self) -> bool:
        return self._protocol.state not in ("idle", "lost")

    def trouble(
        self, error: FeedError | None, at: Moment, *, reached_at: float | None, is_server: bool
    ) -> Instructions:
        """The connection has ended, or something was heard of it.

        `reached_at`: since when somebody listens there. `is_server`: whether that is a server.
        """
        failover, is_known = self._failover, self._is_known
        failover.note_reached(reached_at)
        if not isinstance(error, AuthError):
            return [] if error is None else self._lose(str(error), at, is_server=is_server)
        is_news = failover.refusal is None
        if failover.note_refusal(error) and not is_known:
            return self._fail(error)
        done = self._lose(str(error), at, is_server=is_server)
        # It may pass, as if a server comes back before its keys do; if not, its user has to act.
        return [*done, (Do.NOTE_LOST, str(error))] if is_known and is_news else done

    def cannot_take(self, error: FeedError, at: Moment) -> Instructions:
        """A message cannot be taken. The server would go on sending it, so it is left."""
        most = next((most for kind, most in _MOST_SPOILED if isinstance(error, kind)), 0)
        if isinstance(error, OwnLimitError):
            if self.options.plane != "shared":
                return self._do_without_shared(str(error), at)
            error, most = TransportError(*error.args), 0
        self._spoiled[most] += 1
        is_last = self._spoiled[most] > most
        done = self._finish(error) if is_last else []
        return done + self._lose(str(error), at, gives_up=is_last)

    def _do_without_shared(self, why: str, at: Moment) -> Instructions:
        """Go on with frames, as memory cannot be mapped here, now or later.

        Over the same connection, once: to come back would have the feed begin anew for all queues
        each time. For good: the limit of this process that stands in the way will stand there later
        too.
        """
        self.options = self.options._replace(plane="frames", why_frames=why[:500])
        left = self._leave_lease("the server was asked for frames", at)
        self._life.on("returns")
        return left + self._ask_again(at) if left else self._lose(why, at)

    def _lose(
        self, why: str, at: Moment, *, is_server: bool = True, gives_up: bool = False
    ) -> Instructions:
        """Give the connection up, and look for a server again if there is more to come."""
        if not is_server:
            self._failover.pause(at.now)
        # A consumer for which the feed has not run yet starts with all others, and is waited for.
        # If it came back instead, nobody would wait long for the queues that are still missing.
        move = "gives up" if gives_up else "returns" if self._ended else "lost"
        self._life.on(move)
        done = self._disconnect()
        if self.state not in SEEKS:
            self._rest()
        elif self._give_up_at == math.inf and self.state != "reporting":
            # It was served until now, so the time to come back begins here. Later losses, while
            # it searches, do not prolong it.
            self._wait_at_most(self.options.reconnect_s, at.now)
            done.append((Do.NOTE_LOST, why))
        return done

    def _part(self, message: say.Farewell, at: Moment) -> Instructions:
        """The server stops, or has ended the lease and is to be asked for the queue again."""
        if not message.generation:
            why = f"the server stopped: {message.reason}"
            return self._lose(why, at, gives_up=self.state in HAS_ALL)
        # Another server may live, and knows nothing of the edit.
        self._failover.stay()
        done = self._lose(f"the server has ended the lease: {message.reason}", at)
        if self.state in SEEKS:
            # However short a loss may last: it is there.
            limit_s = max(self.options.reconnect_s, self.options.timeout_s)
            self._wait_at_most(limit_s, at.now)
        return done

    def _fail(self, error: FeedError) -> Instructions:
        """End the search with an error."""
        done = self._finish(error)
        self._life.on("gives up")
        self._rest()
        return done + self._disconnect()

    def _finish(self, error: FeedError) -> Instructions:
        self._failure = self._failure or error
        return [(Do.FINISH, error)]

    def _rest(self) -> None:
        """No server is wanted any more; calls of other threads are still served."""
        self._failover.reset()
        self._give_up_at = math.inf

    def _disconnect(self) -> Instructions:
        self._protocol = Session(CONSUMER, "lost")
        # Nobody will answer: whoever waits for a snapshot is told so now and not in ten seconds.
        return [(Do.DISCONNECT,), *self._refuse("the connection has ended")]

    # ---- the question for the queue

    def _ask(self, at: Moment) -> Instructions:
        """Ask for the queue."""
        options, last = self.options, self._last
        self._generation = b""
        self._attempt += 1
        self._num_opens += 1
        self._protocol.on("Open")
        question = say.Open(
            version=say.PROTOCOL_VERSION, feed=options.feed, queue=options.queue,
            replica=options.replica, token=self._token if last is None else last.asked,
            skip=self._skip if last is None else 0, credit=options.credit, hold=options.hold,
            intent="start" if self.state == "starting" else "rejoin",
            # The user may yet load a state: the feed need not begin for this consumer. Once the
            # user waits for a batch, or any has come, this is where it starts.
            undecided=not (self._has_position or at.begun or at.received),
            takeover=options.takes_over and not self._is_known,
            consumer=self._consumer, attempt=self._attempt, ended=self._ended, who=options.who,
            # An empty one asks the server not to offer shared memory, and to make no arenas.
            boot_id=self._boot_id if options.plane != "frames" else "",
            checksum=options.checksum,
        )  # fmt: skip
        return [(Do.SEND, question)]

    def _ask_again(self, at: Moment) -> Instructions:
        """Ask for the queue once more over the same connection."""
        self._protocol = Session(CONSUMER, "connecting")
        return self._ask(at)

    def _leave_lease(self, why: str, at: Moment) -> Instructions:
        """Leave the lease, to ask again over the same connection; nothing if that cannot be.

        It cannot while an earlier question is open, nor more often than a server lets one
        connection ask.
        """
        if self.state not in HOLDS or self._num_opens >= say.MAX_OPENS:
            return []
        return [*self._say_bye(at), (Do.END_LEASE,), *self._refuse(why)]

    # ---- what the user's thread wants

    def load(self, token: bytes, at: Moment) -> Instructions:
        """Start at another position; only before a batch was handed out."""
        self._failure = None
        if "loads" not in LIFE[self.state]:
            return []  # Another thread closes it.
        self._last, self._token, self._has_position = None, token, True
        self._skip = self.options.skip
        self._ended, self._dealt = (), {}
        self._spoiled.clear()
        left = self._leave_lease("another state was loaded", at)
        self._life.on("reloads" if self.options.rejoins else "loads")
        self._wait_at_most(self.options.timeout_s, at.now)
        return left + self._ask_again(at) if left else self._disconnect()

    def close(self, at: Moment) -> Instructions:
        """Say goodbye and wait for the server's answer.

        A consumer that has lost its server after its user was handed everything finds the next one
        first: a server that waits until all has been used would wait for it. Nobody else does: who
        has not had everything would hold a queue that its successor comes for.
        """
        lacks_some = self.state == "reporting" and at.handed < at.received
        if "closes" not in LIFE[self.state] or lacks_some:
            return self.stop()
        self._life.on("closes")
        self._wait_at_most(_FAREWELL_S, at.now)
        return self._say_goodbye(at) if self.state == "leaving" else []

    def stop(self) -> Instructions:
        """End at once."""
        self._life.on("stops")
        self._rest()
        return self._disconnect()

    def _say_goodbye(self, at: Moment) -> Instructions:
        self._wait_at_most(_FAREWELL_S, at.now)
        # First let go of what nobody has taken: its slots go back with the goodbye, and an arena of
        # which all slots are back serves the next consumer, without new pages from the system.
        return [(Do.DROP,), *self._say_bye(at)]

    def _say_bye(self, at: Moment) -> Instructions:
        """End the lease: the server may give the queue to another at once."""
        # The goodbye carries nothing, so what was used and released goes before it: the server's
        # checkpoint then has it, and arenas that were given back whole serve the next consumer.
        return [*self.tell_used(at), (Do.SEND, say.Bye(generation=self._generation))]

    def tell_used(
        self, at: Moment, slots: tuple[int, ...] = (), *, renews: bool = False
    ) -> Instructions:
        """Tell the server how many batches were used and which slots are free, if that is news;
        with `renews` in any case.

        Used and released go in one message, since each message wakes both processes.
        """
        # Negative while batches of earlier leases are with the user: they are `pending`, and until
        # they are used the server must not take this queue for one that has ended.
        used = at.handed - self._base
        is_news = renews or bool(slots) or used > self._told or at.begun > self._told_begun
        self._told, self._told_begun = max(used, self._told), self._told_begun or at.begun
        if is_news:
            self._renew_by(at.now)
        return [(Do.TELL_USED, self._generation, used, self._told_begun, slots, is_news)]

    def _renew_by(self, now: float) -> None:
        assert self._opened is not None
        self._renew_at = now + _renewal_s(self._opened)

    # ---- snapshots

    def ask_snapshot(self, question: Any, at: Moment) -> Instructions:
        """Ask for the state after what has been handed out, once earlier questions are answered."""
        self._questions.append(question)
        return self._send_questions(at)

    def _send_questions(self, at: Moment) -> Instructions:
        """Send the oldest question that somebody waits for, and refuse those without an answer."""
        done: Instructions = []
        while self._questions and self._asked is None:
            question = self._questions.popleft()
            if question.given_up:
                continue
            if self.state not in ANSWERED:
                why = str(self._failure or self.describe_wait())
                done.append((Do.ANSWER, question, _no(why)))
            # The batch at hand came under an earlier lease, whose rows this server may not have.
            elif at.handed < self._base:
                done.append((Do.ANSWER, question, _no(_UNKNOWN)))
            else:
                self._asked = question
                # First what was used: the server knows the state behind batches that it was told
                # of.
                message = say.Snapshot(
                    generation=self._generation, sequence=at.handed - self._base,
                    receipt=self._receipt,
                )  # fmt: skip
                done += [*self.tell_used(at), (Do.SEND, message)]
        return done

    def _refuse(self, why: str) -> Instructions:
        """Refuse all questions: the server answers no more."""
        questions = [*self._questions, *([] if self._asked is None else [self._asked])]
        self._questions.clear()
        # Later questions would wait for its answer, which never comes, instead of being refused.
        self._asked = None
        return [(Do.ANSWER, question, _no(why)) for question in questions]

    # ---- said by the server

    def hear(self, message: say.Message, at: Moment, frames: Sequence[Any] = ()) -> Instructions:
        """A message has come, with the frames after it.

        Raises `ProtocolError` if it may not come now, and `ResumeError` if the server deals the
        feed otherwise than before.
        """
        if self.state == "leaving":
            # Batches that are still on their way are nobody's any more.
            return self.stop() if isinstance(message, say.Farewell) else []
        self._silent_s = 0.0
        if self._is_stale(message):
            return []
        self._protocol.on(type(message).__name__)
        match message:
            case say.Batches() | say.Arena():
                return [(Do.TAKE, message, frames)]
            case say.Opened():
                identity = identity_of(message)
                self._check_dealing(_dealing(message, identity))
                return [(Do.JOIN, message, identity, self._token)]
            case say.Spec():
                # The columns come when the feed begins, so this consumer was part of a start.
                self._life.on("begins")
                return [(Do.TAKE, message, frames)]
            case say.Waiting():
                if self._said != (said := (message.queues, message.ended)):
                    self._said = self._waiting, self._ended = said
            case say.State():
                return self._take_state(message, at)
            case say.End():
                # The end has a position of its own: who comes back with it is sent nothing more.
                end = RemotePosition(self._identity, message.token)
                self._last, self._token = None, end.asked
                self._life.on("ends")
                return [(Do.FINISH, end)]
            case say.Fault():
                return self._take_fault(message, at)
            case say.Farewell():
                return self._part(message, at)
        return []

    def _is_stale(self, message: say.Message) -> bool:
        """Whether a message is of a lease that is over; errors may cross a question, too."""
        generation = getattr(message, "generation", b"")
        if not generation or isinstance(message, say.Opened):
            return False
        return bool(generation != self._generation)

    def joined(
        self, opened: say.Opened, identity: Identity, plane: Literal["shared", "frames"],
        reason: str, at: Moment,
    ) -> Instructions:  # fmt: skip
        """The way of a lease's batches is there: the server may send them."""
        self._protocol.on("Attached")
        self._opened, self._identity, self._generation = opened, identity, opened.generation
        self._waiting, self._receipt, self._is_known = (), b"", True
        self._said = (), ()
        # Not 0: that nothing of earlier leases is pending is news, also before the first batch.
        self._base, self._told, self._told_begun = at.received, -1, False
        # Where it began is known now, so a later server can be asked for the same. Also if the
        # user gave a position: that may lie in the middle of a round, and the server's does not.
        if self._last is not None and self._last.identity.is_before(identity):
            # The same place, as the server says it since the edit.
            self._last = RemotePosition(identity, opened.token)
        if self._last is None and self.state not in HAS_ALL:
            self._token, self._skip = RemotePosition(identity, opened.token).asked, 0
        self._dealt = self._dealt or _dealing(opened, identity)
        self._life.on("given")
        self._rest()
        self._renew_by(at.now)
        ready = say.Attached(generation=opened.generation, plane=plane, reason=reason)
        goodbye = self._say_goodbye(at) if self.state == "leaving" else []
        return [(Do.SEND, ready), *goodbye]

    def took(self, last: RemotePosition) -> None:
        """Batches have come, the last of which ended at `last`."""
        # The next server is asked for what comes after these.
        self._last, self._waiting = last, ()
        self._spoiled.clear()

    def _check_dealing(self, now: Mapping[str, Any]) -> None:
        """Raise `ResumeError` if the server that is there again has other settings: other numbers
        of queues, of trainers for each or of epochs, or, as the fields of a refusal tell, others.

        Also before the first batch: this consumer is one of so many trainers, and has told its user
        how many batches there are for it. Not if it has had everything: the position that it
        comes with is the end, however the feed is dealt.
        """
        found = [
            f"{name}: {then} then, {now[name]} now" for name, then in self._dealt.items()
            if then is not None and now.get(name, then) not in (then, None)
        ]  # fmt: skip
        if self._dealt and isinstance(settings := now.get("settings"), str):
            told = differences_in_words(in_words(self._identity.fingerprint), settings)
            # A run that was edited while this consumer was away is not another one, and a server
            # that has another history says so.
            found += [] if any(one.startswith(f"{HISTORY}:") for one in told) else told
        if found and self.state not in HAS_ALL:
            raise ResumeError(
                f"the server was replaced by one that deals the feed otherwise ({'; '.join(found)})"
                ": this trainer would get batches that are not its own; restart all trainers from "
                "a checkpoint, or the server with the settings of then"
            )

    def _take_fault(self, fault: say.Fault, at: Moment) -> Instructions:
        error = error_of(fault)
        if self.state in HOLDS:
            # An error in a batch's place leaves the lease: the user of a failed feed may still ask
            # for a snapshot. One without a place ends it.
            is_over = fault.sequence is None
            self._life.on("expelled" if is_over else "fails")
            return self._finish(error) + (self._refuse(str(error)) if is_over else [])
        # The question for the queue is refused. What for may follow from this:
        self._check_dealing(fault.fields)
        # Another server makes the batches of this queue.
        if fault.fields.get("elsewhere"):
            if self._failover.note_refusal(error, at.now) and not self._is_known:
                return self._fail(error)
            return self._lose(str(error), at)
        # Once it was given the queue its position is right: only the intent was out of date,
        # because the others went on.
        is_late = isinstance(error, ResumeError) and self.state == "starting" and self._dealt
        if is_late and self._num_opens < say.MAX_OPENS:
            self._life.on("returns")
            return self._ask_again(at)
        return self._fail(error)

    def _take_state(self, message: say.State, at: Moment) -> Instructions:
        # The states allow an answer at any time; that there was a question is checked here.
        question, self._asked = self._asked, None
        if question is None:
            raise ProtocolError("a snapshot came that was not asked for")
        self._receipt = message.receipt
        answer = _no(_UNKNOWN) if message.data is None else message.data
        return [(Do.ANSWER, question, answer), *self._send_questions(at)]


def _renewal_s(opened: say.Opened) -> float:
    """How long after one renewal of a lease the next is due."""
    return min(_TELL_S, opened.lease_s / 3)


def _dealing(opened: say.Opened, identity: Identity) -> dict[str, Any]:
    """How a server deals the feed: what may be another though a position fits."""
    dealing = None if identity.began is None else identity.began.dealing
    queues = None if dealing is None else dealing.num
    epochs = epochs_in_words(opened.epochs)
    return {"queues": queues, "replicas": opened.replicas, "epochs": epochs}


def _no(why: str) -> RemoteError:
    return RemoteError(f"no snapshot: {why}; use state_dict()")
