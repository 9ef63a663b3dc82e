"""The content of the status page: figures that are read once a second, verdicts and curves."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from feeder.errors import FeedError
from feeder.observe.figures import Figures
from feeder.observe.status.history import History

# A point of the page's curves is a second; faster would show the scheduler's noise.
SAMPLE_S = 1.0


class Board:
    """Reads figures now and then; any thread may ask for what came of it. Its lock guards the
    history and `_closed`.

    `read_figures` reads the figures of the process, and raises a `FeedError` where it cannot.
    """

    def __init__(self, read_figures: Callable[[], Figures]) -> None:
        self._read_figures = read_figures
        self._lock = threading.Lock()
        self._closing = threading.Condition(self._lock)
        self._history = History()
        self._closed = False

    def run_sampler(self) -> None:
        """Thread body: read the figures once a second."""
        is_open = True
        while is_open:
            began = time.monotonic()
            self.sample()
            is_open = self.pause(max(0.0, began + SAMPLE_S - time.monotonic()))

    def pause(self, seconds: float) -> bool:
        """Let time pass; returns at once, with False, where it is closed."""
        with self._lock:
            return not self._closing.wait_for(lambda: self._closed, seconds)

    def sample(self) -> None:
        """Read the figures, where they can be had."""
        try:
            figures = self._read_figures()
        except FeedError:
            return  # What is wrong is told to whoever asks.
        with self._lock:
            self._history.add(figures)

    def close(self) -> None:
        """End the sampler."""
        with self._lock:
            self._closed = True
            self._closing.notify_all()

    # ---- what is shown

    def figures(self) -> Figures:
        """The figures now. Raises `FeedError`."""
        return self._read_figures()

    def kinds(self, figures: Figures) -> dict[str, str]:
        """The kind of each feed's verdict, by its title; `figures` are the latest."""
        with self._lock:
            self._begin(figures)
            return {title: verdict.kind for title, verdict in self._history.verdicts().items()}

    def everything(self) -> bytes:
        """Figures, verdicts and curves as JSON, for the page. Raises `FeedError`."""
        figures = self._read_figures()
        with self._lock:
            self._begin(figures)
            verdicts, points = self._history.verdicts(), self._history.points()
        told: dict[str, Any] = {
            title: {"kind": verdict.kind, "why": verdict.why, "advice": verdict.advice}
            for title, verdict in verdicts.items()
        }
        return msgspec.json.encode({"figures": figures, "verdicts": told, "history": points})

    def _begin(self, figures: Figures) -> None:
        """Before the sampler's first reading the verdict is of the time since the start."""
        if self._history.latest is None:
            self._history.add(figures)

    def trouble(self) -> str | None:
        """Why this process is not ready: it does not answer, or a feed has failed; else None."""
        try:
            failed = [feed for feed in self._read_figures().feeds if feed.state == "failed"]
        except FeedError as error:
            return str(error)
        return "; ".join(f"feed {feed.title!r}: {feed.failure}" for feed in failed) or None


def stacks() -> str:
    """The stack of every thread of this process."""
    # Taken at once: threads may start and end while the text is made.
    frames = sys._current_frames()
    parts = [
        f"{thread.name} (daemon={thread.daemon}):\n"
        + "".join(traceback.format_stack(frames[thread.ident]))
        for thread in threading.enumerate()
        if thread.ident in frames
    ]
    return "\n".join(parts)
