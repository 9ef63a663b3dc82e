"""A served feed: how its stream is made, stopped, and made again at another position.

`StreamIncarnation` is one stream from one position on, with an outbox for each seat. `ServedFeed`
ends one incarnation and makes the next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

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


class StreamIncarnation:
    """The stream of a feed from one position on, with an outbox for each seat. Immutable."""

    def __init__(self, pipeline: Pipeline, queues: Sequence[FanOut]) -> None:
        self.pipeline = pipeline
        self.queues = queues
        self.outboxes = [outbox for queue in queues for outbox in queue.outboxes]
        """One for each seat."""
        for number, queue in enumerate(queues):
            queue.count_out = partial(pipeline.queue.hand_out, number)

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
    `_asked`, `_number`, `_old`, `_closed`, `_has_spare`, `run` and `failure`. The I/O thread reads
    `run` and `failure` without it: both are replaced as a whole.
    """

    def __init__(self, factory: FeedFactory, slots: ArenaSlots, wake: Callable[[], None]) -> None:
        self.factory = factory
        self.slots = slots
        slots.on_spare = self._let_go
        self._wake = wake
        self._asked: tuple[Resume | None, list[float], CheckBatches, Counting] | None = None
        self._closed = self._has_spare = False
        self._changed = threading.Condition()
        # A run that was told to end and is still to be joined.
        self._old: StreamIncarnation | None = None
        # Counts the requests: a run that was made for an older one is thrown away.
        self._number = 0
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
        """Why there is no run, where making one failed."""
        self.reported: FeedError | None = None
        """The error that consumers were last sent, since the feed was last begun."""
        self.stuck: StuckWorkerError | None = None
        """Set where a fetch function did not return when a run was stopped."""

    @property
    def ended_with(self) -> FeedError | None:
        """The error that its run ended with, or for which none could be made; None without one."""
        run = self.run
        return self.failure if run is None else run.failure

    @property
    def name(self) -> str:
        """The feed's name."""
        return self.factory.name

    def start_run(
        self, resume: Resume | None, first_steps: list[float], check: CheckBatches,
        counting: Counting | None = None,
    ) -> None:  # fmt: skip
        """Ask for a run from another position on, which deals as `counting` says; of each seat the
        batches before its first number are discarded. `check` is called with all batches, in order,
        before anything else."""
        self.stop_run()
        self.stats.begun += 1
        self.started_at = self.started_at or time.monotonic()
        with self._changed:
            if not self._closed:
                self._asked = resume, first_steps, check, counting or self.factory.counting
            self._changed.notify_all()

    def stop_run(self) -> None:
        """Stop the run, if there is one, or if one is being made."""
        with self._changed:
            self._number += 1
            run, self.run, self._asked = self.run, None, None
            self.failure = self.reported = None
            if run is not None:
                self._old = run
            self._changed.notify_all()
        # Outside the condition: these take the locks of the stream and of the slots.
        if run is not None:
            run.close()
            self.slots.close()

    def make_use_of_room(self) -> None:
        """Wake the enqueuer where it waits for slots, if consumers have given enough back, or if
        one of them has nothing to come."""
        run = self.run
        self.slots.wake(hungry=run is None or not all(map(len, run.outboxes)))

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
            number, is_over = self._number, self._closed
        try:
            # First: two runs at once would call one fetch function twice at a time.
            if old is not None:
                old.join(_CLOSE_S if self._closed else _JOIN_S)
            if asked is not None:
                if self._may_rewind(number):
                    self._make(number, *asked)
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
            self._fail(number, error)
        except FeedError as error:
            self._fail(number, error)
        except Exception as error:
            failed = RemoteError(f"feed {self.name!r} could not be made: {in_words(error)}")
            failed.__cause__ = error
            self._fail(number, failed)
        return False

    def _may_rewind(self, number: int) -> bool:
        """Wait until the bucket allows another run; False where this one is wanted no more.

        A request that was overtaken takes no token. So a consumer that comes after many that came
        and went within a moment waits for one interval, and pays no debt of theirs.
        """
        with self._changed:
            while number == self._number:
                wait_s = self.rewinds_in(time.monotonic())
                if not wait_s:
                    self._tokens -= 1.0
                    return True
                self._log.warn("feed %r is begun again too often; it waits", self.name)
                self._changed.wait_for(lambda: number != self._number, wait_s)
            return False

    def rewinds_in(self, now: float) -> float:
        """In how many seconds the bucket allows another run; 0 where it does now. The maker's."""
        passed, self._refilled_at = now - self._refilled_at, now
        self._tokens = min(_REWINDS, self._tokens + passed / _REWIND_INTERVAL_S)
        return max(0.0, (1.0 - self._tokens) * _REWIND_INTERVAL_S)

    def _fail(self, number: int, error: FeedError) -> None:
        with self._changed:
            if number == self._number:
                self.failure = error
        self._wake()

    def _make(
        self, number: int, resume: Resume | None, first_steps: list[float], check: CheckBatches,
        counting: Counting,
    ) -> None:  # fmt: skip
        point("server.rewind")
        config = self.factory.make(resume)
        # Never None: without a position a pipeline does not seek, and this function may have been
        # called before.
        resume = resume or Resume(cut=self.factory.start_cut())
        recall(config.stream.fetch, resume)

        num, replicas = len(config.devices), self.factory.replicas
        outboxes = [Outbox(stats.starved, self._wake) for stats in self.stats.queues]
        queues = [
            FanOut(
                outboxes[at : at + replicas], first_steps[at : at + replicas],
                number=counting.number, check=check, free=partial(self._free, at // replicas),
            )
            for at in range(0, len(outboxes), replicas)
        ]  # fmt: skip
        if len(self.counted.partitions) != num_partitions(config.stream, config.run):
            # A factory may give another number of threads each time, and then counters cannot go
            # on.
            self.counted = StreamStats.of(config.stream, config.run, num)
        self.slots.reopen()
        positions = self.factory.positions
        pipeline = Pipeline(
            config.stream, config.run, self.name, queues, self.slots,
            encode=positions.id.encode, resume=resume, stats=self.counted,
            turns=positions.begin_within(resume.cut, counting),
        )  # fmt: skip
        run = StreamIncarnation(pipeline, queues)
        # Threads first, `self.run` after: the I/O thread takes what it finds there as a run that
        # lives.
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

    def _free(self, queue: int, batch: Batch) -> None:
        self.slots.free(queue, slot_of(batch))

    def _drop(self, run: StreamIncarnation) -> None:
        """End a run that nobody has seen; the maker joins it like one that was stopped."""
        with self._changed:
            self._old = run
        run.close()
        self.slots.close()
