"""Readings over time: what the verdict is judged from, and the curves."""

from __future__ import annotations

from typing import Any

import pytest

from feeder.observe.status.history import JUDGED_S, MAX_POINTS, History
from figures import feed, figures, queue


def reading(at_s: float, batches: int, wait_s: float = 0.0, **fields: Any) -> Any:
    taken = queue(batches=batches, bytes=1000 * batches, wait_s=wait_s)
    made = feed(age_s=at_s, batches=batches, bytes=1000 * batches, queues=(taken,), **fields)
    return figures(made, at_s=at_s)


def test_the_first_reading_is_judged_since_the_start() -> None:
    history = History()
    history.add(reading(50.0, 100, wait_s=45.0, chunks_wait_s=45.0))
    assert history.verdicts()["train"].kind == "fetch-bound"
    assert history.intervals()["train"].seconds == 50.0


def test_a_verdict_is_of_the_last_seconds() -> None:
    history = History()
    for i in range(31):
        # Slow for the first 15 s, and quick then.
        wait_s = min(i, 15.0)
        history.add(reading(float(i), 10 * i, wait_s=wait_s, chunks_wait_s=wait_s))
    interval = history.intervals()["train"]
    assert interval.seconds == JUDGED_S
    assert history.verdicts()["train"].kind == "trainer-bound"


def test_a_curve_has_a_point_for_each_reading() -> None:
    history = History()
    for i, batches in enumerate((0, 10, 40)):
        made = reading(float(i), batches, wait_s=0.5 * i, buffered_rows=80, limit_rows=320)
        history.add(made)
    points = history.points()["train"]
    assert [point.at_s for point in points] == [0.0, 1.0, 2.0]
    assert [point.batches for point in points[1:]] == [10.0, 30.0]
    assert [point.bytes for point in points[1:]] == [10_000.0, 30_000.0]
    assert [point.waiting for point in points[1:]] == [0.5, 0.5]
    assert points[-1].fill == 0.25


def test_curves_are_of_bounded_length() -> None:
    history = History()
    for i in range(MAX_POINTS + 50):
        history.add(reading(float(i), i))
    points = history.points()["train"]
    assert len(points) == MAX_POINTS
    assert points[-1].at_s == MAX_POINTS + 49


def test_a_restart_gives_no_negative_rates() -> None:
    history = History()
    history.add(reading(100.0, 5000))
    history.add(reading(2.0, 10))
    assert history.points()["train"][-1].batches == pytest.approx(5.0)


def test_streams_of_one_name_have_curves_of_their_own() -> None:
    history = History()
    history.add(figures(feed(), feed(number=1), feed(name="other")))
    assert sorted(history.points()) == ["other", "train", "train#1"]
    assert sorted(history.verdicts()) == ["other", "train", "train#1"]
