"""The one order of all chunks: rules, without threads, that merge the partitions' chunk lists.

In ticket order one chunk is taken from each live partition in turn, so the order follows from
numbers alone. Where every partition has chunks, whole rounds are merged by slices: the chunks of
partition j go to every W-th place, and the cost per chunk is that of a list assignment. Chunks are
checked after that, all at once and in the order of the stream: of many partitions that have a chunk
each, to check one by one would cost more than to merge them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from feeder.workers.errors import ChunkError, FeedError
from feeder.workers.spec import StreamSpec
from feeder.workers.stream.chunks import ChunkList, End, Schema, count_bytes
from feeder.workers.stream.digests import OTHER_ROWS, Prints, chain_marks, hash_chunk
from feeder.workers.stream.position import Partitions, Position, Span, next_live

# ---- What the merge works with: merged chunks, the end of an epoch, the head of a partition


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


class Head:
    """What is left of a partition's oldest chunk list, not checked yet. Owned by the merge."""

    __slots__ = ("chunks", "ending", "first", "marks")

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.first = 0
        self.marks: list[bytes] | None = None
        self.ending: End | FeedError | None = None

    def take_first(self, num: int) -> tuple[list[Any], list[bytes] | None]:
        """Its first `num` chunks. Nothing is left behind that refers to them, so that the
        assembler can tell whether anybody else does."""
        chunks, marks = self.chunks, self.marks
        self.first += num
        if num == len(chunks):
            self.chunks = []
            return chunks, marks
        self.chunks = chunks[num:]
        if marks is not None:
            self.marks = marks[num:]
        return chunks[:num], marks[:num] if marks is not None else None


class Merge:
    """Merges chunk lists in ticket order, or in the order of arrival.

    Owned by the enqueuer's thread.
    The channel lets one of them in at a time. Nothing here locks, waits or looks at a clock, so
    the same chunk lists always come out in the same order.
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
    ) -> None:
        self._partitions = partitions
        self._schema = schema
        self.position = start
        """Where the merged chunks end."""
        self._spec = spec
        # Where each call gives so many rows: the partition, the number and the rows of the last
        # call, where that gave fewer. It has to be the epoch's last.
        self._rows_per_call = rows_per_call
        self._short: tuple[int, int, int] | None = None
        # Replay compares what calls gave then with what they give now, by a chain of digests.
        self._chained = not (spec.pure or spec.seekable)
        # The debug switch's: what each chunk was when its call returned; None where it is off.
        self._prints = prints
        self._chunk_lists: list[deque[ChunkList]] = [
            deque() for _ in range(partitions.num_partitions)
        ]
        self._heads = [Head() for _ in range(partitions.num_partitions)]
        # The partitions of chunk lists that are not opened, in the order in which they came (order
        # of arrival).
        self._arrivals: deque[int] = deque()
        # After a resume in arrival order the chunk that the cut lies in has to come first.
        self._first_partition = first_partition
        # In the pure form, the smallest index known to have raised StopIteration.
        self._ends_at: int | None = None
        self.discarded_rows = self.discarded_bytes = 0
        """What came from beyond the end of an epoch, for the caller to count out of the bound."""

    @property
    def finished(self) -> bool:
        """Whether the last epoch has been merged."""
        epochs = self._spec.epochs
        return epochs is not None and self.position.epoch >= epochs

    @property
    def wanted(self) -> int | None:
        """The partition that is waited for; None for any."""
        return self._first_partition if self._partitions.arrival else self.position.turn

    @property
    def next_call(self) -> int:
        """The number of the call whose chunk comes next in ticket order."""
        turn = self.position.turn
        return self._partitions.number(turn, self.position.calls[turn])

    def push(self, chunk_lists: list[ChunkList]) -> None:
        """Add chunk lists as they were collected."""
        for chunk_list in chunk_lists:
            self._chunk_lists[chunk_list.partition].append(chunk_list)
            if self._partitions.arrival:
                self._arrivals.append(chunk_list.partition)

    def next(self) -> MergedChunks | EpochEnd | None:
        """The next merged chunks, or the end of an epoch; None where more chunk lists are needed.

        Raises the error of a call, or `ChunkError`, in its place in the order.
        """
        while not self.finished:
            # Asked before anything is opened: what lies behind the end of the epoch is not looked
            # at, so that a defect there is no error.
            if self._has_ended():
                return self._end_epoch()
            partition = self._next_partition()
            if partition is None:
                return None
            if not self._load(partition):
                if self._partitions.arrival and self._first_partition is None:
                    continue  # What it had was stale; another may have something.
                return None
            head = self._heads[partition]
            if self._ends_at is not None:
                # The end of an epoch is known only when a call has raised. By then other partitions
                # may have gone beyond it; what they gave there is not of this epoch.
                self._discard_beyond(partition, head)
            if head.chunks:
                merged = self._take(*self._next_ring(partition))
                if merged is None:
                    continue  # The first of these chunks is defective.
                return merged
            if self._is_early(partition, head):
                continue
            # Taken out first: a raised error must not stay where the next call finds it again.
            ending, head.ending = head.ending, None
            if isinstance(ending, FeedError):
                raise ending
            if ending is not None:
                self._end_partition(partition, ending)
        return None

    def _next_partition(self) -> int | None:
        if not self._partitions.arrival:
            return self.position.turn
        if self._first_partition is not None:
            return self._first_partition
        # What has been begun first; then what came first, of this epoch.
        for partition, head in enumerate(self._heads):
            if head.chunks or (head.ending is not None and not self._is_early(partition, head)):
                return partition
        return next((partition for partition in self._arrivals if self._has_come(partition)), None)

    def _is_early(self, partition: int, head: Head) -> bool:
        """Whether an error is of an index that may yet turn out to lie beyond the end: until all
        smaller indices are done it waits."""
        # In ticket order the merge reaches an index when all smaller ones are done. Where each
        # partition has an end of its own (worker ids) no index lies beyond another partition's end.
        sure = not (self._partitions.pure and self._partitions.arrival)
        if sure or not isinstance(head.ending, FeedError):
            return False
        index, live = self._partitions.number(partition, head.first), self.position.live
        others = (other for other in range(len(live)) if other != partition and live[other])
        return any(self._next_index(other) < index for other in others)

    def _next_index(self, partition: int) -> int:
        """The first index of a pure function's partition that is not done."""
        call, done = self.position.calls[partition], self.position.done
        # After a resume some indices above the first missing one are done already.
        while self._partitions.number(partition, call) in done:
            call += 1
        return self._partitions.number(partition, call)

    def _has_come(self, partition: int) -> bool:
        """Whether the partition's next chunk list is there and not of an epoch to come."""
        chunk_lists = self._chunk_lists[partition]
        return bool(chunk_lists) and chunk_lists[0].epoch <= self.position.epoch

    def _load(self, partition: int) -> bool:
        """Make the partition's head hold something; False where nothing of this epoch has come."""
        head, chunk_lists = self._heads[partition], self._chunk_lists[partition]
        while not head.chunks and head.ending is None:
            if not self._has_come(partition):
                return False
            chunk_list = chunk_lists.popleft()
            if self._partitions.arrival:
                self._arrivals.remove(partition)
            # A pure function is called ahead of the epoch's end, which nobody knows yet. What came
            # for the old epoch counts out of the bound, and is looked at no more.
            if chunk_list.epoch < self.position.epoch:
                self._discard(chunk_list.chunks)
                continue
            self._open(head, chunk_list)
        return True

    def _open(self, head: Head, chunk_list: ChunkList) -> None:
        head.chunks, head.first = chunk_list.chunks, chunk_list.first
        head.marks, head.ending = chunk_list.marks, chunk_list.ending
        error = None if self._prints is None else find_changed(chunk_list, self._prints)
        if error is not None:
            self._end_by(error, head, chunk_list.partition, error.call)

    def _end_by(self, error: ChunkError, head: Head, partition: int, sound: int) -> None:
        """The partition's chunks come to an end after the first `sound` ones, by an error. Those
        are merged first: batches that were good come, whenever the error is known."""
        head.ending = self._place(error, partition, head.first + sound)
        head.chunks = head.chunks[:sound]

    def _place(self, error: ChunkError, partition: int, call: int) -> ChunkError:
        """The error of a partition's call, with the worker and the call as the user knows them."""
        call = self._partitions.number(partition, call)
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

    def _next_ring(self, partition: int) -> tuple[list[int], int]:
        """The partitions from `partition` on whose chunks come next, in turn, and how many chunks
        of each."""
        heads, live = self._heads, self.position.live
        ring, num = [partition], len(heads[partition].chunks)
        if self._partitions.arrival:
            return ring, num
        size = len(live)
        for i in range(partition + 1, partition + size):
            other = i % size
            if not live[other]:
                continue
            chunks = heads[other].chunks if self._load(other) else ()
            if not chunks:
                return ring, 1  # Its turn comes before any other has a second one.
            ring.append(other)
            num = min(num, len(chunks))
        return ring, num

    def _take(self, ring: list[int], num: int) -> MergedChunks | None:
        """The first `num` chunks of each partition of the ring, checked, in the order of the
        stream; those before the first defective one, None where that is none."""
        heads, size = [self._heads[i] for i in ring], len(ring)
        firsts = [head.first for head in heads]
        chunks: list[Any] = [None] * (num * size)
        marks: list[list[bytes] | None] = []
        for j, head in enumerate(heads):
            # Chunk k of partition j is chunk k * size + j of the merged ones: one slice assignment
            # in place of a loop over chunks.
            chunks[j::size], of_partition = head.take_first(num)
            marks.append(of_partition)
        # The fetchers do not check chunks, the merge does, in the order of the stream: the schema
        # is that of the first chunk in this order. Checked where they arrive, of two workers that
        # disagree now the one and now the other would be blamed.
        columns, rows, error = self._schema.arrange(chunks)
        if self._rows_per_call is not None:
            calls = [(ring[i % size], firsts[i % size] + i // size) for i in range(len(chunks))]
            num, wrong = self._check_rows(calls, rows)
            if wrong is not None:
                columns, rows = tuple([column[:num] for column in columns]), rows[:num]
                k, j = divmod(num, size)
                heads[j].first, heads[j].chunks, heads[j].ending = firsts[j] + k, [], wrong
                if not rows:
                    return None
                error = None
        if error is not None:
            k, j = divmod(len(rows), size)
            heads[j].first, heads[j].chunks = firsts[j] + k, []
            self._end_by(error, heads[j], ring[j], 0)
            if not rows:
                return None
        if self._chained:
            marks = self._chain(ring, firsts, columns, len(rows))
        self._first_partition = None
        span = Span(self.position, ring, firsts, rows, marks)
        self.position = span.position(len(rows))
        return MergedChunks(span, list(columns), rows)

    def _check_rows(
        self, calls: list[tuple[int, int]], rows: list[int]
    ) -> tuple[int, ChunkError | None]:
        """How many of these calls, by partition and number, gave as many rows as they have to, and
        what is wrong with another one. `rows` may be fewer: the chunk after them is defective."""
        expected = self._rows_per_call or 0
        if self._short is None and rows.count(expected) == len(rows):
            return len(rows), None
        short = self._short
        for i, call in enumerate(calls[: len(rows) + 1]):
            # A call after one that gave fewer: that one was not the epoch's last.
            if short is not None:
                partition, number, num = short
                return i, self._place(_wrong_rows(num, expected), partition, number)
            if i < len(rows) and rows[i] > expected:
                return i, self._place(_wrong_rows(rows[i], expected), *call)
            if i < len(rows) and rows[i] < expected:
                short = *call, rows[i]
        self._short = short
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

    def _end_partition(self, partition: int, end: End) -> None:
        """A partition has ended the epoch."""
        position = self.position
        live = tuple(alive and i != partition for i, alive in enumerate(position.live))
        # A seekable function moves on as it ends an epoch: the cursor after the end counts, else a
        # resume ends the epoch once more.
        mark = end.mark or position.marks[partition]
        marks = (*position.marks[:partition], mark, *position.marks[partition + 1 :])
        turn = next_live(live, partition)
        self._first_partition = None
        self.position = position._replace(live=live, marks=marks, turn=turn)
        if self._partitions.pure:
            # A pure function ends the epoch by an index. The smallest index that raised counts:
            # which call raised first depends on timing.
            index = self._partitions.number(partition, self._heads[partition].first)
            self._ends_at = index if self._ends_at is None else min(index, self._ends_at)

    def _has_ended(self) -> bool:
        """Whether the epoch has. In ticket order a pure function's first end is the smallest; in
        order of arrival every partition has to come to it."""
        live, partitions = self.position.live, self._partitions
        if self._ends_at is None:
            return not any(live)
        if not partitions.arrival:
            return True
        ends_at = self._ends_at
        return all(
            not live[partition] or self._next_index(partition) > ends_at
            for partition in range(len(live))
        )

    def _discard_beyond(self, partition: int, head: Head) -> None:
        """Drop a partition's chunks from beyond the smallest index that ended the epoch, errors
        too."""
        assert self._ends_at is not None
        num = len(head.chunks)
        # The index that raised gave nothing, so `<=` keeps what is before it.
        sound = sum(
            self._partitions.number(partition, head.first + i) <= self._ends_at for i in range(num)
        )
        if sound < num:
            self._discard(head.chunks[sound:])
            # Their memory is free now, before the epoch ends.
            head.chunks, head.ending = head.chunks[:sound], None
        if not sound:
            calls = self.position.calls
            calls = (
                *calls[:partition],
                # The partition counts as past the end: in order of arrival the epoch ends when all
                # of them are.
                max(calls[partition], head.first + num),
                *calls[partition + 1 :],
            )
            self.position = self.position._replace(calls=calls)

    def _discard(self, chunks: Sequence[Any]) -> None:
        self.discarded_rows += self._schema.count_rows(chunks)
        self.discarded_bytes += sum(map(count_bytes, chunks))

    def _end_epoch(self) -> EpochEnd:
        if self._partitions.pure:
            for head in self._heads:
                self._discard(head.chunks)
                # Chunks beyond the end, and errors of calls beyond it, which a user never hears of.
                head.chunks, head.ending = [], None
            # Also of partitions whose turn never came: an epoch may have fewer calls than those.
            for partition, chunk_lists in enumerate(self._chunk_lists):
                while chunk_lists and chunk_lists[0].epoch <= self.position.epoch:
                    self._discard(chunk_lists.popleft().chunks)
                    if self._partitions.arrival:
                        self._arrivals.remove(partition)
        self._ends_at = self._short = None
        self.position = self._partitions.next_epoch(self.position)
        return EpochEnd(self.position)


def _wrong_rows(got: int, expected: int) -> ChunkError:
    return ChunkError(
        f"chunk has {got} rows, expected {expected}: each call gives rows_per_call rows, an "
        "epoch's last one excepted, which may give fewer",
        got=got, expected=expected,
    )  # fmt: skip


def find_changed(chunk_list: ChunkList, prints: Prints) -> ChunkError | None:
    """The first chunk that is not what the fetch function returned, or would not return again."""
    for i, chunk in enumerate(chunk_list.chunks):
        returned = prints.pop((chunk_list.partition, chunk_list.epoch, chunk_list.first + i), None)
        if returned == OTHER_ROWS:
            return ChunkError(
                "the fetch function gave other rows when the same call was made again; let "
                "fetch(call) depend on the call alone (call.rng draws), or keep its state in "
                "fetch(worker_id, batch_size)",
                call=i,
            )
        if returned is not None and returned != hash_chunk(chunk):
            return ChunkError(
                "the fetch function changed the arrays after it returned them; return "
                "new arrays, or copies",
                call=i,
            )
    return None
