"""A log that says the same no more than now and then: a peer that misbehaves does so often."""

from __future__ import annotations

import logging
import math
import time

logger = logging.getLogger("feeder")

_LOG_EVERY_S = 1.0


class QuietLog:
    """Warnings, at most one a second. Belongs to one thread."""

    def __init__(self) -> None:
        self._logged_at, self._silenced = -math.inf, 0

    def warn(self, text: str, what: str | None) -> None:
        """Log `text % what`, or count it for the next time."""
        now = time.monotonic()
        if now - self._logged_at < _LOG_EVERY_S:
            self._silenced += 1
            return
        more = f" ({self._silenced} more like it)" if self._silenced else ""
        self._logged_at, self._silenced = now, 0
        logger.warning(text + more, what)
