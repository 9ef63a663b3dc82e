"""A log that repeats a text at most once a second, for what peers do wrong.

Bad nonces alone wrote 30,000 lines a second before.
"""

from __future__ import annotations

import logging
import math
import time
import traceback

logger = logging.getLogger("feeder")

# Often enough to see that something goes on; the next line says how many were left out.
_LOG_EVERY_S = 1.0


def plain(text: str) -> str:
    """A text with "?" for characters that could move a terminal's cursor or begin another line.

    What peers say of themselves may hold anything, and logs are read in terminals. Any thread.
    """
    return "".join([char if char.isprintable() else "?" for char in text])


class RateLimitedLog:
    """Warnings, at most one a second of each text. Owned by the thread that made it."""

    def __init__(self) -> None:
        # For each text: when it was logged last, and how often it was left out since. Texts are the
        # program's own, so this stays small whatever peers send.
        self._said: dict[str, tuple[float, int]] = {}

    def warn(self, text: str, what: str | None) -> None:
        """Log `text % what`, or count it for the next time."""
        now = time.monotonic()
        logged_at, silenced = self._said.get(text, (-math.inf, 0))
        if now - logged_at < _LOG_EVERY_S:
            self._said[text] = logged_at, silenced + 1
            return
        more = f" ({silenced} more like it)" if silenced else ""
        self._said[text] = now, 0
        logger.warning(text + more, what)

    def fail(self, text: str, error: Exception) -> None:
        """The same for an unexpected error, with its traceback."""
        self.warn(text, "".join(traceback.format_exception(error)))
