"""One stream of a feed as the user's side sees it: its pipeline and its device queues.

A pipeline begins at one cut and is never started again. So that a feed can be resumed until it
starts, and asked when it has ended, the stream holds what outlives a pipeline: the settings, the
place to begin at, the queues that users read, and what has been handed out.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

from msgspec.structs import replace

from feeder.checkpoint.triggers import CheckpointTriggers
from feeder.config import FeedConfig
from feeder.devices.routed import Devices
from feeder.errors import ClosedError, FeedError, ForkedError, ResumeError
from feeder.feeds.length import progress_of
from feeder.feeds.records import Asked
from feeder.observe.figures import (
    Condition,
    FeedFigures,
    ProgressFigures,
    QueueFigures,
    State,
    build_feed_figures,
    flatten,
)
from feeder.observe.verdict import judge
from feeder.state.positions import Positions, recall
from feeder.state.snapshot import Snapshot, StreamState
from feeder.workers.fetch.resuming import Resume
from feeder.workers.fetch.threads import under_lock
from feeder.workers.pipeline import Pipeline
from feeder.workers.stats import StreamStats
from feeder.workers.stream.position import Cut, LazyPosition

# ---- Progress: how far the devices of one stream have come


class Progress:
    """The position of a stream: that of the last batch handed out; with several devices, that of
    the last batch of the newest round that every device has been handed.

    Rounds are counted from 1. A device's thread says what it is handed by assigning to `handed`, as
    nothing interrupts an assignment; it may take back the last. Any thread may ask for `place`.
    """

    def __init__(self, num_devices: int) -> None:
        self.handed: list[tuple[float, LazyPosition | None]] = [(0, None)] * num_devices
        """The round of which each device was handed a batch last, and where that batch ended;
        infinite where it has had all, and where that is."""
        self._lock = threading.RLock()
        # Of several devices how many have a batch of a round, and where it ends: of those from
        # number `_first` on, which is handed out for good.
        self._ends: dict[int, tuple[int, LazyPosition]] = {}
        self._first = 0

    @property
    def place(self) -> LazyPosition | None:
        """Where the stream stands; None before the first batch."""
        # One device has no rounds. At the end all devices stand at the same place.
        if len(self.handed) == 1 or all(num == math.inf for num, _ in self.handed):
            return self.handed[0][1]
        return self._place()

    @under_lock
    def _place(self) -> LazyPosition | None:
        return self._ends.get(self._newest(), (0, None))[1]

    @property
    def round(self) -> float:
        """The newest round that every device has been handed its batch of."""
        return self.handed[0][0] if len(self.handed) == 1 else self._round()

    @under_lock
    def _round(self) -> int:
        return self._newest()

    def _newest(self) -> int:
        """The same, of several devices; under the lock."""
        newest = self._first
        # Round by round: one at an epoch's end may have no batch for the last devices, so that
        # what these were handed last does not tell.
        while (end := self._ends.get(newest + 1)) is not None:
            if any(num <= newest for num, _ in self.handed[: end[0]]):
                break
            newest += 1
        return newest

    @under_lock
    def note(self, num: int, size: int, place: LazyPosition) -> None:
        """The last of the `size` devices that have a batch of round `num` is about to be handed it,
        and it ends at `place`: to be said again where an interrupt has come in between."""
        self._ends[num] = size, place
        newest = self._newest()
        # The newest round stays, and the one before it, since a batch may be taken back.
        while self._first < newest - 1:
            self._ends.pop(self._first, None)
            self._first += 1


logger = logging.getLogger("feeder")

_LOG_EVERY_S = 60.0
"""How often external loggers get the statistics, as Caffe2's did."""


class Stream:
    """What one call of `init_data_input_workers` makes: a pipeline, and a queue for each device.

    The coordinator's thread starts, stops and moves it, and writes its fields. Users' threads write
    `progress` alone. Any thread may ask for `state`, `stats` and `figures`.
    """

    def __init__(self, config: FeedConfig, number: int) -> None:
        self.config = config
        self.number = number
        # What its source is now; the positions are those of an earlier format where it goes on so,
        # or of a run that has been edited.
        self._given = self.positions = Positions(config, number)
        # Rounds are skipped from a place. A function that is no pure one may stand anywhere.
        skips = config.skip and config.stream.pure
        self._resume: Resume | None = self.positions.origin() if skips else None
        self._unusable: FeedError | None = ClosedError(
            f"feed {config.name!r} is not started: use `with coordinator:` or coordinator.start()"
        )
        # The bound is on all devices together; each gets its share, and one batch at least.
        num = len(config.devices)
        most = max(1, config.max_buffered_batches // num)
        self._devices = Devices(
            config.devices, self._describe_wait, capacity=most, depth=config.depth,
            writable=config.run.writable, look_s=config.run.timeout_s,
            advance=None if config.run.num_threads else self._advance,
        )  # fmt: skip
        self.queues, self.slots = self._devices.queues, self._devices.slots
        self.progress = Progress(num)
        self.counted = StreamStats.of(config.stream, config.run, num)
        """The counts and clocks of the stream."""
        self.triggers: CheckpointTriggers | None = None
        """Batches at which something is to be done; None where there are none."""
        self.initialised = self.started = self.stopped = False
        self._started_at: float | None = None
        self._asked_at: float | None = None
        self._stopped_at: float | None = None
        self._had_ended = False
        self._logged: FeedFigures | None = None
        self._logged_at = 0.0
        self._logged_last = False
        self._build()

    def _build(self) -> None:
        config, encode = self.config, self.positions.id.encode
        resume, turns = self.positions.begin(self._resume)
        self._dealing = turns.dealing
        self.pipeline = Pipeline(
            config.stream, config.run, config.name, self.queues, self.slots, encode=encode,
            resume=resume, report=self._log_now_and_then, stats=self.counted, turns=turns,
        )  # fmt: skip

    # ---- life

    def start(self) -> None:
        """Start the threads; once."""
        self.started = True
        self._unusable = None
        self._started_at = self._logged_at = time.monotonic()
        self._devices.start()
        self.pipeline.start()

    def close(self) -> None:
        """Wake everything that waits, so that it ends."""
        # Noted before the queues are closed, which takes the end out of them.
        self._had_ended = self._had_ended or self._has_ended()
        self._stopped_at = self._stopped_at or time.monotonic()
        self.stopped = True
        self.pipeline.close()
        self._devices.close()

    def fail(self, error: FeedError) -> None:
        """Something beside the stream has failed: its user is told in place of a next batch."""
        # In a forked child the error that says so stands before any other.
        if not self.forked:
            self._unusable = error
        for queue in self.queues:
            queue.finish(error)

    def join(self, deadline_s: float) -> None:
        """Wait for the threads; raises `StuckWorkerError`."""
        end = time.monotonic() + deadline_s
        try:
            self.pipeline.join(deadline_s)
            self.pipeline.forget()
        finally:
            # Also where a fetch function is stuck: a GPU's thread must not be left to run on.
            self._devices.join(max(0.0, end - time.monotonic()))
        if self.started and not self._logged_last:
            self._logged_last = True
            self._log()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy."""
        return isinstance(self._unusable, ForkedError)

    def check_usable(self) -> None:
        """Raise where batches cannot be had: before the start, or in a forked child."""
        if self._unusable is not None:
            raise self._unusable

    def after_fork(self) -> None:
        """This is a forked child: its copy of the stream has no threads."""
        self._unusable = ForkedError(
            f"feed {self.config.name!r} was made in the parent process; make it after the fork, "
            "or start children with the spawn method"
        )

    # ---- position

    def state(self, *, with_rows: bool) -> StreamState:
        """Where the stream stands; with the leftover rows where asked and where they exist."""
        if self.forked:
            self.check_usable()
        self._asked_at = time.monotonic()
        place, resume, columns = self.progress.place, self._resume, self.pipeline.schema.columns
        if place is not None:
            return self.positions.state_at(place, columns, with_rows=with_rows)
        # Before the first batch the position is where the stream was to begin, leftover rows and
        # all: a state dict that was loaded and never used comes back as it was.
        if resume is None:
            return self.positions.state(self.pipeline.start_cut, (), None, with_rows=with_rows)
        return self.positions.state(resume.cut, resume.rows, resume.columns, with_rows=with_rows)

    def find_resume(self, position: Snapshot | bytes) -> Resume:
        """The place that a snapshot or a token means for this stream; changes nothing. Raises
        `ResumeError`."""
        if self.started:
            raise ResumeError(
                f"feed {self.config.name!r} is started already; load its state before "
                "coordinator.start()"
            )
        resume = self._given.find_in(position)
        if resume.cut.dealing is None:
            self.positions.check_round(resume.cut)
        return resume

    def resume(self, resume: Resume) -> None:
        """Go on from there; before the start alone."""
        self._resume = resume
        self.positions = resume.owner or self._given
        self.config = self.positions.config
        recall(self.config.stream.fetch, resume)
        self.positions.warn_of_replay(resume.cut)
        self.positions.tell_of_dealing(resume.cut)
        self._build()

    # ---- what is told

    def places(self) -> list[Cut]:
        """Places of the stream that are known: where it began, and where it stands."""
        place = self.progress.place
        return [self.pipeline.start_cut, *([] if place is None else [place.cut()])]

    def asked(self) -> Asked:
        """The stream as it is asked for its records."""
        return Asked.of_feed(self.config, self._dealing)

    def figures(self, now: float, first_queue: int = 0) -> FeedFigures:
        """The figures of the stream. Its queues are numbered from `first_queue` on."""
        # The clocks of a stopped stream stand: its rates are those of its life.
        now = now if self._stopped_at is None else self._stopped_at
        condition = Condition(
            state=self.condition(),
            failure=self._failure(),
            started_at=self._started_at,
            asked_at=self._asked_at,
        )
        queues = [self._queue(device, first_queue, now) for device in range(len(self.queues))]
        blocked_s = sum([queue.blocked.seconds(now) for queue in self.queues])
        return build_feed_figures(
            self.config, self.number, condition, self.counted, self.pipeline.bound, queues, now,
            blocked_s=blocked_s, executor=self.pipeline.executor_counts(),
            progress=self._told_progress(),
        )  # fmt: skip

    def _told_progress(self) -> ProgressFigures | None:
        # A forked child's copy says nothing of the parent's.
        if self.forked:
            return None
        place = self.progress.place
        at = self.pipeline.start_cut if place is None else place.settled()
        return progress_of(self.config, at)

    def _queue(self, device: int, first: int, now: float) -> QueueFigures:
        stats, queue = self.counted, self.queues[device]
        wait_s = queue.starved.seconds(now)
        batches, rows, num_bytes = stats.handed[device]
        return QueueFigures(
            queue=first + device,
            device=self.config.devices[device],
            batches=batches,
            rows=rows,
            bytes=num_bytes,
            # Those that the user's thread has taken together wait too: full, and never fuller.
            waiting=min(max(0, stats.queued[device] - batches), queue.capacity),
            capacity=queue.capacity,
            wait_s=wait_s,
            starved_s=wait_s,
            wait_p99_s=queue.starved.quantile(0.99),
            checked_s=0.0,
            corrupt=0,
            consumer=None,
        )

    def _failure(self) -> FeedError | None:
        endings = [queue.ending for queue in self.queues]
        failures = [e for e in endings if isinstance(e, FeedError)]
        return next((e for e in failures if not isinstance(e, ClosedError)), None)

    def _has_ended(self) -> bool:
        """Whether all batches have been handed out."""
        stats = self.counted
        return all(
            isinstance(queue.ending, LazyPosition) and stats.queued[i] == stats.handed[i][0]
            for i, queue in enumerate(self.queues)
        )

    def condition(self) -> State:
        """How it stands. Any thread may ask."""
        if self._failure() is not None:
            return "failed"
        if self._had_ended or (not self.stopped and self._has_ended()):
            return "ended"
        if self.stopped:
            return "stopped"
        return "running" if self.started else "waiting"

    def stats(self, first_queue: int = 0) -> dict[str, Any]:
        """Plain numbers of what the stream has done."""
        now = time.monotonic()
        return {
            **self.pipeline.numbers(now),
            "queued_batches": sum(map(len, self.queues)),
            "starved_s": sum([queue.starved.seconds(now) for queue in self.queues]),
            **flatten(self.figures(now, first_queue)),
        }

    def _describe_wait(self) -> str:
        """Say what a device's user waits for. Raises `FeedError` if another device's user holds it
        up and has taken nothing for `timeout` seconds: often one thread reads both, this one first;
        or if nobody makes batches."""
        if self.pipeline.is_orphaned:
            raise FeedError(
                f"feed {self.config.name!r} has lost the thread that makes batches, as it may if a "
                "tracer such as coverage follows threads: start the run again without it"
            )
        name, timeout_s, now = self.config.name, self.config.run.timeout_s, time.monotonic()
        full = {
            device: now - (queue.blocked.since or now)
            for device, queue in zip(self.config.devices, self.queues, strict=True)
            if queue.is_full
        }
        if not full:
            return f"feed {name!r} waits for its fetch function"
        waits = f"feed {name!r} waits for {[*full]!r} to take a batch"
        if max(full.values()) >= timeout_s:
            raise FeedError(
                f"{waits}, which took none for {timeout_s} s: batches go to the devices in turns, "
                "so read the devices in turns, or each in a thread of its own; or raise timeout"
            )
        return waits

    def _advance(self) -> None:
        self.pipeline.advance()

    def _log_now_and_then(self) -> None:
        if self.config.external_loggers and time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._log()

    def _log(self) -> None:
        now = time.monotonic()
        figures, before = self.figures(now), self._logged
        seconds = now - self._logged_at
        self._logged, self._logged_at = figures, now
        verdict = str(judge(before, figures, seconds))
        if figures.state == "stopped":
            verdict += f"; until then {judge(before, replace(figures, state='running'), seconds)}"
        stats = {"input_source_name": self.config.name, "verdict": verdict, **self.stats()}
        for external in self.config.external_loggers:
            try:
                external.log(dict(stats))
            except Exception:
                logger.exception("external logger %r failed", external)
