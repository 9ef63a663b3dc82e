"""A feed as it is served: its stream, stopped and begun again at another place when it has to."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from feeder.checkpoint.resuming import find_position
from feeder.checkpoint.store import CheckpointStore
from feeder.config import FeedConfig
from feeder.errors import ConfigError, FeedError, RemoteError, ResumeError, StuckWorkerError
from feeder.feeds.coordinator import Coordinator
from feeder.service.faults import point
from feeder.service.memory.arena import ArenaSlots, slot_of
from feeder.service.protocol.fields import HEADER_BYTES, MAX_ITEMS, MAX_NAME
from feeder.service.ratelimited_log import RateLimitedLog
from feeder.service.server.stats import FeedStats
from feeder.state.positions import Positions
from feeder.state.snapshot import Snapshot, StreamState
from feeder.state.statedict import unpack_position
from feeder.workers.errors import ClosedError, in_words
from feeder.workers.fetch.scheduler import Held
from feeder.workers.pipeline import Pipeline
from feeder.workers.stats import Stopwatch, StreamStats, num_partitions
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import Cut, LazyPosition, Partitions
from feeder.workers.stream.resuming import Resume

# ---- How a served feed is made again when it has to go back: from its factory, or in place.


class FeedFactory:
    """Makes the settings of one feed, with a fetch function that nobody has called yet.

    Given a factory it calls that each time; given a coordinator it has but one fetch function,
    which can be used again where it can be put back: `fetch(call)`, or one with cursor and seek.
    """

    def __init__(
        self,
        name: str,
        coordinator: Coordinator,
        factory: Callable[[], Any] | None,
        queues: int | None,
    ) -> None:
        self.name = name
        self._factory = factory
        self._queues = queues
        self._next: Coordinator | None = coordinator
        self.positions = Positions(self._config(coordinator), 0)
        """What the feed's positions mean."""
        self.origin: Resume | None = None
        """Where consumers begin that come without a position; None for the feed's beginning."""
        _check_names(name, self.config.stream.names)
        if len(self.config.devices) > MAX_ITEMS:
            raise ConfigError(
                f"feed {name!r} has {len(self.config.devices)} queues, expected at most {MAX_ITEMS}"
            )
        if self.config.stream.order == "arrival" and len(self.config.devices) > 1:
            raise ConfigError(
                f"feed {name!r} has order='arrival' and {len(self.config.devices)} queues: what "
                "each is dealt could not be repeated; serve it with one queue"
            )
        if coordinator[name].streams[0].started:
            self._take_over(coordinator)

    def _take_over(self, coordinator: Coordinator) -> None:
        """The feed runs already: end that, and serve it from where its user stands."""
        stream, spec = coordinator[self.name].streams[0], self.config.stream
        if not (spec.pure or spec.seekable):
            raise ConfigError(
                f"feed {self.name!r} is started already, and its fetch function cannot be put "
                "back; serve it before it is started, or serve a factory"
            )
        position = Snapshot((stream.state(with_rows=True),))
        if not coordinator.stop(self.name):
            raise ConfigError(f"feed {self.name!r} is started already, and does not stop")
        self._next = None
        self.begin_at(position)

    @property
    def config(self) -> FeedConfig:
        """The feed's settings."""
        return self.positions.config

    @property
    def goes_back(self) -> bool:
        """Whether the feed can be made again."""
        stream = self.config.stream
        return self._factory is not None or stream.pure or stream.seekable

    def _config(self, coordinator: Coordinator) -> FeedConfig:
        streams = coordinator[self.name].streams
        if len(streams) != 1:
            raise ConfigError(
                f"feed {self.name!r} was made by {len(streams)} calls, one per device; a served "
                "feed is one stream, dealt out: make it with devices=N, or serve it with queues=N"
            )
        config = streams[0].config
        num = len(config.devices) if self._queues is None else self._queues
        return replace(config, devices=tuple(f"queue:{i}" for i in range(num)))

    def begin_at(self, position: Snapshot | bytes) -> None:
        """Let consumers that come without a position begin there. Raises `ResumeError`."""
        origin = self.positions.find_in(position)
        self.positions.check_round(origin.cut)
        self.origin = origin

    def find(self, token: bytes | None, *, rejoins: bool) -> Resume | None:
        """Where a consumer begins that comes with a position, or without one. Raises
        `ResumeError`.

        The stored place is where all begin together. One that comes back alone without a position
        was lost before it had saved any: its model has seen nothing, and it begins at the start.
        """
        if token is None:
            return None if rejoins else self.origin
        return self.positions.find_in(unpack_position(token, most_header_bytes=HEADER_BYTES))

    def start_state(self) -> StreamState:
        """Where such consumers begin, with the leftover rows where they are known."""
        return self.state(self.origin)

    def state(self, resume: Resume | None, *, with_rows: bool = True) -> StreamState:
        """A position that a consumer came with, or the start of the feed's stream."""
        at = resume or Resume(cut=self.start_cut(), rows=(), columns=None)
        return self.positions.state(at.cut, at.rows, at.columns, with_rows=with_rows)

    def start_cut(self) -> Cut:
        """The start of the feed's stream."""
        stream = self.config.stream
        arrival = stream.order == "arrival"
        partitions = Partitions(
            num_partitions=stream.num_workers, pure=stream.pure, arrival=arrival
        )
        return Cut(
            epoch=0, index=0, step=0, finished=False, position=partitions.origin(), leftover=None,
            encode=self.positions.id.encode,
        )  # fmt: skip

    def token(self, resume: Resume | None) -> bytes:
        """The same as it is told: a snapshot where leftover rows go with it."""
        state = self.state(resume, with_rows=False)
        return state.token if state.rows is None else bytes(Snapshot((state,)))

    def make(self, resume: Resume | None) -> FeedConfig:
        """The settings, with a fetch function that stands where `resume` needs it. Raises
        `ResumeError` where there is none, and what the factory or `init_fun` raises."""
        coordinator, self._next = self._next, None
        if coordinator is None and self._factory is not None:
            coordinator = make_coordinator(self._factory)
        if coordinator is None:
            if not self.goes_back:
                raise ResumeError(
                    f"feed {self.name!r} has to go back, and its fetch function can only be put "
                    "back by a new one: serve a factory (MODULE:FUNCTION) instead of a "
                    "coordinator, give the function cursor(worker_id) and seek(worker_id, "
                    "cursor), or use fetch(call)"
                )
            return self.config
        try:
            config = self._config(coordinator)
            if config.init_fun is not None:
                config.init_fun(coordinator[self.name], coordinator)
        except BaseException:
            # Nobody has called the function: the next consumer may have more luck.
            self._next = coordinator
            raise
        return config


def _check_names(feed: str, columns: Sequence[str]) -> None:
    """Whether consumers can be told of them. Raises `ConfigError`."""
    if len(columns) > MAX_ITEMS:
        raise ConfigError(
            f"feed {feed!r} has {len(columns)} columns, expected at most {MAX_ITEMS}; a served "
            "batch holds no more: stack them"
        )
    for kind, name in [("feed", feed), *(("column", column) for column in columns)]:
        # Surrogates stand for what is no text, as in names of files.
        if len(name) > MAX_NAME or name != name.encode(errors="ignore").decode():
            raise ConfigError(
                f"{kind} name {name[:50]!r} has {len(name)} characters, expected at most "
                f"{MAX_NAME}, all of which UTF-8 has; what is served is told of by name"
            )


def make_recipes(
    coordinator: Coordinator, factory: Callable[[], Any] | None, queues: int | None
) -> list[FeedFactory]:
    """A recipe for each feed of a coordinator. Raises `ConfigError`."""
    names = list(coordinator)
    if not names:
        raise ConfigError("the coordinator has no feed to serve; add one first")
    return [FeedFactory(name, coordinator, factory, queues) for name in names]


def begin_at(recipes: list[FeedFactory], resume: Any, store: CheckpointStore | None) -> None:
    """Let consumers that come without a position begin at the one that `resume` means. Raises
    `ResumeError` where it does not fit, and `CheckpointError`."""
    found = find_position(resume, store)
    if found.position is not None:
        with found.named():
            for recipe in recipes:
                recipe.begin_at(found.position)


def make_coordinator(factory: Callable[[], Any]) -> Coordinator:
    """What a factory makes; raises `ConfigError` where that is no coordinator."""
    made = factory()
    if not isinstance(made, Coordinator):
        raise ConfigError(
            f"{getattr(factory, '__name__', factory)!r} returned {type(made).__name__}, expected "
            "a Coordinator, as init_data_input_workers returns it"
        )
    return made


# ---- The device queue of a served feed: batches on their way from the enqueuer to the I/O thread.


Look = Callable[[list[Batch]], None]
"""Sees batches before they are queued; what it raises ends the run."""


class Outbox:
    """Batches of one queue that are not sent yet. Slots bound their number: it never waits.

    `put` and `finish` are the enqueuer's; `take`, `ending` and `starve` the I/O thread's; `close`
    anybody's.
    """

    def __init__(
        self,
        first_step: float,
        look: Look,
        discard: Callable[[Batch], None],
        starved: Stopwatch,
    ) -> None:
        self._first_step = first_step
        self._look = look
        self._discard = discard
        self._batches: deque[Batch] = deque()
        self._ending: LazyPosition | FeedError | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to send."""
        self._starved = starved
        self.is_urgent = True
        """Whether to wake the I/O thread for a batch: not while the consumer has enough, since it
        says what it has used before that runs out."""

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def waited_since(self) -> float | None:
        """Since when the consumer has used all that it was sent; None while it has not."""
        return self._starved.since

    def put(self, batches: list[Batch]) -> None:
        """Add batches in order; those that the consumer has had before are discarded. Raises
        `ClosedError` where the queue is closed, and what `look` raises, which sees all."""
        self._look(batches)
        wanted = batches
        if batches[0].step < self._first_step:
            wanted = [batch for batch in batches if batch.step >= self._first_step]
            for batch in batches[: len(batches) - len(wanted)]:
                self._discard(batch)
        with self._lock:
            if self._closed:
                raise ClosedError("the feed is stopped")
            point("server.put")
            self._batches.extend(wanted)
            if wanted:
                self._starved.stop(time.monotonic())
        if self.is_urgent:
            self.wake()

    def yield_to_user(self) -> None:
        """Nothing: the user is another process."""

    def finish(self, ending: LazyPosition | FeedError) -> None:
        """After the batches put so far comes the end of the stream, or an error."""
        with self._lock:
            if self._ending is None:
                self._ending = ending
            if not self._closed:
                self._starved.stop(time.monotonic())
        self.wake()

    def take(self, most: int) -> list[Batch]:
        """The next batches, at most so many; perhaps none."""
        with self._lock:
            batches = self._batches
            return [batches.popleft() for _ in range(min(most, len(batches)))]

    @property
    def first_bytes(self) -> int:
        """Bytes of the first batch that is here."""
        return self._batches[0].held_bytes

    @property
    def result(self) -> LazyPosition | FeedError | None:
        """What will come after all batches; None while that is not known."""
        return self._ending

    @property
    def ending(self) -> LazyPosition | FeedError | None:
        """What comes after all batches; None while there are batches, or more may come, and where
        it is closed: batches that were dropped are still to come, from another run."""
        with self._lock:
            return None if self._batches or self._closed else self._ending

    def starve(self) -> None:
        """The consumer has used all that it was sent."""
        with self._lock:
            if not self._batches and self._ending is None and self.waited_since is None:
                self._starved.start(time.monotonic())

    def close(self) -> None:
        """Take no more batches, and drop those that are here."""
        with self._lock:
            self._closed = True
            self._batches.clear()


logger = logging.getLogger("feeder")

_JOIN_S, _CLOSE_S = 60.0, 3.5
# A feed is begun again at most so often in a row, then once per interval.
_REWINDS = 8
_REWIND_INTERVAL_S = 0.5


class StreamIncarnation:
    """The stream of a feed from one place on."""

    def __init__(self, pipeline: Pipeline, outboxes: list[Outbox]) -> None:
        self.pipeline = pipeline
        self.outboxes = outboxes
        """One for each queue."""

    @property
    def failure(self) -> FeedError | None:
        """The error that it ended with; None while there is none."""
        result = self.outboxes[0].result  # All are told, this one first.
        return result if isinstance(result, FeedError) else None

    def close(self) -> None:
        """Wake everything that waits, so that it ends."""
        self.pipeline.close()
        for outbox in self.outboxes:
            outbox.close()

    def join(self, deadline_s: float) -> None:
        """Wait for the threads, and let go of the slots: what waits for the garbage collector
        must not keep arenas. Raises `StuckWorkerError`."""
        self.pipeline.join(deadline_s)
        self.pipeline.forget()


class ServedFeed:
    """One feed: the I/O thread asks for runs, and a thread of the feed's own makes them, because
    stopping and making one takes as long as the user's functions take.

    `begin` and `halt` are the I/O thread's, `run_maker` is the body of the feed's own thread.
    """

    def __init__(self, recipe: FeedFactory, slots: ArenaSlots, wake: Callable[[], None]) -> None:
        self.recipe = recipe
        self.slots = slots
        slots.on_spare = self._let_go
        self._wake = wake
        self._asked: tuple[Resume | None, list[float], Look] | None = None
        self._closed = self._has_spare = False
        self._changed = threading.Condition()
        self._old: StreamIncarnation | None = None
        # Counts what was asked: what is made for an older wish is thrown away.
        self._number = 0
        self._tokens, self._refilled_at = float(_REWINDS), time.monotonic()
        self._log = RateLimitedLog()
        config = recipe.config
        self.counted = StreamStats.of(config.stream, config.run, len(config.devices))
        """What its streams have done, one after the other."""
        self.account = FeedStats(len(config.devices))
        """What is counted of its consumers."""
        self.started_at: float | None = None
        """When it was first begun."""
        self.run: StreamIncarnation | None = None
        """The run that batches are taken from; None while there is none."""
        self.failure: FeedError | None = None
        """Why there is no run, where making one failed."""
        self.told: FeedError | None = None
        """The error that consumers were sent last, since the feed was last begun."""
        self.stuck: StuckWorkerError | None = None
        """The fetch function that did not return when a run was stopped."""

    @property
    def ended_with(self) -> FeedError | None:
        """The error that its run ended with, or that none could be made for; None without one."""
        run = self.run
        return self.failure if run is None else run.failure

    @property
    def name(self) -> str:
        """The feed's name."""
        return self.recipe.name

    def begin(self, resume: Resume | None, first_steps: list[float], look: Look) -> None:
        """Go on at another place; of each queue the batches before its first step are discarded.
        `look` sees all first, in order."""
        self.halt()
        self.account.begun += 1
        self.started_at = self.started_at or time.monotonic()
        with self._changed:
            if not self._closed:
                self._asked = (resume, first_steps, look)
            self._changed.notify_all()

    def halt(self) -> None:
        """Stop the run, if there is one, or if one is being made."""
        with self._changed:
            self._number += 1
            run, self.run, self._asked = self.run, None, None
            self.failure = self.told = None
            if run is not None:
                self._old = run
            self._changed.notify_all()
        if run is not None:
            run.close()
            self.slots.close()

    def make_use_of_room(self) -> None:
        """Wake the enqueuer where it waits for slots, and those that consumers gave back are worth
        it, or a consumer has nothing to come."""
        run = self.run
        self.slots.wake(hungry=run is None or not all(map(len, run.outboxes)))

    def close(self) -> None:
        """No more runs."""
        with self._changed:
            self._closed = True
            self.halt()

    def _let_go(self) -> None:
        with self._changed:
            self._has_spare = True
            self._changed.notify_all()

    def run_maker(self) -> None:
        """Thread body: make the runs that are asked for, and give back memory that was not."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._asked is not None or self._closed or self._has_spare
                )
                old, self._old = self._old, None
                asked, self._asked = self._asked, None
                number, is_over = self._number, self._closed
            try:
                if old is not None:
                    old.join(_CLOSE_S if self._closed else _JOIN_S)
                if asked is not None:
                    if self._may_rewind(number):
                        self._make(number, *asked)
                elif is_over:
                    self.slots.drop()
                    return
                else:
                    self._has_spare = False
                    self.slots.let_go()
            except StuckWorkerError as error:
                self.stuck = error
                if self._closed:
                    logger.error("%s", str(error))  # not what its traceback holds
                    self.slots.forget()
                    return
                self._fail(number, error)
            except FeedError as error:
                self._fail(number, error)
            except Exception as error:
                failed = RemoteError(f"feed {self.name!r} could not be made: {in_words(error)}")
                failed.__cause__ = error
                self._fail(number, failed)

    def _may_rewind(self, number: int) -> bool:
        """Wait until the feed may be begun again; False where that is wanted no more, which costs
        nothing: who comes after those that came and went too often waits for one interval."""
        with self._changed:
            while number == self._number:
                now = time.monotonic()
                passed, self._refilled_at = now - self._refilled_at, now
                self._tokens = min(_REWINDS, self._tokens + passed / _REWIND_INTERVAL_S)
                if self._tokens >= 1.0:
                    self._tokens -= 1.0
                    return True
                self._log.warn("feed %r is begun again too often; it waits", self.name)
                wait_s = (1.0 - self._tokens) * _REWIND_INTERVAL_S
                self._changed.wait_for(lambda: number != self._number, wait_s)
            return False

    def _fail(self, number: int, error: FeedError) -> None:
        with self._changed:
            if number == self._number:
                self.failure = error
        self._wake()

    def _make(
        self, number: int, resume: Resume | None, first_steps: list[float], look: Look
    ) -> None:
        point("server.rewind")
        config = self.recipe.make(resume)
        # A fetch function that was called before goes back to the start as well.
        resume = resume or Resume(cut=self.recipe.start_cut())

        def discard(queue: int, batch: Batch) -> None:
            self.slots.free(queue, slot_of(batch))
            held = Held(1, batch.rows, batch.held_bytes, batch.kept_rows)
            pipeline.channel.hand_out(queue, held)

        outboxes = [
            Outbox(step, look, partial(discard, queue), self.account.queues[queue].starved)
            for queue, step in enumerate(first_steps)
        ]
        if len(self.counted.partitions) != num_partitions(config.stream, config.run):
            # A factory may give another number of threads each time.
            self.counted = StreamStats.of(config.stream, config.run, len(outboxes))
        self.slots.reopen()
        pipeline = Pipeline(
            config.stream, config.run, self.name, outboxes, self.slots,
            encode=self.recipe.positions.id.encode, resume=resume, stats=self.counted,
        )  # fmt: skip
        run = StreamIncarnation(pipeline, outboxes)
        for outbox in outboxes:
            outbox.wake = self._wake
        try:
            pipeline.start()
        except BaseException:  # as where the system has no more threads
            self._drop(run)
            raise
        point("server.started")
        with self._changed:
            is_wanted = number == self._number
            if is_wanted:
                self.run = run
        if not is_wanted:
            self._drop(run)
        self._wake()

    def _drop(self, run: StreamIncarnation) -> None:
        """End a run that nobody has had; it is waited for like one that was halted."""
        with self._changed:
            self._old = run
        run.close()
        self.slots.close()
