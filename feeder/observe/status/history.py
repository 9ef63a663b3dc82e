"""The last readings of figures: the verdict is judged from them, and the page draws its curves."""

from __future__ import annotations

from collections import deque

import msgspec

from feeder.observe.figures import FeedFigures, Figures
from feeder.observe.interval import Interval
from feeder.observe.verdict import Verdict, judge

JUDGED_S = 10.0
"""A verdict is of so many seconds."""
MAX_POINTS = 300
"""Points of a curve; at one a second, five minutes."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One feed between two readings of its figures."""

    at_s: float
    """When the second was read, as in `Figures`."""
    batches: float
    """Batches a second that were taken."""
    bytes: float
    """Bytes a second in them."""
    waiting: float
    """The share of the time that the hungriest trainer waited."""
    fill: float
    """Share of its room that was filled at the end."""


class History:
    """The last readings of a process's figures. Belongs to one thread at a time."""

    def __init__(self) -> None:
        self._recent: deque[Figures] = deque()
        self._points: dict[str, deque[Point]] = {}

    def add(self, figures: Figures) -> None:
        """One more reading."""
        last = self._recent[-1] if self._recent else None
        for feed in figures.feeds:
            before = None if last is None else find(last, feed.title)
            seconds = 0.0 if last is None else figures.at_s - last.at_s
            points = self._points.setdefault(feed.title, deque(maxlen=MAX_POINTS))
            points.append(_point(Interval(before, feed, seconds), figures.at_s))
        self._recent.append(figures)
        # Two stay in any case, and the older one is the last that is at least so old.
        while len(self._recent) > 2 and figures.at_s - self._recent[1].at_s >= JUDGED_S:
            self._recent.popleft()

    @property
    def latest(self) -> Figures | None:
        """The last reading."""
        return self._recent[-1] if self._recent else None

    def intervals(self) -> dict[str, Interval]:
        """The last interval of each feed, by its title."""
        return {title: Interval(*readings) for title, readings in self._readings().items()}

    def verdicts(self) -> dict[str, Verdict]:
        """The verdict on each feed over the last interval, by its title."""
        return {title: judge(*readings) for title, readings in self._readings().items()}

    def _readings(self) -> dict[str, tuple[FeedFigures | None, FeedFigures, float]]:
        if not self._recent:
            return {}
        first, last = self._recent[0], self._recent[-1]
        seconds = last.at_s - first.at_s
        return {
            feed.title: (None if first is last else find(first, feed.title), feed, seconds)
            for feed in last.feeds
        }

    def points(self) -> dict[str, list[Point]]:
        """The curves of each feed, by its title."""
        return {title: list(points) for title, points in self._points.items()}


def find(figures: Figures, title: str) -> FeedFigures | None:
    """A feed by its title; None where there is none."""
    return next((feed for feed in figures.feeds if feed.title == title), None)


def _point(interval: Interval, at_s: float) -> Point:
    feed = interval.after
    return Point(
        at_s,
        interval.taken_per_s,
        interval.taken_bytes_per_s,
        interval.starving,
        min(1.0, feed.buffered_rows / max(1, feed.limit_rows)),
    )
