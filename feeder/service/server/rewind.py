"""Where a served feed begins or begins again, and how far all its consumers have used it.

Whoever opens a queue, the feed begins again at the oldest position of all queues, and batches that
a queue has had already are made and discarded. This one way serves a start, a failover and a lost
trainer; nothing patches a running stream. Owned by the server's I/O thread, but for the two methods
that say otherwise.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from feeder.errors import ClosedError, FeedError, FetchError, ResumeError
from feeder.service.protocol.seats import Seats
from feeder.service.server.delivery import Delivery
from feeder.service.server.lease import Lease
from feeder.service.server.run import FeedFactory, ServedFeed
from feeder.state.snapshot import StreamState
from feeder.workers.spec import StreamSpec
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.position import Cut, LazyPosition
from feeder.workers.stream.resuming import Resume

# ---- Whether the positions that consumers came with lie in one stream.
#
# A position may be whole and still be of another run: a token says with which settings it was made,
# not with which data. A feed begins at the oldest position and from there passes the positions of
# all others. When the stream reaches a consumer's step, its position must equal the stream's;
# otherwise that consumer would silently get wrong rows. Compared are the numbers of calls and rows
# and the digest of leftover rows. Cursors are not compared: their bytes are the user's, who may
# write the same place down in several ways.
#
# The check runs in the batcher's thread, in `Outbox.put`, and raises there, which ends the run.
# That is a call upwards, and it stays: the position before a batch is that of the batch before, of
# any queue, and only the batcher sees all batches in order and before anybody is sent one.


class Stand(NamedTuple):
    """A consumer, and the position from which it wants the stream. Immutable."""

    lease: Lease
    cut: Cut


class Agreement:
    """Compares the stream of one run with the positions that its consumers came with.

    `look` is called by the run's batcher alone. Everything else is the I/O thread's, which reads
    what `look` writes only after the run has ended, or finds it a batch late, which does no harm.
    """

    def __init__(self, stands: Sequence[Stand], stream: StreamSpec) -> None:
        self._stream = stream
        first, *others = sorted(stands, key=lambda stand: stand.cut.step)
        self._first = first
        self._leases = [stand.lease for stand in stands]
        # Where the run fails at its first call, any of these may have brought the reason.
        self._beside = [first.lease, *(s.lease for s in others if s.cut.step == first.cut.step)]
        # Who has not been passed yet, by step. A stream that does not repeat itself passes other
        # positions than before, so there nothing can be compared.
        self._ahead: dict[int, list[Stand]] = {}
        for stand in others if stream.repeatable else ():
            self._ahead.setdefault(stand.cut.step, []).append(stand)
        self._passed = [] if stream.repeatable else [stand.lease for stand in others]
        self._at: Cut | LazyPosition = first.cut
        self._doubted: list[Lease] = []
        self.error: ResumeError | None = None
        """Why two of the positions cannot be of one stream."""

    def look(self, batches: Sequence[Batch]) -> None:
        """Compare the positions of consumers that begin with one of these batches, which come next.

        Raises `ResumeError` where one stands elsewhere than the stream, and `ClosedError` from then
        on. The batcher's thread.
        """
        if self.error is not None:
            raise ClosedError("the feed is stopped")
        # With everybody passed only the first batch counts: `_at` tells later whether the run has
        # moved at all, and each of a million batches costs one assignment less.
        for batch in batches if self._ahead else batches[:1]:
            for stand in self._ahead.get(batch.step, ()):
                self._compare(stand, batch)
            self._ahead.pop(batch.step, None)
            self._at = batch.place

    def _compare(self, stand: Stand, batch: Batch) -> None:
        here = self._at.cut() if isinstance(self._at, LazyPosition) else self._at
        if self._is_same(here, stand.cut, batch):
            self._passed.append(stand.lease)
            return
        first, other = self._first.lease, stand.lease
        # Two positions differ, and either may be the wrong one. Where somebody agrees with the
        # first, only the other is in doubt.
        self._doubted = [other] if self._passed else [first, other]
        self.error = ResumeError(
            f"the positions of queue {first.queue} ({first.who}) and queue {other.queue} "
            f"({other.who}) are not of one stream: from the one batch {batch.step} begins at "
            f"{_describe(here)}, and the other says {_describe(stand.cut)}; resume from a "
            "checkpoint of this run"
        )
        raise self.error

    def _is_same(self, one: Cut, other: Cut, batch: Batch) -> bool:
        if one.epoch != other.epoch and batch.index == 0:
            # An epoch's end has as many names as epochs without a batch follow it.
            return True
        return key(one, self._stream) == key(other, self._stream)

    def settle(self) -> None:
        """Note who is now known to stand in the feed's stream: everybody who agrees with a consumer
        that is known to, and everybody at all where all were passed and nobody disagrees."""
        agreed = [self._first.lease, *self._passed]
        is_known = any(lease.agrees for lease in agreed)
        if is_known or (self.error is None and not self._ahead):
            for lease in agreed:
                lease.agrees = True

    def doubted(self, failure: Exception) -> list[Lease]:
        """The consumers whose position may be why the run has failed."""
        if failure is self.error:
            suspects = self._doubted
        elif self._at is self._first.cut and any(lease.agrees for lease in self._leases):
            # It failed at its first call, and others are known to stand elsewhere, so it need not
            # begin here. A call that raises fails for any position; only after `seek` it may have
            # failed because of the cursor.
            is_calls = isinstance(failure, FetchError) and not self._stream.seekable
            suspects = [] if is_calls else self._beside
        else:
            suspects = []
        return [lease for lease in suspects if not lease.agrees]


def key(cut: Cut, stream: StreamSpec) -> tuple[Any, ...]:
    """What two cuts have in common that name the same place of a stream in the same way."""
    at, left = cut.position, cut.leftover
    # Without a cursor of the user's, the mark is a digest of all rows so far, which does compare.
    is_chained = not (stream.pure or stream.seekable)
    marks = tuple(mark or b"" for mark in at.marks) if is_chained else ()
    rest = None if left is None else (left.partition, left.call, left.taken, left.rows, left.digest)
    return cut.epoch, cut.index, cut.step, at._replace(marks=marks), rest


def _describe(cut: Cut) -> str:
    left = cut.leftover
    rest = "" if left is None else f" after row {left.taken} of call {left.call}"
    return f"batch {cut.index} of epoch {cut.epoch}, calls {list(cut.position.calls)}{rest}"


# ---- How far a served feed has been used by all: the newest round of which every queue has used
# its batch. A server stores this position, and trainers that come without one begin there. Only
# what users were handed counts, never what was sent: a stored position may stand still for a while,
# and is never ahead of a trainer.


class LowWatermark:
    """The newest position up to which all consumers of one feed have used it.

    Written by the I/O thread. Any thread may call `state`: the fields that it reads are replaced as
    a whole, so it finds an older position at worst.
    """

    def __init__(self, factory: FeedFactory) -> None:
        self._positions = factory.positions
        self._num = len(factory.config.devices)
        # For each queue the number of rounds of which it has used its batch; infinity at the end.
        self._rounds: list[float] = [0] * self._num
        # Where those rounds ended that the last queue has used and some other has not. A round ends
        # with the last queue's batch, so only that queue's positions are kept.
        self._ends: deque[LazyPosition] = deque()
        self._place: LazyPosition | None = None
        self._columns: Columns | None = None
        # While some consumers are missing their batches are discarded, and nothing is noted.
        self._stands = False
        self._state = factory.start_state()

    def restart_at(self, first_steps: Sequence[float], *, lacks_some: bool = False) -> None:
        """The feed begins at another position: of each queue the batches before its first step
        count as used.

        The position so far stands until a whole round has been used from there on; where the feed
        lacks some consumers, until it begins again with them.
        """
        self._rounds = [step if step == math.inf else step // self._num for step in first_steps]
        self._ends.clear()
        self._stands = lacks_some

    def note(self, queue: int, places: Iterable[LazyPosition], columns: Columns | None) -> None:
        """A queue's user has been handed the batches that end at these positions."""
        if self._stands:
            return
        for place in places:
            self._rounds[queue] = (place.step - 1) // self._num + 1
            if queue == self._num - 1:
                self._ends.append(place)
        self._settle(columns)

    def leave_out(self, queue: int, columns: Columns | None) -> None:
        """A queue's user has been handed everything."""
        if not self._stands:
            self._rounds[queue] = math.inf
            self._settle(columns)

    def _settle(self, columns: Columns | None) -> None:
        used = min(self._rounds)
        while self._ends and self._ends[0].step <= used * self._num:
            self._columns, self._place = columns, self._ends.popleft()

    def finish_at(self, place: LazyPosition, columns: Columns | None) -> None:
        """All users have been handed everything: the stream has ended at `place`."""
        self._columns, self._place = columns, place

    def state(self) -> StreamState:
        """The position with its leftover rows. Any thread."""
        # Made when somebody asks: to encode one costs more than to use a small batch.
        place = self._place
        if place is not None:
            self._state = self._positions.state_at(place, self._columns, with_rows=True)
        return self._state


logger = logging.getLogger("feeder")

# After a failover trainers find the new server within a second or so of each other. One that does
# not may have had everything while no server was there, so the others must not wait for long.
_RETURN_S = 5.0
"""How long a feed whose consumers all come back waits for those that do not."""


class Beginning:
    """Decides when the run of one feed begins, at which position, and for which queues.

    Owned by the I/O thread. It owns the list of leases: `admit` and `note_end` alone change it, and
    the desk reads it. The run begins anew when a consumer is ready, leaves, or is heard of again.
    """

    def __init__(
        self, feed: ServedFeed, seats: Seats, delivery: Delivery, low_watermark: LowWatermark
    ) -> None:
        self._feed = feed
        self._seats = seats
        self.leases: list[Lease | None] = [None] * len(seats.seats)
        """The lease of each queue; None where nobody holds it."""
        self._delivery = delivery
        self._low_watermark = low_watermark
        self._is_halted = False
        self._agreement: Agreement | None = None
        # Per queue: the last consumer known to stand in the stream, and the positions from which
        # it may come back.
        self._left: dict[int, tuple[bytes, set[tuple[Any, ...]]]] = {}
        # Since when the feed has been waiting for queues that may have had everything.
        self._waits_since: float | None = None

    def admit(self, lease: Lease) -> None:
        """A consumer has a queue. It is known to stand in the stream where it comes back from a
        position that it was given here."""
        self.leases[lease.queue] = lease
        consumer, keys = self._left.get(lease.queue, (b"", set()))
        if consumer == lease.consumer and lease.resume is not None:
            lease.agrees = key(lease.resume.cut, self._feed.factory.config.stream) in keys

    def begin_run(self, *, without_missing: bool = False) -> None:
        """Begin the run where every queue is there, or without those that are missing; else stop
        it."""
        missing = set(self._seats.missing())
        here = [lease for lease in self.leases if lease is not None and self._is_here(lease)]
        ready = all(lease.has_attached for lease in here)
        self._is_halted = not ready or bool(missing and not without_missing)
        if self._is_halted:
            # Where all who are here come back, somebody who does not may have had everything. A
            # trainer that starts anew wants all others, however long they take.
            may_lack = ready and missing and all(lease.rejoins for lease in here)
            self._waits_since = (self._waits_since or time.monotonic()) if may_lack else None
            self._feed.stop_run()
            return
        self._waits_since = None
        for lease in here:
            self._seats.join_run(lease.queue)
        # Who has been sent the end wants nothing more; all others go on after what they were sent.
        positions = {lease.queue: self._position(lease) for lease in here if not lease.ended}
        steps = {queue: 0 if at is None else at.cut.step for queue, at in positions.items()}
        oldest = min(steps, key=lambda queue: steps[queue]) if steps else None
        # Not `steps`: what was sent is not used yet, and a position that is stored must not be
        # ahead of a trainer that dies now.
        used = {lease.queue: self._used_step(lease) for lease in here if not lease.has_all}
        self._low_watermark.restart_at(self._seats.first_steps(used), lacks_some=bool(missing))
        if not positions:
            return self._feed.stop_run()  # Everybody has had everything.
        first_steps = self._seats.first_steps(steps)
        self._agreement = self._agree(positions)
        start = None if oldest is None else positions[oldest]
        self._feed.start_run(start, first_steps, self._agreement.look)

    def _agree(self, positions: dict[int, Resume | None]) -> Agreement:
        if self._agreement is not None:
            self._agreement.settle()
        factory, stands = self._feed.factory, []
        for queue, at in positions.items():
            lease = self.leases[queue]
            assert lease is not None
            # Who came without a position, or with the one this server began at, had it from here.
            lease.agrees = lease.agrees or at is None or at is factory.origin
            stands.append(Stand(lease, factory.start_cut() if at is None else at.cut))
        return Agreement(stands, factory.config.stream)

    def note_end(self, lease: Lease) -> None:
        """A lease ends: nobody holds the queue. Remember from where its consumer may come back."""
        self.leases[lease.queue] = None
        if self._agreement is not None:
            self._agreement.settle()
        stream = self._feed.factory.config.stream
        self._left.pop(lease.queue, None)
        if not (lease.agrees and stream.repeatable and len(self.leases) > 1):
            return
        # Every position that it may hold: those of batches it was sent, and the one it came with.
        places = [lease.used_place, *[batch.place for batch in lease.sent]]
        cuts = [place.cut() for place in places if place is not None]
        cuts += [] if lease.resume is None else [lease.resume.cut]
        self._left[lease.queue] = lease.consumer, {key(cut, stream) for cut in cuts}

    def find_doubted(self, failure: FeedError | None) -> list[tuple[Lease, FeedError]]:
        """The consumers whose positions are the reason why the feed has failed, where others can go
        on without them: each with the error that it is to be sent."""
        agreement = self._agreement
        if failure is None or agreement is None:
            return []
        agreement.settle()
        doubted = [one for one in agreement.doubted(failure) if self.leases[one.queue] is one]
        others = [one for one in self.leases if one and not one.ended and one not in doubted]
        if not others:
            return []  # Nobody would be left: the failure is the feed's, and all are sent it.
        self._agreement = None
        return [(lease, _unfit(lease, failure)) for lease in doubted]

    def look_again(self) -> None:
        """Begin where the feed has waited: a consumer is gone, was heard of again, or is undecided
        no more, so perhaps nobody is missing now. Every such news has to come here: one that does
        not leaves all trainers waiting for ever."""
        if self._is_halted:
            self.begin_run()

    def look(self, now: float, lease_s: float) -> float:
        """Begin without those that did not come back in time; when to look again."""
        if self._waits_since is None:
            return math.inf
        # A feed that cannot go back has one run: it would be used up without those who are late. So
        # it waits as long as for a consumer that hangs.
        wait_s = min(lease_s, _RETURN_S if self._feed.factory.goes_back else math.inf)
        if now < (until := self._waits_since + wait_s):
            return until
        logger.warning(
            "feed %r: nobody came for queues %r in %.0f s; it goes on without them until somebody "
            "does", self._feed.name, self._seats.missing(), now - self._waits_since,
        )  # fmt: skip
        self.begin_run(without_missing=True)
        return math.inf

    def move_seats(self) -> None:
        """Note in the seats how far users have been handed their queues: done before seats are
        compared, since each used batch would be too often."""
        for lease in self.leases:
            place = None if lease is None else lease.place_after(lease.used)
            if lease is not None and place is not None:
                self._seats.move(lease.queue, place.step)

    def starts(self, lease: Lease) -> bool:
        """Whether a consumer may start where it stands, now that its user asks for a batch. It may
        not where it came without a position and the others have gone on."""
        seat = self._seats.seats[lease.queue]
        if seat.takes_part or lease.rejoins or not seat.undecided:
            return True
        self.move_seats()
        return self._out_of_step(lease) is None

    def refusal(self, lease: Lease, now: float, lease_s: float) -> ResumeError | None:
        """The error for a consumer that could not start for a lease's time; None before that.

        It is a trainer that died before its first checkpoint and was started again without a
        position: without the error all would wait for ever. It is not sent at once, since the
        others may be about to be replaced, too.
        """
        # Who has been sent the end leaves by itself: then another pass over the stream begins.
        leaving = [other.queue for other in self.leases if other is not None and other.ended]
        error = self._out_of_step(lease, leaving)
        since = lease.out_of_step_since or now
        lease.out_of_step_since = None if error is None else since
        return error if now >= since + lease_s else None

    def _out_of_step(self, lease: Lease, apart_from: Sequence[int] = ()) -> ResumeError | None:
        seat = self._seats.seats[lease.queue]
        try:
            self._seats.check(
                lease.queue, int(seat.step), lease.who, takes_over=True, finished=seat.finished,
                apart_from=apart_from,
            )  # fmt: skip
        except ResumeError as error:
            return error
        return None

    def _is_here(self, lease: Lease) -> bool:
        """Whether the feed counts on this consumer. Not where it hangs before it can take batches,
        unless the feed could not go back for it later."""
        alive = self._seats.seats[lease.queue].alive
        return lease.has_attached or alive or not self._feed.factory.goes_back

    def _position(self, lease: Lease) -> Resume | None:
        """Where a queue goes on: after the last batch that it was sent."""
        if lease.place is None:
            return lease.resume
        return self._delivery.resume_after(lease.place)

    def _used_step(self, lease: Lease) -> int:
        """The step up to which the user of a queue has been handed batches, as far as is known."""
        if lease.used_place is not None:
            return lease.used_place.step
        # A position with which a consumer comes back is where its next batch comes from. Batches
        # before it may still wait in the consumer, so nothing of the queue counts as used.
        return 0 if lease.rejoins or lease.resume is None else lease.resume.cut.step


def _unfit(lease: Lease, failure: FeedError) -> FeedError:
    """The error for a consumer with whose position the feed cannot go on."""
    if isinstance(failure, ResumeError):
        return failure
    return ResumeError(f"the feed cannot go on at the position of queue {lease.queue}: {failure}")
