"""From merged chunks to batches of exactly the right size: rules, without threads.

Each row is copied once, straight into a slot. Rows of the last chunk that do not fit stay where
they are until the next batch takes them: the remainder is never put back into a queue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from weakref import ref

import numpy as np

from feeder.workers.errors import ResumeError
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.buffers import Arrays, Slot, Slots
from feeder.workers.stream.chunks import Columns, Schema, columns_like, part_of
from feeder.workers.stream.copying import (
    copy_elsewhere,
    copy_part,
    copy_rows,
    is_sole_owner,
    keep_or_copy,
    lies_at,
    lies_in,
    pieces_of,
)
from feeder.workers.stream.merge import MergedChunks
from feeder.workers.stream.placement import Placement
from feeder.workers.stream.position import (
    Frame,
    LazyPosition,
    Leftover,
    PartialChunk,
    Position,
    Span,
)
from feeder.workers.stream.rounds import Turns, next_round
from feeder.workers.stream.spec import StreamSpec

Filled = tuple[Arrays, Slot | None]
"""The arrays of a batch, and the slot that its reader gives back (`Batch._slot`)."""


class Assembler:
    """Cuts merged chunks into batches, and stamps each with the place where it ended.

    Owned by the thread that makes batches, as the merge is. A batch is never changed after it was
    yielded, with one exception: `LazyPosition.after` of an epoch's last batch, which is set when
    the epoch's end is known.
    """

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
        turns: Turns,
        expected: Leftover | None,
        places: Placement | None = None,
    ) -> None:
        self._spec = spec
        # Where calls may write their rows into the slots of batches to come, these are its slots.
        self._places = places
        self._frame = frame
        self.schema = schema
        """The columns of the stream."""
        self._slots = slots
        self._num_devices = num_devices
        self.epoch, self.index, self.step = epoch, index, step
        self.turn, self._first_round = turns.first, turns.first_round
        self._ends_after = turns.ends_after
        self._expected = expected
        # The batch that the expected chunk was last in may have been of another run's size.
        self._compared = turns.older_size or spec.batch_size
        # The rest of another run's round consists of batches of the size of then. They are nobody's
        # and need no slot: their rows are counted, and not copied.
        self._older = turns.older
        self._size = turns.older_size if turns.older else spec.batch_size
        # Rows that are in the slot at hand, and whether one of the chunks at hand has no row.
        self._filled, self._has_empty = 0, False
        # The slot at hand belongs to the next batch, whichever epoch that is of: rows that were
        # dropped are written over.
        self._slot: Slot | None = None
        # Those that were at hand when a round began anew, by device: the next batch is of another.
        self._spare: dict[int, Slot] = {}
        self._last: LazyPosition | None = None
        # Where the rows in the slot at hand end, if all those of their last chunk are in it.
        self._rest: tuple[Span, int] | None = None
        # Batches that end in the same chunk share one `PartialChunk`, so that its digest is
        # computed once at most.
        self._partial: PartialChunk | None = None
        self._partial_key: tuple[Span | None, int] = (None, 0)
        # Of the rows of finished chunks, those free now and those that a snapshot may still need.
        self._freed = 0
        self._freed_later = 0
        self._kept = self._dropped = self._dropped_bytes = 0
        # Whether rows were copied into the next batch: they lie nowhere already.
        self._has_copied = False

    @property
    def columns(self) -> Columns | None:
        """The columns, once they are known."""
        return self.schema.columns

    @property
    def device(self) -> int:
        """The device that the next batch goes to."""
        return self.turn % self._num_devices

    def add(self, merged: MergedChunks) -> Iterator[Batch | None]:
        """The batches that merged chunks complete. None asks the caller to `wait_for_slot`, since
        no slot is free for the next batch; the iterator then goes on where it was."""
        first, taken = self._take_up(merged)
        if self._spec.dont_rebatch:
            yield from self._each_chunk(merged, first)
            return
        rows = merged.rows
        # Where each chunk ends, in rows: one bisection per batch finds its last chunk, however
        # small chunks are.
        ends = list(accumulate(rows))
        i, self._has_empty = first, not all(rows)
        while i < len(rows):
            size = self._size
            # A chunk that is exactly a batch, at a batch's start, need not be copied row by row,
            # and perhaps not at all.
            if rows[i] == size and not (self._filled or taken or self._older):
                while (filled := self._pass_on(merged, i) or self._copy_whole(merged, i)) is None:
                    yield None
                i += 1
                self._partial = None
                place = LazyPosition(self._frame, merged.span, i, 0, None, self.epoch)
                yield self._stamp(filled, place, size)
                continue
            # The row count at which the batch is full.
            goal = ends[i] - rows[i] + taken + size - self._filled
            j = bisect_left(ends, goal, i)
            if j == len(rows):
                while not self._copy(merged, i, taken, j, 0, ends):
                    yield None
                is_whole = merged.span.rows[j - 1] <= self._filled
                self._rest = (merged.span, j) if is_whole else None
                return
            last = rows[j] - (ends[j] - goal)
            # A batch that ends with a chunk begins the next one at its row 0: nothing is left over
            # then.
            if last == rows[j]:
                j, last = j + 1, 0
            while not self._copy(merged, i, taken, j, last, ends):
                yield None
            i, taken = j, last
            yield self._emit_slot(self._place(merged, j + (last > 0), last), size, size)

    def pass_by(self, num: int) -> None:
        """So many batches come next that are made elsewhere; none is being written here."""
        self.turn += num
        self.index += num
        self.step += num
        # The last batch before them is not its epoch's last.
        self._last = None if num else self._last

    def end_epoch(self, position: Position) -> Iterator[Batch | None]:
        """The epoch has ended; `position` is the start of the next. Yields the rest as a batch
        where the feed's `last_batch` says so; at the end of the stream "carry" keeps it too. None
        asks the caller to `wait_for_slot`, as `add` does."""
        # The chunk that the resumed stream was to begin with has not come: the fetch function does
        # not repeat itself.
        if self._expected is not None:
            raise self._not_deterministic("the epoch ended instead", self._expected)
        rest, policy = self._filled, self._spec.last_batch
        place = self.start_of(position)
        # "carry" has no next epoch to carry into at the end of the stream; to drop the rows there
        # would lose them.
        # If another run's stream ended here, in the middle of its round, these rows were its last
        # batch. A queue of that run has used them, so here the batch is nobody's.
        is_last = policy == "carry" and (place.cut().finished or self._ends_other(position.epoch))
        if rest and (policy in ("keep", "pad") or is_last):
            if policy == "pad" and not self._older:
                self._pad(rest)
            end = self._end_of_rest(place)
            batch = self._emit_slot(end, self._size if policy == "pad" else rest, rest)
            place.step = self.step
            self._begin_round_at(place)  # Only now its number is known.
            yield batch
        # With "carry" the rest stays in the slot, and the last batch before was not the epoch's
        # last.
        elif not rest or policy == "drop":
            self._drop()
            if self._last is not None:
                # That its last batch was the last of the epoch is known only now.
                self._last.drops_rest = bool(rest) and self._spec.global_batch_size is not None
                self._last.after = place
        self.epoch, self.index = position.epoch, 0
        self._begin_places()

    def _begin_places(self) -> None:
        """An epoch, or a round of it, begins with the next call and the next batch."""
        places = self._places
        if places is None:
            return
        # The slot at hand is that of rows that were dropped, and goes back with all others.
        self._slot = None
        first_call, within = divmod(self._older * self._size, places.rows_per_call)
        turn = self.turn + self._older
        places.begin(None if within else places.plan(self.epoch, first_call, turn))

    def _end_of_rest(self, place: LazyPosition) -> LazyPosition:
        """Where an epoch's rest ends, which is at the start of the next epoch, `place`; as the end
        of its last chunk where all of that is in the batch, so that it can be compared."""
        if self._rest is None or self._frame.axes is None:
            return place
        end = LazyPosition(self._frame, *self._rest, 0, None, self.epoch)
        end.after = place
        return end

    def start_of(self, position: Position) -> LazyPosition:
        """The start of an epoch, or the end of the stream, as a place."""
        place = LazyPosition(
            self._frame, Span(position, (), (), [], ()), 0, 0, None, position.epoch
        )
        place.step = self.step
        self._begin_round_at(place)
        return place

    def _begin_round_at(self, place: LazyPosition) -> None:
        if self._spec.rounds == "epoch":
            place.frame = self._begun_at(place.step)

    def ends_round(self, epoch: int) -> bool:
        """Whether a round ends where this epoch begins, though it may not be complete: in each
        epoch, or where the stream of the run ended of which a round is being dropped."""
        return self._ends_other(epoch) or self._spec.rounds == "epoch"

    def _ends_other(self, epoch: int) -> bool:
        """Whether a round that another run began ends where this epoch begins."""
        return self.turn < self._first_round and epoch == self._ends_after

    def begin_round(self) -> None:
        """The next batch begins a round, whether or not the one at hand is complete."""
        if self._older:
            # Rows that flow into the next epoch were counted and are nowhere.
            if self._filled:
                raise ResumeError(
                    "the position is in the last round of a stream that ended then, with batches "
                    "of another size, and last_batch is 'carry'; resume from an earlier round"
                )
            self._end_older()
        self._put_by()
        self.turn = next_round(
            self.turn, self._num_devices, drops=self._spec.last_round == "drop",
            first=self._first_round,
        )  # fmt: skip
        # Where rounds are still to be skipped, the first that counts begins behind them.
        self._frame = self._begun_at(self.step - min(0, self.turn))
        self._begin_places()

    def _put_by(self) -> None:
        """The slot at hand, of rows that were dropped, is for the next batch of its device."""
        if self._slot is not None and self._places is None:
            self._spare[self.device], self._slot = self._slot, None

    def _end_older(self) -> None:
        """The batches from now on have the size of this run."""
        self._older, self._size = 0, self._spec.batch_size

    def _begun_at(self, step: int) -> Frame:
        dealing = self._frame.dealing
        return self._frame._replace(dealing=dealing and dealing.begun_at(step))

    def forget(self) -> None:
        """Let go of the slots that are being written."""
        if self._places is not None:
            self._places.forget(self._slot)
        self._slot = None
        self._spare.clear()

    def settle(self) -> tuple[int, int, int]:
        """What has changed since the last call: by how many rows those have grown that are kept
        though copied, how many rows were dropped, and their bytes."""
        settled = self._kept, self._dropped, self._dropped_bytes
        self._kept = self._dropped = self._dropped_bytes = 0
        return settled

    def _drop(self) -> None:
        self._kept += self._filled - self._freed - self._freed_later
        self._dropped += self._filled
        self._dropped_bytes += self._filled * sum(column.row_bytes for column in self.columns or ())
        self._filled = self._freed = self._freed_later = 0

    # ---- batches

    def _stamp(self, filled: Filled, place: LazyPosition, rows: int) -> Batch:
        """The next batch of the stream, which ended at `place`."""
        epoch, (arrays, slot) = self.epoch, filled
        batch = Batch(
            self.schema.names, arrays, place, epoch, self.index, self.step, rows, slot=slot
        )
        batch.turn = self.turn
        batch._is_copied, self._has_copied = self._has_copied, False
        self.turn += 1
        self.index = index = self.index + 1
        self.step = place.step = self.step + 1
        # Where the place is the next epoch's start already, the next batch is number 0 there.
        place.index = index if place.epoch == epoch else 0
        if place.partial is None and self._frame.axes is not None:
            place.batch = ref(batch)
        self._last = place
        if self._older == 1:
            self._end_older()
        elif self._older:
            self._older -= 1
        return batch

    def _emit(
        self, filled: Filled, place: LazyPosition, rows: int, *, whole: bool = False
    ) -> Batch:
        batch = self._stamp(filled, place, rows)
        # A chunk stays in memory, though all of it was copied, as long as the batch before is the
        # newest that the user holds: a snapshot there needs the rest of the chunk. These rows are
        # counted apart, else small batches from large chunks would hold twice the bound.
        batch.kept_rows = self._freed_later
        # The batch's rows are counted anew where they are copied to; rows of chunks that are free
        # now no longer count.
        self._kept += (0 if whole else rows) - self._freed
        self._freed = self._freed_later = 0
        return batch

    def _emit_slot(self, place: LazyPosition, length: int, rows: int) -> Batch:
        filled: Filled = (), None
        if not self._older:
            assert self._slot is not None
            filled = self._finish(self._slot, length)
        self._slot, self._filled = None, 0
        return self._emit(filled, place, rows)

    def _finish(self, slot: Slot, rows: int) -> Filled:
        """The next batch lies in this slot."""
        if self._places is not None:
            self._places.pass_by(self.turn, slot)
        return self._lease(slot, rows)

    def _place(self, merged: MergedChunks, num_chunks: int, taken: int) -> LazyPosition:
        partial = None
        if taken:
            i = num_chunks - 1
            # Only the first chunk after a resume lacks rows at its head: those that batches before
            # the cut have had.
            skip = merged.skip if i == 0 else 0
            partial = self._keep(merged, i, skip)
            taken += skip
        else:
            self._partial = None
        return LazyPosition(self._frame, merged.span, num_chunks, taken, partial, self.epoch)

    def _keep(self, merged: MergedChunks, i: int, skip: int) -> PartialChunk:
        """The chunk that a batch ends in; the same object for all batches that end in it."""
        # Told by its place and not by its arrays, of which a chunk may share any with another.
        if self._partial is None or self._partial_key != (merged.span, i):
            self._partial_key = (merged.span, i)
            arrays = tuple([column[i] for column in merged.columns])
            digest = merged.digest if i == 0 else None
            rows = merged.rows[i] + skip
            self._partial = PartialChunk(arrays, self.schema.axes, rows, skip, digest)
        return self._partial

    def repeat(self, batch: Batch, end: LazyPosition) -> Batch | None:
        """The last batch once more, with no real rows, to fill its round; None asks the caller to
        `wait_for_slot`. `end` is the end of the stream, or of the epoch."""
        self._put_by()
        filled = self._copy_arrays(batch.columns)
        if filled is None:
            return None
        arrays, slot = filled
        # What fills up an epoch takes no numbers from the next: there each batch has the number
        # that it has with any number of queues.
        self.step += self._spec.rounds == "stream"
        # A repeated batch stands where the last real one does, so that a resume gives nothing more.
        place = self.start_of(end.span.start)
        names, index, step = self.schema.names, batch.index + 1, batch.step + 1
        repeated = Batch(names, arrays, place, batch.epoch, index, step, 0, slot=slot)
        repeated.turn = self.turn
        self.turn += 1
        return repeated

    # ---- rows

    def _copy(
        self, merged: MergedChunks, i: int, taken: int, j: int, last: int, ends: list[int]
    ) -> bool:
        """Copy from row `taken` of chunk i up to, not including, row `last` of chunk j. False,
        with nothing changed, where there is no slot to copy to."""
        rows = merged.rows
        start = ends[i] - rows[i] + taken
        stop = (ends[j - 1] if j else 0) + last
        # Before anything is counted: where no slot is free the caller comes again with the same
        # arguments.
        slot = self._take() if stop > start and not self._older else None
        if slot is None and stop > start and not self._older:
            return False
        # Chunks that end here are free now, but for the one that the batch before ended in: that
        # may still be asked for.
        if j > i:
            whole = ends[j - 1] - (ends[i] if taken else ends[i] - rows[i])
            self._freed += whole
            self._freed_later += rows[i] if taken else 0
        filled = self._filled
        end = self._filled = filled + stop - start
        if slot is None:
            if i < j:
                _let_go(merged, i, j)
            return True
        is_whole = not (taken or last)
        if self._places is not None and is_whole and self._write(slot, merged, i, j, filled):
            _let_go(merged, i, j)
            return True
        self._has_copied = True
        for axis, arrays, target, flat in zip(
            self.schema.axes, merged.columns, slot.arrays, slot.flats, strict=True
        ):
            # The common case of large chunks, without building a list of pieces.
            if i == j and flat is not None:
                copy_part(target, flat, filled, arrays[i], taken, last, slot.seen)
                continue
            pieces = pieces_of(arrays, rows, axis, i, taken, j, last)
            # Arrays without rows have no memory to join; some kinds cannot be cast to bytes.
            if self._has_empty:
                pieces = [piece for piece in pieces if piece.shape[axis]]
            copy_rows(target, flat, axis, filled, end, pieces, slot.seen)
        # Before the iterator goes on: their memory may be used by the next call already.
        if i < j:
            _let_go(merged, i, j)
        return True

    def _write(self, slot: Slot, merged: MergedChunks, i: int, j: int, at: int) -> bool:
        """Write chunks i to j - 1 to the slot from row `at` on, where some lie there already: calls
        wrote them. False, with nothing changed, where none does."""
        elsewhere, num = [], 0
        for axis, arrays, target in zip(self.schema.axes, merged.columns, slot.arrays, strict=True):
            row = at
            for array, rows in zip(arrays[i:j], merged.rows[i:j], strict=True):
                part = part_of(target, axis, row, row + rows)
                row += rows
                num += 1
                if not lies_at(array, part):
                    elsewhere.append((part, array))
        # All of them in other memory are copied as ever.
        if len(elsewhere) == num and not any(lies_in(array, slot) for _, array in elsewhere):
            return False
        copy_elsewhere(slot, elsewhere)
        return True

    def _take(self) -> Slot | None:
        """The slot of the next batch, perhaps one that dropped rows were written to."""
        if self._slot is None and self._places is not None:
            self._slot = self._places.take(self.turn)
        elif self._slot is None:
            columns = self.schema.columns
            assert columns is not None
            self._slot = self._spare.pop(self.device, None) or self._slots.take_slot(
                self.device, columns, self._size
            )
        return self._slot

    def wait_for_slot(self) -> None:
        """Wait until a slot of the next batch's device may be free."""
        self._slots.wait_for_slot(self.device)

    def _lease(self, slot: Slot, rows: int) -> Filled:
        # Host memory comes back by itself, when its last array is gone. A slot that a reader gives
        # back by number has to be known to whoever sends it.
        return slot.lease(rows), slot if self._slots.reserved else None

    def _copy_whole(self, merged: MergedChunks, i: int) -> Filled | None:
        """Chunk i, which is a whole batch, in a slot, or kept by it; None where no slot is free."""
        slot = self._take()
        if slot is None:
            return None
        self._slot = None
        if self._places is None or not self._write(slot, merged, i, i + 1, 0):
            self._has_copied = True
            for number, arrays in enumerate(merged.columns):
                keep_or_copy(slot, number, arrays[i])
        # The chunk's own references go, so that its memory does not wait for the rest of the
        # merged chunks.
        _let_go(merged, i, i + 1)
        return self._finish(slot, self._size)

    def _pad(self, rest: int) -> None:
        """Fill the slot by repeating its last row."""
        assert self._slot is not None
        for axis, target in zip(self.schema.axes, self._slot.arrays, strict=True):
            rows = np.moveaxis(target, axis, 0)
            rows[rest:] = rows[rest - 1]

    def _pass_on(self, merged: MergedChunks, i: int) -> Filled | None:
        """The arrays of chunk i as they are, where nobody but the merged chunks hold them."""
        # Slots that lie in a consumer's or a GPU's memory: rows have to be copied there.
        if not self._slots.passes:
            return None
        columns = merged.columns
        for column in columns:
            if not is_sole_owner(column, i):
                return None
        # All columns or none: a batch does not lie in two kinds of memory.
        arrays = tuple([column[i] for column in columns])
        for column in columns:
            column[i] = None
        if self._places is not None:
            self._places.pass_by(self.turn, None)
        return self._own(arrays), None

    def _own(self, arrays: Arrays) -> Arrays:
        """Arrays that nobody else holds, as the user gets them."""
        writable = self._slots.writable
        for array in arrays:
            array.flags.writeable = writable
        return arrays

    def _copy_arrays(self, arrays: Arrays) -> Filled | None:
        """A copy of arrays of any number of rows; None where no slot is free."""
        if self._slots.passes:
            return self._own(tuple([array.copy() for array in arrays])), None
        assert self.schema.columns is not None
        if self._places is not None:
            self._places.give_back(self.device)
        # With `dont_rebatch` each chunk has a shape of its own, and a repeated batch perhaps fewer
        # rows.
        columns = columns_like(self.schema.columns, arrays)
        rows: int = arrays[0].shape[columns[0].axis]
        slot = self._slots.take_slot(self.device, columns, rows)
        if slot is None:
            return None
        for number, array in enumerate(arrays):
            keep_or_copy(slot, number, array)
        return self._lease(slot, rows)

    def _each_chunk(self, merged: MergedChunks, first: int) -> Iterator[Batch | None]:
        """Each chunk with rows as a batch of its own (`dont_rebatch`), from one on."""
        for i, rows in enumerate(merged.rows):
            if rows and i >= first:
                while (filled := self._pass_on(merged, i) or self._copy_chunk(merged, i)) is None:
                    yield None
                yield self._emit(filled, self._place(merged, i + 1, 0), rows, whole=True)

    def _copy_chunk(self, merged: MergedChunks, i: int) -> Filled | None:
        return self._copy_arrays(tuple([column[i] for column in merged.columns]))

    # ---- resuming

    def _take_up(self, merged: MergedChunks) -> tuple[int, int]:
        """The chunk that the next batch begins with, and the rows of it that batches before the cut
        have taken."""
        expected = self._expected
        if expected is None:
            return 0, 0
        # Once: the comparison is of the first chunk after the resume alone.
        self._expected = None
        partial = self._keep(merged, 0, 0)
        most = expected.rows if self._spec.dont_rebatch else self._compared
        # The rows after a cursor come in one order, however many a call gives. Of several workers
        # they come in turns: other queues of a server may have had the batches of then already.
        is_alone = self._spec.num_workers == 1 or not self._slots.reserved
        may_grow = self._spec.seekable and is_alone
        what = partial.differs_from(expected, most, may_grow=may_grow)
        if what:
            raise self._not_deterministic(what, expected)
        if expected.taken < expected.rows:
            return 0, expected.taken
        # It was taken whole, and came again to be compared.
        self._partial = None
        self._dropped += expected.rows
        self._dropped_bytes += sum(array.nbytes for array in partial.arrays)
        _let_go(merged, 0, 1)
        return 1, 0

    def _not_deterministic(self, what: str, expected: Leftover) -> ResumeError:
        worker_id = self._spec.worker_id(expected.partition, expected.call)
        return self._spec.not_repeatable(worker_id, expected.call, what)


def _let_go(merged: MergedChunks, i: int, j: int) -> None:
    """Forget chunks i to j - 1, so that their memory is free before all are done."""
    for column in merged.columns:
        column[i:j] = [None] * (j - i)
