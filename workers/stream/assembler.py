"""From runs of chunks to batches of exactly the right size. Rules without threads.

Each row is copied once, straight into a slot. What the last chunk has too many stays where it is
until the next batch takes it: leftover is never put back into a queue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from weakref import ref

import numpy as np

from feeder.workers.errors import ResumeError
from feeder.workers.fetch.calls import not_repeatable
from feeder.workers.spec import StreamSpec
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.buffers import Arrays, Slot, Slots
from feeder.workers.stream.chunks import Columns, Schema
from feeder.workers.stream.copying import (
    copy_part,
    copy_rows,
    is_sole_owner,
    keep_or_copy,
    pieces_of,
)
from feeder.workers.stream.merge import MergedChunks
from feeder.workers.stream.position import (
    Frame,
    LazyPosition,
    Leftover,
    PartialChunk,
    Position,
    Span,
)


class Assembler:
    """Cuts runs into batches, and stamps each with the place where it ended."""

    def __init__(
        self,
        spec: StreamSpec,
        frame: Frame,
        schema: Schema,
        slots: Slots,
        *,
        num_devices: int,
        epoch: int,
        index: int,
        step: int,
        expected: Leftover | None,
    ) -> None:
        self._spec = spec
        self._frame = frame
        self._schema = schema
        self._slots = slots
        self._num_devices = num_devices
        self.epoch, self.index, self.step = epoch, index, step
        self._expected = expected
        self._size = spec.batch_size
        self._filled, self._has_empty = 0, False
        self._slot: Slot | None = None
        self._last: LazyPosition | None = None
        self._straddler: PartialChunk | None = None
        self._straddled: tuple[Span | None, int] = (None, 0)
        # Of the rows of finished chunks, those free now and those that a snapshot may still need.
        self._freed = 0
        self._freed_later = 0
        self._kept = self._dropped = self._copied = self._passed = 0

    @property
    def columns(self) -> Columns | None:
        """The columns, once they are known."""
        return self._schema.columns

    @property
    def device(self) -> int:
        """The device that the next batch goes to."""
        return self.step % self._num_devices

    def add(self, run: MergedChunks) -> Iterator[Batch]:
        """The batches that a run completes."""
        if self._spec.dont_rebatch:
            yield from self._each_chunk(run)
            return
        rows, size = run.rows, self._size
        ends = list(accumulate(rows))
        i, taken, self._has_empty = 0, self._take_up(run), not all(rows)
        while i < len(rows):
            if rows[i] == size and not (self._filled or taken):
                arrays = self._pass_on(run, i) or self._copy_whole(run, i)
                i += 1
                self._straddler = None
                place = LazyPosition(self._frame, run.span, i, 0, None, self.epoch)
                yield self._stamp(arrays, place, size)
                continue
            goal = ends[i] - rows[i] + taken + size - self._filled
            j = bisect_left(ends, goal, i)
            if j == len(rows):
                self._copy(run, i, taken, j, 0, ends)
                return
            last = rows[j] - (ends[j] - goal)
            if last == rows[j]:
                j, last = j + 1, 0
            self._copy(run, i, taken, j, last, ends)
            i, taken = j, last
            yield self._emit_slot(self._place(run, j + (last > 0), last), size, size)

    def end_epoch(self, position: Position) -> Iterator[Batch]:
        """The epoch has ended; `position` is the start of the next. Yields the rest as a batch
        where the feed's `last_batch` says so; at the end of the stream "carry" keeps it too."""
        if self._expected is not None:
            raise self._not_deterministic("the epoch ended instead", self._expected)
        rest, policy = self._filled, self._spec.last_batch
        place = self.start_of(position)
        if rest and (policy in ("keep", "pad") or (policy == "carry" and place.cut().finished)):
            if policy == "pad":
                self._pad(rest)
            yield self._emit_slot(place, self._size if policy == "pad" else rest, rest)
        elif not rest or policy == "drop":
            self._drop()
            if self._last is not None:
                # That its last batch was the last of the epoch is known only now.
                self._last.after = place
        self.epoch, self.index = position.epoch, 0

    def start_of(self, position: Position) -> LazyPosition:
        """The start of an epoch, or the end of the stream, as a place."""
        place = LazyPosition(
            self._frame, Span(position, (), (), [], ()), 0, 0, None, position.epoch
        )
        place.step = self.step
        return place

    def forget(self) -> None:
        """Let go of the slot that is being written."""
        self._slot = None

    def settle(self) -> tuple[int, int, int, int]:
        """By how many rows, since last asked, those have grown that are kept though copied, how
        many rows were dropped, how many slots taken to copy into, and batches passed on."""
        settled = self._kept, self._dropped, self._copied, self._passed
        self._kept = self._dropped = self._copied = self._passed = 0
        return settled

    def _drop(self) -> None:
        self._kept += self._filled - self._freed - self._freed_later
        self._dropped += self._filled
        self._filled = self._freed = self._freed_later = 0

    # ---- batches

    def _stamp(self, arrays: Arrays, place: LazyPosition, rows: int) -> Batch:
        """The next batch of the stream, which ended at `place`."""
        epoch = self.epoch
        batch = Batch(self._schema.names, arrays, place, epoch, self.index, self.step, rows)
        self.index = index = self.index + 1
        self.step = place.step = self.step + 1
        place.index = index if place.epoch == epoch else 0
        if place.straddler is None and self._frame.axes is not None:
            place.batch = ref(batch)
        self._last = place
        return batch

    def _emit(
        self, arrays: Arrays, place: LazyPosition, rows: int, *, whole: bool = False
    ) -> Batch:
        batch = self._stamp(arrays, place, rows)
        batch.kept_rows = self._freed_later
        self._kept += (0 if whole else rows) - self._freed
        self._freed = self._freed_later = 0
        return batch

    def _emit_slot(self, place: LazyPosition, length: int, rows: int) -> Batch:
        assert self._slot is not None
        arrays = self._slot.lease(length)
        self._slot, self._filled = None, 0
        return self._emit(arrays, place, rows)

    def _place(self, run: MergedChunks, num_chunks: int, taken: int) -> LazyPosition:
        straddler = None
        if taken:
            i = num_chunks - 1
            skip = run.skip if i == 0 else 0
            straddler = self._keep(run, i, skip)
            taken += skip
        else:
            self._straddler = None
        return LazyPosition(self._frame, run.span, num_chunks, taken, straddler, self.epoch)

    def _keep(self, run: MergedChunks, i: int, skip: int) -> PartialChunk:
        """The chunk that a batch ends in; the same object for all batches that end in it."""
        # Told by its place and not by its arrays, of which a chunk may share any with another.
        if self._straddler is None or self._straddled != (run.span, i):
            self._straddled = (run.span, i)
            arrays = tuple([column[i] for column in run.columns])
            digest = run.digest if i == 0 else None
            rows = run.rows[i] + skip
            self._straddler = PartialChunk(arrays, self._schema.axes, rows, skip, digest)
        return self._straddler

    def repeat(self, batch: Batch, end: LazyPosition) -> Batch:
        """A batch once more, with no real rows, to fill the last round of a stream."""
        place = self.start_of(end.span.start)
        place.step = batch.step + 2
        names, step = self._schema.names, batch.step + 1
        arrays = self._adopt(step % self._num_devices, batch.arrays)
        return Batch(names, arrays, place, batch.epoch, batch.index + 1, step, 0)

    # ---- rows

    def _copy(
        self, run: MergedChunks, i: int, taken: int, j: int, last: int, ends: list[int]
    ) -> None:
        """Copy from row `taken` of chunk i up to, not including, row `last` of chunk j."""
        rows = run.rows
        start = ends[i] - rows[i] + taken
        stop = (ends[j - 1] if j else 0) + last
        if j > i:
            whole = ends[j - 1] - (ends[i] if taken else ends[i] - rows[i])
            self._freed += whole
            self._freed_later += rows[i] if taken else 0
        if stop == start:
            return
        slot, filled = self._take(), self._filled
        end = self._filled = filled + stop - start
        for axis, arrays, target, flat in zip(
            self._schema.axes, run.columns, slot.arrays, slot.flats, strict=True
        ):
            if i == j and flat is not None:
                copy_part(target, flat, filled, arrays[i], taken, last, slot.seen)
                continue
            pieces = pieces_of(arrays, rows, axis, i, taken, j, last)
            if self._has_empty:
                pieces = [piece for piece in pieces if piece.shape[axis]]
            copy_rows(target, flat, axis, filled, end, pieces, slot.seen)
        if i < j:
            _let_go(run, i, j)

    def _take(self) -> Slot:
        """The slot of the next batch, perhaps one that dropped rows were written to."""
        columns = self._schema.columns
        assert columns is not None
        if self._slot is None:
            self._slot = self._slots.take(self.device, columns, self._size)
            self._copied += 1
        return self._slot

    def _copy_whole(self, run: MergedChunks, i: int) -> Arrays:
        """Chunk i, which is a whole batch, in a slot, or kept by it."""
        slot, self._slot = self._take(), None
        for number, arrays in enumerate(run.columns):
            keep_or_copy(slot, number, arrays[i])
            arrays[i] = None
        return slot.lease(self._size)

    def _pad(self, rest: int) -> None:
        """Fill the slot by repeating its last row."""
        assert self._slot is not None
        for axis, target in zip(self._schema.axes, self._slot.arrays, strict=True):
            rows = np.moveaxis(target, axis, 0)
            rows[rest:] = rows[rest - 1]

    def _pass_on(self, run: MergedChunks, i: int) -> Arrays | None:
        """The arrays of chunk i as they are, where nobody but the run holds them."""
        if not self._slots.passes:
            return None
        columns = run.columns
        for column in columns:
            if not is_sole_owner(column, i):
                return None
        arrays = tuple([column[i] for column in columns])
        for column in columns:
            column[i] = None
        self._passed += 1
        assert self._schema.columns is not None
        return self._slots.adopt(self.device, self._schema.columns, arrays)

    def _adopt(self, device: int, arrays: Arrays) -> Arrays:
        columns = self._schema.columns
        assert columns is not None
        self._copied += 1
        copies = tuple(array.copy() for array in arrays) if self._slots.passes else arrays
        return self._slots.adopt(device, columns, copies)

    def _each_chunk(self, run: MergedChunks) -> Iterator[Batch]:
        """Each chunk with rows as a batch of its own (`dont_rebatch`)."""
        for i, rows in enumerate(run.rows):
            if rows:
                arrays = self._pass_on(run, i)
                if arrays is None:
                    arrays = self._adopt(self.device, tuple(column[i] for column in run.columns))
                yield self._emit(arrays, self._place(run, i + 1, 0), rows, whole=True)

    # ---- resuming

    def _take_up(self, run: MergedChunks) -> int:
        """Rows of the run's first chunk that batches before the cut have taken."""
        expected = self._expected
        if expected is None:
            return 0
        self._expected = None
        straddler = self._keep(run, 0, 0)
        what = straddler.differs_from(expected, self._size)
        if what:
            raise self._not_deterministic(what, expected)
        return expected.taken

    def _not_deterministic(self, what: str, expected: Leftover) -> ResumeError:
        worker_id = self._spec.worker_id(expected.partition, expected.call)
        return not_repeatable(worker_id, expected.call, what)


def _let_go(run: MergedChunks, i: int, j: int) -> None:
    """Forget chunks i to j - 1 of a run, so that their memory is free before the run is done."""
    for column in run.columns:
        column[i:j] = [None] * (j - i)
