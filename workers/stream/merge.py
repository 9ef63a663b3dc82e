"""The one order of all chunks: from the partitions' bundles to runs. Rules without threads.

In ticket order one chunk is taken from each live partition in turn, so the order follows from
numbers alone. Where every partition has a bundle, whole rounds are merged by slices: partition j's
chunks go to every W-th place, and the cost per chunk is that of a list assignment.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from feeder.workers.errors import ChunkError, FeedError
from feeder.workers.fetch.calls import chain_marks
from feeder.workers.fetch.scheduler import ChunkList, End
from feeder.workers.spec import CallNames
from feeder.workers.stream.chunks import Schema
from feeder.workers.stream.position import Partitions, Position, Span, next_live

# ---- The nouns of the merge: a run of merged chunks, the end of an epoch, the head of a partition.


Columns = list[list[Any]]


class MergedChunks:
    """Chunks in merged order, as columns of arrays, and where they came from."""

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
    """All rows of an epoch have been merged."""

    __slots__ = ("position",)

    def __init__(self, position: Position) -> None:
        self.position = position
        """The start of the next epoch."""


class Head:
    """What is left of a partition's oldest bundle, checked and in columns."""

    __slots__ = ("columns", "ending", "first", "marks", "rows")

    def __init__(self) -> None:
        self.columns: Columns = []
        self.rows: list[int] = []
        self.first = 0
        self.marks: list[bytes] | None = None
        self.ending: End | FeedError | None = None

    def take(self, num: int) -> tuple[Columns, list[int], list[bytes] | None]:
        """Its first `num` chunks. Nothing is left behind that refers to them, so that the
        assembler can tell whether anybody else does."""
        columns, rows, marks = self.columns, self.rows, self.marks
        self.first += num
        if num == len(rows):
            self.columns, self.rows = [[] for _ in columns], []
            return columns, rows, marks
        taken = [column[:num] for column in columns]
        for column in columns:
            del column[:num]
        self.rows = rows[num:]
        if marks is not None:
            self.marks = marks[num:]
        return taken, rows[:num], marks[:num] if marks is not None else None


class Merge:
    """Merges in ticket order, or in the order of arrival."""

    def __init__(
        self,
        partitions: Partitions,
        schema: Schema,
        start: Position,
        epochs: int | None,
        *,
        chained: bool,
        names: CallNames,
        first_partition: int | None,
    ) -> None:
        self._partitions = partitions
        self._schema = schema
        self.position = start
        """Where the merged chunks end."""
        self._epochs = epochs
        self._chained = chained
        self._names = names
        self._bundles: list[deque[ChunkList]] = [deque() for _ in range(partitions.num_partitions)]
        self._heads = [Head() for _ in range(partitions.num_partitions)]
        self._arrivals: deque[int] = deque()
        # After a resume in arrival order the chunk that the cut straddles has to come first.
        self._first_partition = first_partition
        # In the pure form, the smallest index known to have raised StopIteration.
        self._ends_at: int | None = None
        self.discarded_rows = 0
        """Rows from beyond the end of an epoch, for the caller to count out of the bound."""

    @property
    def finished(self) -> bool:
        """Whether the last epoch has been merged."""
        return self._epochs is not None and self.position.epoch >= self._epochs

    @property
    def wanted(self) -> int | None:
        """The partition that is waited for; None for any."""
        return self._first_partition if self._partitions.arrival else self.position.turn

    def push(self, bundles: list[ChunkList]) -> None:
        """Add bundles as they were collected."""
        for bundle in bundles:
            self._bundles[bundle.partition].append(bundle)
            if self._partitions.arrival:
                self._arrivals.append(bundle.partition)

    def next(self) -> MergedChunks | EpochEnd | None:
        """The next run or end of an epoch; None where more bundles are needed.

        Raises the error of a call, or `ChunkError`, in its place in the order.
        """
        while not self.finished:
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
                self._discard_beyond(partition, head)
            if head.rows:
                return self._round(partition) or self._single(partition)
            if self._is_early(partition, head):
                continue
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
            if head.rows or (head.ending is not None and not self._is_early(partition, head)):
                return partition
        return next((partition for partition in self._arrivals if self._has_come(partition)), None)

    def _is_early(self, partition: int, head: Head) -> bool:
        """Whether an error is of an index that may yet turn out to lie beyond the end: until all
        smaller indices are done it waits."""
        sure = not (self._partitions.pure and self._partitions.arrival)
        if sure or not isinstance(head.ending, FeedError):
            return False
        index, live = self._partitions.number(partition, head.first), self.position.live
        others = (other for other in range(len(live)) if other != partition and live[other])
        return any(self._next_index(other) < index for other in others)

    def _next_index(self, partition: int) -> int:
        """The first index of a pure function's partition that is not done."""
        call, done = self.position.calls[partition], self.position.done
        while self._partitions.number(partition, call) in done:
            call += 1
        return self._partitions.number(partition, call)

    def _has_come(self, partition: int) -> bool:
        """Whether the partition's next bundle is there and not of an epoch to come."""
        bundles = self._bundles[partition]
        return bool(bundles) and bundles[0].epoch <= self.position.epoch

    def _load(self, partition: int) -> bool:
        """Make the partition's head hold something; False where nothing of this epoch has come."""
        head, bundles = self._heads[partition], self._bundles[partition]
        while not head.rows and head.ending is None:
            if not self._has_come(partition):
                return False
            bundle = bundles.popleft()
            if self._partitions.arrival:
                self._arrivals.remove(partition)
            if bundle.epoch < self.position.epoch:
                self.discarded_rows += self._schema.count_rows(bundle.chunks)
                continue
            self._open(head, bundle)
        return True

    def _open(self, head: Head, bundle: ChunkList) -> None:
        """Check a bundle's chunks and make them columns."""
        error = bundle.check()
        partition, first = bundle.partition, bundle.first
        chunks = bundle.chunks if error is None else bundle.chunks[: error.call]
        head.first, head.marks, head.ending = first, bundle.marks, bundle.ending
        if chunks:
            arranged = self._schema.arrange(chunks)
            head.columns, head.rows = list(arranged.columns), arranged.rows
            error = arranged.error or error
        bundle.chunks = chunks = []
        if error is not None:
            head.ending = self._place(error, partition, first)
        if self._chained and head.rows:
            columns, mark = head.columns, self.position.marks[partition]
            head.marks = chain_marks(
                mark, first, len(head.rows), lambda i: tuple(column[i] for column in columns)
            )

    def _place(self, error: ChunkError, partition: int, first: int) -> ChunkError:
        """An error of the chunk that is `error.call`-th in its bundle, as the user is told it."""
        worker_id, call = self._names.describe(partition, first + error.call)
        error.worker_id, error.call = worker_id, call
        name = self._names.first_name(self.position.epoch, call)
        record = "" if name is None else f"; the call's first record is {name}"
        error.args = (f"worker {worker_id}, call {call}: {error}{record}",)
        return error

    def _round(self, partition: int) -> MergedChunks | None:
        """As many whole rounds as all live partitions have chunks for; None where that is none."""
        live, partitions = self.position.live, self._partitions
        if partitions.arrival or partitions.num_partitions == 1:
            return None
        num = partitions.num_partitions
        order = [(partition + i) % num for i in range(num)]
        ring = [i for i in order if live[i]]
        # Before the schema is known the chunks have to be looked at in their order.
        if len(ring) == 1 or self._schema.columns is None or not all(map(self._load, ring)):
            return None
        heads = [self._heads[i] for i in ring]
        num = min(len(head.rows) for head in heads)
        if num == 0:
            return None
        size = len(ring)
        columns: Columns = [[None] * (num * size) for _ in self._schema.names]
        rows = [0] * (num * size)
        marks = []
        firsts = [head.first for head in heads]
        for j, head in enumerate(heads):
            taken, of_partition, marks_of_partition = head.take(num)
            rows[j::size] = of_partition
            marks.append(marks_of_partition)
            for column, part in zip(columns, taken, strict=True):
                column[j::size] = part
        return self._run(Span(self.position, ring, firsts, rows, marks), columns)

    def _single(self, partition: int) -> MergedChunks:
        """The partition's next chunk, or all it has where no other partition has a turn in
        between."""
        head = self._heads[partition]
        alone = self._partitions.arrival or next_live(self.position.live, partition) == partition
        first = head.first
        columns, rows, marks = head.take(len(head.rows) if alone else 1)
        self._first_partition = None
        return self._run(Span(self.position, (partition,), (first,), rows, (marks,)), columns)

    def _run(self, span: Span, columns: Columns) -> MergedChunks:
        self.position = span.position(len(span.rows))
        return MergedChunks(span, columns, span.rows)

    def _end_partition(self, partition: int, end: End) -> None:
        """A partition has ended the epoch."""
        position = self.position
        live = tuple(alive and i != partition for i, alive in enumerate(position.live))
        mark = end.mark or position.marks[partition]
        marks = (*position.marks[:partition], mark, *position.marks[partition + 1 :])
        turn = next_live(live, partition)
        self._first_partition = None
        self.position = position._replace(live=live, marks=marks, turn=turn)
        if self._partitions.pure:
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
        num = len(head.rows)
        sound = sum(
            self._partitions.number(partition, head.first + i) <= self._ends_at for i in range(num)
        )
        if sound < num:
            self.discarded_rows += sum(head.rows[sound:])
            for column in head.columns:
                del column[sound:]
            head.rows, head.ending = head.rows[:sound], None
        if not sound:
            calls = self.position.calls
            calls = (
                *calls[:partition],
                max(calls[partition], head.first + num),
                *calls[partition + 1 :],
            )
            self.position = self.position._replace(calls=calls)

    def _end_epoch(self) -> EpochEnd:
        if self._partitions.pure:
            for head in self._heads:
                self.discarded_rows += sum(head.rows)
                head.columns, head.rows, head.ending = [], [], None
        self._ends_at = None
        self.position = self._partitions.next_epoch(self.position)
        return EpochEnd(self.position)
