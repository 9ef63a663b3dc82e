"""Where the calls of a stream stand: positions, and the places of batches within them.

A *partition* is one sequence of calls in the order of their numbers. With worker ids each worker is
one; the calls of a pure function are one, by index, however many are under way. So a position says
nothing of threads, and is valid for any number of them.

A position of many workers is long, and nearly none is ever asked for. So a batch is stamped with a
`LazyPosition` alone: which of the merged chunks it ended in. All else is worked out when somebody
asks.

All of these are values or are written once, so any thread may read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from feeder.workers.public import public
from feeder.workers.stream.chunks import slice_rows
from feeder.workers.stream.digests import digest_chunk, digest_last_rows
from feeder.workers.stream.rounds import Dealing

# ---- Partial chunks: a batch ended in the middle of each


class Leftover(NamedTuple):
    """The chunk that a cut lies in the middle of, by reference."""

    partition: int
    """The partition whose call returned it."""
    call: int
    """The number of that call."""
    taken: int
    """Rows of the chunk that batches before the cut have taken."""
    rows: int
    """Rows of the chunk in all."""
    digest: int
    """Digest of the chunk: what a second fetch of it is compared with."""
    mark: bytes | None
    """The partition's mark before the call, None before its first."""


@public("feeder")
@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The place in the stream just after a batch.

    Two cuts are equal when they name the same place. Where the end of the epoch was known when
    the cut was read, (epoch, last + 1) is written as (epoch + 1, 0). It is not if rows are left out
    in between which batches of another size may have.
    """

    epoch: int
    """The epoch of the next batch."""
    index: int
    """The number of the next batch in its epoch."""
    step: int
    """The number of the next batch in the stream."""
    finished: bool
    """Whether no batch follows."""
    position: Position
    """Where the calls stand, the one that returned the leftover included."""
    leftover: Leftover | None
    """The chunk that the next batch begins in the middle of."""
    checked: Leftover | None = field(default=None, compare=False)
    """The last chunk where all its rows are taken, for a pure fetch function: its call is made
    again at a resume and compared, and what it returns is thrown away. The digest is that of the
    rows that the last batch took. It is known while the rows of that batch are in memory, so it
    does not belong to what makes two cuts equal. Where it is not done in the position's epoch, it
    is of the one before, which has ended with it."""
    dealing: Dealing | None = field(default=None, compare=False)
    """How batches are dealt out to queues around it: where it lies in the middle of a round, a
    resume goes on after the round. None where it is not known, as in positions that were written
    before it was noted; then it counts as from the start of the stream."""
    encode: Callable[[Cut], bytes] = field(compare=False, repr=False)
    """The codec of the feed, which adds the feed's name and fingerprint."""

    def token(self) -> bytes:
        """The cut as bytes: small, self-contained, checksummed; `resume=` takes it."""
        return self.encode(self)


def first_step(cut: Cut) -> int:
    """The first batch after a position that no queue has had: with several queues the one after its
    round."""
    return cut.step if cut.dealing is None else cut.step + cut.dealing.rest(cut.epoch, cut.step)


class PartialChunk:
    """A chunk that a batch ended in the middle of, kept for snapshots. Its arrays do not change.
    Any thread may ask for the digest: each would compute the same."""

    __slots__ = ("_digest", "arrays", "axes", "rows", "skip")

    def __init__(
        self,
        arrays: tuple[NDArray[Any], ...],
        axes: tuple[int, ...],
        rows: int,
        skip: int = 0,
        digest: int | None = None,
    ) -> None:
        self.arrays = arrays
        self.axes = axes
        self.rows = rows
        """Rows of the whole chunk."""
        self.skip = skip
        """Rows missing at the head of `arrays`: taken before the feed was resumed."""
        self._digest = digest

    @property
    def digest(self) -> int:
        """The chunk's digest, computed once."""
        # Only a cut that somebody asks for costs a digest: most chunks never need one.
        if self._digest is None:
            self._digest = digest_chunk(self.arrays)
        return self._digest

    def differs_from(self, then: Leftover, most: int, *, may_grow: bool = False) -> str:
        """What differs between the chunk and what it was then; empty where nothing does. Of a chunk
        that was taken whole only its last rows were known, at most `most`: those of the last batch.
        One that `may_grow` may have more rows after those of then, as a log has.
        """
        if then.rows != self.rows and not (may_grow and then.rows < self.rows):
            return f"{then.rows} rows then, {self.rows} now"
        is_whole = then.taken == then.rows
        arrays = slice_rows(self.arrays, self.axes, 0, then.rows)
        now = digest_last_rows(arrays, self.axes, most) if is_whole else digest_chunk(arrays)
        if then.digest == now:
            return ""
        # The digest is of the batch, which PyTorch writes to though it is read-only.
        unless = ", unless the batch was written to" if is_whole else ""
        return f"other rows than before{unless}"

    def rest(self, taken: int) -> tuple[NDArray[Any], ...]:
        """The rows after the first `taken`, as views."""
        # After a resume `arrays` begin at row `skip` of the chunk; `taken` counts from row 0 of it.
        start, stop = taken - self.skip, self.rows - self.skip
        return slice_rows(self.arrays, self.axes, start, stop)


_T = TypeVar("_T")


class Position(NamedTuple):
    """Where each partition stands, and whose turn is next. A pure function has one, whose `calls`
    is the next index of the epoch."""

    epoch: int
    """The epoch that the next call belongs to."""
    turn: int
    """The partition whose chunk comes next."""
    live: tuple[bool, ...]
    """Which partitions have not ended this epoch."""
    calls: tuple[int, ...]
    """Number of the next call of each partition: from the start of the stream in the ring form, of
    the epoch in the pure form."""
    rows: tuple[int, ...]
    """Rows that each partition has given since the start of the stream."""
    marks: tuple[bytes | None, ...]
    """Of each partition the cursor after its last call, or the running digest of what it gave."""
    done: tuple[int, ...] = ()
    """Indices at or above `calls` that are done already (pure form in arrival order)."""


class Partitions(NamedTuple):
    """How the calls of a feed are laid out: those of a pure function are one partition, those of
    each worker another. What follows for positions."""

    num_partitions: int
    """Number of partitions."""
    pure: bool
    """Whether the calls are those of a pure function."""
    arrival: bool
    """Whether chunks are merged as they arrive."""

    @classmethod
    def of(cls, num_workers: int, *, pure: bool, arrival: bool) -> Partitions:
        """Those of a stream."""
        return cls(1 if pure else num_workers, pure, arrival)

    def origin(self) -> Position:
        """The start of the stream."""
        num = self.num_partitions
        return Position(0, 0, (True,) * num, (0,) * num, (0,) * num, (None,) * num)

    def next_epoch(self, position: Position) -> Position:
        """The position at which the epoch after `position`'s begins."""
        num = self.num_partitions
        # An index counts in its epoch, a worker's calls through the whole stream: its function has
        # no other way to know where it stands.
        calls = (0,) * num if self.pure else position.calls
        return position._replace(
            epoch=position.epoch + 1, turn=0, live=(True,) * num, calls=calls, done=()
        )

    def plain(self, position: Position) -> Position:
        """A position as it is written in a cut, of a pure function without its cursor, which is
        asked for anew whenever a position is written."""
        if not self.pure:
            return position
        return Position(position.epoch, 0, (True,), position.calls, (0,), (None,), position.done)

    def after(self, span: Span, num_chunks: int) -> Position:
        """The position after the first chunks of a span, in as few words as it can be told."""
        if self.pure and not self.arrival:
            # Each chunk is a call, and calls come in order: there is nothing to look up.
            index = span.start.calls[0] + num_chunks
            return Position(span.start.epoch, 0, (True,), (index,), (0,), (None,))
        position = span.position(num_chunks)
        if not self.arrival:
            return position
        if not self.pure:
            return position._replace(turn=0)
        # Some indices above a missing one may be done, too, and are named. Those that follow
        # without a gap need no names, so cuts stay small.
        (index,), done = position.calls, set(position.done)
        while index in done:
            index += 1
        above = tuple(sorted(number for number in done if number > index))
        return position._replace(calls=(index,), done=above)

    def is_done(self, position: Position, call: int) -> bool:
        """Whether a call of the position's epoch is done there (pure form)."""
        return call < position.calls[0] or call in position.done

    def rewind(self, position: Position, leftover: Leftover) -> Position:
        """A position as it is written in a cut, put back to before the call of the leftover."""
        partition, call = leftover.partition, leftover.call
        if not self.pure:
            return position._replace(
                turn=partition,
                calls=_put(position.calls, partition, call),
                rows=_put(position.rows, partition, position.rows[partition] - leftover.rows),
                marks=_put(position.marks, partition, leftover.mark),
            )
        # Only the leftover's call is to be made again: calls after it are done and stay so.
        low = position.calls[0]
        done = {*position.done, *range(call + 1, low)} - {call}
        return position._replace(calls=(min(call, low),), done=tuple(sorted(done)))


def _put(values: tuple[_T, ...], i: int, value: _T) -> tuple[_T, ...]:
    return (*values[:i], value, *values[i + 1 :])


class Span:
    """Where merged chunks came from: enough to tell the position after any of them, without holding
    the chunks. Written once, by the merge; batches share it."""

    __slots__ = ("firsts", "marks", "ring", "rows", "start")

    def __init__(
        self,
        start: Position,
        ring: Sequence[int],
        firsts: Sequence[int],
        rows: list[int],
        marks: Sequence[Sequence[bytes] | None],
    ) -> None:
        self.start = start
        """The position before the first chunk."""
        self.ring = ring
        """The partitions that its chunks came from, in turn."""
        self.firsts = firsts
        """Number of the first call of each partition of the ring."""
        self.rows = rows
        """Rows of each chunk."""
        self.marks = marks
        """The marks after the calls of each partition of the ring, where the feed keeps marks."""

    def position(self, num_chunks: int) -> Position:
        """The position after the first `num_chunks` chunks."""
        start, ring = self.start, self.ring
        # `start` itself may have a turn that no chunk of the ring had.
        if num_chunks == 0:
            return start
        size = len(ring)
        full, extra = divmod(num_chunks, size)
        calls, rows, marks = list(start.calls), list(start.rows), list(start.marks)
        for i, partition in enumerate(ring):
            count = full + (i < extra)
            if count == 0:
                continue
            # Counted from `firsts` and not from `start`: calls that gave nothing lie in between.
            calls[partition] = self.firsts[i] + count
            rows[partition] += sum(self.rows[i:num_chunks:size])
            of_partition = self.marks[i]
            if of_partition is not None:
                marks[partition] = of_partition[count - 1]
        turn = next_live(start.live, ring[(num_chunks - 1) % size])
        return Position(
            start.epoch, turn, start.live, tuple(calls), tuple(rows), tuple(marks), start.done
        )

    def call(self, num_chunks: int) -> tuple[int, int, bytes | None]:
        """The call that the chunk after the first `num_chunks` came from: its partition, its
        number, and the mark of the partition before it."""
        count, i = divmod(num_chunks, len(self.ring))
        partition, of_partition = self.ring[i], self.marks[i]
        mark = (
            of_partition[count - 1]
            if of_partition is not None and count
            else self.start.marks[partition]
        )
        return partition, self.firsts[i] + count, mark


class IndexSpan(Span):
    """The span of calls of a pure function that were merged as they came. Written once, by the
    merge."""

    __slots__ = ("numbers",)

    def __init__(self, start: Position, numbers: Sequence[int], rows: list[int]) -> None:
        super().__init__(start, (0,), numbers[:1], rows, (None,))
        self.numbers = numbers

    def position(self, num_chunks: int) -> Position:
        """The position after the first `num_chunks` chunks."""
        done = (*self.start.done, *self.numbers[:num_chunks])
        return self.start._replace(done=done)

    def call(self, num_chunks: int) -> tuple[int, int, bytes | None]:
        """The call that the chunk after the first `num_chunks` came from."""
        return 0, self.numbers[num_chunks], None


def next_live(live: Sequence[bool], partition: int) -> int:
    """The first live partition after `partition` in the ring; `partition` itself where there is no
    other."""
    num = len(live)
    for step in range(1, num):
        if live[(partition + step) % num]:
            return (partition + step) % num
    return partition


class Frame(NamedTuple):
    """What all places of one stream have in common."""

    partitions: Partitions
    encode: Callable[[Cut], bytes]
    epochs: int | None
    axes: tuple[int, ...] | None = None
    """The axes that are rows, where the last chunk is compared at a resume; else None, as where the
    user may write to a batch, so that it holds other rows when a position is asked for."""
    dealing: Dealing | None = None
    """How batches are dealt out to queues; None where that is from the start of the stream."""


class HasColumns(Protocol):
    """A batch, as positions and slots know it."""

    @property
    def columns(self) -> Sequence[NDArray[Any]]:
        """Its columns."""

    @property
    def rows(self) -> int:
        """Its rows without those that fill it up."""


class LazyPosition:
    """Where a batch ended: after `num_chunks` chunks of a span, the last of which gave `taken` of
    its rows, all of them where `partial` is None.

    Made by the assembler and complete once its batch is handed over, but for `after`. That is set
    at most once, by the same thread, so a reader finds either None or the start of the epoch.
    """

    __slots__ = (
        "after", "batch", "drops_rest", "epoch", "frame", "index", "num_chunks", "partial", "span",
        "step", "taken",
    )  # fmt: skip

    def __init__(
        self,
        frame: Frame,
        span: Span,
        num_chunks: int,
        taken: int,
        partial: PartialChunk | None,
        epoch: int,
    ) -> None:
        self.frame = frame
        self.span = span
        self.num_chunks = num_chunks
        self.taken = taken
        self.partial = partial
        self.epoch = epoch
        self.index = 0
        self.step = 0
        self.after: LazyPosition | None = None
        """The start of the next epoch, once this is known to be the end of its own."""
        self.drops_rest = False
        """Whether rows lie between this and that start which batches of another size may have."""
        self.batch: Callable[[], HasColumns | None] | None = None
        """A weak reference to the batch that ended here, where its last chunk is compared."""

    def ends(self, epoch: int) -> bool:
        """Whether it is known to be the end of that epoch, in which its batch is."""
        return self.after is not None or self.epoch != epoch

    def settled(self) -> LazyPosition:
        """This place, as the start of the next epoch where it is known to be that."""
        return self if self.after is None else self.after.settled()

    def cut(self) -> Cut:
        """The place as the user is given it."""
        # The batch was its epoch's last: (epoch, last + 1) and (epoch + 1, 0) are one place, and
        # cuts that name one place are equal. With rows in between it is another place, whether or
        # not the end is known by now.
        if self.after is not None and not self.drops_rest:
            cut = self.settled().cut()
            # Of the call's epoch nothing is written but that it is the one before.
            if cut.finished or cut.position.epoch != self.span.start.epoch + 1:
                return cut
            return replace(cut, checked=self._checked())
        partitions, encode, epochs, _, dealing = self.frame
        leftover = None if self.partial is None else self._leftover(self.partial)
        return Cut(
            epoch=self.epoch,
            index=self.index,
            step=self.step,
            finished=epochs is not None and self.epoch >= epochs,
            position=partitions.after(self.span, self.num_chunks),
            leftover=leftover,
            checked=self._checked(),
            dealing=dealing,
            encode=encode,
        )

    def _checked(self) -> Leftover | None:
        batch = None if self.batch is None else self.batch()
        axes = self.frame.axes
        if batch is None or axes is None or not self.num_chunks:
            return None
        rows, arrays = self.span.rows[self.num_chunks - 1], batch.columns
        # Arrays of a GPU stay there, and the pinned memory that they came by is written again: its
        # batch has a tuple of its own kind.
        is_here = type(arrays) is tuple and all(isinstance(one, np.ndarray) for one in arrays)
        if not rows or not is_here:
            return None
        _, call, mark = self.span.call(self.num_chunks - 1)
        return Leftover(
            partition=0,
            call=call,
            taken=rows,
            rows=rows,
            digest=digest_last_rows(slice_rows(arrays, axes, 0, batch.rows), axes, rows),
            mark=mark,
        )

    def _leftover(self, partial: PartialChunk) -> Leftover:
        partitions = self.frame.partitions
        partition, call, mark = self.span.call(self.num_chunks - 1)
        return Leftover(
            partition=0 if partitions.pure else partition,
            call=call,
            taken=self.taken,
            rows=partial.rows,
            digest=partial.digest,
            mark=mark,
        )

    def leftover_rows(self) -> tuple[NDArray[Any], ...]:
        """The rows that the batch left over, as views; nothing where it left none."""
        return () if self.partial is None else self.partial.rest(self.taken)
