"""A served feed: how its stream is made, stopped, and made again at another position.

A feed goes back by being made anew: a `Request` says from where on, a `StreamIncarnation` is the
stream that is made for it, and `ServedFeed` ends one incarnation and makes the next. To make one
takes as long as the user's functions take, and meanwhile another one may be asked for. So there is
one request in force, and whatever was made for another is thrown away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from feeder.config import FeedConfig
from feeder.errors import FeedError, RemoteError, StuckWorkerError
from feeder.service.faults import point
from feeder.service.memory.arena import ArenaSlots, slot_of
from feeder.service.ratelimited_log import RateLimitedLog
from feeder.service.server.factory import FeedFactory
from feeder.service.server.outbox import CheckBatches, FanOut, Outbox
from feeder.service.server.stats import FeedStats
from feeder.state.positions import recall
from feeder.workers.errors import in_words
from feeder.workers.fetch.resuming import Resume
from feeder.workers.pipeline import Pipeline
from feeder.workers.stats import StreamStats, num_partitions
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.rounds import Counting

logger = logging.getLogger("feeder")

# A run can end only when the user's fetch function returns. While serving that may take its time,
# since others wait for the feed all the same; a close has 5 s in all.
_JOIN_S, _CLOSE_S = 60.0, 3.5
# A token bucket: each rewind costs calls whose batches are discarded, and any peer may cause one.
# Eight in a row are a whole node's trainers that start together; then two a second. Nobody waits
# for longer than one interval, however many came before.
_REWINDS = 8
_REWIND_INTERVAL_S = 0.5


class Request(NamedTuple):
    """What run a feed is to have. Immutable."""

    resume: Resume | None
    """The position that it begins at; None for the start of the feed."""
    first_steps: Sequence[float]
    """The number of the first batch that each seat wants; those before it are discarded."""
    check: CheckBatches
    """Is called with all batches, in order, before anything else."""
    counting: Counting
    """How it deals batches to queues."""


class StreamIncarnation:
    """The stream of a feed from one position on, with an outbox for each seat. Immutable."""

    def __init__(self, feed: ServedFeed, config: FeedConfig, request: Request) -> None:
        positions, slots, replicas = feed.factory.positions, feed.slots, feed.factory.replicas
        # Never None: without a position a pipeline does not seek, and this function may have been
        # called before.
        resume = request.resume or Resume(cut=feed.factory.start_cut())
        recall(config.stream.fetch, resume)

        def free(queue: int, batch: Batch) -> None:
            slots.free(queue, slot_of(batch))

        self.outboxes = [Outbox(stats.starved, feed.wake) for stats in feed.stats.queues]
        """One for each seat."""
        self.queues = [
            FanOut(
                self.outboxes[at : at + replicas], request.first_steps[at : at + replicas],
                number=request.counting.number, check=request.check,
                free=partial(free, at // replicas),
            )
            for at in range(0, len(self.outboxes), replicas)
        ]  # fmt: skip
        slots.reopen()
        self.pipeline = Pipeline(
            config.stream, config.run, feed.name, self.queues, slots,
            encode=positions.id.encode, resume=resume, stats=feed.counted,
            turns=positions.begin_within(resume.cut, request.counting),
        )  # fmt: skip
        for number, queue in enumerate(self.queues):
            queue.count_out = partial(self.pipeline.queue.hand_out, number)

    @property
    def failure(self) -> FeedError | None:
        """The error that it ended with; None without one."""
        result = self.outboxes[0].result  # An error goes to all outboxes, to this one first.
        return result if isinstance(result, FeedError) else None

    def close(self) -> None:
        """Tell its threads to end, and wake those that wait."""
        self.pipeline.close()
        for outbox in self.outboxes:
            outbox.close()

    def join(self, deadline_s: float) -> None:
        """Wait for the threads, then let go of the slots, so that no garbage cycle keeps an arena.
        Raises `StuckWorkerError`."""
        self.pipeline.join(deadline_s)
        self.pipeline.forget()


class ServedFeed:
    """One feed: the I/O thread asks for runs, and a thread of the feed's own, the maker, makes
    them, because to stop and to make one takes as long as the user's functions take.

    `start_run`, `stop_run` and `make_use_of_room` are the I/O thread's; `run_maker` is the body of
    the maker; `close` may be called by any thread. The condition `_changed` guards what both use:
    `_wanted`, `_asked`, `_old`, `_closed`, `_has_spare`, `run` and `failure`. The I/O thread reads
    `run` and `failure` without it: both are replaced as a whole.
    """

    def __init__(self, factory: FeedFactory, slots: ArenaSlots, wake: Callable[[], None]) -> None:
        self.factory = factory
        self.slots = slots
        slots.on_spare = self._let_go
        self.wake = wake
        """Wakes the I/O thread."""
        # The request in force, and the same as long as the maker has not taken it.
        self._wanted: Request | None = None
        self._asked: Request | None = None
        self._closed = self._has_spare = False
        self._changed = threading.Condition()
        # A run that was told to end and is still to be joined.
        self._old: StreamIncarnation | None = None
        self._tokens, self._refilled_at = float(_REWINDS), time.monotonic()
        self._log = RateLimitedLog()
        config = factory.config
        self.counted = StreamStats.of(config.stream, config.run, len(config.devices))
        """Counters of its streams, one after the other: they go on when the feed is begun again."""
        self.stats = FeedStats(factory.num_seats)
        """Counters of its consumers. (Written by the I/O thread.)"""
        self.started_at: float | None = None
        """When it was begun for the first time."""
        self.run: StreamIncarnation | None = None
        """The run whose batches are sent; None while there is none."""
        self.failure: FeedError | None = None
        """Why there is no run, if making one failed."""
        self.reported: FeedError | None = None
        """The error that consumers were last sent, since the feed was last begun."""
        self.stuck: StuckWorkerError | None = None
        """Set if a fetch function did not return when a run was stopped."""

    @property
    def ended_with(self) -> FeedError | None:
        """The error that its run ended with, or for which none could be made; None without one."""
        run = self.run
        return self.failure if run is None else run.failure

    @property
    def name(self) -> str:
        """The feed's name."""
        return self.factory.name

    def start_run(self, request: Request) -> None:
        """Ask for another run."""
        self.stop_run()
        self.stats.begun += 1
        self.started_at = self.started_at or time.monotonic()
        with self._changed:
            if not self._closed:
                self._wanted = self._asked = request
            self._changed.notify_all()

    def stop_run(self) -> None:
        """Stop the run, if there is one, or if one is being made."""
        with self._changed:
            run, self.run = self.run, None
            self._wanted = self._asked = None
            self.failure = self.reported = None
            if run is not None:
                self._old = run
            self._changed.notify_all()
        # Outside the condition: these take the locks of the stream and of the slots.
        if run is not None:
            run.close()
            self.slots.close()

    def make_use_of_room(self) -> None:
        """Wake the enqueuer, if it waits for slots and consumers have given enough back, or if
        one of them has nothing to come."""
        run, replicas, own = self.run, self.factory.replicas, self.factory.own_queues
        seats = slice(own.start * replicas, own.stop * replicas)
        self.slots.wake(hungry=run is None or not all(map(len, run.outboxes[seats])))

    def close(self) -> None:
        """Stop the run, and make no more."""
        with self._changed:
            self._closed = True
            self.stop_run()

    def _let_go(self) -> None:
        # Called under the lock of the slots, so it only notes that there is memory to give back: to
        # give 24 MiB back takes the system milliseconds.
        with self._changed:
            self._has_spare = True
            self._changed.notify_all()

    def run_maker(self) -> None:
        """Thread body: make the runs that are asked for, and give back memory that no arena
        needs."""
        is_over = False
        while not is_over:
            with self._changed:
                self._changed.wait_for(lambda: self.has_work)
            is_over = self.make_next()

    @property
    def has_work(self) -> bool:
        """Whether there is something for `make_next` to do."""
        return self._asked is not None or self._closed or self._has_spare

    def make_next(self) -> bool:
        """Do what has been asked for; returns whether no run will be made any more. The maker's."""
        with self._changed:
            old, self._old = self._old, None
            asked, self._asked = self._asked, None
            wanted, is_over = self._wanted, self._closed
        try:
            # First: two runs at once would call one fetch function twice at a time.
            if old is not None:
                old.join(_CLOSE_S if self._closed else _JOIN_S)
            if asked is not None:
                if self._may_rewind(asked):
                    self._make(asked)
            elif is_over:
                self.slots.drop()
                return True
            else:
                self._has_spare = False
                self.slots.let_go()
        except StuckWorkerError as error:
            self.stuck = error
            if self._closed:
                # As text: a record keeps what a traceback holds.
                logger.error("%s", str(error))
                # The stuck threads may still hold slots: only what nobody has is let go of.
                self.slots.forget()
                return True
            # A call that has not returned may still write to its slot.
            for queue in range(len(self.factory.config.devices)):
                self.slots.retire(queue)
            self._fail(wanted, error)
        except FeedError as error:
            self._fail(wanted, error)
        except Exception as error:
            failed = RemoteError(f"feed {self.name!r} could not be made: {in_words(error)}")
            failed.__cause__ = error
            self._fail(wanted, failed)
        return False

    def _may_rewind(self, request: Request) -> bool:
        """Wait until the bucket allows another run; False if this one is wanted no more.

        A request that was overtaken takes no token. So a consumer that comes after many that came
        and went within a moment waits for one interval, and pays no debt of theirs.
        """
        with self._changed:
            while request is self._wanted:
                wait_s = self.rewinds_in(time.monotonic())
                if not wait_s:
                    self._tokens -= 1.0
                    return True
                self._log.warn("feed %r is begun again too often; it waits", self.name)
                self._changed.wait_for(lambda: request is not self._wanted, wait_s)
            return False

    def rewinds_in(self, now: float) -> float:
        """In how many seconds the bucket allows another run; 0 if it does now. The maker's."""
        passed, self._refilled_at = now - self._refilled_at, now
        self._tokens = min(_REWINDS, self._tokens + passed / _REWIND_INTERVAL_S)
        return max(0.0, (1.0 - self._tokens) * _REWIND_INTERVAL_S)

    def _fail(self, request: Request | None, error: FeedError) -> None:
        with self._changed:
            if request is self._wanted:
                self.failure = error
        self.wake()

    def _make(self, request: Request) -> None:
        point("server.rewind")
        config = self.factory.make(request.resume)
        if len(self.counted.partitions) != num_partitions(config.stream, config.run):
            # A factory may give another number of threads each time, and then counters cannot go
            # on.
            self.counted = StreamStats.of(config.stream, config.run, len(config.devices))
        run = StreamIncarnation(self, config, request)
        # Threads first, `self.run` after: the I/O thread takes what it finds there as a run that
        # lives.
        try:
            run.pipeline.start()
        except BaseException:  # as where the system has no more threads
            self._drop(run)
            raise
        point("server.started")
        with self._changed:
            is_wanted = request is self._wanted
            if is_wanted:
                self.run = run
        if not is_wanted:
            self._drop(run)
        self.wake()

    def _drop(self, run: StreamIncarnation) -> None:
        """End a run that nobody has seen; the maker joins it like one that was stopped."""
        with self._changed:
            self._old = run
        run.close()
        self.slots.close()
