"""Whether the positions that consumers came with lie in one stream.

A position may be whole and still be of another run: a token says with which settings it was made,
not with which data. A feed begins at the oldest position and from there passes the positions of all
others. When the stream reaches a consumer's step, its position must equal the stream's; otherwise
that consumer would silently get wrong rows. Compared are the numbers of calls and rows and the
digest of leftover rows. Cursors are not compared: their bytes are the user's, who may write the
same place down in several ways. If two differ, the membership decides who is to go.

The check runs in the enqueuer's thread, in `FanOut.put`, and raises there, which ends the run. That
is a call upwards, and it stays: the position before a batch is that of the batch before, of any
queue, and only the enqueuer sees all batches in order and before anybody is sent one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from feeder.errors import ClosedError, FeedError, FetchError, ResumeError
from feeder.service.protocol.events import Failed, Void
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import Cut, LazyPosition
from feeder.workers.stream.rounds import Counting
from feeder.workers.stream.spec import StreamSpec


class Stand(NamedTuple):
    """A consumer, and the position from which it wants the stream. Immutable."""

    seat: int
    who: str
    cut: Cut


class PositionCheck:
    """Compares the stream of one run with the positions that its consumers came with.

    `check` is called by the run's enqueuer alone. Everything else is the I/O thread's, which reads
    what `check` writes only after the run has ended, or finds it a batch late, which does no harm.
    """

    def __init__(
        self, stands: Sequence[Stand], stream: StreamSpec, counting: Counting | None = None,
        void: Void | None = None, *, compares: bool = True,
    ) -> None:  # fmt: skip
        """`compares`: whether the stream passes the positions of others."""
        self._stream = stream
        self._counting, self._void = counting, void
        # The stream begins at the first one: the oldest.
        self._first, *others = stands
        # The consumers that have not been passed yet, by step. A stream that does not repeat itself
        # passes other positions than before, so there nothing can be compared.
        self._ahead: dict[int, list[Stand]] = {}
        for stand in others if compares and stream.repeatable else ():
            self._ahead.setdefault(stand.cut.step, []).append(stand)
        self._passed: list[int] = []
        self._num_told = 0
        self._at: Cut | LazyPosition = self._first.cut
        self._differs: int | None = None
        self.error: ResumeError | None = None
        """Why two of the positions cannot be of one stream."""

    def check(self, batches: Sequence[Batch]) -> None:
        """Compare the positions of consumers that begin with one of these batches, which come next.

        Raises `ResumeError` if one stands elsewhere than the stream, and `ClosedError` from then
        on. The enqueuer's thread.
        """
        if self.error is not None:
            raise ClosedError("the feed is stopped")
        if self._void is not None:
            self._check_void(self._void, batches)
        # With everybody passed only the first batch counts: `_at` tells later whether the run has
        # moved at all, and each of a million batches costs one assignment less.
        for batch in batches if self._ahead else batches[:1]:
            # Batches without rows fill up a round. At an epoch's end they take no numbers from the
            # next epoch, so theirs are those of batches to come.
            fills_epoch = self._stream.rounds == "epoch" and batch.rows == 0
            for stand in () if fills_epoch else self._ahead.pop(batch.step, ()):
                self._compare(stand, batch)
            self._at = batch.place

    def _check_void(self, void: Void, batches: Sequence[Batch]) -> None:
        """Look for a batch, in a range that has none if all positions are of one round."""
        counting = self._counting
        assert counting is not None
        for batch in batches:
            number = counting.number(batch)
            if number >= void.stop:
                self._void = None
                return
            # Some queues have no batch in an uneven last round. Their position before that round is
            # also the one after it, so only a batch of a queue that wants it tells.
            is_uneven = self._stream.last_round == "uneven"
            first = void.begins[counting.queue(number)] if is_uneven else void.first
            if number >= first:
                self.error = ResumeError(
                    f"the positions are of different rounds: some are of "
                    f"{counting.round_name(number)}, and others of a later epoch; start all "
                    "trainers from one checkpoint"
                )
                raise self.error

    def _compare(self, stand: Stand, batch: Batch) -> None:
        here = self._at.cut() if isinstance(self._at, LazyPosition) else self._at
        if self._is_same(here, stand.cut, batch):
            self._passed.append(stand.seat)
            return
        first, self._differs = self._first, stand.seat
        self.error = ResumeError(
            f"the positions of {first.who} and {stand.who} are not of one stream: from the one "
            f"batch {batch.step} begins at "
            f"{_describe(here)}, and the other says {_describe(stand.cut)}; resume from a "
            "checkpoint of this run"
        )
        raise self.error

    def _is_same(self, one: Cut, other: Cut, batch: Batch) -> bool:
        if one.epoch != other.epoch and batch.index == 0:
            # An epoch's end has as many names as epochs without a batch follow it.
            return True
        return key(one, self._stream) == key(other, self._stream)

    def news(self) -> tuple[int, ...]:
        """The seats that have been passed and stand in the stream, if they are more than was
        last told; else none."""
        if len(self._passed) == self._num_told:
            return ()
        told = tuple(self._passed)
        self._num_told = len(told)
        return told

    def failed(self, failure: FeedError) -> Failed:
        """What the run's failure tells of the positions."""
        if failure is self.error:
            return Failed(failure, differs=self._differs)
        # A call that raises fails for any position; only after `seek` it may have failed because of
        # the cursor.
        is_calls = isinstance(failure, FetchError) and not self._stream.seekable
        return Failed(failure, at_start=self._at is self._first.cut and not is_calls)


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
