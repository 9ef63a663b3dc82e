"""How often threads take turns at the interpreter while the feeder's own are among them.

A thread that computes in Python is asked for the interpreter once another has waited for the
switch interval, 5 ms unless the user says otherwise (`sys.setswitchinterval`). Beside a busy one
every hand-over of rows waits for so long, and so does each call that lets go of the interpreter,
as large copies and reads do: the trainer's loop starves the threads that are to feed it. After
1 ms they get four times as much done.
"""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType

SWITCH_S = 0.001
"""How long our threads wait before they ask."""
_PYTHONS_S = 0.005
"""Who has another interval than Python's own has chosen it."""


class Turns:
    """The switch interval of the process: 1 ms while anybody is within, then Python's own again.

    One that the user has set, before or meanwhile, is left alone, as far as it can be told from
    these two. Any thread may enter.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nobody is within any more: a forked child has none of the threads that were."""
        self._lock = threading.Lock()
        self._num_within = 0
        self._is_ours = False

    def __enter__(self) -> None:
        with self._lock:
            self._num_within += 1
            if self._num_within == 1 and _is_set_to(_PYTHONS_S):
                # First: a fork may come between these two.
                self._is_ours = True
                sys.setswitchinterval(SWITCH_S)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within:
                self._end()

    def _end(self) -> None:
        if self._is_ours and _is_set_to(SWITCH_S):
            sys.setswitchinterval(_PYTHONS_S)
        self._is_ours = False

    def fork(self) -> None:
        """This is a forked child."""
        self._end()
        self.reset()


def _is_set_to(seconds: float) -> bool:
    # Python keeps whole microseconds.
    return round(sys.getswitchinterval() * 1e6) == round(seconds * 1e6)


TURNS = Turns()
"""The process's: there is one interpreter."""

os.register_at_fork(after_in_child=TURNS.fork)
