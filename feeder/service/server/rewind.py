"""When the run of a served feed begins, and where: once its consumers are there, at the oldest of
their positions. Belongs to the I/O thread."""

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

# ---- Whether the positions that consumers came with are of one stream.
#
# A position may be whole and yet be of another run: the same settings, but other data, or the rows
# of another checkpoint. A feed begins at the oldest position and from there passes those of all
# others: there its own place has to be theirs, else who came with one of the two would be given
# other rows than come next, and nobody would know. What is compared is where each call stands, and
# the digests of rows. Cursors are the user's, who may write the same place down in several ways.


class Stand(NamedTuple):
    """A consumer, and the place from which it wants the stream."""

    lease: Lease
    cut: Cut


class Agreement:
    """Of one run. `look` is the enqueuer's, all else the I/O thread's."""

    def __init__(self, stands: Sequence[Stand], stream: StreamSpec) -> None:
        self._stream = stream
        first, *others = sorted(stands, key=lambda stand: stand.cut.step)
        self._first = first
        self._leases = [stand.lease for stand in stands]
        self._beside = [first.lease, *(s.lease for s in others if s.cut.step == first.cut.step)]
        # Who has not been passed yet, by step; what does not come again cannot be compared.
        self._ahead: dict[int, list[Stand]] = {}
        for stand in others if stream.repeatable else ():
            self._ahead.setdefault(stand.cut.step, []).append(stand)
        self._passed = [] if stream.repeatable else [stand.lease for stand in others]
        self._at: Cut | LazyPosition = first.cut
        self._doubted: list[Lease] = []
        self.error: ResumeError | None = None
        """Why two of the positions cannot be of one stream."""

    def look(self, batches: Sequence[Batch]) -> None:
        """These batches come next. Raises `ResumeError` where a consumer that begins with one of
        them stands elsewhere, and `ClosedError` from then on."""
        if self.error is not None:
            raise ClosedError("the feed is stopped")
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
        # With whom another agrees is taken to be right.
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
            return True  # The end of an epoch has several names: epochs after it may have no batch.
        return key(one, self._stream) == key(other, self._stream)

    def settle(self) -> None:
        """Note who is known to stand in the feed's stream: who agrees with one of whom that is
        known, and everybody where nobody disagrees."""
        agreed = [self._first.lease, *self._passed]
        is_known = any(lease.agrees for lease in agreed)
        if is_known or (self.error is None and not self._ahead):
            for lease in agreed:
                lease.agrees = True

    def doubted(self, failure: Exception) -> list[Lease]:
        """Whose position may be why the run has failed."""
        if failure is self.error:
            suspects = self._doubted
        elif self._at is self._first.cut and any(lease.agrees for lease in self._leases):
            # It failed as it began, where it need not begin: others are known to stand elsewhere.
            # Calls fail by themselves; those that are sought may fail for the cursor.
            is_calls = isinstance(failure, FetchError) and not self._stream.seekable
            suspects = [] if is_calls else self._beside
        else:
            suspects = []
        return [lease for lease in suspects if not lease.agrees]


def key(cut: Cut, stream: StreamSpec) -> tuple[Any, ...]:
    """What is equal of cuts that name the same place of a stream by the same name."""
    at, left = cut.position, cut.leftover
    # Without a cursor a mark is a digest of all rows so far.
    is_chained = not (stream.pure or stream.seekable)
    marks = tuple(mark or b"" for mark in at.marks) if is_chained else ()
    rest = None if left is None else (left.partition, left.call, left.taken, left.rows, left.digest)
    return cut.epoch, cut.index, cut.step, at._replace(marks=marks), rest


def _describe(cut: Cut) -> str:
    left = cut.leftover
    rest = "" if left is None else f" after row {left.taken} of call {left.call}"
    return f"batch {cut.index} of epoch {cut.epoch}, calls {list(cut.position.calls)}{rest}"


# ---- How far a served feed has been used: the newest round of which every queue has used its
# batch.
#
# Rules without sockets and clocks. The I/O thread notes what consumers say; any thread may ask.


class LowWatermark:
    """What all consumers of one feed have used."""

    def __init__(self, recipe: FeedFactory) -> None:
        self._positions = recipe.positions
        self._num = len(recipe.config.devices)
        # For each queue the number of rounds of which it has used its batch.
        self._rounds: list[float] = [0] * self._num
        # Where the rounds ended that the last queue has used, and not all others.
        self._ends: deque[LazyPosition] = deque()
        self._place: LazyPosition | None = None
        self._columns: Columns | None = None
        self._stands = False
        self._state = recipe.start_state()

    def begin(self, first_steps: Sequence[float], *, lacks_some: bool = False) -> None:
        """The feed begins at another place: of each queue the batches before its first step are
        used. What was used before stands until a round has been used from there on; where the
        feed lacks some consumers it stands until it begins anew with them."""
        self._rounds = [step if step == math.inf else step // self._num for step in first_steps]
        self._ends.clear()
        self._stands = lacks_some

    def note(self, queue: int, places: Iterable[LazyPosition], columns: Columns | None) -> None:
        """A consumer has used the batches that end at these places."""
        if self._stands:
            return
        for place in places:
            self._rounds[queue] = (place.step - 1) // self._num + 1
            if queue == self._num - 1:
                self._ends.append(place)
        self._settle(columns)

    def leave_out(self, queue: int, columns: Columns | None) -> None:
        """A consumer has used everything."""
        if not self._stands:
            self._rounds[queue] = math.inf
            self._settle(columns)

    def _settle(self, columns: Columns | None) -> None:
        used = min(self._rounds)
        while self._ends and self._ends[0].step <= used * self._num:
            self._columns, self._place = columns, self._ends.popleft()

    def end(self, place: LazyPosition, columns: Columns | None) -> None:
        """Every consumer has used everything: the stream has ended at `place`."""
        self._columns, self._place = columns, place

    def state(self) -> StreamState:
        """The position of what was used, with its leftover rows."""
        place = self._place
        if place is not None:
            self._state = self._positions.state_at(place, self._columns, with_rows=True)
        return self._state


logger = logging.getLogger("feeder")

_RETURN_S = 5.0
"""For so long a feed whose consumers all come back waits for those that do not."""


class Beginning:
    """Of one feed. `leases` and `resumes` are its desk's: who holds each queue, and the position
    that its last consumer came with."""

    def __init__(
        self, feed: ServedFeed, seats: Seats, leases: list[Lease | None],
        resumes: list[Resume | None], delivery: Delivery, used: LowWatermark,
    ) -> None:  # fmt: skip
        self._feed = feed
        self._seats = seats
        self._leases = leases
        self._resumes = resumes
        self._delivery = delivery
        self._used = used
        self._is_halted = False
        self._agreement: Agreement | None = None
        # Of each queue the last consumer that was known to stand in the stream, and where it may
        # say that it stands when it comes back.
        self._left: dict[int, tuple[bytes, set[tuple[Any, ...]]]] = {}
        # Since when the feed has been waiting for queues that may have had everything.
        self._waits_since: float | None = None

    def begin(self, *, without_missing: bool = False) -> None:
        """Begin the run, once every queue is there, or without those that are missing."""
        missing = set(self._seats.missing())
        here = [lease for lease in self._leases if lease is not None and self._is_here(lease)]
        ready = all(lease.has_attached for lease in here)
        self._is_halted = not ready or bool(missing and not without_missing)
        if self._is_halted:
            # Where everybody who is here goes on alone, one who is not may have had everything.
            may_lack = ready and missing and all(lease.rejoins for lease in here)
            self._waits_since = (self._waits_since or time.monotonic()) if may_lack else None
            self._feed.halt()
            return
        self._waits_since = None
        for lease in here:
            self._seats.seats[lease.queue].takes_part = True
        positions = {lease.queue: self._position(lease) for lease in here if not lease.ended}
        steps = {queue: 0 if at is None else at.cut.step for queue, at in positions.items()}
        oldest = min(steps, key=lambda queue: steps[queue]) if steps else None
        # What was sent is not used yet.
        used = {lease.queue: self._used_step(lease) for lease in here if not lease.has_all}
        self._used.begin(self._seats.first_steps(used), lacks_some=bool(missing))
        if not positions:
            return self._feed.halt()  # Everybody has had everything.
        first_steps = self._seats.first_steps(steps)
        self._agreement = self._agree(positions)
        start = None if oldest is None else positions[oldest]
        self._feed.begin(start, first_steps, self._agreement.look)

    def _agree(self, positions: dict[int, Resume | None]) -> Agreement:
        if self._agreement is not None:
            self._agreement.settle()
        recipe, stands = self._feed.recipe, []
        for queue, at in positions.items():
            lease = self._leases[queue]
            assert lease is not None
            # Who came without a position was told it by this server.
            lease.agrees = lease.agrees or at is None or at is recipe.origin
            stands.append(Stand(lease, recipe.start_cut() if at is None else at.cut))
        return Agreement(stands, recipe.config.stream)

    def note_end(self, lease: Lease) -> None:
        """A lease ends; its consumer may come back, with a position that it was told here."""
        if self._agreement is not None:
            self._agreement.settle()
        stream, resume = self._feed.recipe.config.stream, self._resumes[lease.queue]
        self._left.pop(lease.queue, None)
        if not (lease.agrees and stream.repeatable and len(self._leases) > 1):
            return
        places = [lease.used_place, *[batch.place for batch in lease.sent]]
        cuts = [place.cut() for place in places if place is not None]
        cuts += [] if resume is None else [resume.cut]
        self._left[lease.queue] = lease.consumer, {key(cut, stream) for cut in cuts}

    def recognise(self, lease: Lease, resume: Resume | None) -> None:
        """A consumer has come: it is known where it comes back with what it was told."""
        consumer, keys = self._left.get(lease.queue, (b"", set()))
        if consumer == lease.consumer and resume is not None:
            lease.agrees = key(resume.cut, self._feed.recipe.config.stream) in keys

    def find_doubted(self, failure: FeedError | None) -> list[tuple[Lease, FeedError]]:
        """Those who came with a position for which the feed has failed, where others do not stand
        there: each with what it is to be told."""
        agreement = self._agreement
        if failure is None or agreement is None:
            return []
        agreement.settle()
        doubted = [one for one in agreement.doubted(failure) if self._leases[one.queue] is one]
        others = [one for one in self._leases if one and not one.ended and one not in doubted]
        if not others:
            return []  # Everybody is told.
        self._agreement = None
        return [(lease, _unfit(lease, failure)) for lease in doubted]

    def look_again(self) -> None:
        """A consumer is gone, or is heard of that was taken for lost, or has decided: nobody may be
        missing any more."""
        if self._is_halted:
            self.begin()

    def look(self, now: float, lease_s: float) -> float:
        """Begin without those that did not come back in time; when to look again."""
        if self._waits_since is None:
            return math.inf
        # Where the feed could not go back for who is late, they have a lease's time.
        wait_s = min(lease_s, _RETURN_S if self._feed.recipe.goes_back else math.inf)
        if now < (until := self._waits_since + wait_s):
            return until
        logger.warning(
            "feed %r: nobody came for queues %r in %.0f s; it goes on without them until somebody "
            "does", self._feed.name, self._seats.missing(), now - self._waits_since,
        )  # fmt: skip
        self.begin(without_missing=True)
        return math.inf

    def move_seats(self) -> None:
        """Note how far consumers have used their queues."""
        for lease in self._leases:
            place = None if lease is None else lease.place_after(lease.used)
            if lease is not None and place is not None:
                self._seats.move(lease.queue, place.step)

    def starts(self, lease: Lease) -> bool:
        """Whether a consumer whose user asks for a batch starts where it stands: not where it has
        loaded no state, and others have gone on."""
        seat = self._seats.seats[lease.queue]
        if seat.takes_part or lease.rejoins or not seat.undecided:
            return True
        self.move_seats()
        return self._out_of_step(lease) is None

    def refusal(self, lease: Lease, now: float, lease_s: float) -> ResumeError | None:
        """What it is told where it has not been able to for a lease's time, since all would wait
        for ever; until then the others may be replaced."""
        # Who has been sent everything leaves by itself.
        leaving = [other.queue for other in self._leases if other is not None and other.ended]
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
        """Whether it is not one that hangs before it can take batches. A feed that cannot go back
        for it waits."""
        alive = self._seats.seats[lease.queue].alive
        return lease.has_attached or alive or not self._feed.recipe.goes_back

    def _position(self, lease: Lease) -> Resume | None:
        """Where a queue stands: after the last batch that it was sent."""
        if lease.place is None:
            return self._resumes[lease.queue]
        return self._delivery.find(lease.place)

    def _used_step(self, lease: Lease) -> int:
        """Where the user of a queue stands. One who comes back has told where its next batch comes
        from, and may not have used what came before."""
        resume = self._resumes[lease.queue]
        if lease.used_place is not None:
            return lease.used_place.step
        return 0 if lease.rejoins or resume is None else resume.cut.step


def _unfit(lease: Lease, failure: FeedError) -> FeedError:
    """What somebody is told with whose position the feed cannot go on."""
    if isinstance(failure, ResumeError):
        return failure
    return ResumeError(f"the feed cannot go on at the position of queue {lease.queue}: {failure}")
