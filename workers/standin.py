"""Who does the enqueuer's work where fetching takes next to no time.

To wake a thread costs more than a small batch. So a fetcher whose calls were quick does the
enqueuer's work itself while that waits for what it has fetched, and goes on fetching when there is
nothing left to merge: one thread at a time leads, the other watches over the calls (the pattern
is Schmidt's Leader/Followers, 1996). What a call that does not return has got before, and the
timeout, stay the enqueuer's: it looks again every now and then, without being woken.
"""

from __future__ import annotations

LOOK_S = 0.01
"""How long the enqueuer sleeps between two looks while others stand in for it again and again."""


class StandIn:
    """Whether a fetcher stands in for the enqueuer. The channel's lock guards it."""

    def __init__(self) -> None:
        self.active = False
        """Whether one does now; the enqueuer waits meanwhile."""
        self.times = 0
        """How often one did."""
        self._finished = False
        self._error: BaseException | None = None

    def begin(self) -> None:
        """A fetcher begins."""
        self.active = True
        self.times += 1

    def end(self) -> None:
        """It has nothing left to do."""
        self.active = False

    def finish(self, error: BaseException | None) -> None:
        """It has come to the end of the stream, or to an error."""
        self.active = False
        self._finished, self._error = True, error

    def has_finished(self) -> bool:
        """Whether the stream has come to its end; raises the error that it ended with."""
        if self._error is not None:
            raise self._error
        return self._finished
