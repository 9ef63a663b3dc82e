"""When the run of a served feed begins, and where: once its consumers are there, at the oldest of
their positions. Belongs to the I/O thread."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from feeder.errors import FeedError, ResumeError
from feeder.service.protocol.seats import Seats
from feeder.service.server.agreement import Agreement, Stand, key
from feeder.service.server.delivery import Delivery
from feeder.service.server.run import ServedFeed
from feeder.service.server.lease import Lease
from feeder.service.server.used import Used
from feeder.workers.stream.resuming import Resume

logger = logging.getLogger("feeder")

_RETURN_S = 5.0
"""For so long a feed whose consumers all come back waits for those that do not."""


class Beginning:
    """Of one feed. `leases` and `resumes` are its desk's: who holds each queue, and the position
    that its last consumer came with."""

    def __init__(
        self, feed: ServedFeed, seats: Seats, leases: list[Lease | None],
        resumes: list[Resume | None], delivery: Delivery, used: Used,
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
