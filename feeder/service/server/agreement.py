"""Whether the positions that consumers came with are of one stream.

A position may be whole and yet be of another run: the same settings, but other data, or the rows of
another checkpoint. A feed begins at the oldest position and from there passes those of all others:
there its own place has to be theirs, else who came with one of the two would be given other rows
than come next, and nobody would know. What is compared is where each call stands, and the digests
of rows. Cursors are the user's, who may write the same place down in several ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from feeder.errors import ClosedError, FetchError, ResumeError
from feeder.service.server.lease import Lease
from feeder.workers.stream.batch import Batch, Cut
from feeder.workers.stream.position import Place
from feeder.workers.spec import StreamSpec


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
        self._at: Cut | Place = first.cut
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
        here = self._at.cut() if isinstance(self._at, Place) else self._at
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
    rest = None if left is None else (left.lane, left.call, left.taken, left.rows, left.digest)
    return cut.epoch, cut.index, cut.step, at._replace(marks=marks), rest


def _describe(cut: Cut) -> str:
    left = cut.leftover
    rest = "" if left is None else f" after row {left.taken} of call {left.call}"
    return f"batch {cut.index} of epoch {cut.epoch}, calls {list(cut.position.calls)}{rest}"
