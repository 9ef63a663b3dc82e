"""The consumer's I/O thread: it connects, receives, tells what was used, and connects again."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable

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
    TransportError,
)
from feeder.service.client.inbox import Inbox
from feeder.service.client.options import ConsumerOptions
from feeder.service.client.session import ClientSession, SnapshotRequest
from feeder.service.faults import point
from feeder.service.memory.fdpass import OwnLimitError
from feeder.service.net.connection import Connection
from feeder.service.net.waker import Waker, wait_for
from feeder.service.protocol import messages as say
from feeder.service.protocol.coding import decode, encode

# ---- Which of a consumer's addresses is tried, since when, and for how long. Rules: no clock.


_TURN_S, _MAX_DOUBLED = 0.25, 2
"""How long one of several addresses is tried before the next: twice as long in each of two rounds,
which is enough for a host to show that somebody listens there."""
_ANSWER_S, _MOST_ANSWER_S = 1.0, 8.0
"""From then on it may take so long to give the queue: twice as long in each round."""
_PAUSE_S = 0.1
"""What listens there and is no server is let alone for so long."""
_LEASES_AT_FIRST = 4
"""So many times longer than elsewhere a server at the first address is waited with."""


class Failover:
    """The tries of one consumer. Times are those of a monotonic clock."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses
        self._num = self._num_since = 0
        self.begins_at = -math.inf
        """When the next try may begin."""
        self.ends_at = math.inf
        """When this one is given up."""
        self._refused_by: set[int] = set()
        self.refusal: AuthError | None = None
        """What one of them said that does not take this client; None where none did."""

    def begin(self, now: float) -> str:
        """The address to try."""
        address = self._addresses[self._num % len(self._addresses)]
        if len(self._addresses) > 1:
            doubled = min(_MAX_DOUBLED, self._num_since // len(self._addresses))
            self.ends_at = now + _TURN_S * 2**doubled
        self._num += 1
        self._num_since += 1
        return address

    def reach(self, at: float | None) -> None:
        """Somebody listens there since then, or nobody as far as is known."""
        if at is not None and self.ends_at < math.inf:
            round_ = min(16, (self._num_since - 1) // len(self._addresses))
            self.ends_at = max(self.ends_at, at + min(_MOST_ANSWER_S, _ANSWER_S * 2**round_))

    def fail(self, now: float) -> None:
        """It was no server."""
        self.begins_at = now + _PAUSE_S

    def refuse(self, why: AuthError) -> bool:
        """It does not take this client; whether every address has said so. A forwarder with nobody
        behind it looks the same."""
        self.refusal = why
        self._refused_by.add((self._num - 1) % len(self._addresses))
        return len(self._refused_by) == len(self._addresses)

    def patience_s(self, lease_s: float) -> float:
        """How long to stay with a server that waits for other consumers, who may be at another:
        without end where there is but one address. Consumers that wait for each other at two
        servers should not change places at once, so each adds a random part of the time."""
        if len(self._addresses) == 1:
            return math.inf
        is_first = (self._num - 1) % len(self._addresses) == 0
        return lease_s * (_LEASES_AT_FIRST if is_first else 1) * (1 + random.random())

    def move_on(self) -> None:
        """Leave the server of the present address: the first one is tried next, or the second by
        those who are at the first."""
        self._num = 1 if (self._num - 1) % len(self._addresses) == 0 else 0

    def end(self) -> None:
        """Nothing has to be tried any more: a server has given the queue, or none will."""
        self._num_since, self.refusal = 0, None
        self._refused_by.clear()
        self.ends_at = math.inf


class Patience:
    """How often a server may give what cannot be taken before it gives a batch."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num, self._received = 0, -1

    def ends(self, received: int) -> bool:
        """Once more; so many batches have come. Whether that is too often."""
        if received != self._received:
            self._num, self._received = 0, received
        self._num += 1
        return self._num > self._most


logger = logging.getLogger("feeder")

_FAREWELL_S = 1.0
"""How long a server may take to say goodbye."""


class ClientLoop:
    """The I/O thread's state. The user's thread touches `inbox`, `waker` and `ask` alone."""

    def __init__(
        self,
        wish: ConsumerOptions,
        connect: Callable[[str], Connection],
        token: bytes | None,
        at_end: Callable[[], None],
        landing: Landing | None = None,
    ) -> None:
        self.wish = wish
        self._connect, self._at_end = connect, at_end
        self._wire: Connection | None = None
        self._tries = Failover(wish.addresses)
        # What was broken on its way comes again; who gave no memory may just have been killed.
        self._broken, self._unshared = Patience(1), Patience(10)
        self._wait_at_most(wish.timeout_s)
        self._move_on_at = math.inf
        self._asked: deque[Callable[[], None]] = deque()
        self._over = self._leaving = self._resting = False
        self._ending: FeedError | None = None
        self.waker = Waker()
        """Wakes the I/O thread."""
        self.inbox = Inbox(lambda: self._talk.describe_wait(), landing)
        """What has come."""
        self._talk = ClientSession(
            wish, token, self.inbox, self.waker.wake, self._say, self._why_too_long
        )

    # ---- asked by the user's thread

    @property
    def failure(self) -> FeedError | None:
        """Why nothing can be asked any more; None where something can."""
        return self.inbox.failure if self._over else None

    def ask(self, what: Callable[[], None]) -> None:
        """Have something done by the I/O thread; from any thread."""
        self._asked.append(what)
        self.waker.wake()
        if self._ending is not None:
            self._end_asked(self._ending)

    def stop(self) -> None:
        """Say goodbye, and wait for the server's; done by the I/O thread."""
        reading = self.inbox.reading
        if self._leaving or reading is None or not self._holds_lease:
            self._over = True
            return
        self._leaving = True
        self._wait_at_most(_FAREWELL_S)
        # What nobody has taken goes back with the goodbye.
        self.inbox.fail(ClosedError("the consumer is closed"))
        self.inbox.batches.close()
        reading.leave(self.inbox.handed)

    def ask_snapshot(self) -> SnapshotRequest:
        """Ask for the state after what has been handed out."""
        question = SnapshotRequest()
        self.ask(lambda: self._talk.ask_snapshot(question))
        return question

    def reopen(self, number: int, token: bytes) -> None:
        """Start where state `number` says, unless that was done, before any batch was handed out;
        done by the I/O thread."""
        if number <= self.inbox.num_restarts:
            return
        if self._wire is not None:
            self._wire.unwatch()
        self._resting = False
        self._wait_at_most(self.wish.timeout_s)
        if not self._talk.restart(number, token):
            self._close_wire()

    @property
    def _holds_lease(self) -> bool:
        return self._wire is not None and self._talk.holds_lease

    # ---- the thread

    def run(self) -> None:
        """Thread body."""
        failure: FeedError = ClosedError("the consumer is closed")
        try:
            while not self._over:
                self._step()
        except ConfigError as error:
            failure = error
        except Exception as error:
            logger.exception("the consumer's I/O thread failed")
            failure = RemoteError(f"the consumer failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._over = True
        self._close_wire()
        self._at_end()
        self._ending = failure
        self._end_asked(failure)

    def _end_asked(self, failure: FeedError) -> None:
        """Nothing is left for the thread, which has ended; nor does anybody wait for it."""
        with contextlib.suppress(IndexError):
            while True:
                self._asked.popleft()()
        if self.inbox.failure is None:  # Else a finaliser would take locks for nothing.
            self.inbox.fail(failure)

    def _step(self) -> None:
        """Wait for something, and do what there is to do."""
        now = time.monotonic()
        if self._wire is None and not self._resting and now >= self._tries.begins_at:
            self._begin(now)
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
        reading = self.inbox.reading
        if reading is not None and not self._leaving and self._talk.state in ("streaming", "ended"):
            reading.tell(self.inbox.handed, begun=self.inbox.begun)
        while self._asked:
            self._asked.popleft()()
        self._look_at_clock()

    def _look_again_at(self) -> float:
        reading = self.inbox.reading
        renew_at = reading.renew_at if reading is not None and self._holds_lease else math.inf
        is_between = self._wire is None and not self._resting
        try_at = self._tries.begins_at if is_between else self._tries.ends_at
        return min(self._give_up_at, try_at, renew_at, self._move_on_at)

    def _look_at_clock(self) -> None:
        now, reading = time.monotonic(), self.inbox.reading
        if now >= self._give_up_at:
            self._give_up()
        elif now >= self._tries.ends_at and not self._holds_lease:
            self._close_wire()
        if reading is not None and self._holds_lease and now >= reading.renew_at:
            reading.tell(self.inbox.handed, renew=True)
        self._look_for_others(now)

    def _look_for_others(self, now: float) -> None:
        """Where the server has waited for other consumers for long, these may be at another."""
        reading = self.inbox.reading
        if reading is None or self._leaving or not self._talk.waits_for_others:
            self._move_on_at = math.inf
        elif self._move_on_at == math.inf:
            self._move_on_at = now + self._tries.patience_s(reading.opened.lease_s)
        elif now >= self._move_on_at:
            self._move_on_at = math.inf
            self._tries.move_on()
            reading.leave(self.inbox.handed)
            self._lose(f"{self._talk.describe_wait()}, who may be at another address")

    def _give_up(self) -> None:
        if self._leaving:
            self._over = True
            return
        where = ", ".join(self.wish.addresses)
        why = f"no answer from {where} within {self._limit_s} s; does `feeder serve` run there?"
        self._fail(self._tries.refusal or ConnectTimeout(why))

    def _wait_at_most(self, limit_s: float) -> None:
        self._limit_s, self._give_up_at = limit_s, time.monotonic() + limit_s

    # ---- the connection

    def _begin(self, now: float) -> None:
        """Try the next address."""
        self._wire = self._connect(self._tries.begin(now))
        self._wire.wake_with(self.waker)
        self._talk.begin()

    def _say(self, message: say.Message) -> None:
        if self._wire is not None:
            self._wire.send(encode(message))

    def _why_too_long(self, num_bytes: int) -> str | None:
        return None if self._wire is None else self._wire.why_too_long(num_bytes)

    def _receive(self, wire: Connection) -> None:
        try:
            for data, frames in wire.receive():
                message = decode(data, from_consumer=False)
                if self._leaving:
                    self._over = self._over or isinstance(message, say.Farewell)
                    continue
                was_asking = self._talk.state == "opening"
                error = self._talk.hear(message, frames)
                if isinstance(message, say.Opened):
                    self._tries.end()
                    self._give_up_at = math.inf
                    wire.watch(self._talk.connection)
                elif error is not None and isinstance(message, say.Farewell):
                    self._lose(str(error), rests=self._talk.has_ended)
                elif error is not None and not (was_asking and self._talk.comes_back_after(error)):
                    self._fail(error)
                if self._wire is not wire:
                    return
        except ProtocolError as error:
            if wire.is_own or (wire.trouble() is not None and wire.is_own):
                return self._lose("nobody listens there")  # It has heard itself.
            self._lose_over(error, is_last=self._broken.ends(self.inbox.received))
        except OwnLimitError as error:
            wire.unwatch()
            if self.wish.plane == "shared":
                self._lose_over(TransportError(*error.args), is_last=True)
            elif not self._talk.do_without_shared(str(error)):
                self._lose(str(error))
        except TransportError as error:
            # Its shared memory cannot be had: it may have been killed just now.
            self._lose_over(error, is_last=self._unshared.ends(self.inbox.received))
        except (ConfigError, DeviceError) as error:
            self._lose_over(error, is_last=True)

    def _on_trouble(self, wire: Connection) -> None:
        error = wire.trouble()
        self._tries.reach(wire.reached_at)
        if isinstance(error, AuthError) and not self.inbox.num_opened and self._tries.refuse(error):
            self._fail(error)
        elif error is not None:
            self._lose(str(error))

    def _lose_over(self, error: FeedError, *, is_last: bool) -> None:
        """What came cannot be taken: the server would go on sending it."""
        if is_last:
            self.inbox.fail(error)
        self._lose(str(error), rests=is_last)

    def _lose(self, why: str, *, rests: bool = False) -> None:
        """The connection is gone: look for a server again, where there is more to come."""
        if self._leaving:
            self._over = True
            return
        state = self._talk.state
        if self._wire is not None and (self._wire.connected_at is None or self._wire.is_own):
            self._tries.fail(time.monotonic())
        self._close_wire()
        if rests or state in ("failed", "refused"):
            if state == "refused":
                self.inbox.fail(TransportError(why))  # Unless a reason was told before.
            return self._rest()
        self._talk.come_back()
        if self._give_up_at == math.inf and not self._talk.has_ended:
            # It was served: the time to come back begins.
            point("consumer.lost")
            logger.warning("consumer: %s; looking for a server", why)
            self._wait_at_most(self.wish.reconnect_s)

    def _fail(self, error: FeedError) -> None:
        """Nothing more will come."""
        self.inbox.fail(error)
        if not self._holds_lease:
            self._close_wire()
            self._rest()

    def _rest(self) -> None:
        """There is nobody to talk to any more."""
        self._resting = True
        self._tries.end()
        self._give_up_at = math.inf

    def _close_wire(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self._talk.drop_questions("the connection has ended")
        if self.inbox.reading is not None:
            self.inbox.reading.plane.close()
