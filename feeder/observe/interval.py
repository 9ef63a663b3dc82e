"""What happened to a stream between two moments: differences of its figures, shares of time."""

from __future__ import annotations

from typing import NamedTuple

from feeder.observe.figures import FeedFigures, QueueFigures, WorkerFigures


class WorkerPart(NamedTuple):
    """One worker's part of an interval."""

    worker: int
    calls: int
    fetch_s: float
    """Seconds in the fetch function, a call under way included."""
    wait_s: float
    """Seconds for which the enqueuer waited for just this worker."""
    computed_s: float
    """Seconds of `fetch_s` in which its thread had a processor."""

    @property
    def call_s(self) -> float:
        """Seconds that a call takes; that of a call which has not returned counts as one."""
        return self.fetch_s / max(1, self.calls)


class QueuePart(NamedTuple):
    """One queue's part of an interval."""

    after: QueueFigures
    batches: int
    bytes: int
    wait: float
    """Share of the time that its trainer waited."""
    on_the_way: float
    """Share of the time that its trainer waited for batches which the feed had ready."""
    checked: float
    """Share of the time that checksums took."""


class Interval:
    """A stream between two readings of its figures; since its start where there is no first one.
    It never changes."""

    def __init__(self, before: FeedFigures | None, after: FeedFigures, seconds: float) -> None:
        if before is None or before.batches > after.batches or before.age_s > after.age_s:
            # Another server, or the stream was made anew: its counts have begun at 0.
            before, seconds = None, after.age_s
        self.after = after
        """The figures at the end."""
        # Two readings at one moment, as where a page is loaded twice, must not divide by 0.
        self.seconds = max(seconds, 1e-9)
        """How long it was."""
        self._before = before
        olds = {} if before is None else {old.worker: old for old in before.workers}
        self.workers = [_worker(olds.get(new.worker), new) for new in after.workers]
        """Each worker's part."""
        seen = {} if before is None else {old.name: old for old in before.queues}
        self.queues = [_queue(seen.get(new.name), new, self.seconds) for new in after.queues]
        """Each queue's part."""
        self.errors = self._of_workers("errors")
        """Calls that raised."""
        self.nothings = self._of_workers("nothings")
        """Calls that returned None."""
        self.calls = self._of_workers("calls")
        """Calls that returned a chunk."""

    def _of_workers(self, name: str) -> int:
        old = () if self._before is None else self._before.workers
        counts = [getattr(worker, name) for worker in self.after.workers]
        return int(sum(counts) - sum(getattr(worker, name) for worker in old))

    def _grown(self, name: str) -> float:
        old = 0 if self._before is None else getattr(self._before, name)
        return float(getattr(self.after, name) - old)

    def _share(self, seconds: float) -> float:
        # The figures' clocks are read one after another, so a wait may come out a little too long.
        return min(1.0, max(0.0, seconds / self.seconds))

    # ---- rates

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second in the batches that were made."""
        return self._grown("bytes") / self.seconds

    @property
    def taken_per_s(self) -> float:
        """Batches a second that trainers took."""
        return sum(queue.batches for queue in self.queues) / self.seconds

    @property
    def taken_bytes_per_s(self) -> float:
        """Bytes in them a second."""
        return sum(queue.bytes for queue in self.queues) / self.seconds

    @property
    def batch_bytes(self) -> float:
        """Bytes of a batch, on the average since the start."""
        return self.after.bytes / max(1, self.after.batches)

    @property
    def chunk_rows(self) -> float:
        """Rows of a chunk, on the average since the start."""
        calls = sum(worker.calls for worker in self.after.workers)
        return sum(worker.rows for worker in self.after.workers) / max(1, calls)

    def of_store(self, name: str) -> float:
        """How much a figure of the stores has grown; 0 if none is read from."""
        old, new = self._before and self._before.store, self.after.store
        return float((getattr(new, name) if new else 0) - (getattr(old, name) if old else 0))

    # ---- shares of the time

    @property
    def starving(self) -> float:
        """The share of the time that the hungriest trainer waited."""
        return max((queue.wait for queue in self.queues), default=0.0)

    @property
    def chunks(self) -> float:
        """The share of the time that the enqueuer waited for chunks."""
        return self._share(self._grown("chunks_wait_s"))

    @property
    def room(self) -> float:
        """The share of the time that the enqueuer waited for room."""
        return self._share(self._grown("room_wait_s"))

    @property
    def busy(self) -> float:
        """The share of the time that the enqueuer worked."""
        return max(0.0, 1.0 - self.chunks - self.room)

    @property
    def fetching(self) -> float:
        """The share of all fetchers' time that was spent in the fetch function."""
        seconds = sum(worker.fetch_s for worker in self.workers)
        return self._share(seconds / max(1, self.after.threads))

    @property
    def storage(self) -> float:
        """The share of the time in the fetch function that was spent waiting for object stores."""
        seconds = sum(worker.fetch_s for worker in self.workers)
        return min(1.0, self.of_store("wait_s") / max(seconds, 1e-9))

    @property
    def calling(self) -> float:
        """How many calls were under way at a time, on the average."""
        return sum(worker.fetch_s for worker in self.workers) / self.seconds

    @property
    def computing(self) -> float:
        """How many processors they had, on the average."""
        return sum(worker.computed_s for worker in self.workers) / self.seconds

    @property
    def fetch_s_per_batch(self) -> float:
        """Seconds in the fetch function for a batch."""
        made = max(1.0, self._grown("batches"))
        return sum(worker.fetch_s for worker in self.workers) / made


def _worker(old: WorkerFigures | None, new: WorkerFigures) -> WorkerPart:
    if old is None:
        return WorkerPart(new.worker, new.calls, new.fetch_s, new.wait_s, new.computed_s)
    return WorkerPart(
        new.worker, new.calls - old.calls, new.fetch_s - old.fetch_s, new.wait_s - old.wait_s,
        new.computed_s - old.computed_s,
    )  # fmt: skip


def _queue(old: QueueFigures | None, new: QueueFigures, seconds: float) -> QueuePart:
    batches, size, wait_s, starved_s, checked_s = 0, 0, 0.0, 0.0, 0.0
    if old is not None:
        batches, size, wait_s, starved_s, checked_s = (
            old.batches, old.bytes, old.wait_s, old.starved_s, old.checked_s
        )  # fmt: skip
    # A served trainer's wait is starved time, in which the feed had nothing, and time on the way.
    waited = max(0.0, new.wait_s - wait_s)
    ready = max(0.0, waited - max(0.0, new.starved_s - starved_s))
    return QueuePart(
        after=new,
        batches=new.batches - batches,
        bytes=new.bytes - size,
        wait=min(1.0, waited / seconds),
        on_the_way=min(1.0, ready / seconds),
        checked=min(1.0, max(0.0, new.checked_s - checked_s) / seconds),
    )
