"""Who does the enqueuer's work where fetching takes next to no time.

To wake a thread costs more than a small batch, or one that is passed on without a copy. So a
fetcher whose calls were quick, or give such batches, takes the lead: it does the enqueuer's work
while that waits for what was fetched, and goes on fetching when there is nothing left to merge
(the pattern is Schmidt's Leader/Followers, 1996). The enqueuer watches over the calls meanwhile:
the timeout, and what a call that does not return has got before, stay its own. It looks again
every now and then, without being woken.

"The enqueuer" is said of this work in general; its own thread is meant where threads are spoken of.
"""

from __future__ import annotations

LOOK_S = 0.002
"""How long the enqueuer sleeps between two looks, while others lead again and again: for as long
calls that have become slow are made one after another."""


class Lead:
    """Whether a fetcher leads. The channel's lock guards it."""

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

    def take_end(self) -> bool:
        """Whether the stream has come to its end; raises the error that it ended with, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._finished
