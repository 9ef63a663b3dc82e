"""The feed of a world: the real assembler over a small pure function, driven one turn at a time.

`Pipeline` stands for `feeder.workers.pipeline.Pipeline`, whose threads fetch and merge. Here one
event makes the batches of a few calls. Slots are the real ones, in real shared memory.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import feeder
from feeder.service.memory.arena import ArenaSlots
from feeder.service.server.factory import FeedFactory
from feeder.workers.enqueuer import DeviceQueue, RoundRobinRouter
from feeder.workers.errors import ClosedError, FeedError, FetchError
from feeder.workers.fetch.bound import Held
from feeder.workers.fetch.calls import told_of
from feeder.workers.fetch.resuming import Resume, StreamStart
from feeder.workers.stats import StreamStats
from feeder.workers.stream.assembler import Assembler
from feeder.workers.stream.batch import Batch, Call
from feeder.workers.stream.chunks import Schema
from feeder.workers.stream.merge import MergedChunks
from feeder.workers.stream.parts import PartCalls
from feeder.workers.stream.position import Cut, Frame, Partitions, Position, Span
from feeder.workers.stream.rounds import Turns
from feeder.workers.stream.spec import RunSpec, StreamSpec
from simulation.world import World

if TYPE_CHECKING:
    from simulation.server import ServerProcess

NAME = "train"
WAITS = -1
"""In the place of a device: the enqueuer waits for chunks."""


class Feed(NamedTuple):
    """What defines a stream."""

    queues: int
    calls: int
    """Calls in each epoch."""
    chunk_rows: int
    batch_size: int
    epochs: int
    last_batch: str
    writable: bool = False
    replicas: int = 1
    """Trainers that are given the batches of each queue."""
    threads: int = 1
    """Fetcher threads: so many calls may be under way."""
    rounds: str = "stream"
    last_round: str = "uneven"

    @property
    def num_batches(self) -> int:
        """Batches of the whole stream."""
        return len(rows_of(self))

    @property
    def num_seats(self) -> int:
        """Trainers in all."""
        return self.queues * self.replicas

    @property
    def batches_per_epoch(self) -> int:
        """Batches of each epoch."""
        return self.num_batches // self.epochs


class Dealt(NamedTuple):
    """What a naive loop deals out."""

    starts: list[int]
    """The number of the batch with which each round begins, also of one that is left out."""
    numbers: list[list[int]]
    """The numbers of each queue's batches."""


class Deal(NamedTuple):
    """How the batches of a feed are dealt to its queues, as a naive loop does it."""

    feed: Feed
    begins: int = 0
    """The number of a batch with which a round begins: the dealing to so many queues began there.
    """

    def first(self, step: int, queue: int) -> int:
        """The number of a queue's first batch at or after a step; where none is left, that of
        batches of the whole stream."""
        numbers = dealt(self).numbers[queue]
        return self._find(numbers, bisect_left(numbers, step))

    def round_of(self, step: int) -> int:
        """The round of a batch; the number of rounds where the stream has ended before it."""
        starts = dealt(self).starts
        if step >= self.feed.num_batches:
            return len(starts)
        return bisect_right(starts, step) - 1

    def start_of(self, at_round: int) -> int:
        """The number of the first batch of a round, or of batches where it is behind the last."""
        return self._find(dealt(self).starts, at_round)

    def next_round(self, step: int) -> int:
        """The number of the first batch of the next round; a step that begins one stays."""
        starts = dealt(self).starts
        return self._find(starts, bisect_left(starts, step))

    def _find(self, numbers: list[int], at: int) -> int:
        return numbers[at] if at < len(numbers) else self.feed.num_batches

    @property
    def num_rounds(self) -> int:
        """Rounds from where it began to the end of the stream, the last one perhaps incomplete."""
        return len(dealt(self).starts)


@cache
def dealt(deal: Deal) -> Dealt:
    """What a naive loop deals out."""
    feed, at = deal.feed, deal.begins
    found = Dealt([], [[] for _ in range(feed.queues)])
    while at < feed.num_batches:
        stop = min(at + feed.queues, feed.num_batches)
        if feed.rounds == "epoch":
            stop = min(stop, (at // feed.batches_per_epoch + 1) * feed.batches_per_epoch)
        found.starts.append(at)
        if feed.last_round == "uneven" or stop - at == feed.queues:
            for queue, number in enumerate(range(at, stop)):
                found.numbers[queue].append(number)
        at = stop
    return found


@cache
def rows_of(feed: Feed) -> list[bytes]:
    """The rows of each batch of the stream, as a naive loop makes them."""
    batches: list[bytes] = []
    for epoch in range(feed.epochs):
        rows = np.concatenate([_chunk(feed, epoch, index) for index in range(feed.calls)])
        size = feed.batch_size
        parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        if feed.last_batch == "drop" and len(parts[-1]) < size:
            parts.pop()
        batches += [part.tobytes() for part in parts]
    return batches


def _chunk(feed: Feed, epoch: int, index: int) -> Any:
    first = (epoch * max(1000, feed.calls) + index) * feed.chunk_rows
    return np.arange(first, first + feed.chunk_rows, dtype=np.int64)


def calls_of(feed: Feed) -> Callable[[Call], Any]:
    """The fetch function."""

    def fetch(call: Call) -> Any:
        if call.index >= feed.calls:
            raise StopIteration
        return (_chunk(feed, call.epoch, call.index),)

    return fetch


@cache
def _template(feed: Feed) -> FeedFactory:
    coordinator = feeder.init_data_input_workers(
        ["x"], calls_of(feed), feed.batch_size, 1, NAME, devices=feed.queues, epochs=feed.epochs,
        last_batch=feed.last_batch, writable=feed.writable, num_threads=feed.threads,
        rounds=feed.rounds, last_round=feed.last_round,
        coordinator=feeder.Coordinator(),
    )  # fmt: skip
    factory = FeedFactory(NAME, coordinator, None, feed.queues, feed.replicas)
    factory.make(None)  # From here on it gives the same settings each time.
    return factory


def factory_of(feed: Feed) -> FeedFactory:
    """A factory of the feed, as a new server makes it."""
    return copy.copy(_template(feed))


class Slots(ArenaSlots):
    """The real slots. Where the enqueuer would wait it is told to, and is told when to go on."""

    def __init__(self, server: ServerProcess, factory: FeedFactory) -> None:
        num = len(factory.config.devices)
        super().__init__(num, server.num_slots, replicas=factory.replicas)
        self.server = server
        self.waiter: Callable[[], None] | None = None

    def must_wait(self, device: int, go_on: Callable[[], None]) -> bool:
        """What `wait_for_slot` does, but for the waiting."""
        pool, num_bytes = self._pools[device], self._known[2].num_bytes
        with self._freed:
            if self._closed or not pool.is_exhausted(num_bytes):
                return False
            self._waiting, self.waiter = device, go_on
            return True

    def _wake(self) -> None:
        super()._wake()
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter()


class Queue:
    """Stands for the queue between fetchers and enqueuer."""

    def __init__(self) -> None:
        self.row_bytes: int | None = None
        self.closed = False

    def run_steps(self, steps: Generator[float, None, Any]) -> Any:
        try:
            while True:
                next(steps)
        except StopIteration as end:
            return end.value

    def wait_for(self, is_there: Callable[[], bool], seconds: float) -> bool:
        return is_there()

    def tell(self) -> None:
        pass

    def count(self, rows: int, num_bytes: int, kept: int = 0) -> None:
        pass

    def queue(self, device: int, num: int) -> None:
        pass

    def hand_out(self, device: int, held: Held) -> None:
        pass


class Pipeline:
    """Makes the batches of a stream, a few calls in each event."""

    def __init__(
        self, spec: StreamSpec, run: RunSpec, name: str, queues: Sequence[DeviceQueue],
        slots: Slots, *, encode: Callable[[Cut], bytes], resume: Resume | None,
        stats: StreamStats, turns: Turns | None = None,
    ) -> None:  # fmt: skip
        turns = turns or Turns(0 if resume is None else resume.cut.step)
        self._spec, self._slots = spec, slots
        self._partitions = partitions = Partitions(num_partitions=1, pure=True, arrival=False)
        self._begin = begin = StreamStart(spec, run, partitions, resume, stats.fetch)
        axes = None if run.writable else spec.axes
        frame = Frame(partitions, encode, spec.epochs, axes, turns.dealing)
        self.schema = Schema(spec.names, spec.axes, known=begin.columns)
        self.queue: Any = Queue()
        self._assembler = Assembler(
            spec, frame, self.schema, slots, num_devices=len(queues), epoch=begin.epoch,
            index=begin.index, step=begin.step, turns=turns, expected=begin.expected,
        )  # fmt: skip
        self._part = run.part and PartCalls(spec, run, turns, begin.epoch, begin.index)
        self._router = RoundRobinRouter(
            queues, self.queue, self._assembler, spec, run, made=stats.made, report=None,
            slots=slots,
        )  # fmt: skip
        self._server = slots.server
        self.name = f"{self._server.name} run {self._server.next_run()}"
        self._draws = World.current.draws(self.name)
        self._work = self._make()
        self._is_over = False

    def start(self) -> None:
        self._soon()

    def close(self) -> None:
        self.queue.closed = True

    def join(self, deadline_s: float) -> None:
        self._is_over = True
        self._work.close()

    def forget(self) -> None:
        self._router.forget()

    def _soon(self) -> None:
        seconds = self._server.plan.make_s * self._draws.random()
        World.current.after(seconds, self._server.turn_of, self._turn)

    def _turn(self) -> None:
        """One event of the enqueuer: what `run_enqueuer` does."""
        if self._is_over:
            return
        try:
            device = next(self._work)
        except (ClosedError, StopIteration):
            self._is_over = True
            return
        except FeedError as error:
            self._is_over = True
            self._fail(error)
            return
        if device == WAITS:
            return  # It goes on when chunks come.
        if device is None or not self._slots.must_wait(device, self._soon):
            self._soon()

    def _fail(self, error: FeedError) -> None:
        try:
            self._router.fail(error)
        except ClosedError:
            return

    def _make(self) -> Generator[int | None, None, None]:
        """What `Enqueuer.run` does; gives the device for whose slots it waits, or None."""
        spec, assembler, router = self._spec, self._assembler, self._router
        self._begin.call_apart(self.queue)
        leftover = self._begin.leftover_chunks(self.schema, self.queue)
        if leftover is not None:
            yield from self._take(leftover)
        position = self._begin.position
        while spec.epochs is None or position.epoch < spec.epochs:
            if self.queue.closed:
                raise ClosedError("the feed is stopped")
            chunks: list[Any] = []
            position, stop = self._pass_by(position)
            first, ended = position.calls[0], False
            failed: FeedError | None = None
            for index in range(first, int(min(stop, first + self._draws.randint(1, 4)))):
                try:
                    chunks.append(spec.fetch(Call(index, position.epoch, 0, spec.rows_asked, 0)))
                except StopIteration:
                    ended = True
                    break
                except Exception as error:
                    failed = FetchError(
                        f"worker 0, call {index}: {told_of(error)}", worker_id=0, call=index
                    )
                    failed.__cause__ = error
                    break
            if chunks:
                arranged = self.schema.arrange(chunks)
                span = Span(position, (0,), (first,), arranged.rows, (None,))
                num = len(arranged.rows)
                yield from self._take(MergedChunks(span, arranged.columns, arranged.rows))
                position = span.position(num)
            if failed is not None:
                raise failed
            if ended:
                position = self._partitions.next_epoch(position)
                self._end_epoch(position)
            router.flush()
            yield None
        router.finish(assembler.start_of(position))

    def _pass_by(self, position: Position) -> tuple[Position, float]:
        """Where the next call is that is made here, and the first after it that is not."""
        if self._part is None:
            return position, math.inf
        self._part.go_to(position.epoch)
        call = position.calls[0]
        first, stop = self._part.block(call)
        if first > call:
            self._router.pass_by(self._part.batch(first) - self._part.batch(call))
        return position._replace(calls=(first,)), stop

    def _end_epoch(self, position: Position) -> None:
        """An epoch has ended; `position` begins the next one."""
        assembler, router = self._assembler, self._router
        for batch in assembler.end_epoch(position):
            router.route(batch)
        if assembler.ends_round(position.epoch):
            router.end_epoch(assembler.start_of(position))
            assembler.begin_round()

    def _take(self, merged: MergedChunks) -> Generator[int, None, None]:
        columns = self.schema.columns
        if self.queue.row_bytes is None and columns is not None:
            self.queue.row_bytes = sum(column.row_bytes for column in columns)
        for batch in self._assembler.add(merged):
            if batch is None:
                self._router.flush()
                yield self._assembler.device
            else:
                self._router.route(batch)


def content(batch: Batch) -> bytes:
    """The real rows of a batch."""
    return bytes(batch.arrays()[0][: batch.rows].tobytes())
