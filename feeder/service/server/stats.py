"""What is counted of a served feed and of a consumer, beside the stream itself. Rules: no clock.

A consumer tells with every `Used` what it has seen since it last told, and the server adds it up:
only the consumer knows for how long its trainer has waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from feeder.service.protocol.messages import Report
from feeder.workers.stats import BatchStats, Stopwatch


class Counted(Protocol):
    """A batch that was sent."""

    @property
    def rows(self) -> int:
        """Its rows."""

    @property
    def held_bytes(self) -> int:
        """Their bytes."""


class QueueStats:
    """What a server counts of one queue, whoever holds it."""

    def __init__(self) -> None:
        self.used = BatchStats()
        """Batches handed to the user."""
        self.starved = Stopwatch()
        """Times in which the consumer had used all that it was sent, and nothing was there."""
        self.checked_s = 0.0
        """Seconds that checksums took here."""
        self.corrupt = 0
        """Batches that arrived corrupt."""
        self.asked_at: float | None = None
        """When the position was last asked for."""
        self._waited_s = self._consumer_checked_s = self._shown_s = 0.0
        self._told_at = 0.0

    def hear(self, report: Report, news: Sequence[Counted], now: float) -> None:
        """The consumer tells of itself, and of the batches that it has used since it last did."""
        rows = sum([batch.rows for batch in news])
        self.used.count(len(news), rows, sum([batch.held_bytes for batch in news]))
        self._waited_s += report.waited_s
        self._consumer_checked_s += report.checked_s
        self.corrupt += report.corrupt
        self._told_at = now
        if report.positions:
            self.asked_at = now

    def wait_s(self, now: float) -> float:
        """Seconds for which the trainer has waited; never less than was said before. While it has
        nothing left it is taken to wait, since it says nothing then."""
        since = self.starved.since
        waits_s = 0.0 if since is None else max(0.0, now - max(since, self._told_at))
        self._shown_s = max(self._shown_s, self._waited_s + waits_s)
        return self._shown_s

    @property
    def most_checked_s(self) -> float:
        """Seconds that checksums took, of the two sides the longer."""
        return max(self.checked_s, self._consumer_checked_s)


class FeedStats:
    """What a server counts of one feed."""

    def __init__(self, num_queues: int) -> None:
        self.queues = [QueueStats() for _ in range(num_queues)]
        """Each queue's."""
        self.opened = 0
        """Times that a consumer was given a queue."""
        self.reopened = 0
        """Those of them for one that came back."""
        self.fenced = 0
        """Leases that ended because another consumer took the queue."""
        self.expired = 0
        """Leases that ran out unheard."""
        self.begun = 0
        """Runs that were begun."""

    def open(self, *, rejoins: bool) -> None:
        """A consumer is given a queue."""
        self.opened += 1
        self.reopened += rejoins

    @property
    def asked_at(self) -> float | None:
        """When a position was last asked for, of the queue where that is longest ago; None where
        one never was."""
        times = [queue.asked_at for queue in self.queues if queue.asked_at is not None]
        return min(times) if len(times) == len(self.queues) else None
