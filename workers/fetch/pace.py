"""Whether the calls of a lane take next to no time. A rule without threads."""

from __future__ import annotations

QUICK_CALL_S = 0.00002
"""What takes less than it takes to wake another thread."""

QUICK_BUNDLE_S = 0.003
"""No bundle of quick calls takes longer: others would wait for it."""

QUICK_WAIT_S = 0.001
"""Nor do they wait for longer, as readers of files do: others could be called meanwhile. And what
takes as long each is not tried."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.2
_WEIGHT = 1 / 8


class Trials:
    """When calls that were not quick are tried again: those of all lanes at once, since a lane that
    is quick has to wait for the interpreter beside one that is not, and would fail.

    Threads share it without a lock: what that may spoil is one trial.
    """

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S / 2
        self._began = -1.0
        self.next = 0.0
        """From when on they are."""

    def begin(self, now: float) -> None:
        """The calls of a lane are tried."""
        if self._began < self.next:
            self._began = now

    def fail(self, now: float) -> None:
        """Those of a lane have turned out not to be quick: no lane is tried for a while, and for
        twice as long whenever it is the same again soon. Lanes that are quick stay so."""
        if now >= self.next:
            lasted = now - self._began > 10 * self._pause_s
            self._pause_s = _FIRST_PAUSE_S if lasted else min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self.next = now + self._pause_s


class Pace:
    """Whether the calls of one lane count as quick, from how long its bundles took.

    Beside other threads a call waits for the interpreter, and how long it takes itself is not
    seen. So calls count as quick until they show that they are not, and are tried again later. To
    be mistaken costs a few milliseconds.
    """

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._is_quick = False
        self._num = 0
        # Seconds per call, averaged over the last bundles.
        self._call_s = 0.0

    def note(self, num_calls: int, took: float, waited: float, now: float) -> bool:
        """So many calls took so long, waited for so much of it, and ended now; returns whether
        they count as quick."""
        if not self._is_quick:
            # As long as that no call takes that is quick and waits for the interpreter alone.
            if now >= self._trials.next and took < QUICK_WAIT_S * max(1, num_calls):
                self._trials.begin(now)
                self._is_quick, self._num = True, 0
                self._call_s = QUICK_CALL_S / 2
            return self._is_quick
        self._num += 1
        if num_calls:
            latest = min(took / num_calls, 4 * QUICK_CALL_S)
            self._call_s += _WEIGHT * (latest - self._call_s)
        # The first may have been under way beside those of other threads.
        is_long = (took >= QUICK_BUNDLE_S or waited >= QUICK_WAIT_S) and self._num > 1
        if is_long or self._call_s >= QUICK_CALL_S:
            self._is_quick = False
            self._trials.fail(now)
        return self._is_quick
