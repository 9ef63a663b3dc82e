"""Counters of a served feed and of its queues, beside those of the stream itself.

Only a consumer knows for how long its trainer has waited. So it reports with every `Used`, twice a
second at least, what it has counted since its last report, and the server adds that up. Rules: the
time is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence

from feeder.service.protocol.messages import Report
from feeder.workers.stats import BatchStats, Waits
from feeder.workers.stream.batch import Batch


class QueueStats:
    """Counters of one queue, or of one of its replicas, whoever holds it. They never fall, since
    Prometheus takes a counter that falls for a restart.

    Written by the server's I/O thread; only `starved` also by the enqueuer, under the `Outbox`'s
    lock.
    """

    def __init__(self) -> None:
        self.used = BatchStats()
        """Batches handed to the user."""
        self.starved = Waits()
        """Times in which the consumer had used all that it was sent, and nothing more was there."""
        self.checked_s = 0.0
        """Seconds that checksums took here."""
        self.corrupt = 0
        """Batches that the consumer found corrupt."""
        self.asked_at: float | None = None
        """When the position was last asked for."""
        self._waited_s = self._consumer_checked_s = self._shown_s = 0.0
        self._told_at = 0.0

    def add_report(self, report: Report, news: Sequence[Batch], now: float) -> None:
        """Add a consumer's report, which came with the news of these used batches."""
        rows = sum([batch.rows for batch in news])
        self.used.count(len(news), rows, sum([batch.held_bytes for batch in news]))
        self._waited_s += report.waited_s
        self._consumer_checked_s += report.checked_s
        self.corrupt += report.corrupt
        self._told_at = now
        if report.positions:
            self.asked_at = now

    def wait_s(self, now: float) -> float:
        """Seconds for which the trainer has waited; never less than was returned before."""
        # Between two reports a consumer that has used all it was sent is taken to wait. Its next
        # report may say less, and then the larger number stands until the sum has caught up.
        since = self.starved.since
        waits_s = 0.0 if since is None else max(0.0, now - max(since, self._told_at))
        self._shown_s = max(self._shown_s, self._waited_s + waits_s)
        return self._shown_s

    @property
    def most_checked_s(self) -> float:
        """Seconds that checksums took on the side where they took longer: both sides run at once,
        so the longer one may hold the stream up."""
        return max(self.checked_s, self._consumer_checked_s)


class FeedStats:
    """Counters of one feed. Owned by the server's I/O thread."""

    def __init__(self, num_seats: int) -> None:
        self.queues = [QueueStats() for _ in range(num_seats)]
        """The counters of each queue, or of each replica of each."""
        self.opened = 0
        """How often a consumer was given a queue."""
        self.reopened = 0
        """How often that was one that came back."""
        self.fenced = 0
        """Leases that ended because another consumer took the queue."""
        self.expired = 0
        """Leases that ran out unheard."""
        self.begun = 0
        """Runs that were begun."""

    def count_open(self, *, rejoins: bool) -> None:
        """Count a consumer that is given a queue."""
        self.opened += 1
        self.reopened += rejoins

    @property
    def asked_at(self) -> float | None:
        """When the position of a queue was last asked for, for the queue where that is longest ago;
        None if some queue was never asked. So "checkpoints are old" shows the worst trainer."""
        times = [queue.asked_at for queue in self.queues if queue.asked_at is not None]
        return min(times) if len(times) == len(self.queues) else None
