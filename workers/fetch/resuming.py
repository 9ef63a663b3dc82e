"""Where a stream starts: at its origin, or at a cut, with the rows that the cut left over.

A cut lies within a chunk more often than between two. So a resumed stream begins with the rest of a
chunk that is at hand, or that a call gives once more. The second is preferred to be a call in its
usual place, so that these rows come by the one way that all rows come; it is made apart only if the
calls cannot begin with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from feeder.workers.errors import FetchTimeout
from feeder.workers.fetch.calls import fetch_again
from feeder.workers.fetch.queue import Queue
from feeder.workers.stats import FetchStats
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import Columns, Schema
from feeder.workers.stream.merge import MergedChunks
from feeder.workers.stream.position import Cut, Leftover, PartialChunk, Partitions, Position, Span
from feeder.workers.stream.spec import RunSpec, StreamSpec

Rows = tuple[NDArray[Any], ...]


class Resume(NamedTuple):
    """Where a stream goes on."""

    cut: Cut
    """The place to go on at."""
    rows: Rows | None = None
    """The rows left over at the cut if they are at hand; otherwise their chunk is fetched again."""
    columns: Columns | None = None
    """The columns as they were observed then."""
    left_out: tuple[tuple[int, int, str, str], ...] = ()
    """What the source had left out by then: `sources.LeftOut`."""
    owner: Any = None
    """The `Positions` of the stream that it is a place in, if that is not the stream as it is
    given: of an earlier format of its source, or of a run that has been edited."""
    fingerprint: bytes = b""
    """The digest of the settings in the position, if it came from one."""


class LeftoverSpan(Span):
    """The span of the one chunk left over. After it the stream stands at the cut, even if calls of
    smaller indices are still to be made (pure form in order of arrival). Written once, by the
    thread that starts the stream."""

    __slots__ = ("after",)

    def __init__(
        self, before: Position, after: Position, partition: int, call: int, rows: int
    ) -> None:
        super().__init__(before, (partition,), (call,), [rows], (None,))
        self.after = after

    def position(self, num_chunks: int) -> Position:
        """The position after the chunk, or before it."""
        return self.after if num_chunks else self.start


class StreamStart:
    """The first position of a stream, and how its leftover rows come back.

    There are three ways. If the rows are at hand they are the stream's first chunk. Otherwise the
    calls begin with the one that returned their chunk; the assembler compares the chunk and skips
    the rows that were taken. In order of arrival calls of smaller indices may still be missing, so
    there a pure function is called for that one chunk apart. A chunk that was taken whole comes
    again in the same ways, and is compared alone; one that ended its epoch comes apart.

    All values are known when it is made, but for what the call that is made apart came to. A
    fetcher makes that call, since only fetchers call the function, and the enqueuer's thread waits
    for it; that thread alone calls `leftover_chunks`.
    """

    def __init__(
        self,
        spec: StreamSpec,
        run: RunSpec,
        partitions: Partitions,
        resume: Resume | None,
        stats: FetchStats,
    ) -> None:
        self._spec, self._run, self._partitions, self._resume = spec, run, partitions, resume
        self._stats = stats
        cut = resume.cut if resume is not None else None
        go_on = None if cut is None or cut.finished else cut
        self._leftover = None if go_on is None else go_on.leftover
        is_compared = go_on is not None and spec.pure and spec.repeatable
        checked = go_on.checked if go_on is not None and is_compared else None
        position = cut.position if cut is not None else partitions.origin()
        ended = checked is not None and not partitions.is_done(position, checked.call)
        # After rounds that were skipped, calls lie between: to go back would make them.
        is_apart = ended or (checked is not None and checked.call + 1 < position.calls[0])
        # It may be a call that is made elsewhere: here it is made to be compared, alone.
        is_apart = is_apart or run.part is not None
        # A cursor is of the call that comes first, which would then be another.
        if ended and (position.marks[0] or not position.epoch):
            checked = None
        again = self._leftover or checked
        if resume is not None and resume.rows is not None:
            again = None
        # Put back by one call, so that there is no second way into the assembler: the chunk comes
        # like any other, and is compared as it comes.
        self.expected: Leftover | None = None
        """The chunk that the calls begin with, if they begin before one."""
        self._apart: tuple[Leftover, Call] | None = None
        self._chunk: Any = None
        self._error: BaseException | None = None
        self._is_called = False
        if again is not None and (is_apart or (spec.pure and partitions.arrival)):
            worker_id = spec.worker_id(again.partition, again.call)
            epoch = position.epoch - ended
            self._apart = again, Call(again.call, epoch, worker_id, spec.rows_asked, spec.seed)
        elif again is not None:
            self.expected = again
            position = partitions.rewind(position, again)
        self.position = partitions.plain(position)
        """Where the calls begin."""
        self.epoch, self.index, self.step = (
            (cut.epoch, cut.index, cut.step) if cut is not None else (0, 0, 0)
        )
        self.columns = resume.columns if resume is not None else None
        """The columns as they were observed before."""

    @property
    def begins_epoch(self) -> bool:
        """Whether no row of the epoch has been merged before."""
        return self.index == 0 and self._leftover is None

    @property
    def first_partition(self) -> int | None:
        """The partition whose chunk has to come first, whatever the order."""
        return None if self.expected is None else self.expected.partition

    def call_apart(self, queue: Queue) -> None:
        """Make the call that is made out of turn, if there is one. For one fetcher, before its
        other calls."""
        if self._apart is None:
            return
        # May wait and retry; `queue.pause` returns at once when the stream is stopped.
        try:
            steps = fetch_again(self._spec, self._run, self._apart[1], self._stats)
            self._chunk = queue.run_steps(steps)
        except BaseException as error:  # The enqueuer raises it.
            self._error = error
        self._is_called = True
        queue.tell()

    def leftover_chunks(self, schema: Schema, queue: Queue) -> MergedChunks | None:
        """The rows left over, which come before all that is fetched, counted into the buffers;
        None if there are none or if they come with the calls."""
        leftover, resume = self._leftover, self._resume
        if resume is None or self.expected is not None:
            return None
        rows = resume.rows if self._apart is None else self._take(*self._apart, schema, queue)
        if leftover is None or rows is None:
            return None
        partitions, partition = self._partitions, leftover.partition
        before = partitions.plain(partitions.rewind(resume.cut.position, leftover))
        after = partitions.plain(resume.cut.position)
        span = LeftoverSpan(before, after, partition, leftover.call, leftover.rows)
        num_rows = leftover.rows - leftover.taken
        # These rows came from no fetcher, so nobody else has counted them into the bound.
        queue.count(num_rows, sum(array.nbytes for array in rows))
        columns: list[list[Any]] = [[array] for array in rows]
        return MergedChunks(span, columns, [num_rows], leftover.taken, leftover.digest)

    def _take(self, leftover: Leftover, call: Call, schema: Schema, queue: Queue) -> Rows | None:
        """The rows left over, of the chunk that comes apart; None if the stream is over."""
        spec, seconds = self._spec, self._run.timeout_s
        if not queue.wait_for(lambda: self._is_called, seconds) and not queue.closed:
            raise FetchTimeout(
                f"worker {call.worker_id}, call {call.index}: no chunk for {seconds} s when it was "
                "made again for the resume; raise timeout",
                worker_id=call.worker_id,
                call=call.index,
            )
        chunk, self._chunk = self._chunk, None
        if self._error is not None:
            raise self._error
        if chunk is None:
            return None
        arranged = schema.arrange([chunk])
        if arranged.error is not None:
            raise arranged.error
        arrays = tuple(column[0] for column in arranged.columns)
        partial = PartialChunk(arrays, spec.axes, arranged.rows[0])
        # The seam between two runs: without the comparison half of one chunk would be joined to
        # half of another. Of a chunk that was taken whole, what the last batch had is compared.
        dealing = None if self._resume is None else self._resume.cut.dealing
        size = spec.batch_size if dealing is None else dealing.batch_size
        most = leftover.rows if spec.dont_rebatch else size
        what = partial.differs_from(leftover, most)
        if what:
            raise spec.not_repeatable(call.worker_id, call.index, what)
        return partial.rest(leftover.taken)
