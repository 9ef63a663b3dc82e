"""The enqueuer: it takes what came in order, has exact batches cut, and puts them on device queues.

One thread does all of this, because each step follows from the one before: to order, to cut and to
deal out are rules over one position, and with a second thread every one of them would need a lock.
What this thread waits for lies elsewhere, behind locks of their own: chunks and room in the bounded
queue, a free slot at the device. Before each of these waits everything that is made goes out, since
what it waits for may come only when a reader has used just that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from feeder.workers.errors import ClosedError, FeedError, FetchError
from feeder.workers.fetch.queue import Queue
from feeder.workers.fetch.resuming import StreamStart
from feeder.workers.stats import BatchStats
from feeder.workers.stream.assembler import Assembler
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.buffers import Slots
from feeder.workers.stream.merge import EpochEnd, Merge, MergedChunks
from feeder.workers.stream.parts import Passed
from feeder.workers.stream.placement import Placement
from feeder.workers.stream.position import LazyPosition
from feeder.workers.stream.rounds import ends_round
from feeder.workers.stream.spec import RunSpec, StreamSpec

_MOST_UNFILLED = 100
"""So many epochs in a row without a batch are an error in a stream without end."""
# Epochs may differ, as those of shards do. No position lies between such epochs, so that a run that
# was resumed counts the same.
_GROUP_BYTES = 16 * 1024 * 1024
_GROUP_BATCHES = 64
"""A group of batches ends at so many bytes or batches."""
# One by one, batches of 8 KB and 1 MB from 17-row chunks take 30 to 45 % more CPU: each hand-over
# takes the locks of both queues, and wakes the user (2026-11-28).


class DeviceQueue(Protocol):
    """Where the batches of one device wait for the user."""

    @property
    def waited_since(self) -> float | None:
        """Since when (monotonic clock) the user has been waiting for a batch; None while not."""

    def put(self, batches: list[Batch]) -> None:
        """Add batches, waiting for room; raises `ClosedError` if the queue is closed."""

    def finish(self, ending: LazyPosition | FeedError) -> None:
        """After the batches put so far comes the end of the stream, or an error."""


class RoundRobinRouter:
    """Hands batches out to device queues: the batch of turn t goes to queue t mod N.

    Batches are handed over in groups, since each hand-over wakes another thread, which costs more
    than a small batch. A group ends at 64 batches, at 16 MiB, at half the bound, and before the
    thread waits for anything. Owned by the enqueuer's thread.
    """

    def __init__(
        self,
        queues: Sequence[DeviceQueue],
        queue: Queue,
        assembler: Assembler,
        spec: StreamSpec,
        run: RunSpec,
        *,
        made: BatchStats,
        report: Callable[[], None] | None,
        slots: Slots,
    ) -> None:
        self._made = made
        self._report = report
        self._slots = slots
        # Whether what is copied adds to what the bound counts. Without threads one batch at a time
        # is made, when the user asks for it.
        self._needs_room = not slots.reserved and run.num_threads > 0
        self._queues = queues
        self._queue = queue
        self._assembler = assembler
        # With one device every round is complete, so there is nothing to drop or repeat.
        self._policy = spec.last_round if len(queues) > 1 else "uneven"
        self._per_epoch, self._part = spec.rounds == "epoch", run.part
        # A batch that is known to end an incomplete round ends it for positions too, so it waits
        # until that is known.
        self._keeps_back = self._policy == "pad" or (self._per_epoch and len(queues) > 1)
        # Whether a round of this epoch was complete, as it was where a position lies within it. The
        # first epoch may have none: a stream without a round ends quietly.
        self._has_round = assembler.index > 0 or assembler.epoch == 0
        self._group: list[Batch] = []
        most = run.max_rows // spec.batch_size // 2
        self._most_batches = min(_GROUP_BATCHES, most) if run.num_threads else 1
        self._most_bytes, self._bytes = min(_GROUP_BYTES, run.max_bytes // 2), 0
        self._round: list[Batch] = []  # One that is not complete yet and may have to be dropped.
        # The last batch so far, if it may have to be repeated (`last_round="pad"`) or may end a
        # round that is not complete.
        self._last: Batch | None = None
        self.is_over = False
        """Whether the end has come, or an error in the place of the next batch."""

    def route(self, batch: Batch) -> None:
        """Take a batch, which is handed over with its group."""
        row_bytes = self._queue.row_bytes
        if row_bytes is None:
            batch.held_bytes = sum(array.nbytes for array in batch.columns)
        else:
            batch.held_bytes = batch.rows * row_bytes
        # One without arrays is the rest of another run's round (`Turns.older`).
        if batch.turn < 0 or not batch.columns:
            # Of the rest of a round some batches were dealt out before.
            whole = not batch.columns or ends_round(batch.turn, len(self._queues))
            self._has_round = self._has_round or whole
            self._discard(batch)
            return
        # Bytes bound how long a group takes to make, and what leaves the caches meanwhile.
        self._bytes += batch.held_bytes
        if self._policy == "drop":
            self._hold(batch)
        elif self._keeps_back:
            self._keep_back(batch)
        else:
            self._group.append(batch)
        # Bytes bound what waits here for its group; the count bounds how long a small batch waits.
        if self._bytes >= self._most_bytes or len(self._group) >= self._most_batches:
            self.flush()

    def _hold(self, batch: Batch) -> None:
        """Keep a batch until its round is complete."""
        self._round.append(batch)
        if ends_round(batch.turn, len(self._queues)):
            self._group += self._round
            self._round = []
            self._has_round = True

    def _discard(self, batch: Batch) -> None:
        """Throw a batch away that nobody is to get: its rows are buffered no more."""
        self._queue.count(-batch.rows, -batch.held_bytes, -batch.kept_rows)
        if batch.columns:
            self._slots.take_back(batch.turn % len(self._queues), batch)

    def _keep_back(self, batch: Batch) -> None:
        """Keep a batch until the next one is there. One that may have to be repeated: once it is
        handed over, its slot may be written again."""
        if self._last is not None:
            self._group.append(self._last)
        # A batch that ends a round is never repeated, so it goes at once.
        is_complete = ends_round(batch.turn, len(self._queues))
        self._last = None if is_complete else batch
        if is_complete:
            self._group.append(batch)

    def pass_by(self, num: int) -> None:
        """So many batches come next that are made elsewhere."""
        turn, devices = self._assembler.turn, len(self._queues)
        self._assembler.pass_by(num)
        if num and self._last is not None:
            self._group.append(self._last)
            self._last = None
        if turn // devices < (turn + num) // devices:
            # The last batch of the round is among them.
            self._group += self._round
            self._round, self._has_round = [], True

    def flush(self) -> None:
        """Hand over the batches that were taken so far."""
        group, self._group, self._bytes = self._group, [], 0
        num = len(self._queues)
        # Counted in groups too: each count takes the queue's lock.
        kept, dropped, dropped_bytes = self._assembler.settle()
        self._queue.count(-dropped, -dropped_bytes, kept)
        self._made.count(
            len(group), sum([one.rows for one in group]), sum([one.held_bytes for one in group])
        )
        # One lock for the whole group; with several devices the order of the stream comes first.
        if num == 1 and group:
            self._put(0, group)
        else:
            # One by one in the order of the stream: a device may wait for its batch while the
            # next of another, which is full, cannot be put.
            for at in range(len(group)):
                self._put(group[at].turn % num, [group[at]])
        # Otherwise this frame would hold batches, and their slots, while it waits.
        del group
        if self._needs_room:
            self._queue.wait_for_room()
        if self._report is not None:
            self._report()

    def wait_for_slot(self) -> None:
        """Hand over what has been made, then wait for a slot: the slot may be one that comes back
        when a reader has used just these batches."""
        self.flush()
        self._assembler.wait_for_slot()

    def _put(self, device: int, batches: list[Batch]) -> None:
        # Before the put: the user may hand the batches out before this thread goes on, and the
        # count must not go below zero.
        self._queue.queue(device, len(batches))
        self._queues[device].put(batches)

    def forget(self) -> None:
        """Let go of batches that were not handed over, and of the slot that is being written."""
        # Their arrays must not keep slots from being free while nobody runs.
        self._group, self._round, self._last = [], [], None
        self._assembler.forget()

    def end_epoch(self, place: LazyPosition) -> None:
        """An epoch that a round ends with has ended at `place`. Raises `FeedError` if it gave no
        queue anything, and would not the next time."""
        if self._policy == "drop" and not self._has_round:
            num = len(self._queues)
            raise FeedError(
                f"epoch {place.epoch - 1} has fewer batches than the {num} queues, and "
                "last_round='drop' leaves them out; use last_round='pad', fewer queues, or "
                "rounds='stream'"
            )
        self._has_round = not self._per_epoch
        self._end_round(place)

    def _end_round(self, place: LazyPosition) -> LazyPosition:
        """The round at hand gets no more batches of the stream, which stands at `place`; returns
        where it stands when the round is done with."""
        num, last, self._last = len(self._queues), self._last, None
        if last is not None:
            self._group.append(last)
            # The other devices of the last round get the last batch again, with no real rows, so
            # that all give equally many batches.
            while self._policy == "pad" and not ends_round(last.turn, num):
                repeated = self._assembler.repeat(last, place)
                if repeated is None:
                    self.wait_for_slot()
                    continue
                last = repeated
                self._group.append(last)
            return last.place
        if self._policy == "drop":
            # Batches of an incomplete round do not count: the stream ended before them. Within the
            # stream each keeps the number that it has with any number of queues.
            if not self._per_epoch:
                num_made = len(self._round)
                place.step -= num_made if self._part is None else self._assembler.turn % num
            for batch in self._round:
                self._discard(batch)
            self._round = []
        return place

    def finish(self, place: LazyPosition) -> None:
        """The stream has ended at `place`."""
        self.is_over = True
        place = self._end_round(place)
        self.flush()
        for queue in self._queues:
            queue.finish(place)

    def fail(self, error: FeedError) -> None:
        """An error has taken the place of the next batch."""
        self.is_over = True
        if self._last is not None:
            self._group.append(self._last)
        try:
            self.flush()
        finally:
            for queue in self._queues:
                queue.finish(error)


class Enqueuer:
    """Turns what the merge gives into batches, and hands these to the router.

    The enqueuer's thread owns it, and merge, assembler and router.
    """

    def __init__(
        self,
        spec: StreamSpec,
        queue: Queue,
        merge: Merge,
        assembler: Assembler,
        router: RoundRobinRouter,
        start: StreamStart,
        places: Placement | None = None,
        *,
        is_inline: bool,
    ) -> None:
        self._spec, self._is_inline = spec, is_inline
        self._queue = queue
        self._places = places
        self._merge = merge
        self._assembler = assembler
        self._router = router
        self._start = start
        # Whether an epoch that ends now has given no row at all.
        self._empty_epoch = start.begins_epoch
        # The batches before the epoch at hand, and how many epochs before it had rows for none.
        self._step, self._num_unfilled = assembler.step, 0

    def steps(self) -> Iterator[bool]:
        """Make batches until the end of the stream. Who drives it, a thread of its own or the
        user's, may stop at each yield: True comes before it waits for chunks, False once a batch is
        in its queue, if the run has no threads."""
        if self._is_inline:
            self._start.call_apart(self._queue)
        # In this thread and not in the constructor: it may have to call the fetch function again.
        leftover = self._start.leftover_chunks(self._assembler.schema, self._queue)
        if leftover is not None:
            yield from self._take(leftover)
            # Otherwise this frame would hold the chunk for as long as the stream runs.
            del leftover
        while not self._merge.finished:
            yield from self._merge_all()
            self._router.flush()
            if not self._merge.finished:
                self._provide()
                yield True
                merge = self._merge
                merge.push(self._queue.collect(merge.wanted, merge.num_held))
        self._router.finish(self._assembler.start_of(self._merge.position))

    def has_come(self) -> bool:
        """Whether it need not wait for chunks; for who makes the calls in the same thread."""
        return self._queue.has_come(self._merge.wanted, self._merge.num_held)

    def _provide(self) -> None:
        """Have slots for the next batches, and let their calls be made, which may write there."""
        places, queue = self._places, self._queue
        if places is None:
            return
        # What has been made is handed over: a slot may come back only when that was used.
        size, wanted = self._spec.batch_size, self._merge.wanted
        while not places.provide(queue.batches_ahead(size, places.calls_per_batch)):
            self._router.wait_for_slot()
        assert wanted is not None
        queue.allow(places.allowed(wanted[1]))

    def _merge_all(self) -> Iterator[bool]:
        """Make batches of everything that has been collected."""
        while True:
            # Looked at between merged chunks: a stop ends the work on what was collected, however
            # much that is.
            if self._queue.closed:
                raise ClosedError("the feed is stopped")
            merged = self._merge.next()
            if self._merge.discarded_rows:
                self._queue.count(-self._merge.discarded_rows, -self._merge.discarded_bytes)
                self._merge.discarded_rows = self._merge.discarded_bytes = 0
            if merged is None:
                return
            if isinstance(merged, EpochEnd):
                yield from self._end_epoch(merged)
            elif isinstance(merged, Passed):
                self._empty_epoch = self._empty_epoch and not merged.num
                self._router.pass_by(merged.num)
            else:
                yield from self._take(merged)

    def _take(self, merged: MergedChunks) -> Iterator[bool]:
        self._learn_row_bytes()
        # An epoch without a row in a stream without end would be repeated for ever.
        self._empty_epoch = self._empty_epoch and not any(merged.rows)
        return self._route(self._assembler.add(merged))

    def _route(self, batches: Iterator[Batch | None]) -> Iterator[bool]:
        route, queue, is_inline = self._router.route, self._queue, self._is_inline
        for batch in batches:
            # Here too: chunks that were merged at once may make many batches.
            if queue.closed:
                raise ClosedError("the feed is stopped")
            if batch is None:
                self._router.wait_for_slot()
            else:
                route(batch)
                if is_inline:
                    yield False

    def _end_epoch(self, end: EpochEnd) -> Iterator[bool]:
        epoch = end.position.epoch - 1
        if self._empty_epoch and not self._may_be_empty(epoch):
            skipped = getattr(self._spec.fetch, "skipped", None)
            # One epoch of nothing ends quietly, unless all that there was is defective.
            if skipped or self._spec.epochs != 1:
                raise FetchError(f"epoch {epoch} ended without a row; {_why_empty(skipped)}")
        self._empty_epoch = True
        self._check_filled(epoch)
        if self._places is not None:
            # Calls beyond the end may still be writing behind the rows of its last batch.
            self._router.flush()
            self._queue.wait_for_calls(epoch)
        yield from self._route(self._assembler.end_epoch(end.position))
        if self._assembler.ends_round(end.position.epoch):
            self._router.end_epoch(self._assembler.start_of(end.position))
            self._assembler.begin_round()

    def _check_filled(self, epoch: int) -> None:
        """Raise `FeedError` if no epoch of a stream without end fills a batch: it would be read for
        ever."""
        spec, step = self._spec, self._assembler.step
        is_unfilled = step == self._step and not self._may_be_empty(epoch)
        self._num_unfilled = self._num_unfilled + 1 if is_unfilled else 0
        self._step = step
        is_dropped = spec.epochs is None and spec.last_batch == "drop"
        if is_dropped and self._num_unfilled == _MOST_UNFILLED:
            raise FeedError(
                f"the last {_MOST_UNFILLED} epochs, up to epoch {epoch}, did not fill a batch of "
                f"{spec.batch_size} rows, and last_batch='drop' leaves their rows out: use a "
                "smaller batch_size, or another last_batch"
            )

    def _may_be_empty(self, epoch: int) -> bool:
        """Whether an epoch may have no row, though those to come have some: only the source of a
        run that has been edited says so."""
        may_be: Callable[[int], bool] | None = getattr(self._spec.fetch, "may_be_empty", None)
        return may_be is not None and may_be(epoch)

    def _learn_row_bytes(self) -> None:
        columns = self._assembler.columns
        if self._queue.row_bytes is None and columns is not None and not self._spec.dont_rebatch:
            row_bytes = sum(column.row_bytes for column in columns)
            self._queue.learn(row_bytes)


def _why_empty(skipped: int | None) -> str:
    """Why an epoch may have had no row, in the words of who gave them; how many reads a source has
    left out, None if the rows are a fetch function's."""
    # A source starts over by itself, so the records are to blame.
    if skipped is None:
        return "after raising StopIteration the fetch function must start over"
    if skipped:
        return (
            f"{skipped} reads of defective records were left out, all that there were in this "
            "shard: look at its records, or have the error raised with on_error='raise'"
        )
    return "a filter leaves out every record of this shard"


def run_enqueuer(enqueuer: Enqueuer, router: RoundRobinRouter) -> None:
    """Thread body: make batches until the end of the stream, or until something fails."""
    try:
        for _ in enqueuer.steps():
            pass
    except BaseException as error:
        # Also what is no Exception: somebody waits for what this thread makes.
        fail(router, error)


def fail(router: RoundRobinRouter, error: BaseException) -> None:
    """What has ended the work of an enqueuer takes the place of the next batch."""
    if isinstance(error, ClosedError):
        return
    if not isinstance(error, FeedError):
        # "enqueuer" is the thread's name in logs, errors and the status page, which users know.
        failed = FeedError(f"the enqueuer failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        error = failed
    try:
        # The batches before the error are handed over first; the error takes the place of the next
        # one.
        router.fail(error)
    except ClosedError:
        return
