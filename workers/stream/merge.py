"""The one order of all chunks: rules, without threads, that merge the partitions' chunk lists.

In ticket order one chunk is taken from each live partition in turn, so the order follows from
numbers alone. Where every partition has chunks, whole rounds are merged by slices: the chunks of
partition j go to every W-th place, and the cost per chunk is that of a list assignment.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from feeder.workers.errors import ChunkError, FeedError
from feeder.workers.fetch.calls import chain_marks
from feeder.workers.fetch.scheduler import ChunkList, End
from feeder.workers.spec import StreamSpec
from feeder.workers.stream.chunks import Schema
from feeder.workers.stream.digests import OTHER_ROWS, Prints, hash_chunk
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
    """All rows of an epoch have been merged."""

    __slots__ = ("position",)

    def __init__(self, position: Position) -> None:
        self.position = position
        """The start of the next epoch."""


class Head:
    """What is left of a partition's oldest chunk list, checked, in columns. Owned by the merge."""

    __slots__ = ("columns", "ending", "first", "marks", "rows")

    def __init__(self) -> None:
        self.columns: Columns = []
        self.rows: list[int] = []
        self.first = 0
        self.marks: list[bytes] | None = None
        self.ending: End | FeedError | None = None

    def take_first(self, num: int) -> tuple[Columns, list[int], list[bytes] | None]:
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
    """Merges chunk lists in ticket order, or in the order of arrival.

    Owned by the thread that makes batches: the batcher's, or that of a fetcher which merges inline.
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
    ) -> None:
        self._partitions = partitions
        self._schema = schema
        self.position = start
        """Where the merged chunks end."""
        self._spec = spec
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
        self.discarded_rows = 0
        """Rows from beyond the end of an epoch, for the caller to count out of the bound."""

    @property
    def finished(self) -> bool:
        """Whether the last epoch has been merged."""
        epochs = self._spec.epochs
        return epochs is not None and self.position.epoch >= epochs

    @property
    def wanted(self) -> int | None:
        """The partition that is waited for; None for any."""
        return self._first_partition if self._partitions.arrival else self.position.turn

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
            if head.rows:
                return self._round(partition) or self._single(partition)
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
            if head.rows or (head.ending is not None and not self._is_early(partition, head)):
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
        while not head.rows and head.ending is None:
            if not self._has_come(partition):
                return False
            chunk_list = chunk_lists.popleft()
            if self._partitions.arrival:
                self._arrivals.remove(partition)
            # A pure function is called ahead of the epoch's end, which nobody knows yet. What came
            # for the old epoch counts out of the bound, and is looked at no more.
            if chunk_list.epoch < self.position.epoch:
                self.discarded_rows += self._schema.count_rows(chunk_list.chunks)
                continue
            self._open(head, chunk_list)
        return True

    def _open(self, head: Head, chunk_list: ChunkList) -> None:
        """Check the chunks of a list and make them columns."""
        # The fetchers do not check chunks, the merge does, in the order of the stream: the schema
        # is that of the first chunk in this order. Checked where they arrive, of two workers that
        # disagree now the one and now the other would be blamed.
        error = None if self._prints is None else find_changed(chunk_list, self._prints)
        partition, first = chunk_list.partition, chunk_list.first
        chunks = chunk_list.chunks if error is None else chunk_list.chunks[: error.call]
        head.first, head.marks, head.ending = first, chunk_list.marks, chunk_list.ending
        if chunks:
            arranged = self._schema.arrange(chunks)
            head.columns, head.rows = list(arranged.columns), arranged.rows
            error = arranged.error or error
        # Nothing but the columns may refer to an array: the assembler passes an array on only where
        # its reference count says that nobody else has it.
        chunk_list.chunks = chunks = []
        if error is not None:
            # The sound chunks before the defective one are merged first: batches that were good
            # come, whenever the error is known.
            head.ending = self._place(error, partition, first)
        if self._chained and head.rows:
            # Replay has no cursors. A running digest of what the calls gave takes their place, and
            # a resume compares it call by call.
            columns, mark = head.columns, self.position.marks[partition]
            head.marks = chain_marks(
                mark, first, len(head.rows), lambda i: tuple(column[i] for column in columns)
            )

    def _place(self, error: ChunkError, partition: int, first: int) -> ChunkError:
        """The error of chunk number `error.call` of a chunk list, with the worker and the call as
        the user knows them."""
        call = self._partitions.number(partition, first + error.call)
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
        # From here on every live partition has something. As many rounds as the shortest has chunks
        # are merged at once.
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
            taken, of_partition, marks_of_partition = head.take_first(num)
            rows[j::size] = of_partition
            marks.append(marks_of_partition)
            for column, part in zip(columns, taken, strict=True):
                # Chunk k of partition j is chunk k * size + j of the merged ones: one slice
                # assignment in place of a loop over chunks.
                column[j::size] = part
        return self._merged(Span(self.position, ring, firsts, rows, marks), columns)

    def _single(self, partition: int) -> MergedChunks:
        """The partition's next chunk, or all it has where no other partition has a turn in
        between."""
        head = self._heads[partition]
        # Where another partition has a turn in between, one chunk is all that may be taken; else
        # all that is here.
        alone = self._partitions.arrival or next_live(self.position.live, partition) == partition
        first = head.first
        columns, rows, marks = head.take_first(len(head.rows) if alone else 1)
        self._first_partition = None
        return self._merged(Span(self.position, (partition,), (first,), rows, (marks,)), columns)

    def _merged(self, span: Span, columns: Columns) -> MergedChunks:
        self.position = span.position(len(span.rows))
        return MergedChunks(span, columns, span.rows)

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
        num = len(head.rows)
        # The index that raised gave nothing, so `<=` keeps what is before it.
        sound = sum(
            self._partitions.number(partition, head.first + i) <= self._ends_at for i in range(num)
        )
        if sound < num:
            self.discarded_rows += sum(head.rows[sound:])
            for column in head.columns:
                # Their memory is free now, before the epoch ends.
                del column[sound:]
            head.rows, head.ending = head.rows[:sound], None
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

    def _end_epoch(self) -> EpochEnd:
        if self._partitions.pure:
            for head in self._heads:
                self.discarded_rows += sum(head.rows)
                # Chunks beyond the end, and errors of calls beyond it, which a user never hears of.
                head.columns, head.rows, head.ending = [], [], None
        self._ends_at = None
        self.position = self._partitions.next_epoch(self.position)
        return EpochEnd(self.position)


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
