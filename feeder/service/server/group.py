"""The consumers of one feed: events about them go to its membership, and what that says is done."""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from typing import Any, cast

from feeder.devices.layout import credit_for
from feeder.errors import ConfigError, FeedError, ProtocolError, ResumeError
from feeder.service.faults import point
from feeder.service.memory.memfd import wanted_by_all
from feeder.service.net.listener import Peer
from feeder.service.protocol import events
from feeder.service.protocol import messages as say
from feeder.service.protocol.member import Ended, Start
from feeder.service.protocol.membership import Membership
from feeder.service.protocol.seats import seat_names, seat_of
from feeder.service.ratelimited_log import plain
from feeder.service.server.delivery import Delivery, Lease, News, make_fault
from feeder.service.server.editing import Change, place_in
from feeder.service.server.position_check import PositionCheck, Stand, key
from feeder.service.server.run import Request, ServedFeed
from feeder.service.server.watermark import LowWatermark
from feeder.state.positions import Positions
from feeder.state.snapshot import HISTORY, StreamState
from feeder.workers.fetch.resuming import Resume

logger = logging.getLogger("feeder")


class ConsumerGroup:
    """The consumers of one feed, each with a lease; the place where all events about them arrive.

    Owned by the server's I/O thread, and nothing in it waits. `num_slots` is the enqueuer's and
    `state` any thread's: both read single attributes.
    """

    def __init__(self, feed: ServedFeed, run_id: bytes, lease_s: float) -> None:
        self.feed = feed
        self._run_id = run_id
        factory = feed.factory
        self.num_queues = len(factory.config.devices)
        self.replicas = factory.replicas
        """How many consumers are given the batches of each queue."""
        # Of batches that are made elsewhere no position is passed. And where each batch is made by
        # calls of its own, it says nothing but what its number says.
        self._compares = factory.config.stream.repeatable and factory.part is None
        self.membership = Membership(
            self.num_queues,
            lease_s,
            replicas=self.replicas,
            goes_back=factory.goes_back,
            compares=self._compares,
            counting=factory.counting,
            own=factory.own_queues,
        )
        self.delivery = Delivery(feed)
        self.low_watermark = LowWatermark(factory)
        """How far all consumers have used the feed."""
        self._position_check: PositionCheck | None = None
        # Per seat: the last consumer known to stand in the stream, and the positions from which
        # it may come back.
        self._left: dict[int, tuple[bytes, set[tuple[Any, ...]]]] = {}
        # The position of a consumer that came back with the end of the stream.
        self._finished: Resume | None = None
        # What was used since the last `pump` and is not let go of yet.
        self._unsettled: list[tuple[Lease, News]] = []

    @property
    def leases(self) -> list[Lease]:
        """The leases of all consumers that hold a seat."""
        return [one for one in self.membership.own if isinstance(one, Lease)]

    def _handle(self, event: Any, now: float | None = None) -> None:
        """Tell the membership what has happened, and do what follows."""
        now = time.monotonic() if now is None else now
        if self._position_check is not None and (passed := self._position_check.news()):
            self.membership.note_passed(passed)
        for one in self.membership.handle(event, now):
            self._perform(one)

    def _perform(self, one: Any) -> None:
        match one:
            case events.Refuse(error):
                raise error
            case events.SendAway(Lease() as lease, error, fences):
                self.feed.stats.fenced += fences
                self._say_why(lease, error)
                # Its connection is left to it: a hang-up would come before the error.
                self._end_lease(lease, hangs_up=False)
            case events.EndLease(Lease() as lease):
                self._end_lease(lease)
            case events.SendEnd(Lease() as lease):
                self._finished = lease.resume
                self.delivery.send_end(lease, self.start_token(lease))
            case events.StartRun():
                self._start_run(one)
            case events.StopRun():
                self.feed.stop_run()
            case events.TellWaiting():
                self.tell_waiting()
            case _:
                self._log(one)

    def _say_why(self, lease: Lease, error: FeedError | None) -> None:
        """Tell a consumer why its lease ends."""
        message: say.Message
        if error is None:
            message = say.Farewell(generation=lease.generation, reason="the feed was edited")
            lease.session.on("Farewell")
        else:
            message = make_fault(lease.generation, error, None)
        self.delivery.send(lease.peer, message, ())

    def _log(self, one: Any) -> None:
        name = self.feed.name
        match one:
            case events.NoteHung(member):
                self.feed.stats.expired += 1
                logger.warning(
                    "feed %r: %s, %s, was not heard of for %.0f s: it is stopped or overloaded, or "
                    "the network to it is cut; another may take its queue",
                    name, member.who, member.name, self.membership.lease_s,
                )  # fmt: skip
            case events.NoteEnded(seats, who):
                named = seat_names(seats, self.replicas)
                logger.info("feed %r: %s says that all has been had of %s", name, who, named)
            case events.NoteLacking(seats, waited_s):
                logger.warning(
                    "feed %r: nobody came for %s in %.0f s; it goes on without them until "
                    "somebody does", name, seat_names(seats, self.replicas), waited_s,
                )  # fmt: skip

    # ---- coming and going

    def open(self, peer: Peer, message: say.Open) -> Lease:
        """Give a consumer its queue, or raise `LeaseLost`, `ResumeError` or `ConfigError`."""
        queue, replica = message.queue, message.replica
        for kind, number, num in (
            ("queue", queue, self.num_queues), ("replica", replica, self.replicas),
        ):  # fmt: skip
            if number >= num:
                raise ConfigError(
                    f"{kind} is {number}, but feed {self.feed.name!r} has {num}; expected 0 to "
                    f"{num - 1}"
                )
        part = self.feed.factory.part
        if not (part is None or part.has(queue)):
            error = ConfigError(
                f"queue is {queue}, and the server there makes {part} of feed "
                f"{self.feed.name!r}; give the address of one that makes it, too"
            )
            error.elsewhere = 1  # type: ignore[attr-defined]
            raise error
        seat = seat_of(queue, replica, self.replicas)
        rejoins = message.intent == "rejoin"
        positions = self.feed.factory.positions
        resume = self.feed.factory.find(
            message.token, rejoins=rejoins, skip=message.skip,
            others=lambda: self._decided_beside(message.consumer, rejoins=rejoins),
        )  # fmt: skip
        if self.feed.factory.positions is not positions:
            self._follow(
                positions, [one for one in self.leases if one.consumer != message.consumer]
            )
        start = None if resume is None else self._start_at(resume)
        # A consumer without a position, or with the one this server began at, had it from here.
        is_known = resume is None or resume is self.feed.factory.origin
        # Fences off every earlier lease, also those of other servers at this address.
        generation = self._run_id + (self.feed.stats.opened + 1).to_bytes(8, "big")
        record = partial(
            Lease, peer=peer, generation=generation, credit=message.credit, hold=message.hold,
            checksum=message.checksum, resume=resume,
        )  # fmt: skip
        self._handle(events.Asks(
            seat, plain(message.who), message.consumer, message.attempt, start, rejoins,
            message.undecided, message.takeover, message.ended, is_known, record,
        ))  # fmt: skip
        self.feed.stats.count_open(rejoins=rejoins)
        lease = self.membership.members[seat]
        assert isinstance(lease, Lease)
        consumer, keys = self._left.get(seat, (b"", set()))
        stream = self.feed.factory.config.stream
        if consumer == message.consumer and resume and key(resume.cut, stream) in keys:
            lease.agrees = True
        # Also if nobody held the queue: its arena may be of a size that this lease cannot use.
        self.feed.slots.retire(queue, lambda a: a.num_slots == self.num_slots(queue, a.slot_bytes))
        lease.session.on("Open")
        return lease

    def _start_at(self, resume: Resume) -> Start:
        """What the membership is told of a position."""
        cut = resume.cut
        nobodys, into_round = self.feed.factory.positions.within(cut)
        return Start(
            cut.step, cut.finished, cut.epoch, cut.index, nobodys, into_round
        )  # fmt: skip

    def _end_lease(self, lease: Lease, *, hangs_up: bool = True) -> None:
        """End a lease: memory that its consumer may still look at is never written again."""
        self._note_places(lease)
        self.feed.stats.queues[lease.seat].starved.stop(time.monotonic())
        # The arena goes as a whole. A late reader then sees old bytes, and never torn ones; other
        # replicas go on reading what is in it.
        self.feed.slots.retire(lease.queue, lambda arena: lease.shared)
        if lease.connection is not None and hangs_up:
            lease.connection.close()
        self.delivery.let_go(lease, lease.take_used(len(lease.under_way)))

    def _note_places(self, lease: Lease) -> None:
        """Remember from where a consumer whose lease ends may come back: it is then known to stand
        in the stream."""
        stream = self.feed.factory.config.stream
        self._left.pop(lease.seat, None)
        if not (lease.agrees and stream.repeatable and len(self.membership.members) > 1):
            return
        # Every position that it may hold: those of batches it was sent, and the one it came with.
        places = [lease.place_after(lease.used), *[batch.place for batch in lease.under_way]]
        cuts = [place.cut() for place in places if place is not None]
        cuts += [] if lease.resume is None else [lease.resume.cut]
        self._left[lease.seat] = lease.consumer, {key(cut, stream) for cut in cuts}

    def lose(self, lease: Lease) -> None:
        """The connection of a lease's consumer is dead."""
        if lease.has_lease:
            logger.info("feed %r: %s, %s, is gone", self.feed.name, lease.who, lease.name)
            self._handle(events.Died(lease.seat))

    def _dismiss(self, lease: Lease, error: FeedError) -> None:
        """End a lease for what its consumer has done, or wants."""
        if lease.has_lease:
            self._handle(events.Dismissed(lease.seat, error))

    def attach(self, lease: Lease, message: say.Attached) -> None:
        """A consumer is ready for batches; raises `ProtocolError` if it cannot be."""
        lease.session.on("Attached")
        lease.plane = message.plane
        # A consumer that has not attached yet may still turn to frames.
        ready = [one for one in self._of_queue(lease.queue) if one.has_attached]
        wanted = wanted_by_all([lease.wanted, *[one.wanted for one in ready]])
        self.feed.slots.prepare(lease.queue, wanted)
        if lease.shared and lease.connection is None:
            raise ProtocolError("plane is 'shared', but no connection to the unix socket was made")
        if message.reason:
            logger.info("feed %r, %s: frames, because %s", self.feed.name, lease.name,
                        plain(message.reason))  # fmt: skip
        self._handle(events.Attaches(lease.seat))

    def leave(self, lease: Lease) -> None:
        """A consumer says goodbye."""
        self._handle(events.Left(lease.seat))

    @property
    def acknowledged(self) -> bool:
        """Whether the users of all queues have been handed everything."""
        return self.membership.are_all_done(time.monotonic())

    def _start_run(self, run: events.StartRun) -> None:
        factory, counting = self.feed.factory, self.membership.counting
        self.low_watermark.restart_at(
            run.used_steps, lacks_some=run.lacks_some, counting=counting
        )  # fmt: skip
        stands: list[Stand] = []
        start = None
        for seat in run.stands:
            lease = self.membership.members[seat]
            assert isinstance(lease, Lease)
            # After the last batch that it was sent.
            place = lease.sent_to
            at = lease.resume if place is None else self.delivery.resume_after(cast("Any", place))
            start = start if stands else at
            cut = factory.start_cut() if at is None else at.cut
            stands.append(Stand(seat, f"{lease.name} ({lease.who})", cut))
        if not stands:
            return self.feed.stop_run()  # Everybody has had everything.
        check = self._position_check = PositionCheck(
            stands, factory.config.stream, counting, run.void, compares=self._compares
        )  # fmt: skip
        self.feed.start_run(Request(start, run.first_steps, check.check, counting))

    def state(self) -> StreamState:
        """How far all consumers have used the feed; any thread may ask."""
        ending, finished = self.delivery.ending, self._finished
        if (ending or finished) and self.acknowledged:
            if ending is None:
                return self.feed.factory.state(finished)  # All came back with the end.
            self.low_watermark.finish_at(ending, self.delivery.columns)
        return self.low_watermark.state()

    def num_slots(self, queue: int, slot_bytes: int) -> int:
        """How many slots of this size an arena of the queue needs; the enqueuer's thread asks,
        since only then is the size of a batch known."""
        leases = self._of_queue(queue)
        return max([one.num_slots(slot_bytes) for one in leases], default=credit_for(slot_bytes))

    def _of_queue(self, queue: int) -> list[Lease]:
        """The leases of a queue's replicas."""
        members = self.membership.members[queue * self.replicas :][: self.replicas]
        return [one for one in members if isinstance(one, Lease)]

    def expire(self, now: float) -> float:
        """Let newcomers have the queues of consumers that were silent for too long, and begin
        without those that did not come back; returns when to look again."""
        if now >= self.membership.look_at:
            self._handle(events.Ticked(), now)
        return self.membership.look_at

    def start_token(self, lease: Lease) -> bytes:
        """The position that a lease began at."""
        return self.feed.factory.token(lease.resume)

    # ---- edits

    def edit(self, change: Change, why: str) -> int:
        """Go on with a change from the first round on of which no queue was sent a batch; returns
        the step that it begins with. Raises `ConfigError` and `ResumeError`; then all is as it was.

        Consumers ask for their queues again, as after the loss of a server: so what they were sent
        stays theirs, and each learns what its positions say from there on.
        """
        factory = self.feed.factory
        if factory.part is not None:
            raise ConfigError(
                f"feed {factory.name!r} is made by several servers, of which each would edit it at "
                "another step: serve it with one server, and edit it there"
            )
        leases = self._all_that_run()
        places = [self._place_of(lease) for lease in leases]
        newest, former = max(places, key=lambda place: place.cut.step), factory.positions
        if factory.edit(factory.state(newest), change, why, places):
            self._follow(former, leases)
            self._know_again(former, leases, places)
        step: int = factory.positions.fingerprint[HISTORY][2][-1][3]
        return step

    def _decided_beside(self, consumer: bytes, *, rejoins: bool) -> list[Resume] | None:
        """Where those stand who hold a queue beside a consumer, and have said where they start;
        None if it brings them no edits: who starts does not, to those that run already."""
        others = [one for one in self.leases if one.lives and not one.undecided]
        others = [one for one in others if one.consumer != consumer]
        if not (rejoins or all(one.starts for one in others)):
            return None
        return [self._place_of(one) for one in others]

    def _follow(self, former: Positions, leases: list[Lease]) -> None:
        """The feed is another run from now on. If edits have made it of the one before, these
        consumers ask for their queues anew, and learn what their positions say."""
        factory, so_far = self.feed.factory, self.low_watermark.state()
        if factory.was(former):
            self.feed.stop_run()
            self._position_check = None
            self.delivery.settle()
            for lease in leases:
                self._handle(events.Dismissed(lease.seat, None))
            # Where batches have another size from now on, what comes before cannot be had in the
            # new run: the position so far stays one of the run before.
            with contextlib.suppress(ResumeError):
                found = factory.place_in(former, former.find(so_far))
                so_far = factory.state(found)
        self.low_watermark.go_on_as(factory.positions, so_far)
        self.delivery.begin()

    def _know_again(self, former: Positions, leases: list[Lease], places: list[Resume]) -> None:
        """Consumers that come back at these places are known to stand in the stream."""
        positions = self.feed.factory.positions
        for lease, at in zip(leases, places, strict=True):
            if lease.seat in self._left:
                place = positions.deal(place_in(positions, former, at), skip=0)
                self._left[lease.seat][1].add(key(place.cut, positions.config.stream))

    def _all_that_run(self) -> list[Lease]:
        """The leases of all seats, whose consumers have run with the feed and live. Raises
        `ResumeError` if some have not."""
        name, members = self.feed.name, self.membership.own
        ended = [one for one in members if one.ending == "end" or one.ended is not Ended.NO]
        if ended:
            raise ResumeError(f"the run of feed {name!r} has ended: an edit would change nothing")
        if (failure := self.feed.ended_with) is not None:
            raise ResumeError(f"feed {name!r} has failed, and cannot be edited: {failure}")
        lacking = [one.seat for one in members if not (one.lives and one.has_run)]
        if lacking or self.feed.run is None:
            what = seat_names(lacking, self.replicas) if lacking else "its batches"
            raise ResumeError(
                f"feed {name!r} waits for {what}: it can be edited while all its consumers are "
                "there, since only then is it known what each has had"
            )
        return self.leases

    def _place_of(self, lease: Lease) -> Resume:
        """Where a consumer goes on: after the last batch that it was sent."""
        if (place := lease.sent_to) is not None:
            return self.delivery.resume_after(cast("Any", place))
        return lease.resume or Resume(cut=self.feed.factory.start_cut())

    # ---- messages of consumers

    def use(self, lease: Lease, message: say.Used) -> None:
        """Note what a consumer reports: batches that its user was handed, slots that are free
        again, or only that it lives."""
        seat, sequence = lease.seat, message.sequence
        if not lease.used <= sequence <= lease.sent:
            raise ProtocolError(
                f"used {sequence} batches, expected from {lease.used} to {lease.sent}"
            )
        num, now = sequence - lease.used, time.monotonic()
        place = lease.place_after(sequence)
        self._handle(events.Used(seat, sequence, message.pending, place, message.begun), now)
        if not lease.has_lease:
            return
        if message.slots:
            if not lease.shared:
                raise ProtocolError("slots are released that were never given")
            self.feed.slots.release(lease.queue, message.slots, lease.replica)
            point("server.released")
        news = lease.take_used(num)
        places = [batch.place for batch in news.batches]
        self.feed.stats.queues[seat].add_report(message.report, news.batches, now)
        self.low_watermark.note(seat, places, self.delivery.columns)
        self._unsettled.append((lease, news))
        if lease.has_all:
            self.low_watermark.leave_out(seat, self.delivery.columns)
        self._show_life(lease, now)

    def _show_life(self, lease: Lease, now: float) -> None:
        """Answer a renewal, so that its consumer knows that the server lives: it says once more
        what it said last. Not each, since a message wakes both processes."""
        if now >= lease.answers_at:
            lease.answers_at = now + self.membership.lease_s / say.ANSWERS
            self._say_waiting(lease)

    def snapshot(self, lease: Lease, message: say.Snapshot) -> None:
        """Answer a consumer that asks for its position with leftover rows."""
        lease.answers.check(message.receipt)
        if not self.delivery.send_state(lease, message.sequence, lease.resume):
            self.lose(lease)

    # ---- messages to consumers

    def pump(self) -> None:
        """Send what there is to everybody who has credit, then let go of what was used: called at
        the end of each turn of the I/O loop."""
        failure = self.feed.ended_with
        # Before a failure is sent to anybody: if one consumer's position is the reason, it alone
        # is sent away and the others go on.
        if failure is not None and self._position_check is not None:
            self._handle(self._position_check.failed(failure))
        self.delivery.judged = failure
        for lease in self.leases:
            if lease.excess is not None:
                self._dismiss(lease, lease.excess)
            elif lease.has_lease and lease.session.state == "streaming":
                try:
                    self._pump(lease)
                except Exception as error:
                    # It concerns this consumer alone: the others are served all the same.
                    self.delivery.send_failure(lease, error)
        # After all sends: this wakes the enqueuer, and each send lets go of the interpreter, which
        # the enqueuer would then take while other consumers wait.
        unsettled, self._unsettled = self._unsettled, []
        for lease, news in unsettled:
            try:
                self.delivery.let_go(lease, news)
            # A lease that releases what it does not have ends alone.
            except ProtocolError as error:
                logger.exception("feed %r, %s", self.feed.name, lease.name)
                self._dismiss(lease, error)
        self.delivery.settle()
        if self.replicas > 1:
            self._look_for_kept()
        self.feed.make_use_of_room()

    def _look_for_kept(self) -> None:
        """Have more slots made if replicas keep different batches, so many in all that no slot
        is left for the next one."""
        # Memory is for one consumer, since replicas mostly keep the same batches. A replica that
        # was handed all that it was sent keeps the slots that it has not given back. It does not
        # report the batch at hand; the others it reports twice a second at least.
        queue, run = self.feed.slots.waiting, self.feed.run
        if queue is None or run is None:
            return
        has_more = any(map(len, run.queues[queue].outboxes))
        if not (has_more or any(len(lease.under_way) > 1 for lease in self._of_queue(queue))):
            self.feed.slots.grow(queue)

    def _pump(self, lease: Lease) -> None:
        run, failure = self.feed.run, self.feed.failure
        if run is not None:
            if not self.delivery.pump(lease, run):
                self.lose(lease)
        elif failure is not None and failure is self.delivery.judged:
            self.delivery.send_failure(lease, failure)

    def tell_waiting(self) -> None:
        """Send `Waiting` to everybody for whom it says something new: consumers tell the next
        server which queues have ended."""
        # The ended ones are named as soon as they are known: this server may be killed any moment.
        waiting = self.membership.news()
        for lease in self.leases:
            if lease.last_waiting != waiting:
                lease.last_waiting = waiting
                self._say_waiting(lease)

    def _say_waiting(self, lease: Lease) -> None:
        missing, ended = lease.last_waiting
        message = say.Waiting(generation=lease.generation, queues=missing, ended=ended)
        self.delivery.send(lease.peer, message, ())
