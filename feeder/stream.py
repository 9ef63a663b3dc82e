"""One stream of a feed as the user's side sees it: its pipeline, its device queues, and how far
batches have been handed out."""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
from collections import deque
from typing import Any

from feeder.config import FeedConfig
from feeder.devices.host import HostQueue
from feeder.devices.slots import HostSlots, PrivateSlots
from feeder.errors import ClosedError, FeedError, ForkedError, ReplayWarning, ResumeError
from feeder.snapshot import Rows, Snapshot, StreamState, summarise
from feeder.token import StreamId, make_fingerprint
from workers.batch import Cut
from workers.pipeline import Pipeline
from workers.position import Place
from workers.resuming import Resume

logger = logging.getLogger("feeder")

_LOG_EVERY_S = 60.0
_TINY_QUEUE_BATCHES = 1024


class Progress:
    """How far the devices of one stream have come: the newest round that all of them have.

    The position is that of the last batch handed out; with several devices, that of the last
    batch of the newest round that every device has been handed.
    """

    def __init__(self, num_devices: int) -> None:
        self._taken: list[float] = [0] * num_devices
        self._ends: deque[Place] = deque()
        self._rounds = 0
        self._lock = threading.Lock()
        self.place: Place | None = None
        """Where the stream stands; None before the first batch."""

    def note(self, device: int, place: Place) -> None:
        """A device, one of several, has been handed the batch that ends at `place`. With one
        device its place is simply the stream's, and no rounds are counted."""
        with self._lock:
            self._taken[device] += 1
            if device == len(self._taken) - 1:
                self._ends.append(place)
            self._advance()

    def end(self, device: int, place: Place) -> None:
        """A device has been told that the stream ended, at `place`."""
        with self._lock:
            self._taken[device] = math.inf
            self._advance()
            if min(self._taken) == math.inf:
                self.place = place

    def _advance(self) -> None:
        while self._ends and self._rounds < min(self._taken):
            self.place = self._ends.popleft()
            self._rounds += 1


class Stream:
    """What one call of `init_data_input_workers` makes."""

    def __init__(self, config: FeedConfig, number: int) -> None:
        self.config = config
        self.number = number
        self._fingerprint = config.fingerprint()
        self.id = StreamId(config.name, number, make_fingerprint(self._fingerprint))
        self._resume: Resume | None = None
        self._unusable: FeedError | None = ClosedError(
            f"feed {config.name!r} is not started: use `with coordinator:` or coordinator.start()"
        )
        num = len(config.devices)
        most = max(1, config.max_buffered_batches // num)
        self.queues = [HostQueue(most, self._describe_wait) for _ in range(num)]
        self.slots = PrivateSlots() if config.run.writable else HostSlots()
        self.progress = Progress(num)
        self.initialised = self.started = self.stopped = False
        self._logged_at = 0.0
        self._build()

    def _build(self) -> None:
        config = self.config
        self.pipeline = Pipeline(
            config.stream, config.run, config.name, self.queues, self.slots, self.id.encode,
            self._resume, self._log_now_and_then,
        )  # fmt: skip

    # ---- life

    def start(self) -> None:
        """Start the threads; once."""
        self.started = True
        self._unusable = None
        self._logged_at = time.monotonic()
        self.pipeline.start()

    def close(self) -> None:
        """Wake everything that waits, so that it ends."""
        self.stopped = True
        self.pipeline.close()
        for queue in self.queues:
            queue.close()

    def join(self, deadline_s: float) -> None:
        """Wait for the threads; raises `StuckWorkerError`."""
        self.pipeline.join(deadline_s)
        if self.started:
            self._log()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy."""
        return isinstance(self._unusable, ForkedError)

    def check_usable(self) -> None:
        """Raise where batches cannot be had: before the start, or in a forked child."""
        if self._unusable is not None:
            raise self._unusable

    def fork(self) -> None:
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
        place, resume = self.progress.place, self._resume
        rows: Rows | None
        columns = self.pipeline.schema.columns
        if place is not None:
            place = place.settled()
            cut, rows = place.cut(), place.leftover_rows()
        else:
            cut = self.pipeline.start_cut
            rows = () if resume is None else resume.rows
            columns = None if resume is None else resume.columns
        return StreamState(
            name=self.config.name,
            number=self.number,
            fingerprint=self._fingerprint,
            token=cut.token(),
            columns=columns,
            rows=rows if with_rows or not self.config.stream.repeatable else None,
            summary=summarise(cut),
        )

    def find_resume(self, state: StreamState | bytes) -> Resume:
        """What a state or a token means for this stream; changes nothing. Raises `ResumeError`."""
        if self.started:
            raise ResumeError(
                f"feed {self.config.name!r} is started already; load its state before "
                "coordinator.start()"
            )
        epochs = self.config.stream.epochs
        if isinstance(state, bytes):
            resume = Resume(cut=self.id.decode(state, epochs))
        else:
            self._compare(state)
            cut = self.id.decode(state.token, epochs)
            resume = Resume(cut=cut, rows=state.rows, columns=state.columns)
        self._check_resume(resume)
        return resume

    def resume(self, resume: Resume) -> None:
        """Go on from there; before the start alone."""
        self._resume = resume
        self._warn_of_replay(resume.cut)
        self._build()

    def _compare(self, state: StreamState) -> None:
        """Raise `ResumeError` with every field in which a snapshot's feed differs from this."""
        then, now = state.fingerprint, self._fingerprint
        differences = [
            f"{name}: {then.get(name)!r} then, {now.get(name)!r} now"
            for name in {**then, **now}
            if then.get(name) != now.get(name)
        ]
        if state.name != self.config.name:
            differences.insert(0, f"name: {state.name!r} then, {self.config.name!r} now")
        if differences:
            raise ResumeError(
                f"the snapshot is of another feed than {self.config.name!r}: "
                f"{'; '.join(differences)}"
            )

    def _check_resume(self, resume: Resume) -> None:
        stream, num, cut = self.config.stream, len(self.config.devices), resume.cut
        if cut.step % num and not cut.finished:
            raise ResumeError(
                f"the position is before batch {cut.step}, which is no multiple of {num} devices; "
                "resume with a number of devices that divides it"
            )
        if stream.repeatable:
            return
        if resume.rows is None:
            raise ResumeError(
                f"feed {self.config.name!r} has repeatable=False: a bare token does not hold its "
                "leftover rows; resume from a snapshot or state dict"
            )
        if self._is_replayed(cut):
            raise ResumeError(
                f"feed {self.config.name!r} has repeatable=False and its fetch function has no "
                "cursor(worker_id) and seek(worker_id, cursor): it cannot be put back"
            )

    def _is_replayed(self, cut: Cut) -> bool:
        stream = self.config.stream
        return not (stream.pure or stream.seekable) and sum(cut.position.calls) > 0

    def _warn_of_replay(self, cut: Cut) -> None:
        if self._is_replayed(cut):
            warnings.warn(
                f"feed {self.config.name!r} is resumed by replay: {sum(cut.position.calls)} calls "
                "are made again and what they return is discarded; give the fetch function "
                "cursor(worker_id) and seek(worker_id, cursor), or use fetch(call)",
                ReplayWarning,
                stacklevel=6,
            )

    # ---- what is told

    def stats(self) -> dict[str, Any]:
        """Plain numbers of what the stream has done."""
        return {
            **self.pipeline.stats(),
            "queued_batches": sum(map(len, self.queues)),
            "starved_s": sum(queue.starved_s for queue in self.queues),
        }

    def _describe_wait(self) -> str:
        full = [
            device
            for device, queue in zip(self.config.devices, self.queues, strict=True)
            if len(queue) >= queue.capacity
        ]
        if full:
            return f"feed {self.config.name!r} waits for {full!r} to take a batch"
        return f"feed {self.config.name!r} waits for its fetch function"

    def _log_now_and_then(self) -> None:
        if self.config.external_loggers and time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._log()

    def _log(self) -> None:
        self._logged_at = time.monotonic()
        stats = {"input_source_name": self.config.name, **self.stats()}
        for external in self.config.external_loggers:
            try:
                external.log(dict(stats))
            except Exception:
                logger.exception("external logger %r failed", external)


def find_state(snapshot: Snapshot, stream: Stream) -> StreamState:
    """The state of a stream in a snapshot; raises `ResumeError` where it has none."""
    for state in snapshot.states:
        if (state.name, state.number) == (stream.config.name, stream.number):
            return state
    held = [f"{state.name}[{state.number}]" for state in snapshot.states]
    raise ResumeError(
        f"the snapshot holds feeds {held!r}, expected {stream.config.name}[{stream.number}]"
    )
