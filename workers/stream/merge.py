"""The one order of all chunks: rules, without threads, that say which chunk comes next.

What calls gave comes here in any order, and waits by number for its turn. In the order of tickets
one chunk is taken from each live worker in turn, and of a pure function the next index, so the
order follows from numbers alone. All that is there is taken at once, and only then checked, in the
order of the stream: to check chunks one by one would cost more than to merge them, and checked as
they come, of two workers that disagree now the one and now the other would be blamed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from feeder.workers.errors import ChunkError, FeedError
from feeder.workers.stream.chunks import Schema, count_bytes
from feeder.workers.stream.digests import OTHER_ROWS, Prints, chain_marks, hash_chunk
from feeder.workers.stream.parts import PartCalls, Passed
from feeder.workers.stream.position import IndexSpan, Partitions, Position, Span, next_live
from feeder.workers.stream.spec import StreamSpec

# ---- What the merge works with: what calls came to, merged chunks, the end of an epoch


class End:
    """A call has ended its epoch. Written once, by the thread that made it."""

    __slots__ = ("mark",)

    def __init__(self, mark: bytes | None) -> None:
        self.mark = mark
        """The cursor after `StopIteration`, which the next epoch begins at."""


Came = tuple[int, int, int, list[Any], "list[bytes] | None", "End | FeedError | None"]
"""What calls came to: their partition (a worker, or 0), their epoch, the number of the first; their
chunks, and the worker's cursors after them; and what the call after them came to: the end of the
epoch, an error in the place of a chunk, or nothing yet."""


class _Line:
    """What a partition's calls came to, and was not merged yet. Owned by the merge."""

    __slots__ = ("chunks", "ending", "later", "marks")

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        """Those of the next calls, without a gap."""
        self.marks: list[bytes] = []
        """The worker's cursors after them, if the feed has cursors."""
        self.ending: End | FeedError | None = None
        """What the call after them came to."""
        self.later: dict[tuple[int, int], Came] = {}
        """The others, by the epoch and the number of their first call."""

    def join(self, epoch: int, number: int) -> None:
        """Join to the next calls, of which the first has this number, those that follow."""
        while self.later and self.ending is None:
            came = self.later.pop((epoch, number + len(self.chunks)), None)
            if came is None:
                return
            _, _, _, chunks, marks, self.ending = came
            self.chunks += chunks
            self.marks += marks or ()

    def take(self, num: int) -> tuple[list[Any], list[bytes]]:
        """Take so many chunks from the head, and the cursors after them."""
        chunks, marks = self.chunks[:num], self.marks[:num]
        del self.chunks[:num], self.marks[:num]
        return chunks, marks


Columns = list[list[Any]]


class MergedChunks:
    """Chunks in merged order, as columns of arrays, and where they came from. Made by the merge;
    the assembler of the same thread owns it from then on."""

    __slots__ = ("columns", "digest", "rows", "skip", "span")

    def __init__(
        self,
        span: Span,
        columns: Columns,
        rows: list[int],
        skip: int = 0,
        digest: int | None = None,
    ) -> None:
        self.span = span
        self.columns = columns
        self.rows = rows
        self.skip = skip
        """Rows missing at the head of the first chunk (the leftover of a snapshot)."""
        self.digest = digest
        """The digest of that chunk."""


class EpochEnd:
    """All rows of an epoch have been merged. Written once, by the thread that merges."""

    __slots__ = ("position",)

    def __init__(self, position: Position) -> None:
        self.position = position
        """The start of the next epoch."""


class Merge:
    """Merges what calls gave, in the order of tickets or in the order of arrival.

    Owned by the enqueuer's thread. Nothing here locks, waits or looks at a clock, so the same
    chunks always come out in the same order.
    """

    def __init__(
        self,
        partitions: Partitions,
        schema: Schema,
        start: Position,
        spec: StreamSpec,
        *,
        prints: Prints | None,
        first_partition: int | None,
        rows_per_call: int | None = None,
        part: PartCalls | None = None,
    ) -> None:
        """`part`: the calls that are made, where others are made elsewhere."""
        self._part = part
        self._partitions = partitions
        self._schema = schema
        self.position = start
        """Where the merged chunks end."""
        self._spec = spec
        # If each call gives so many rows: the partition, the number and the rows of the last call,
        # if that gave fewer. It has to be the epoch's last.
        self._rows_per_call = rows_per_call
        self._short: tuple[int, int, int] | None = None
        # Replay compares what calls gave then with what they give now, by a chain of digests.
        self._chained = not (spec.pure or spec.seekable)
        # The debug switch's: what each chunk was when its call returned; None if it is off.
        self._prints = prints
        num = partitions.num_partitions
        self._lines = [_Line() for _ in range(num)]
        # What came, in the order in which it came (order of arrival).
        self._arrivals: deque[Came] = deque()
        # After a resume in arrival order the chunk that the cut lies in has to come first.
        self._first_partition = first_partition
        # What comes next in the order and is no chunk, with its partition.
        self._last: tuple[int, End | FeedError] | None = None
        # Of a pure function in arrival order: errors of indices that may yet turn out to lie beyond
        # the end; and the smallest index known to have raised StopIteration.
        self._early: dict[int, FeedError] = {}
        self._ends_at: int | None = None
        self.num_held = 0
        """Calls that came and cannot be merged yet."""
        self.discarded_rows = self.discarded_bytes = 0
        """What came from beyond the end of an epoch, for the caller to count out of the bound."""

    @property
    def finished(self) -> bool:
        """Whether the last epoch has been merged."""
        epochs = self._spec.epochs
        return epochs is not None and self.position.epoch >= epochs

    @property
    def wanted(self) -> tuple[int, int] | None:
        """The partition and the number of the call that is waited for; None for any."""
        turn = self._first_partition if self._partitions.arrival else self.position.turn
        return None if turn is None else (turn, self.position.calls[turn])

    def push(self, came: Iterable[Came]) -> None:
        """Add what calls came to, as it was collected."""
        for one in came:
            partition, epoch, first, chunks, _, ending = one
            # A pure function is called ahead of the epoch's end, which nobody knows yet.
            if epoch < self.position.epoch:
                self._discard(chunks)
                continue
            self.num_held += len(chunks) + (ending is not None)
            if self._partitions.arrival:
                self._arrivals.append(one)
            else:
                self._lines[partition].later[epoch, first] = one

    def next(self) -> MergedChunks | EpochEnd | Passed | None:
        """The next merged chunks, the end of an epoch, or how many batches come that are made
        elsewhere; None if more has to come.

        Raises the error of a call, or `ChunkError`, in its place in the order.
        """
        while not self.finished:
            if self._has_ended():
                return self._end_epoch()
            if self._part is not None and (passed := self._pass_by(self._part)) is not None:
                return passed
            if self._last is not None:
                # Taken out first: a raised error must not stay for the next call to find it again.
                (partition, last), self._last = self._last, None
                if isinstance(last, FeedError):
                    raise last
                self._end(partition, last)
                continue
            merged = self._merge_arrivals() if self._partitions.arrival else self._merge_ring()
            if merged is not None:
                return merged
            if self._last is None and not self._has_ended() and not self._is_early_next:
                return None
        return None

    def _pass_by(self, part: PartCalls) -> Passed | None:
        """Go past the calls that are made elsewhere."""
        call = self.position.calls[0]
        part.go_to(self.position.epoch)
        if part.error is not None:
            raise part.error
        first, _ = part.block(call)
        if first == call:
            return None
        self.position = self.position._replace(calls=(first,))
        return Passed(part.batch(first) - part.batch(call))

    # ---- in the order of tickets

    def _merge_ring(self) -> MergedChunks | None:
        """All chunks that are there from the next one on, in the order of the ring."""
        position = self.position
        live, calls, num = position.live, position.calls, len(position.live)
        ring, lines = list[int](), list[_Line]()
        for i in chain(range(position.turn, num), range(position.turn)):
            if not live[i]:
                continue
            line = self._lines[i]
            line.join(position.epoch, calls[i])
            if not line.chunks:
                # Once round is all then: of each that comes before it one.
                total = len(ring)
                if not ring and line.ending is not None:
                    self._last, line.ending = (i, line.ending), None
                    self.num_held -= 1
                break
            ring.append(i)
            lines.append(line)
        else:
            total = min([len(line.chunks) * len(ring) + j for j, line in enumerate(lines)])
        if not total:
            return None
        self.num_held -= total
        size, chunks, marks = len(ring), [None] * total, list["list[bytes] | None"]()
        for j, line in enumerate(lines):
            num = -(-(total - j) // size)
            chunks[j::size], of_line = line.take(num)
            marks.append(of_line if self._spec.seekable else None)
        return self._merge(chunks, ring, [calls[i] for i in ring], marks)

    # ---- in the order of arrival

    def _merge_arrivals(self) -> MergedChunks | None:
        """The chunks of one partition that came next."""
        if self._is_early_next:
            self._last = 0, self._early.pop(self.position.calls[0])
            return None
        partition, others = self._first_partition, deque[Came]()
        chunks, numbers, marks = list[Any](), list[int](), list[bytes]()
        while self._arrivals and self._last is None:
            came = self._arrivals.popleft()
            of, epoch, first, came_chunks, came_marks, ending = came
            is_other = partition not in (None, of)
            if epoch > self.position.epoch or (is_other and self._first_partition is None):
                others.append(came)
                break
            if is_other:
                others.append(came)
                continue
            partition = of
            num = self._num_before_end(first, came_chunks)
            chunks += came_chunks[:num]
            numbers += range(first, first + num)
            marks += came_marks or ()
            self._discard(came_chunks[num:])
            self.num_held -= len(came_chunks)
            if ending is not None:
                self.num_held -= 1
                self._end_arrivals(of, first + len(came_chunks), ending)
        # What was passed over comes next.
        self._arrivals.extendleft(reversed(others))
        if not chunks:
            return None
        assert partition is not None
        if not self._partitions.pure:
            numbers = numbers[:1]  # The others follow.
        return self._merge(chunks, [partition], numbers, [marks if self._spec.seekable else None])

    @property
    def _is_early_next(self) -> bool:
        """Whether the index that comes next has failed."""
        return self.position.calls[0] in self._early

    def _num_before_end(self, first: int, chunks: list[Any]) -> int:
        """How many of the chunks of these calls lie before the epoch's end, as far as is known."""
        num = len(chunks)
        return num if self._ends_at is None else min(num, max(0, self._ends_at - first))

    def _end_arrivals(self, partition: int, number: int, ending: End | FeedError) -> None:
        """What a call came to that gave no chunk."""
        if not self._partitions.pure:
            self._last = partition, ending
        elif self._ends_at is not None and number > self._ends_at:
            return  # It means nothing.
        elif isinstance(ending, FeedError):
            self._early[number] = ending
        else:
            self._ends_at = number

    # ---- chunks, checked

    def _merge(
        self, chunks: list[Any], ring: list[int], numbers: list[int],
        marks: Sequence[list[bytes] | None],
    ) -> MergedChunks | None:  # fmt: skip
        """Chunks of the ring's partitions in turn, from these calls on (of a pure function in order
        of arrival of just these), checked; those before the first defective one, None if that is
        none."""
        size = len(ring)
        is_by_index = self._partitions.pure and self._partitions.arrival

        def call_of(i: int) -> tuple[int, int]:
            if is_by_index:
                return 0, numbers[i]
            return ring[i % size], numbers[i % size] + i // size

        if self._prints is not None:
            chunks = self._unchanged(chunks, call_of)
            if not chunks:
                return None
        columns, rows, error = self._schema.arrange(chunks)
        if error is not None:
            self._last = 0, self._place(error, *call_of(len(rows)))
        if self._rows_per_call is not None or self._part is not None:
            num, wrong = self._check_rows([call_of(i) for i in range(len(chunks))], rows)
            if wrong is not None:
                columns, rows = tuple([column[:num] for column in columns]), rows[:num]
                self._last = 0, wrong
        if not rows:
            return None
        if self._chained:
            marks = self._chain(ring, numbers, columns, len(rows))
        self._first_partition = None
        if is_by_index:
            span: Span = IndexSpan(self.position, numbers, rows)
            self.position = self._partitions.after(span, len(rows))
        else:
            span = Span(self.position, ring, numbers[:size], rows, marks)
            self.position = span.position(len(rows))
        return MergedChunks(span, list(columns), rows)

    def _unchanged(self, chunks: list[Any], call_of: Any) -> list[Any]:
        """The chunks before the first that is not what the fetch function returned, or would not
        return again; its error comes next."""
        assert self._prints is not None
        for i, chunk in enumerate(chunks):
            partition, number = call_of(i)
            error = find_changed(chunk, self._prints.pop(
                (partition, self.position.epoch, number), None))  # fmt: skip
            if error is not None:
                self._last = 0, self._place(error, partition, number)
                return chunks[:i]
        return chunks

    def _place(self, error: ChunkError, partition: int, call: int) -> ChunkError:
        """The error of a partition's call, with the worker and the call as the user knows them."""
        worker_id = self._spec.worker_id(partition, call)
        error.worker_id, error.call = worker_id, call
        name = self._first_name(call)
        record = "" if name is None else f"; the call's first record is {name}"
        error.args = (f"worker {worker_id}, call {call}: {error}{record}",)
        return error

    def _first_name(self, call: int) -> str | None:
        """What the fetch function calls the first record of a call, as sources can say."""
        first_name = getattr(self._spec.fetch, "first_name", None)
        if not self._spec.pure or not callable(first_name):
            return None
        return str(first_name(self._spec.call(self.position.epoch, call)))

    def _check_rows(
        self, calls: list[tuple[int, int]], rows: list[int]
    ) -> tuple[int, ChunkError | None]:
        """How many of these calls, by partition and number, gave as many rows as they have to, and
        what is wrong with another one. `rows` may be fewer: the chunk after them is defective."""
        if self._part is not None:
            return self._check_rows_of_part(self._part, calls, rows)
        expected = self._rows_per_call or 0
        if self._short is None and rows.count(expected) == len(rows):
            return len(rows), None
        short = self._short
        for i, call in enumerate(calls[: len(rows) + 1]):
            # A call after one that gave fewer: that one was not the epoch's last.
            if short is not None:
                partition, number, num = short
                return i, self._place(_wrong_rows(num, expected), partition, number)
            if rows[i] > expected:
                return i, self._place(_wrong_rows(rows[i], expected), *call)
            if rows[i] < expected:
                short = *call, rows[i]
        self._short = short
        return len(rows), None

    def _check_rows_of_part(
        self, part: PartCalls, calls: list[tuple[int, int]], rows: list[int]
    ) -> tuple[int, ChunkError | None]:
        """The same, where it is known of each call how many rows it has to give."""
        for i, got in enumerate(rows):
            if got != (expected := part.rows(calls[i][1])):
                error = ChunkError(
                    f"chunk has {got} rows, expected {expected}: which server makes which batch "
                    "follows from how many rows each call gives, and rows(epoch, batch_size) of "
                    "the fetch function says for the epoch", got=got, expected=expected,
                )  # fmt: skip
                return i, self._place(error, *calls[i])
        return len(rows), None

    def _chain(
        self, ring: list[int], firsts: list[int], columns: Sequence[list[Any]], num_chunks: int
    ) -> list[list[bytes] | None]:
        """Replay has no cursors. A running digest of what the calls gave takes their place, and a
        resume compares it call by call."""
        size, marks = len(ring), self.position.marks
        return [
            chain_marks(marks[partition], first, columns, range(j, num_chunks, size))
            for j, (partition, first) in enumerate(zip(ring, firsts, strict=True))
        ]

    # ---- the end of an epoch

    def _end(self, partition: int, end: End) -> None:
        """A partition has ended the epoch."""
        position = self.position
        if self._partitions.pure:
            self._ends_at = call = position.calls[0]
            if self._part is not None and call < self._part.num_calls:
                error = ChunkError(
                    f"the epoch ended, expected {self._part.rows(call)} rows: so many follow from "
                    "rows(epoch, batch_size) of the fetch function", got=0,
                    expected=self._part.rows(call),
                )  # fmt: skip
                self._ends_at, self._last = None, (0, self._place(error, partition, call))
            return
        live = tuple(alive and i != partition for i, alive in enumerate(position.live))
        # A seekable function moves on as it ends an epoch: the cursor after the end counts, since a
        # resume would end the epoch once more otherwise.
        mark = end.mark or position.marks[partition]
        marks = (*position.marks[:partition], mark, *position.marks[partition + 1 :])
        turn = next_live(live, partition)
        self._first_partition = None
        self.position = position._replace(live=live, marks=marks, turn=turn)

    def _has_ended(self) -> bool:
        """Whether the epoch has."""
        # In order of arrival every index before the smallest that raised has to come.
        if self._partitions.pure:
            return self._ends_at is not None and self.position.calls[0] >= self._ends_at
        return not any(self.position.live)

    def _discard(self, chunks: list[Any]) -> None:
        self.discarded_rows += self._schema.count_rows(chunks)
        self.discarded_bytes += sum(map(count_bytes, chunks))

    def _end_epoch(self) -> EpochEnd:
        self.position = self._partitions.next_epoch(self.position)
        if self._partitions.pure:
            # Chunks beyond the end, and errors of calls beyond it, which a user never hears of.
            later, epoch = self._lines[0].later, self.position.epoch
            beyond = [later.pop(key) for key in list(later) if key[0] < epoch]
            beyond += [came for came in self._arrivals if came[1] < epoch]
            self._arrivals = deque([came for came in self._arrivals if came[1] >= epoch])
            for _, _, _, chunks, _, ending in beyond:
                self.num_held -= len(chunks) + (ending is not None)
                self._discard(chunks)
        self._ends_at = self._short = self._last = None
        self._early.clear()
        return EpochEnd(self.position)


def _wrong_rows(got: int, expected: int) -> ChunkError:
    return ChunkError(
        f"chunk has {got} rows, expected {expected}: each call gives rows_per_call rows, an "
        "epoch's last one excepted, which may give fewer",
        got=got, expected=expected,
    )  # fmt: skip


def find_changed(chunk: Any, returned: int | None) -> ChunkError | None:
    """What is wrong if a chunk is not what the fetch function returned, or would not return again;
    `returned` is its digest of then."""
    if returned == OTHER_ROWS:
        return ChunkError(
            "the fetch function gave other rows when the same call was made again; let "
            "fetch(call) depend on the call alone (call.rng draws), or keep its state in "
            "fetch(worker_id, batch_size)"
        )
    if returned is not None and returned != hash_chunk(chunk):
        return ChunkError(
            "the fetch function changed the arrays after it returned them; return "
            "new arrays, or copies"
        )
    return None
