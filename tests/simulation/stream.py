"""The feed of a world: the real assembler over a small pure function, driven one turn at a time.

`Pipeline` stands for `feeder.workers.pipeline.Pipeline`, whose threads fetch and merge. Here one
event makes the batches of a few calls. Slots are the real ones, in real shared memory.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import feeder
from feeder.service.memory.arena import ArenaSlots
from feeder.service.server.factory import FeedFactory
from feeder.state.positions import Positions
from feeder.workers.enqueuer import DeviceQueue, RoundRobinRouter
from feeder.workers.errors import ClosedError, FeedError, FetchError
from feeder.workers.fetch.bound import Held
from feeder.workers.fetch.calls import told_of
from feeder.workers.fetch.resuming import Resume, StreamStart
from feeder.workers.stats import StreamStats
from feeder.workers.stream.assembler import Assembler
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import Schema
from feeder.workers.stream.merge import MergedChunks
from feeder.workers.stream.parts import PartCalls
from feeder.workers.stream.position import Cut, Frame, Partitions, Position, Span
from feeder.workers.stream.rounds import Turns
from feeder.workers.stream.spec import RunSpec, StreamSpec
from simulation.sources import NAME, Edit, coordinator_of, edited, rows_in
from simulation.world import World

if TYPE_CHECKING:
    from simulation.server import ServerProcess

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
    weights: tuple[int, ...] = ()
    """Of the sources that it mixes; nothing: a fetch function makes its calls."""
    skips: bool = False
    """Whether its one source passes over records that cannot be read."""
    retries: int = 0
    edits: tuple[Edit, ...] = ()
    """Those of the run; a server is begun without them."""

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
    numbers: list[list[float]]
    """The numbers of each queue's batches."""
    filling: dict[float, int]
    """Of those without rows, which fill up a round, what they say is their number."""
    end: int
    """The number after all."""


class Deal(NamedTuple):
    """How the batches of a feed are dealt to its queues, as a naive loop does it."""

    feed: Feed
    begins: int = 0
    """The number of a batch with which a round begins: the dealing to so many queues began there.
    """

    @property
    def end(self) -> int:
        """The number after all batches, also those that fill up the last round."""
        return dealt(self).end

    def says(self, number: float) -> int:
        """What a batch of this number says is its number."""
        return dealt(self).filling.get(number, number)  # type: ignore[arg-type]

    def first(self, step: float, queue: int) -> Any:
        """The number of a queue's first batch at or after a step; where none is left, the end."""
        numbers = dealt(self).numbers[queue]
        return self._find(numbers, bisect_left(numbers, step))

    def round_of(self, step: float) -> int:
        """The round of a batch; the number of rounds where the stream has ended before it."""
        starts = dealt(self).starts
        if step >= self.end:
            return len(starts)
        return bisect_right(starts, step) - 1

    def start_of(self, at_round: int) -> int:
        """The number of the first batch of a round, or the end where it is behind the last."""
        return self._find(dealt(self).starts, at_round)

    def next_round(self, step: int) -> int:
        """The number of the first batch of the next round; a step that begins one stays."""
        starts = dealt(self).starts
        return self._find(starts, bisect_left(starts, step))

    def _find(self, numbers: list[Any], at: int) -> Any:
        return numbers[at] if at < len(numbers) else self.end

    @property
    def num_rounds(self) -> int:
        """Rounds from where it began to the end of the stream, the last one perhaps incomplete."""
        return len(dealt(self).starts)


@lru_cache(4096)
def dealt(deal: Deal) -> Dealt:
    """What a naive loop deals out."""
    feed, at = deal.feed, deal.begins
    num = feed.num_batches
    found = Dealt([], [[] for _ in range(feed.queues)], {}, num)
    while at < feed.num_batches:
        stop = min(at + feed.queues, feed.num_batches)
        if feed.rounds == "epoch":
            stop = min(stop, (at // feed.batches_per_epoch + 1) * feed.batches_per_epoch)
        found.starts.append(at)
        if feed.last_round != "drop" or stop - at == feed.queues:
            for queue, number in enumerate(range(at, stop)):
                found.numbers[queue].append(number)
        for queue in range(stop - at, feed.queues) if feed.last_round == "pad" else ():
            says = at + queue
            # Before the number of the next epoch's first batch, which it may say, too.
            number = says if feed.rounds == "stream" else stop - 1 + queue / feed.queues
            found.numbers[queue].append(number)
            found.filling[number] = says
        at = stop
    last = [math.floor(one[-1]) for one in found.numbers if one]
    return found._replace(end=max([num, *(number + 1 for number in last)]))


@lru_cache(4096)
def rows_of(feed: Feed) -> list[bytes]:
    """The rows of each batch of the stream, as a naive loop makes them."""
    if feed.edits:
        return edited(feed)
    batches: list[bytes] = []
    for epoch in range(feed.epochs):
        rows = _rows(feed, epoch)
        size = feed.batch_size
        parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        if feed.last_batch == "drop" and len(parts[-1]) < size:
            parts.pop()
        batches += [part.tobytes() for part in parts]
    return batches


def _rows(feed: Feed, epoch: int) -> Any:
    if feed.weights:
        return rows_in(feed, epoch)
    return np.concatenate([_chunk(feed, epoch, index) for index in range(feed.calls)])


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
    if feed.weights:
        coordinator = coordinator_of(feed)
    else:
        coordinator = feeder.init_data_input_workers(
            ["x"], calls_of(feed), feed.batch_size, 1, NAME, devices=feed.queues,
            epochs=feed.epochs, last_batch=feed.last_batch, writable=feed.writable,
            num_threads=feed.threads, rounds=feed.rounds, last_round=feed.last_round,
            coordinator=feeder.Coordinator(),
        )  # fmt: skip
    factory = FeedFactory(NAME, coordinator, None, feed.queues, feed.replicas)
    factory.make(None)  # From here on it gives the same settings each time.
    return factory


def positions_of(feed: Feed) -> Positions:
    """What the positions of a feed mean, as long as it is not edited."""
    return _template(feed._replace(edits=())).positions


def factory_of(feed: Feed) -> FeedFactory:
    """A factory of the feed, as a new server makes it: without edits."""
    feed = feed._replace(edits=())
    if feed.skips:
        # What a source has passed over is of one process: each server has a source of its own.
        make = partial(coordinator_of, feed)
        return FeedFactory(NAME, make(), make, feed.queues, feed.replicas)
    made = copy.copy(_template(feed))
    made._former = []
    return made


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
        self._spec, self._run, self._slots = spec, run, slots
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
                    chunks.append(self._fetch(Call(index, position.epoch, 0, spec.rows_asked, 0)))
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
                yield from self._end_epoch(position)
            router.flush()
            yield None
        yield from self._room_for_filling()
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

    def _room_for_filling(self) -> Generator[int, None, None]:
        """Wait until there are slots for all batches that may fill up the round at hand: the real
        enqueuer waits while it fills it up."""
        self._router.flush()
        if self._spec.last_round == "pad" and self._router._last is not None:
            for device in range(self._assembler.device, len(self._router._queues)):
                while self._slots.must_wait(device, self._soon):
                    yield WAITS

    def _fetch(self, call: Call) -> Any:
        """Make a call, and make it again as often as the feed says."""
        for left in range(self._run.retries, -1, -1):
            try:
                World.current.breaks(call.epoch, call.index)
                return self._spec.fetch(call)
            except OSError:
                if not left:
                    raise
        raise AssertionError

    def _end_epoch(self, position: Position) -> Generator[int, None, None]:
        """An epoch has ended; `position` begins the next one."""
        assembler, router = self._assembler, self._router
        for batch in assembler.end_epoch(position):
            router.route(batch)
        if assembler.ends_round(position.epoch):
            yield from self._room_for_filling()
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
