"""A feed as it is served: its stream, stopped and begun again at another place when it has to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from feeder.errors import FeedError, RemoteError, StuckWorkerError
from feeder.service.server.stats import FeedAccount
from feeder.service.memory.arena import ArenaSlots
from feeder.service.faults import point
from feeder.service.server.outbox import Look, Outbox
from feeder.service.ratelimited_log import QuietLog
from feeder.service.server.recipes import Recipe
from feeder.workers.stream.batch import Batch
from feeder.workers.errors import in_words
from feeder.workers.fetch.ledger import Held
from feeder.workers.pipeline import Pipeline
from feeder.workers.stream.resuming import Resume
from feeder.workers.stats import StreamStats, num_lanes

logger = logging.getLogger("feeder")

_JOIN_S, _CLOSE_S = 60.0, 3.5
# A feed is begun again at most so often in a row, then once per interval.
_REWINDS = 8
_REWIND_INTERVAL_S = 0.5


class Run:
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

    def __init__(self, recipe: Recipe, slots: ArenaSlots, wake: Callable[[], None]) -> None:
        self.recipe = recipe
        self.slots = slots
        slots.on_spare = self._let_go
        self._wake = wake
        self._asked: tuple[Resume | None, list[float], Look] | None = None
        self._closed = self._has_spare = False
        self._changed = threading.Condition()
        self._old: Run | None = None
        # Counts what was asked: what is made for an older wish is thrown away.
        self._number = 0
        self._tokens, self._refilled_at = float(_REWINDS), time.monotonic()
        self._log = QuietLog()
        config = recipe.config
        self.counted = StreamStats.of(config.stream, config.run, len(config.devices))
        """What its streams have done, one after the other."""
        self.account = FeedAccount(len(config.devices))
        """What is counted of its consumers."""
        self.started_at: float | None = None
        """When it was first begun."""
        self.run: Run | None = None
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
            self.slots.free(queue, batch.arrays)
            held = Held(1, batch.rows, batch.held_bytes, batch.kept_rows)
            pipeline.channel.hand_out(queue, held)

        outboxes = [
            Outbox(step, look, partial(discard, queue), self.account.queues[queue].starved)
            for queue, step in enumerate(first_steps)
        ]
        if len(self.counted.lanes) != num_lanes(config.stream, config.run):
            # A factory may give another number of threads each time.
            self.counted = StreamStats.of(config.stream, config.run, len(outboxes))
        self.slots.reopen()
        pipeline = Pipeline(
            config.stream, config.run, self.name, outboxes, self.slots,
            self.recipe.positions.id.encode, resume, lambda: None, self.counted,
        )  # fmt: skip
        self.slots.before_wait = pipeline.flush
        run = Run(pipeline, outboxes)
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

    def _drop(self, run: Run) -> None:
        """End a run that nobody has had; it is waited for like one that was halted."""
        with self._changed:
            self._old = run
        run.close()
        self.slots.close()
