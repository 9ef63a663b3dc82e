"""The consumers of one feed: who comes and goes, what each has used, and when it is sent more."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from feeder.devices.layout import credit_for
from feeder.errors import ConfigError, FeedError, LeaseLost, ProtocolError
from feeder.service.faults import point
from feeder.service.net.listener import Peer
from feeder.service.protocol import messages as say
from feeder.service.protocol.seats import Seats
from feeder.service.ratelimited_log import plain
from feeder.service.server.delivery import Delivery, Send, make_fault
from feeder.service.server.lease import Lease, News
from feeder.service.server.rewind import Beginning, LowWatermark
from feeder.service.server.run import ServedFeed
from feeder.state.snapshot import StreamState
from feeder.workers.stream.resuming import Resume

logger = logging.getLogger("feeder")


class Desk:
    """The consumers of one feed, each with a lease; the place where all events about them arrive.

    Owned by the server's I/O thread, and nothing in it waits. `num_slots` is the batcher's and
    `state` any thread's: both read single attributes.
    """

    def __init__(self, feed: ServedFeed, run_id: bytes, lease_s: float, send: Send) -> None:
        self.feed = feed
        self._run_id = run_id
        self.lease_s = lease_s
        """Seconds for which a consumer may be silent."""
        self._send = send
        self.num_queues = len(feed.factory.config.devices)
        origin = feed.factory.origin
        self.seats = Seats(self.num_queues, 0 if origin is None else origin.cut.step)
        self._delivery = Delivery(feed, send)
        self.low_watermark = LowWatermark(feed.factory)
        """How far all consumers have used the feed."""
        # The position of a consumer that came back with the end of the stream.
        self._finished: Resume | None = None
        # Until then somebody may come for a queue that has ended by hearsay.
        self._trusts_at = math.inf
        # What was used since the last `pump` and is not let go of yet.
        self._unsettled: list[tuple[Lease, News]] = []
        self._beginning = Beginning(feed, self.seats, self._delivery, self.low_watermark)

    @property
    def leases(self) -> Sequence[Lease | None]:
        """The lease of each queue; None where nobody holds it."""
        return self._beginning.leases

    # ---- coming and going

    def open(self, peer: Peer, message: say.Open) -> Lease:
        """Give a consumer its queue, or raise `LeaseLost`, `ResumeError` or `ConfigError`."""
        queue, num, who = message.queue, self.num_queues, plain(message.who)
        if queue >= num:
            raise ConfigError(
                f"queue is {queue}, but feed {self.feed.name!r} has {num}; expected 0 to {num - 1}"
            )
        rejoins = message.intent == "rejoin"
        resume = self.feed.factory.find(message.token, rejoins=rejoins)
        step = 0 if resume is None else resume.cut.step
        finished = resume is not None and resume.cut.finished
        old = self.leases[queue]
        # ZeroMQ may deliver a question of a former connection after one of a later connection.
        if old is not None and old.consumer == message.consumer and old.attempt > message.attempt:
            raise ProtocolError("a consumer's question came after a later one of its own")
        is_same = old is not None and old.consumer == message.consumer
        takes_over = message.takeover or is_same
        # Everything that may refuse the newcomer comes before the old holder is sent away.
        self._beginning.move_seats()
        self.seats.check(
            queue, step, who, rejoins=rejoins, takes_over=takes_over, undecided=message.undecided,
            finished=finished,
        )  # fmt: skip
        if old is not None:
            self._evict(old, who, fences=not is_same)
        self.seats.take_seat(
            queue, step, who, rejoins=rejoins, undecided=message.undecided, finished=finished
        )
        if rejoins:
            self._hear_of_ended(message.ended, who)
        self.feed.stats.count_open(rejoins=rejoins)
        lease = Lease(
            peer=peer,
            queue=queue,
            # Fences off every earlier lease, also those of other servers at this address.
            generation=self._run_id + self.feed.stats.opened.to_bytes(8, "big"),
            who=who,
            consumer=message.consumer,
            attempt=message.attempt,
            credit=message.credit,
            hold=message.hold,
            checksum=message.checksum,
            rejoins=rejoins,
            resume=resume,
            # Until it says otherwise, a consumer that comes back has batches that its user lacks.
            pending=int(rejoins),
            expires=time.monotonic() + self.lease_s,
        )
        self._beginning.admit(lease)
        # Also where nobody held the queue: its arena may be of a size that this lease cannot use.
        self.feed.slots.retire(queue, lambda a: a.num_slots == lease.num_slots(a.slot_bytes))
        lease.session.on("Open")
        return lease

    def _hear_of_ended(self, queues: Sequence[int], who: str) -> None:
        """Take over what a consumer that comes back knows from a server before this one."""
        if news := self.seats.mark_ended(queues):
            self._trusts_at = time.monotonic() + self.lease_s
            logger.info("feed %r: %s says that queues %r have had everything", self.feed.name, who,
                        news)  # fmt: skip

    def _evict(self, old: Lease, who: str, *, fences: bool) -> None:
        """Make room for a newcomer whose right has been checked."""
        self.feed.stats.fenced += fences
        self._send_away(old, LeaseLost(f"queue {old.queue} was taken over by {who}"))

    def _send_away(self, lease: Lease, error: FeedError) -> None:
        self._send(lease.peer, make_fault(lease.generation, error, None), ())
        # Its connection is left to it: a hang-up would come before the error.
        self.end_lease(lease, hangs_up=False)

    def _dismiss(self, lease: Lease, error: FeedError) -> None:
        """End a lease for what its consumer has done, or wants."""
        if self.leases[lease.queue] is lease:
            self._send_away(lease, error)
            self._lose_holder(lease.queue)

    def end_lease(self, lease: Lease, *, hangs_up: bool = True) -> None:
        """End a lease: memory that its consumer may still look at is never written again."""
        if self.leases[lease.queue] is not lease:
            return
        self._beginning.note_end(lease)
        lease.is_over = True
        self.feed.stats.queues[lease.queue].starved.stop(time.monotonic())
        # The arena goes as a whole. A late reader then sees old bytes, and never torn ones.
        self.feed.slots.retire(lease.queue, lambda arena: lease.shared)
        if lease.connection is not None and hangs_up:
            lease.connection.close()
        self._delivery.let_go(lease, lease.use(lease.sequence))

    def lose(self, lease: Lease) -> None:
        """The connection of a lease's consumer is dead."""
        if self.leases[lease.queue] is not lease:
            return
        logger.info("feed %r: %s, queue %d, is gone", self.feed.name, lease.who, lease.queue)
        # A trainer that ends without a goodbye after its last batch has not failed anybody.
        if lease.has_all:
            return self.leave(lease)
        self.end_lease(lease)
        self._lose_holder(lease.queue)

    def _lose_holder(self, queue: int) -> None:
        self.seats.lose(queue)
        self._beginning.look_again()

    def attach(self, lease: Lease, message: say.Attached) -> None:
        """A consumer is ready for batches; raises `ProtocolError` where it cannot be."""
        lease.session.on("Attached")
        lease.expires = time.monotonic() + self.lease_s
        self.seats.hear(lease.queue, uses=False)
        lease.shared = message.plane == "shared"
        self.feed.slots.prepare(lease.queue, lease.wanted)
        if lease.shared and lease.connection is None:
            raise ProtocolError("plane is 'shared', but no connection to the unix socket was made")
        if message.reason:
            logger.info("feed %r, queue %d: frames, because %s", self.feed.name, lease.queue,
                        plain(message.reason))  # fmt: skip
        resume = lease.resume
        if resume is not None and resume.cut.finished:
            # It has received everything before: it need not wait until the others have.
            self._finished = resume
            self._delivery.send_end(lease, self.start_token(lease))
        self._beginning.begin_run()

    def leave(self, lease: Lease) -> None:
        """A consumer says goodbye."""
        has_all = lease.has_all
        self.end_lease(lease)
        self.seats.leave(lease.queue, ended=has_all)
        self._beginning.look_again()
        self.tell_waiting()

    @property
    def acknowledged(self) -> bool:
        """Whether the users of all queues have been handed everything. An end that this server
        knows by hearsay counts once nobody has come for the queue in a lease's time."""
        pairs = zip(self.seats.seats, self.leases, strict=True)
        trusts = time.monotonic() >= self._trusts_at
        return all(
            (seat.ended and (trusts or not seat.is_hearsay))
            or (lease is not None and lease.has_all)
            for seat, lease in pairs
        )

    def state(self) -> StreamState:
        """How far all consumers have used the feed; any thread may ask."""
        ending, finished = self._delivery.ending, self._finished
        if (ending or finished) and self.acknowledged:
            if ending is None:
                return self.feed.factory.state(finished)  # All came back with the end.
            self.low_watermark.finish_at(ending, self._delivery.columns)
        return self.low_watermark.state()

    def num_slots(self, queue: int, slot_bytes: int) -> int:
        """How many slots of this size an arena of the queue needs; the batcher's thread asks, since
        only then is the size of a batch known."""
        lease = self.leases[queue]
        return credit_for(slot_bytes) if lease is None else lease.num_slots(slot_bytes)

    def expire(self, now: float) -> float:
        """Let newcomers have the queues of consumers that were silent for too long, and begin
        without those that did not come back; returns when to look again."""
        nearest = math.inf
        for lease in self.leases:
            if lease is None:
                continue
            if lease.expires > now:
                nearest = min(nearest, lease.expires)
            elif self.seats.seats[lease.queue].alive:
                logger.warning(
                    "feed %r: %s, queue %d, was not heard of for %.0f s; its connection is alive, "
                    "so it hangs", self.feed.name, lease.who, lease.queue, self.lease_s,
                )  # fmt: skip
                self.feed.stats.expired += 1
                self._lose_holder(lease.queue)
        if now < self._trusts_at:
            nearest = min(nearest, self._trusts_at)
        return min(nearest, self._beginning.look(now, self.lease_s))

    def start_token(self, lease: Lease) -> bytes:
        """The position that a lease began at."""
        return self.feed.factory.token(lease.resume)

    # ---- messages of consumers

    def use(self, lease: Lease, message: say.Used) -> None:
        """Note what a consumer reports: batches that its user was handed, slots that are free
        again, or only that it lives."""
        sequence = message.sequence
        if not lease.used <= sequence <= lease.sequence:
            raise ProtocolError(
                f"used {sequence} batches, expected from {lease.used} to {lease.sequence}"
            )
        lease.expires = (now := time.monotonic()) + self.lease_s
        starts = message.begun and self._beginning.starts(lease)
        if message.begun and not starts:
            error = self._beginning.refusal(lease, now, self.lease_s)
            if error is not None:
                return self._dismiss(lease, error)
        if self.seats.hear(lease.queue, uses=starts or sequence > 0):
            self._beginning.look_again()
        if message.slots:
            if not lease.shared:
                raise ProtocolError("slots are released that were never given")
            self.feed.slots.release(lease.queue, message.slots)
            point("server.released")
        lease.pending = message.pending
        news = lease.use(sequence)
        self.feed.stats.queues[lease.queue].add_report(message.report, news.batches, now)
        self.low_watermark.note(
            lease.queue, [b.place for b in news.batches], self._delivery.columns
        )
        self._unsettled.append((lease, news))
        if lease.has_all:
            self.low_watermark.leave_out(lease.queue, self._delivery.columns)
            self.tell_waiting()

    def snapshot(self, lease: Lease, message: say.Snapshot) -> None:
        """Answer a consumer that asks for its position with leftover rows."""
        lease.answers.check(message.receipt)
        if not self._delivery.send_state(lease, message.sequence, lease.resume):
            self.lose(lease)

    # ---- messages to consumers

    def pump(self) -> None:
        """Send what there is to everybody who has credit, then let go of what was used: called at
        the end of each turn of the I/O loop."""
        failure = self.feed.ended_with
        # Before a failure is sent to anybody: where one consumer's position is the reason, it alone
        # is sent away and the others go on.
        doubted = self._beginning.find_doubted(failure)
        for holder, error in doubted:
            self._dismiss(holder, error)
        if doubted:
            self._beginning.begin_run()
        self._delivery.judged = failure
        for lease in self.leases:
            if lease is not None and lease.excess is not None:
                self._dismiss(lease, lease.excess)
            elif lease is not None and not lease.ended and lease.session.state == "streaming":
                try:
                    self._pump(lease)
                except Exception as error:
                    # It concerns this consumer alone: the others are served all the same.
                    self._delivery.send_failure(lease, error)
        # After all sends: this wakes the batcher, and each send lets go of the interpreter, which
        # the batcher would then take while other consumers wait.
        unsettled, self._unsettled = self._unsettled, []
        for lease, news in unsettled:
            try:
                self._delivery.let_go(lease, news)
            # A lease that releases what it does not have ends alone.
            except ProtocolError as error:
                logger.exception("feed %r, queue %d", self.feed.name, lease.queue)
                self._dismiss(lease, error)
        self._delivery.settle()
        self.feed.make_use_of_room()

    def _pump(self, lease: Lease) -> None:
        run, failure = self.feed.run, self.feed.failure
        if run is not None:
            if not self._delivery.pump(lease, run):
                self.lose(lease)
        elif failure is not None and failure is self._delivery.judged:
            self._delivery.send_failure(lease, failure)

    def tell_waiting(self) -> None:
        """Send `Waiting` to everybody for whom it says something new: consumers tell the next
        server which queues have ended."""
        # The ended ones are named as soon as they are known: this server may be killed any moment.
        have_all = [lease.queue for lease in self.leases if lease is not None and lease.has_all]
        waiting = missing, ended = self.seats.news(have_all)
        for lease in self.leases:
            if lease is not None and lease.last_waiting != waiting:
                lease.last_waiting = waiting
                message = say.Waiting(generation=lease.generation, queues=missing, ended=ended)
                self._send(lease.peer, message, ())
