"""How often threads take turns at the interpreter while the feeder's own are among them.

A thread that computes in Python is asked for the interpreter once another has waited for the
switch interval, 5 ms unless the user says otherwise (`sys.setswitchinterval`). Beside a busy one
every hand-over of rows waits for so long, and so does each call that lets go of the interpreter,
as large copies and reads do: the trainer's loop starves the threads that are to feed it. So they
wait for 1 ms (CONTRIBUTING, decision 103, has what that gains and costs).
"""

from __future__ import annotations

import os
import sys
import threading

SWITCH_S = 0.001
"""How long our threads wait before they ask."""
_PYTHONS_S = 0.005
"""Who has another interval than Python's own has chosen it."""


class Turns:
    """The switch interval of the process: 1 ms while threads run that have begun and not ended,
    then Python's own again.

    One that the user has set, before or meanwhile, is left alone, as far as it can be told from
    these two. `begin` and `end` are called by each of those threads.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """No thread runs: a forked child has none of those that did."""
        self._lock = threading.Lock()
        self._num_running = 0
        self._is_ours = False

    def begin(self) -> None:
        """One more thread runs."""
        with self._lock:
            self._num_running += 1
            if self._num_running == 1 and _is_set_to(_PYTHONS_S):
                # First: a fork may come between these two.
                self._is_ours = True
                sys.setswitchinterval(SWITCH_S)

    def end(self) -> None:
        """One that has begun runs no more."""
        with self._lock:
            self._num_running -= 1
            if not self._num_running:
                self._put_back()

    def _put_back(self) -> None:
        if self._is_ours and _is_set_to(SWITCH_S):
            sys.setswitchinterval(_PYTHONS_S)
        self._is_ours = False

    def fork(self) -> None:
        """This is a forked child."""
        self._put_back()
        self.reset()


def _is_set_to(seconds: float) -> bool:
    # Python keeps whole microseconds.
    return round(sys.getswitchinterval() * 1e6) == round(seconds * 1e6)


TURNS = Turns()
"""The process's: there is one interpreter."""

os.register_at_fork(after_in_child=TURNS.fork)
