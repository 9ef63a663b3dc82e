"""A log that says the same no more than now and then: a peer that misbehaves does so often."""

from __future__ import annotations

import logging
import math
import time
import traceback

logger = logging.getLogger("feeder")

_LOG_EVERY_S = 1.0


def plain(text: str) -> str:
    """A text without what could move a terminal's cursor or begin another line: what peers say of
    themselves, names and errors may hold anything. Any thread."""
    return "".join([char if char.isprintable() else "?" for char in text])


class RateLimitedLog:
    """Warnings, at most one a second of each text. Belongs to one thread."""

    def __init__(self) -> None:
        # Of each text: when it was logged, and how often it was not since.
        self._said: dict[str, tuple[float, int]] = {}

    def warn(self, text: str, what: str | None) -> None:
        """Log `text % what`, or count it for the next time; there are few texts."""
        now = time.monotonic()
        logged_at, silenced = self._said.get(text, (-math.inf, 0))
        if now - logged_at < _LOG_EVERY_S:
            self._said[text] = logged_at, silenced + 1
            return
        more = f" ({silenced} more like it)" if silenced else ""
        self._said[text] = now, 0
        logger.warning(text + more, what)

    def fail(self, text: str, error: Exception) -> None:
        """The same for an error that nobody has thought of, with its traceback."""
        self.warn(text, "".join(traceback.format_exception(error)))
