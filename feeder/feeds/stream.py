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
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from feeder.checkpoint.transcribing import Start, Transcript
from feeder.checkpoint.triggers import CheckpointTriggers
from feeder.config import FeedConfig
from feeder.devices.ondevice import OnDevice
from feeder.devices.routed import Devices
from feeder.errors import (
    ClosedError,
    FeedError,
    ForkedError,
    ResumeError,
    StuckWorkerError,
    TranscriptError,
)
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
from feeder.state.history import Further, digests_before
from feeder.state.positions import Positions, recall
from feeder.state.snapshot import Snapshot, StreamState
from feeder.waking import OneShotEvent
from feeder.workers.fetch.resuming import Resume
from feeder.workers.fetch.threads import ThreadGroup, under_lock
from feeder.workers.pipeline import Pipeline
from feeder.workers.stats import StreamStats
from feeder.workers.stream.position import Cut, LazyPosition, first_step

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
        self.claimed: list[float] = [0] * num_devices
        """The round whose batch each device's thread was about to hand out last; infinite once it
        has been told the end."""
        self.last: float = math.inf
        """The last round that is handed out: an edit is made, or was, of what comes after."""
        self._lock = threading.RLock()
        # Of several devices how many have a batch of a round, and where it ends: of those from
        # number `_first` on, which is handed out for good.
        self._ends: dict[int, tuple[int, LazyPosition]] = {}
        self._first = 0

    @property
    def place(self) -> LazyPosition | None:
        """Where the stream stands; None before the first batch."""
        return self.stands[1]

    @property
    def stands(self) -> tuple[float, LazyPosition | None]:
        """The newest round that every device has been handed its batch of, and where it ends."""
        # One device has no rounds. At the end all devices stand at the same place.
        if len(self.handed) == 1 or all(num == math.inf for num, _ in self.handed):
            return self.handed[0]
        return self._stands()

    @under_lock
    def _stands(self) -> tuple[float, LazyPosition | None]:
        newest = self._newest()
        return newest, self._ends.get(newest, (0, None))[1]

    def hold(self) -> float:
        """From now on no device is handed a batch of a later round than one of them has had, or is
        about to; returns the number of that round."""
        # A device's thread claims its batch, and looks at `last` then (`DeviceFeed._claims`): the
        # claim is found here, or the thread waits.
        self.last = -1
        self.last = last = max(self.claimed)
        return last

    @property
    def is_through(self) -> bool:
        """Whether every device has been handed all that it is to be handed before an edit."""
        return all(num >= self.last for num, _ in self.handed)

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

_JOIN_S = 60.0
"""How long the stream before an edit may take to end before it is named in the log. Nobody waits
for it."""
_LOG_EVERY_S = 60.0
"""How often external loggers get the statistics, as Caffe2's did."""


class Stream:
    """What one call of `init_data_input_workers` makes: a pipeline, and a queue for each device.

    The coordinator's thread starts, stops and moves it, and writes its fields. Users' threads write
    `progress` alone. Any thread may ask for `state`, `stats` and `figures`.

    An edit makes another stream, which takes the place of this one in its feed (`edit`, one thread
    at a time): each device goes on with `next` once it has been handed its batch of the last round
    before the edit, which may be long after other devices.
    """

    def __init__(
        self, config: FeedConfig, number: int, settings: Mapping[str, Any] | None = None
    ) -> None:
        """`settings` are those of `init_data_input_workers` that `config` was made of."""
        self.config = config
        self.number = number
        self.settings = settings or {}
        self.next: Stream | None = None
        """What goes on after an edit."""
        # The stream before the edit that this one began with, until its devices are through.
        self._before: Stream | None = None
        self._num_before = 0  # Batches that each device is handed by streams before edits.
        self._endings = ThreadGroup()
        self._lock = threading.RLock()
        # Devices that have come to an edit that is being made.
        self._held: list[OneShotEvent] = []
        # What its source is now; the positions are those of an earlier format where it goes on so,
        # or of a run that has been edited.
        self._given = self.positions = Positions(config, number)
        # Rounds are skipped from a place. A function that is no pure one may stand anywhere.
        skips = config.skip and config.stream.pure
        self._resume: Resume | None = self.positions.origin() if skips else None
        self._unusable: FeedError | None = ClosedError(
            f"feed {config.name!r} is not started: use `with coordinator:` or coordinator.start()"
        )
        facts, function = (config.stream.seed, config.stream.axes), OnDevice.of(config.on_device)
        self.on_device = function and function.of_stream(lambda batch: facts)
        """What makes of each batch what is handed out."""
        # The bound is on all devices together; each gets its share, and one batch at least.
        num = len(config.devices)
        most = max(1, config.max_buffered_batches // num)
        self._devices = Devices(
            config.devices, self._describe_wait, capacity=most, depth=config.depth,
            writable=config.run.writable, look_s=config.run.timeout_s,
            advance=None if config.run.num_threads else self._advance, on_device=self.on_device,
        )  # fmt: skip
        self.queues, self.slots = self._devices.queues, self._devices.slots
        self.progress = Progress(num)
        self.counted = StreamStats.of(config.stream, config.run, num)
        """The counts and clocks of the stream."""
        self.transcripts: list[Transcript] = []
        """Of each device what it has been handed, if that is written down."""
        if (folder := config.transcript) is not None:
            self.transcripts = [Transcript(folder, config.name, number, i) for i in range(num)]
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
        config = self.config
        encode = self._encode if self.transcripts else self.positions.id.encode
        resume, turns = self.positions.begin(self._resume)
        self._dealing = turns.dealing
        self.pipeline = Pipeline(
            config.stream, config.run, config.name, self.queues, self.slots, encode=encode,
            resume=resume, report=self._log_now_and_then, stats=self.counted, turns=turns,
        )  # fmt: skip

    def _encode(self, cut: Cut) -> bytes:
        """A position leaves: the steps before it are in the transcript, whenever this process
        ends."""
        for transcript in self.transcripts:
            transcript.flush()
        return self.positions.id.encode(cut)

    # ---- life

    def start(self) -> None:
        """Start the threads; once. Raises `TranscriptError`."""
        self._begin_transcripts()
        self.started = True
        self._unusable = None
        self._started_at = self._logged_at = time.monotonic()
        self._devices.start()
        self.pipeline.start()

    def _begin_transcripts(self) -> None:
        # After an edit they are those of the stream before, which go on.
        if not self.transcripts or self._before is not None:
            return
        resume, now = self._resume, self.positions.id.fingerprint
        is_even = self.config.stream.rounds == "stream"
        step, then = 0, {now}
        if resume is not None:
            step = first_step(resume.cut)
            then |= digests_before(self.positions.fingerprint, step)
            then.add(resume.fingerprint or now)
        start = Start(step, len(self.transcripts), then, now, is_even)
        for transcript in self.transcripts:
            transcript.begin(start)

    def _close_transcripts(self) -> None:
        # Of the streams before and after an edit the last one has them.
        for transcript in self.transcripts if self.next is None else ():
            try:
                transcript.close()
            except TranscriptError as error:
                # All else is still to be stopped; a resume says which steps are missing.
                logger.error("%s", error)

    def sync(self) -> None:
        """Have all that was handed out in the transcript for good. Raises `TranscriptError`."""
        for transcript in self.transcripts:
            transcript.sync()

    def close(self) -> None:
        """Wake everything that waits, so that it ends; of streams before and after edits too."""
        for stream in self._chain():
            # Before the chain is looked along further: an edit that adds to it finds this then.
            stream.stopped = True
            stream._close()

    def _close(self) -> None:
        # Noted before the queues are closed, which takes the end out of them.
        self._had_ended = self._had_ended or self._has_ended()
        self._stopped_at = self._stopped_at or time.monotonic()
        self.pipeline.close()
        self._devices.close()

    def _earlier(self) -> Iterator[Stream]:
        """The streams before edits that have not ended yet, the newest first."""
        stream = self._before
        while stream is not None:
            yield stream
            stream = stream._before

    def _chain(self) -> Iterator[Stream]:
        """This stream, and those before and after edits that have not ended yet."""
        yield from self._earlier()
        stream: Stream | None = self
        while stream is not None:
            yield stream
            stream = stream.next

    def fail(self, error: FeedError) -> None:
        """Something beside the stream has failed: its user is told in place of a next batch."""
        for stream in self._chain():
            # In a forked child the error that says so stands before any other.
            if not stream.forked:
                stream._unusable = error
            for queue in stream.queues:
                queue.finish(error)

    def join(self, deadline_s: float) -> None:
        """Wait for the threads; raises `StuckWorkerError`."""
        end = time.monotonic() + deadline_s
        for stream in self._chain():
            stream._join(end)

    def _join(self, end: float) -> None:
        try:
            self.pipeline.join(max(0.0, end - time.monotonic()))
            self.pipeline.forget()
        finally:
            # Also where a fetch function is stuck: a GPU's thread must not be left to run on.
            self._devices.join(max(0.0, end - time.monotonic()))
            self._close_transcripts()
            # Of streams before it, which are perhaps in no chain any more.
            self._endings.close(max(0.0, end - time.monotonic()))
        if self.started and not self._logged_last:
            self._logged_last = True
            self._log()

    # ---- edits

    def edit(
        self, config: FeedConfig, settings: Mapping[str, Any], streams: list[Stream]
    ) -> Stream:
        """The stream that goes on with other settings, and starts, from the first round on of which
        no device has had a batch; it takes the place of this one in `streams`. This one itself, if
        nothing is to change. Raises `ResumeError` and `ConfigError`; then nothing has changed."""
        self.check_usable()
        if self.stopped:
            raise ClosedError(f"feed {self.config.name!r} is stopped")
        progress, new = self.progress, self
        try:
            new = self._edited(config, settings, progress.hold())
            if new is not self:
                new.start()
                at = streams.index(self)
                # Without a call in between: an interrupt finds both or none.
                self.next = streams[at] = new
        except BaseException:
            if new is not self:
                new.transcripts = []
                new._close()
                new._join(time.monotonic() + _JOIN_S)
            raise
        finally:
            if self.next is None:
                progress.last = math.inf
            held, self._held = self._held, []
            for event in held:
                event.ring()
        if new is not self:
            new._take_over(self)
        return new

    def _edited(self, config: FeedConfig, settings: Mapping[str, Any], last: float) -> Stream:
        """The same, not started. `last` is the last round before the edit."""
        if last == math.inf:
            raise ResumeError(
                f"the run of feed {self.config.name!r} has ended: an edit would change nothing"
            )
        num, place = self.progress.stands
        state, further = self._state_at(place, with_rows=True), None
        # Rounds that are left out come before the first batch.
        skip = self.config.skip if place is None else 0
        if last > num:
            assert self._dealing is not None
            batches = (int(last - num) + skip) * len(self.queues)
            skip, further = 0, Further(batches, self._dealing)
            state = state._replace(columns=self.pipeline.schema.columns)
        new = Stream(config._replace(skip=skip), self.number, settings)
        found = new._given.find_in(Snapshot((state,)), further)
        if found.owner is None or found.owner.fingerprint == self.positions.fingerprint:
            return self
        # Each device has a batch of each round before an edit.
        new._num_before = self._num_before + int(last)
        new.counted.go_on(self.counted, new._num_before)
        new.resume(found)
        new.initialised, new.triggers, new._before = True, self.triggers, self
        new.transcripts = self.transcripts
        old: Any
        for queue, old in zip(new.queues, self.queues, strict=True):
            queue.go_on(old)
        return new

    def _take_over(self, old: Stream) -> None:
        """The devices go on here after the last round of the old stream."""
        self._started_at, self._asked_at = old._started_at, old._asked_at
        self._logged, self._logged_at, old._logged_last = old._logged, old._logged_at, True
        # A stop that came meanwhile has perhaps not seen this stream.
        if old.stopped:
            self.close()
            self.join(_JOIN_S)
            raise ClosedError(f"feed {self.config.name!r} is stopped")
        self.end_before()
        if self._before is None:
            return
        # A device that is through is not to wait for batches that others hold up.
        for (num, _), queue in zip(old.progress.handed, old.queues, strict=True):
            if num >= old.progress.last:
                queue.finish(old.pipeline.origin)

    @under_lock
    def end_before(self) -> None:
        """End the stream before the edit, if no device is to be handed a batch of it any more."""
        old = self._before
        if old is not None and old._before is None and old.progress.is_through:
            self._inherit()
            old._close()
            self._endings.start(f"feeder {self.config.name} edited", run_ending, old)
            self._before = None

    def _inherit(self) -> None:
        """Know what was left out before the edit: all of it once the stream before is through."""
        old, resume = self._before, self._resume
        if old is not None and resume is not None:
            old._inherit()
            before = old.positions.left_out_before(resume.cut.position)
            recall(self.config.stream.fetch, resume._replace(left_out=before))

    def wait_for_edit(self) -> Stream | None:
        """The stream that goes on after an edit that is being made, waited for; None if there is
        none, or it was not made."""
        event = OneShotEvent()
        self._held.append(event)
        # If the edit was done with before it could find the event, that is seen here.
        if self.next is None and self.progress.last != math.inf:
            event.wait()
        return self.next

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
        for stream in self._chain():
            for transcript in stream.transcripts:
                transcript.after_fork()
            stream._unusable = ForkedError(
                f"feed {self.config.name!r} was made in the parent process; make it after the "
                "fork, or start children with the spawn method"
            )

    # ---- position

    def state(self, *, with_rows: bool) -> StreamState:
        """Where the stream stands; with the leftover rows where asked and where they exist."""
        if self.forked:
            self.check_usable()
        self._asked_at = time.monotonic()
        stands = self
        # Before an edit the run is one without it.
        for stream in self._earlier():
            if stream.progress.stands[0] < stream.progress.last:
                stands = stream
        stands._inherit()
        return stands._state_at(stands.progress.place, with_rows=with_rows)

    def _state_at(self, place: LazyPosition | None, *, with_rows: bool) -> StreamState:
        resume, columns = self._resume, self.pipeline.schema.columns
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


def run_ending(stream: Stream) -> None:
    """Thread body: wait for the threads of a stream that an edit has ended."""
    try:
        stream._join(time.monotonic() + _JOIN_S)
    except StuckWorkerError as error:
        logger.error("%s", error)
