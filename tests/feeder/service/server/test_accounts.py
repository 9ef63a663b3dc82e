"""What consumers tell of themselves, and what a server makes of it."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from feeder.errors import FeedError
from feeder.service.client.lease import ConsumerStats
from feeder.service.protocol.messages import Report
from feeder.service.server.outbox import Outbox
from feeder.service.server.stats import FeedStats, QueueStats

QUIET = Report(0.0, 0.0, 0, 0)


class Sent(NamedTuple):
    """A batch, as far as it is counted."""

    rows: int
    held_bytes: int


def test_a_consumer_tells_what_is_new() -> None:
    stats = ConsumerStats()
    stats.checked_s, stats.corrupt = 0.5, 1
    stats.note_position_asked(7.0)
    stats.note_position_asked(8.0)
    assert stats.take_report(2.0) == Report(2.0, 0.5, 1, 2)
    assert stats.take_report(2.0) == QUIET
    stats.checked_s = 0.75
    assert stats.take_report(3.5) == Report(1.5, 0.25, 0, 0)
    assert stats.position_asked_at == 8.0


def test_a_server_adds_up_what_it_is_told() -> None:
    account = QueueStats()
    account.add_report(Report(1.0, 0.5, 1, 0), [Sent(4, 64), Sent(3, 48)], 10.0)
    account.add_report(Report(2.0, 0.25, 0, 3), [Sent(4, 64)], 20.0)
    assert (account.used.batches, account.used.rows, account.used.bytes) == (3, 11, 176)
    assert (account.wait_s(20.0), account.corrupt, account.asked_at) == (3.0, 1, 20.0)
    assert account.most_checked_s == 0.75
    account.checked_s = 0.8
    assert account.most_checked_s == 0.8, "the server's own, where it took longer"


def test_a_consumer_that_has_nothing_left_waits() -> None:
    account = QueueStats()
    account.add_report(Report(1.0, 0.0, 0, 0), [], 10.0)
    account.starved.start(10.5)
    assert account.wait_s(12.5) == 3.0
    account.add_report(Report(1.75, 0.0, 0, 0), [], 12.5)
    assert account.wait_s(12.5) == 3.0, "what was said before is not taken back"
    assert account.wait_s(14.0) == pytest.approx(4.25)
    account.starved.stop(14.0)
    assert account.wait_s(99.0) == pytest.approx(4.25)


def test_a_consumer_that_is_due_no_more_does_not_wait() -> None:
    account = QueueStats()
    outbox = Outbox(account.starved)
    outbox.starve()
    assert outbox.waited_since is not None
    outbox.finish(FeedError("no disk"))
    assert outbox.waited_since is None
    outbox.starve()
    assert outbox.waited_since is None


def test_a_queue_that_is_closed_to_begin_again_still_waits() -> None:
    account = QueueStats()
    outbox = Outbox(account.starved)
    outbox.starve()
    outbox.close()
    outbox.finish(FeedError("stopped"))
    assert account.starved.since is not None


def test_a_feed_counts_its_sessions() -> None:
    account = FeedStats(2)
    account.count_open(rejoins=False)
    account.count_open(rejoins=True)
    assert (account.opened, account.reopened) == (2, 1)


def test_the_position_of_a_feed_is_as_old_as_its_oldest() -> None:
    account = FeedStats(2)
    assert account.asked_at is None
    account.queues[0].add_report(Report(0.0, 0.0, 0, 1), [], 10.0)
    assert account.asked_at is None, "one was never asked for"
    account.queues[1].add_report(Report(0.0, 0.0, 0, 1), [], 20.0)
    assert account.asked_at == 10.0
    account.queues[0].add_report(QUIET, [], 30.0)
    assert account.asked_at == 10.0
