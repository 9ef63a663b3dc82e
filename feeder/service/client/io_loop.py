"""The consumer's I/O thread: it owns socket and clock, and carries out what the machine says."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from feeder.devices.cuda.landing import Landing
from feeder.errors import (
    ClosedError,
    ConfigError,
    FeedError,
    ProtocolError,
    RemoteError,
    TransportError,
)
from feeder.service.client.inbox import Inbox, SnapshotRequest
from feeder.service.client.lease import ClientLease
from feeder.service.client.machine import (
    SERVED,
    ClientMachine,
    ConsumerOptions,
    Instructions,
    Moment,
)
from feeder.service.client.remote import Identity, RemotePosition, columns_in
from feeder.service.faults import point
from feeder.service.memory.fdpass import OwnLimitError
from feeder.service.net.connection import Connection
from feeder.service.net.kernel import boot_id
from feeder.service.protocol import messages as say
from feeder.service.protocol.coding import decode, encode
from feeder.waking import Waker, wait_for

logger = logging.getLogger("feeder")

_BESIDE_BYTES = 2048
"""What the message that asks for a queue holds beside the position, rounded up."""


class ClientLoop:
    """The I/O thread of a consumer: `run` is the thread's body.

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
        self.machine = ClientMachine(options, token, os.urandom(16), boot_id(), time.monotonic())
        """What this consumer is to its servers."""
        self._connect, self._at_end = connect, at_end
        self._connection: Connection | None = None
        self._warned: set[str] = set()
        # Calls of other threads. Appending takes no lock, so a finaliser may do it.
        self._tasks: deque[Callable[[], None]] = deque()
        # Why the thread has ended.
        self._ending: FeedError | None = None
        self.waker = Waker()
        """Wakes the I/O thread; for any thread."""
        self.inbox = Inbox(self.machine.describe_wait, landing)
        """What has come, for the user's thread."""

    # ---- asked by the user's thread

    @property
    def failure(self) -> FeedError | None:
        """Why the thread takes no calls any more; None while it does."""
        return self.inbox.failure if self.machine.state == "over" else None

    def call_soon(self, what: Callable[[], None]) -> None:
        """Have something done by the I/O thread. From any thread, also from a finaliser."""
        self._tasks.append(what)
        self.waker.wake()
        # The thread may have ended between its last look and this: then nobody would do it,
        # and whoever asked would wait for ever.
        if self._ending is not None:
            self._run_last_tasks(self._ending)

    def stop(self) -> None:
        """Say goodbye and wait for the server's answer. In the I/O thread."""
        self._do(self.machine.close(self._moment()))

    def request_snapshot(self) -> SnapshotRequest:
        """Ask for the state after what has been handed out. From any thread."""
        request = SnapshotRequest()
        self.call_soon(lambda: self._do(self.machine.ask_snapshot(request, self._moment())))
        return request

    def reopen(self, number: int, token: bytes) -> None:
        """Start where load `number` says, before any batch was handed out. In the I/O thread."""
        # An interrupted load is asked for again by the next call, so it may come twice.
        if number > self.inbox.num_restarts:
            self.inbox.clear(number)
            self._do(self.machine.load(token, self._moment()))

    # ---- the thread

    def run(self) -> None:
        """Thread body. Whatever ends it, whoever waits or calls is told."""
        failure: FeedError = ClosedError("the consumer is closed")
        try:
            while self.machine.state != "over":
                self._step()
        except ConfigError as error:
            # A setting that shows to be wrong only with the server's answer: the user's to mend.
            failure = error
        except Exception as error:
            logger.exception("the consumer's I/O thread failed")
            failure = RemoteError(f"the consumer failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._end(failure)

    def _end(self, failure: FeedError) -> None:
        self._do(self.machine.stop())
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
            self.inbox.finish(failure)

    def _step(self) -> None:
        """Wait for something to happen, then do all there is to do."""
        machine = self.machine
        self._do(machine.seek(self._moment()))
        timeout_s = max(0.0, machine.next_deadline - time.monotonic())
        connection = self._connection
        if connection is None:
            wait_for(self.waker, timeout_s)
        else:
            ready = connection.poll(timeout_s)
            if ready.messages:
                self._receive(connection)
            if ready.trouble and connection is self._connection:
                self._note_trouble(connection, connection.trouble())
        # Cleared before the looking: what comes in between wakes the next poll.
        self.waker.clear()
        # Before the calls: a snapshot that is asked for counts on what was used being told.
        if machine.state in SERVED and (lease := self.inbox.lease) is not None:
            self._do(machine.tell_used(self._moment(), lease.take_released()))
        while self._tasks:
            self._tasks.popleft()()
        self._do(machine.tick(self._moment()))

    def _moment(self) -> Moment:
        inbox = self.inbox
        return Moment(time.monotonic(), inbox.received, inbox.handed, inbox.begun)

    def _receive(self, connection: Connection) -> None:
        """Take the messages that are there."""
        try:
            for data, frames in connection.receive():
                message = decode(data, from_consumer=False)
                self._do(self.machine.hear(message, self._moment(), frames))
                # The message may have ended the connection: what else it brought is void.
                if self._connection is not connection:
                    return
        except FeedError as error:
            if isinstance(error, ProtocolError) and connection.leads_to_itself():
                # Its own question came back: the system gave it the port that it connects to.
                self._note_trouble(connection, TransportError("nobody listens there"))
            else:
                if isinstance(error, OwnLimitError) and self.options.plane != "shared":
                    logger.info("consumer: frames, because %s", error)
                self._do(self.machine.cannot_take(error, self._moment()))

    def _note_trouble(self, connection: Connection, error: FeedError | None) -> None:
        is_server = connection.connected_at is not None and not connection.is_own
        self._do(self.machine.trouble(
            error, self._moment(), reached_at=connection.reached_at, is_server=is_server
        ))  # fmt: skip

    # ---- instructions

    def _do(self, instructions: Instructions) -> None:
        """Carry out instructions of the machine, in order."""
        for what, *told in instructions:
            getattr(self, f"_{what.value}")(*told)

    def _begin_connection(self, address: str) -> None:
        """Begin a connection; ZeroMQ makes it in its own thread."""
        self._connection = self._connect(address)
        self._connection.wake_with(self.waker)

    def _end_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._end_lease()

    def _end_lease(self) -> None:
        if self._connection is not None:
            # Otherwise its end, which is meant here, would be trouble.
            self._connection.unwatch()
        if self.inbox.lease is not None:
            self.inbox.lease.close()

    def _send(self, message: say.Message) -> None:
        if isinstance(message, say.Open):
            point("consumer.before_open")
        if self._connection is not None:
            self._connection.send(encode(message))

    def _tell_used(
        self, generation: bytes, used: int, begun: bool, slots: tuple[int, ...], is_news: bool
    ) -> None:
        lease = self.inbox.lease
        assert lease is not None
        slots = slots or lease.take_released()
        # A message holds so many slots at most, so several may be needed.
        while slots or is_news:
            point("consumer.before_used")
            self._send(say.Used(
                generation=generation, sequence=max(0, used), pending=max(0, -used), begun=begun,
                slots=slots, report=self.inbox.report(),
            ))  # fmt: skip
            point("consumer.used")
            is_news, slots = False, lease.take_released()

    def _join(self, opened: say.Opened, identity: Identity, token: bytes | None) -> None:
        inbox, before = self.inbox, self.inbox.lease
        lease = ClientLease(
            opened, identity, inbox.received, self.machine.options, self.waker.wake, inbox.stats,
            inbox.landing,
        )  # fmt: skip
        # Before the first batch the server declares no columns; the last lease or the position may.
        columns = None if before is None else before.columns
        lease.columns = columns or columns_in(token, opened.name)
        # Kept from the first time: later servers are asked for what comes after all that has been
        # received, which is not where the user stands.
        position = RemotePosition(identity, opened.token)
        start = inbox.start or position.state(lease.columns)
        known = before.starts if before is not None and inbox.has_opened else {}
        lease.starts = {num: at for num, at in known.items() if num >= inbox.handed}
        lease.starts[inbox.received] = position
        point("consumer.opened")
        if inbox.num_opened:
            logger.info("consumer: a server is there again")
        ready = self.machine.joined(opened, identity, lease.kind, lease.reason, self._moment())
        inbox.set_lease(lease, start)
        assert self._connection is not None
        self._connection.watch(lease.attachment)
        self._do(ready)

    def _take(self, message: Any, frames: Sequence[Any]) -> None:
        inbox: Any = self.inbox
        lease = inbox.lease
        if isinstance(message, say.Batches):
            batches = lease.take_batches(message, frames)
            point("consumer.received")
            self.machine.took(batches[-1].place)
            if tokens := message.groups[-1].tokens:
                self._check_fits(tokens[-1])
            inbox.received += len(batches)
            inbox.batches.put(batches)
            point("consumer.put")
        elif isinstance(message, say.Arena):
            lease.add_arena(message)
            point("consumer.mapped")
        else:
            if lease.identity.may_be_uneven:
                self._warn_once(
                    "feed %r: its queues get unequal numbers of batches where the last round is "
                    "not complete, and a trainer that waits for all others then waits for ever; "
                    "last_round='drop' or 'pad' gives each queue as many", lease.identity.name,
                )  # fmt: skip
            lease.set_spec(message)

    def _check_fits(self, token: bytes) -> None:
        """Warn if a position with its leftover rows is too long to ask another server."""
        assert self._connection is not None
        why = self._connection.why_too_long(len(token) + _BESIDE_BYTES)
        if why is not None:
            self._warn_once("consumer: it could not go on when this server is lost: %s", why)

    def _warn_once(self, text: str, *told: Any) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, *told)

    def _finish(self, ending: RemotePosition | FeedError) -> None:
        self.inbox.finish(ending)
        if isinstance(ending, RemotePosition):
            point("consumer.end")

    def _drop(self) -> None:
        self.inbox.finish(ClosedError("the consumer is closed"))
        self.inbox.batches.close()

    def _answer(self, request: SnapshotRequest, answer: bytes | RemoteError) -> None:
        request.answer(answer)

    def _look(self) -> None:
        if self._connection is not None and self._connection.has_moved():
            self.machine.note_sign()

    def _note_lost(self, why: str) -> None:
        point("consumer.lost")
        logger.warning("consumer: %s; looking for a server", why)
