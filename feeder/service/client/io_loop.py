"""The consumer's I/O thread: it connects, receives, reports what was used, and connects again."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from feeder.devices.cuda.landing import Landing
from feeder.errors import (
    AuthError,
    ClosedError,
    ConfigError,
    ConnectTimeout,
    DeviceError,
    FeedError,
    ProtocolError,
    RemoteError,
    ResumeError,
    TransportError,
)
from feeder.service.client.failover import Failover, Patience
from feeder.service.client.inbox import Inbox
from feeder.service.client.options import ConsumerOptions
from feeder.service.client.session import ClientSession, SnapshotRequest
from feeder.service.faults import point
from feeder.service.memory.fdpass import OwnLimitError
from feeder.service.net.connection import Connection
from feeder.service.protocol import messages as say
from feeder.service.protocol.coding import decode, encode
from feeder.waking import Waker, wait_for

logger = logging.getLogger("feeder")

_FAREWELL_S = 1.0
"""How long a consumer that has used everything looks for a server to tell that, and how long the
server may take to answer a goodbye. Its answer shows that what was used last has arrived, so that
the server's checkpoint has it; a hung server must not hold up the trainer's exit.
"""


class ClientLoop:
    """The state of a consumer's I/O thread, and the thread's body, `run`.

    Owned by the I/O thread. Other threads use `call_soon`, `request_snapshot`, `failure`, `waker`
    and `inbox`, and pass `stop` and `reopen` to `call_soon`. There is no lock here: a deque carries
    calls to the thread, and the waker ends its poll.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        connect: Callable[[str], Connection],
        token: bytes | None,
        at_end: Callable[[], None],
        landing: Landing | None = None,
    ) -> None:
        self.options = options
        self._connect, self._at_end = connect, at_end
        self._connection: Connection | None = None
        self._failover = Failover(options.addresses)
        # What was changed on its way comes right the second time, else memory or a fetch function
        # is at fault. A server that gave no memory may just have been killed: its successor will.
        self._corrupt, self._unshared = Patience(1), Patience(10)
        self._wait_at_most(options.timeout_s)
        self._move_on_at = math.inf
        # Calls of other threads. Appending takes no lock, so a finaliser may do it.
        self._tasks: deque[Callable[[], None]] = deque()
        # Running: it is served, or looks for a server. Idle: no server is wanted any more, since
        # the stream has ended or failed; the thread still serves calls, such as a load. Closing:
        # goodbye is to be said. Leaving: it is said. Over: the thread ends.
        self._stage: Literal["running", "idle", "closing", "leaving", "over"] = "running"
        self._ending: FeedError | None = None
        self.waker = Waker()
        """Wakes the I/O thread; for any thread."""
        self.inbox = Inbox(lambda: self._session.describe_wait(), landing)
        """What has come, for the user's thread."""
        self._session = ClientSession(
            options, token, self.inbox, self.waker.wake, self._send, self._why_too_long
        )

    # ---- asked by the user's thread

    @property
    def failure(self) -> FeedError | None:
        """Why the thread takes no calls any more; None while it does."""
        return self.inbox.failure if self._stage == "over" else None

    def call_soon(self, what: Callable[[], None]) -> None:
        """Have something done by the I/O thread. From any thread, also from a finaliser."""
        self._tasks.append(what)
        self.waker.wake()
        # The thread may have ended between its last look and this: then nobody else would do it,
        # and whoever asked would wait for ever.
        if self._ending is not None:
            self._run_last_tasks(self._ending)

    def stop(self) -> None:
        """Say goodbye and wait for the server's answer. In the I/O thread.

        A consumer that has lost its server after its user was handed everything finds the next one
        first: a server that waits until all has been used would wait for it. Nobody else does: who
        has not had everything would hold a queue that its successor comes for.
        """
        has_all = self._session.has_ended and self.inbox.handed == self.inbox.received
        if self._stage != "running" or not (self._holds_lease or has_all):
            self._stage = "over"
            return
        self._stage = "closing"
        self._wait_at_most(_FAREWELL_S)
        if self._holds_lease:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        lease = self.inbox.lease
        assert lease is not None
        self._stage = "leaving"
        self._wait_at_most(_FAREWELL_S)
        # First let go of what nobody has taken: its slots go back with the goodbye, and an arena of
        # which all slots are back serves the next consumer, without new pages from the system.
        self.inbox.fail(ClosedError("the consumer is closed"))
        self.inbox.batches.close()
        lease.say_bye(self.inbox.handed)

    def request_snapshot(self) -> SnapshotRequest:
        """Ask for the state after what has been handed out. From any thread."""
        request = SnapshotRequest()
        self.call_soon(lambda: self._session.request_snapshot(request))
        return request

    def reopen(self, number: int, token: bytes) -> None:
        """Start where load `number` says, before any batch was handed out. In the I/O thread."""
        # An interrupted load is asked for again by the next call, so it may come twice.
        if number <= self.inbox.num_restarts:
            return
        if self._connection is not None:
            # The lease's connection for descriptors is closed below, which is no trouble then.
            self._connection.unwatch()
        if self._stage == "idle":
            self._stage = "running"
        # The farewell of a consumer that another thread closes has its own time.
        if self._stage == "running":
            self._wait_at_most(self.options.timeout_s)
        if not self._session.restart(number, token):
            self._close_connection()

    @property
    def _holds_lease(self) -> bool:
        return self._connection is not None and self._session.holds_lease

    @property
    def _is_between(self) -> bool:
        """Whether it looks for a server and tries none just now."""
        return self._connection is None and self._stage != "idle"

    @property
    def _has_left(self) -> bool:
        """Whether goodbye is said."""
        return self._stage in ("leaving", "over")

    # ---- the thread

    def run(self) -> None:
        """Thread body. Whatever ends it, whoever waits or calls is told."""
        failure: FeedError = ClosedError("the consumer is closed")
        try:
            while self._stage != "over":
                self._step()
        except ConfigError as error:
            # A setting that shows to be wrong only with the server's answer: the user's to mend.
            failure = error
        except Exception as error:
            logger.exception("the consumer's I/O thread failed")
            failure = RemoteError(f"the consumer failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._stage = "over"
        self._close_connection()
        self._at_end()
        # From here on `call_soon` runs calls itself; those that came just before are run here.
        self._ending = failure
        self._run_last_tasks(failure)

    def _run_last_tasks(self, failure: FeedError) -> None:
        """Run the calls that the thread no longer will, and tell waiters the failure.

        The thread has ended, so whichever thread comes here does it; `popleft` gives each call to
        one of them.
        """
        with contextlib.suppress(IndexError):
            while True:
                self._tasks.popleft()()
        # Checked first, since a finaliser may come here and must not take locks for nothing.
        if self.inbox.failure is None:
            self.inbox.fail(failure)

    def _step(self) -> None:
        """Wait for something to happen, then do all there is to do."""
        now = time.monotonic()
        if self._is_between and now >= self._failover.try_at:
            self._try_next_address(now)
        timeout_s = max(0.0, self._next_deadline() - time.monotonic())
        connection = self._connection
        if connection is None:
            wait_for(self.waker, timeout_s)
        else:
            ready = connection.poll(timeout_s)
            if ready.messages:
                self._receive(connection)
            if ready.trouble and connection is self._connection:
                self._on_trouble(connection)
        # Cleared before the looking: what comes in between wakes the next poll.
        self.waker.clear()
        lease = self.inbox.lease
        # Before the calls: a snapshot that is asked for counts on what was used being told.
        is_served = self._session.state in ("streaming", "ended")
        if lease is not None and is_served and not self._has_left:
            lease.tell_used(self.inbox.handed, begun=self.inbox.begun)
        while self._tasks:
            self._tasks.popleft()()
        self._check_deadlines()

    def _next_deadline(self) -> float:
        """Return when something is due next (monotonic clock)."""
        lease = self.inbox.lease
        renew_at = lease.renew_at if lease is not None and self._holds_lease else math.inf
        failover = self._failover
        turn_at = failover.try_at if self._is_between else failover.turn_ends_at
        return min(self._give_up_at, turn_at, renew_at, self._move_on_at)

    def _check_deadlines(self) -> None:
        now, lease = time.monotonic(), self.inbox.lease
        if now >= self._give_up_at:
            self._give_up()
        # A turn ends a search, never a lease.
        elif now >= self._failover.turn_ends_at and not self._holds_lease:
            self._close_connection()
        if lease is not None and self._holds_lease and now >= lease.renew_at:
            lease.tell_used(self.inbox.handed, renew=True)
        self._leave_where_others_lack(now)

    def _leave_where_others_lack(self, now: float) -> None:
        """Leave a server that has long lacked other consumers: they may be at another address."""
        lease = self.inbox.lease
        if lease is None or self._has_left or not self._session.waits_for_others:
            self._move_on_at = math.inf
        elif self._move_on_at == math.inf:
            self._move_on_at = now + self._failover.patience_s(lease.opened.lease_s)
        elif now >= self._move_on_at:
            self._move_on_at = math.inf
            self._failover.move_on()
            lease.say_bye(self.inbox.handed)
            self._lose(f"{self._session.describe_wait()}, who may be at another address")

    def _give_up(self) -> None:
        """End what has taken too long: a goodbye, or the search for a server."""
        if self._stage in ("closing", "leaving"):
            self._stage = "over"
            return
        where = ", ".join(self.options.addresses)
        why = f"no answer from {where} within {self._limit_s} s; does `feeder serve` run there?"
        # A refusal says more than that nobody answered.
        self._fail(self._failover.refusal or ConnectTimeout(why))

    def _wait_at_most(self, limit_s: float) -> None:
        self._limit_s, self._give_up_at = limit_s, time.monotonic() + limit_s

    # ---- the connection

    def _try_next_address(self, now: float) -> None:
        """Begin a connection to the next address; ZeroMQ makes it in its own thread."""
        self._connection = self._connect(self._failover.next_address(now))
        self._connection.wake_with(self.waker)
        self._session.open()

    def _send(self, message: say.Message) -> None:
        if self._connection is not None:
            self._connection.send(encode(message))

    def _why_too_long(self, num_bytes: int) -> str | None:
        return None if self._connection is None else self._connection.why_too_long(num_bytes)

    def _receive(self, connection: Connection) -> None:
        """Take the messages that are there; what cannot be taken says whether to come back."""
        try:
            for data, frames in connection.receive():
                message = decode(data, from_consumer=False)
                self._take_message(message, frames, connection)
                # The message may have ended the connection: what else it brought is void.
                if self._connection is not connection:
                    return
        except ProtocolError as error:
            if connection.leads_to_itself():
                # Its own question came back: the system gave it the port that it connects to.
                return self._lose("nobody listens there")
            self._lose_over(error, is_last=self._corrupt.ends(self.inbox.received))
        except OwnLimitError as error:
            # This process cannot map the arena, now or later. Over the same connection it asks for
            # frames, once: to come back would have the feed begin anew for all queues each time.
            connection.unwatch()
            if self.options.plane == "shared":
                self._lose_over(TransportError(*error.args), is_last=True)
            elif not self._session.do_without_shared(str(error)):
                self._lose(str(error))
        except TransportError as error:
            # The server's shared memory cannot be had: the server may have been killed just now.
            self._lose_over(error, is_last=self._unshared.ends(self.inbox.received))
        except (ConfigError, DeviceError, ResumeError) as error:
            # It would be the same at any server; or this one deals otherwise than the one before.
            self._lose_over(error, is_last=True)

    def _take_message(
        self, message: say.Message, frames: list[Any], connection: Connection
    ) -> None:
        """Hand a message to the session, and do what follows from it for the connection."""
        if self._has_left:
            # Batches that are still on their way are nobody's any more.
            if isinstance(message, say.Farewell):
                self._stage = "over"
            return
        # Looked at before the message moves the session on: a refusal of the question itself may be
        # answered by asking otherwise.
        was_asking = self._session.state == "opening"
        error = self._session.handle(message, frames)
        if isinstance(message, say.Opened):
            self._failover.reset()
            self._give_up_at = math.inf
            connection.watch(self._session.attachment)
            if self._stage == "closing":
                self._say_goodbye()
        elif error is not None and isinstance(message, say.Farewell):
            self._lose(str(error), goes_idle=self._session.has_ended)
        elif error is not None and not (was_asking and self._session.rejoins_after(error)):
            self._fail(error)

    def _on_trouble(self, connection: Connection) -> None:
        error = connection.trouble()
        self._failover.note_reached(connection.reached_at)
        # A server that gave the queue once knows this client: a later refusal is a passing one.
        is_first = not self.inbox.num_opened
        if isinstance(error, AuthError) and is_first and self._failover.note_refusal(error):
            self._fail(error)
        elif error is not None:
            self._lose(str(error))

    def _lose_over(self, error: FeedError, *, is_last: bool) -> None:
        """Leave a server whose message cannot be taken: it would go on sending it."""
        if is_last:
            self.inbox.fail(error)
        self._lose(str(error), goes_idle=is_last)

    def _lose(self, why: str, *, goes_idle: bool = False) -> None:
        """Give the connection up, and look for a server again where there is more to come."""
        if self._has_left:
            self._stage = "over"
            return
        state = self._session.state
        connection = self._connection
        if connection is not None and (connection.connected_at is None or connection.is_own):
            self._failover.pause(time.monotonic())  # It was no server.
        self._close_connection()
        if goes_idle or state in ("failed", "refused"):
            if state == "refused":
                # A session that ends without a reason gives one: else `next` waits for ever. A
                # reason that was given before stands.
                self.inbox.fail(TransportError(why))
            return self._go_idle()
        self._session.prepare_rejoin()
        if self._give_up_at == math.inf and not self._session.has_ended:
            # It was served until now, so the time to come back begins here. Later losses, while
            # it searches, do not prolong it.
            point("consumer.lost")
            logger.warning("consumer: %s; looking for a server", why)
            self._wait_at_most(self.options.reconnect_s)

    def _fail(self, error: FeedError) -> None:
        """End the stream with an error; a lease stays, as the user may still ask for a snapshot."""
        self.inbox.fail(error)
        if not self._holds_lease:
            self._close_connection()
            self._go_idle()

    def _go_idle(self) -> None:
        """Stop looking for a server; the thread lives on for calls of other threads."""
        self._stage = "idle" if self._stage == "running" else "over"
        self._failover.reset()
        self._give_up_at = math.inf

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        # Nobody will answer: whoever waits for a snapshot is told so now and not in ten seconds.
        self._session.refuse_requests("the connection has ended")
        if self.inbox.lease is not None:
            self.inbox.lease.data_path.close()
