"""How a user's thread waits, which may be interrupted at any moment, as by Ctrl-C."""

from __future__ import annotations

import contextlib
import threading


class OneShotEvent:
    """Is set once. The waiting thread puts it where others find it, with their lock held, and waits
    without that lock. Any thread may set it.

    `threading.Condition` takes the lock back after a wait, in Python: a thread that is interrupted
    just then releases what another one holds, and both fail ("release unlocked lock").
    """

    def __init__(self) -> None:
        # A plain lock, which is taken and released in C: an interrupt finds it in one state or the
        # other.
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the waiting thread; harmless when done before."""
        # Set before: the lock is free already.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until it is set, for ever where no time is given; whether it was."""
        return self._lock.acquire(timeout=timeout_s)
