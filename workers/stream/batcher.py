"""What makes batches and puts them on device queues: in a thread of its own, or a fetcher's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from feeder.workers.errors import ClosedError, FeedError, FetchError
from feeder.workers.fetch.channel import Channel
from feeder.workers.spec import RunSpec, StreamSpec
from feeder.workers.stats import BatchStats
from feeder.workers.stream.assembler import Assembler
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.merge import EpochEnd, Merge, MergedChunks
from feeder.workers.stream.position import LazyPosition
from feeder.workers.stream.resuming import Beginning
from feeder.workers.tuning import TUNING


class DeviceQueue(Protocol):
    """Where the batches of one device wait for the user."""

    @property
    def waited_since(self) -> float | None:
        """Since when (monotonic clock) the user has been waiting for a batch; None while not."""

    def put(self, batches: list[Batch]) -> None:
        """Add batches, waiting for room; raises `ClosedError` where the queue is closed."""

    def yield_to_user(self) -> None:
        """Where the user was waiting for what was put last, wait a moment until it is taken."""

    def finish(self, ending: LazyPosition | FeedError) -> None:
        """After the batches put so far comes the end of the stream, or an error."""


class RoundRobinRouter:
    """Deals batches out to device queues, batch `step` to queue `step` mod N.

    Small batches are handed over in groups, of 64 or of 16 MiB and of half the bound at most, or
    before the enqueuer waits: each hand-over wakes another thread, which costs more than they do.
    Each device's first goes at once, and groups grow from there: somebody may be waiting for it.
    """

    def __init__(
        self,
        queues: Sequence[DeviceQueue],
        channel: Channel,
        assembler: Assembler,
        spec: StreamSpec,
        run: RunSpec,
        made: BatchStats,
        report: Callable[[], None],
        *,
        needs_room: bool,
    ) -> None:
        self._made = made
        self._report = report
        self._needs_room = needs_room  # Whether what is copied adds to what the bound counts.
        self._queues = queues
        self._channel = channel
        self._assembler = assembler
        self._policy = spec.last_round if len(queues) > 1 else "uneven"
        self._group: list[Batch] = []
        self._most_batches = min(TUNING.group_batches, run.max_rows // spec.batch_size // 2)
        self._most_bytes = min(TUNING.group_bytes, run.max_bytes // 2)
        self._max_rows = run.max_rows
        self._bytes, self._goal_bytes, self._num_groups = 0, 1, 0
        self._round: list[Batch] = []  # One that is not complete yet and may have to be dropped.
        self._last: Batch | None = None

    def deal(self, batch: Batch) -> None:
        """Hand a batch over, sooner or later."""
        row_bytes = self._channel.row_bytes
        if row_bytes is None:
            batch.held_bytes = sum(array.nbytes for array in batch.arrays)
        else:
            batch.held_bytes = batch.rows * row_bytes
        self._bytes += batch.held_bytes
        if self._policy == "uneven":
            self._group.append(batch)
        elif self._policy == "drop":
            self._hold(batch)
        else:
            self._keep_back(batch)
        if self._bytes >= self._goal_bytes or len(self._group) >= self._most_batches:
            self.flush()

    def _hold(self, batch: Batch) -> None:
        """Keep a batch until its round is complete."""
        self._round.append(batch)
        if (batch.step + 1) % len(self._queues) == 0:
            self._group += self._round
            self._round = []

    def _keep_back(self, batch: Batch) -> None:
        """Keep a batch that may have to be repeated until the next one is there: once it is
        handed over, its slot may be written again."""
        if self._last is not None:
            self._group.append(self._last)
        ends_round = (batch.step + 1) % len(self._queues) == 0
        self._last = None if ends_round else batch
        if ends_round:
            self._group.append(batch)

    def flush(self) -> None:
        """Hand over what has been dealt so far."""
        group, self._group, self._bytes = self._group, [], 0
        num, row_bytes = len(self._queues), self._channel.row_bytes or 0
        kept, dropped, copied, passed = self._assembler.settle()
        self._channel.count(-dropped, -dropped * row_bytes, kept)
        self._count(group)
        if group or copied:
            self._channel.note_batches(copied=copied, passed=passed)
        if num == 1 and group:
            self._put(0, group)
        else:
            # One by one in the order of the stream: a device may wait for its batch while the
            # next of another, which is full, cannot be put.
            for batch in group:
                self._put(batch.step % num, [batch])
        if group and copied and self._max_rows * row_bytes > TUNING.yield_bytes:
            # Else slots go round that no cache holds, and a copy takes up to three times as long.
            self._queues[group[-1].step % num].yield_to_user()
        if self._needs_room:
            self._channel.wait_for_room()
        self._report()

    def _count(self, group: list[Batch]) -> None:
        num_bytes, goal = sum([batch.held_bytes for batch in group]), self._goal_bytes
        self._made.count(len(group), sum([batch.rows for batch in group]), num_bytes)
        self._num_groups += bool(group)
        if group and self._num_groups >= len(self._queues):
            self._goal_bytes = min(self._most_bytes, 2 * max(goal, num_bytes))

    def _put(self, device: int, batches: list[Batch]) -> None:
        self._channel.queue(device, len(batches))
        self._queues[device].put(batches)

    def forget(self) -> None:
        """Let go of batches that were not handed over, and of the slot that is being written."""
        self._group, self._round, self._last = [], [], None
        self._assembler.forget()

    def finish(self, place: LazyPosition) -> None:
        """The stream has ended at `place`."""
        num, last = len(self._queues), self._last
        if last is not None:
            self._group.append(last)
            while (last.step + 1) % num:
                last = self._assembler.repeat(last, place)
                self._group.append(last)
            place = last.place
        elif self._policy == "drop":
            place.step -= len(self._round)
            for batch in self._round:
                self._channel.count(-batch.rows, -batch.held_bytes, -batch.kept_rows)
        self.flush()
        for queue in self._queues:
            queue.finish(place)

    def fail(self, error: FeedError) -> None:
        """An error has taken the place of the next batch."""
        if self._last is not None:
            self._group.append(self._last)
        try:
            self.flush()
        finally:
            for queue in self._queues:
                queue.finish(error)


class Batcher:
    """What turns bundles into dealt batches."""

    def __init__(
        self,
        spec: StreamSpec,
        channel: Channel,
        merge: Merge,
        assembler: Assembler,
        dealer: RoundRobinRouter,
        begin: Beginning,
    ) -> None:
        self._spec = spec
        self._channel = channel
        self._merge = merge
        self._assembler = assembler
        self._dealer = dealer
        self._begin = begin
        # Whether an epoch that ends now has given no row at all.
        self._empty_epoch = begin.begins_epoch

    def run(self) -> None:
        """Make batches until the end of the stream."""
        leftover = self._begin.make_run(self._channel)
        if leftover is not None:
            self._take(leftover)
            del leftover
        while not self._merge.finished:
            self._merge_all()
            self._dealer.flush()
            if not self._merge.finished:
                self._merge.push(self._channel.collect(self._merge.wanted))
        self._dealer.finish(self._assembler.start_of(self._merge.position))

    def merge_inline(self) -> None:
        """Make batches in a fetcher's thread, while the batcher thread waits, until there is
        nothing left to merge."""
        try:
            while not self._merge.finished:
                bundles = self._channel.collect_inline(self._merge.wanted)
                if bundles is None:
                    return
                self._merge.push(bundles)
                del bundles
                self._merge_all()
                self._dealer.flush()
        except BaseException as error:
            self._channel.finish_inline(error)
        else:
            self._channel.finish_inline(None)

    def _merge_all(self) -> None:
        """Make batches of everything that has been collected."""
        while True:
            if self._channel.closed:
                raise ClosedError("the feed is stopped")
            merged = self._merge.next()
            if self._merge.discarded_rows:
                rows, self._merge.discarded_rows = self._merge.discarded_rows, 0
                self._channel.count(-rows, -rows * (self._channel.row_bytes or 0))
            if merged is None:
                return
            if isinstance(merged, EpochEnd):
                self._end_epoch(merged)
            else:
                self._take(merged)

    def _take(self, run: MergedChunks) -> None:
        self._learn_row_bytes()
        self._empty_epoch = self._empty_epoch and not any(run.rows)
        deal = self._dealer.deal
        for batch in self._assembler.add(run):
            deal(batch)

    def _end_epoch(self, end: EpochEnd) -> None:
        epoch = end.position.epoch - 1
        if self._empty_epoch and self._spec.epochs != 1:
            raise FetchError(
                f"epoch {epoch} ended without a row; after raising StopIteration the fetch "
                "function must start over"
            )
        self._empty_epoch = True
        for batch in self._assembler.end_epoch(end.position):
            self._dealer.deal(batch)

    def _learn_row_bytes(self) -> None:
        columns = self._assembler.columns
        if self._channel.row_bytes is None and columns is not None and not self._spec.dont_rebatch:
            self._channel.learn(sum(column.row_bytes for column in columns))


def run_enqueuer(enqueuing: Batcher, dealer: RoundRobinRouter) -> None:
    """Thread body: make batches until the end of the stream, or until something fails."""
    try:
        enqueuing.run()
    except ClosedError:
        return
    except FeedError as error:
        _fail(dealer, error)
    except BaseException as error:
        # Also what is no Exception: somebody waits for what this thread makes.
        failed = FeedError(f"the enqueuer failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        _fail(dealer, failed)


def _fail(dealer: RoundRobinRouter, error: FeedError) -> None:
    try:
        dealer.fail(error)
    except ClosedError:
        return
