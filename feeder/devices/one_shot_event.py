"""How a user's thread waits, which may be interrupted at any moment, as by Ctrl-C."""

from __future__ import annotations

import contextlib
import threading


class OneShotEvent:
    """Rings once. Its thread hangs it where others find it, with their lock held, and waits without
    that lock.

    `threading.Condition` takes the lock back after a wait, in Python: a thread that is interrupted
    just then releases what another one holds, and both fail ("release unlocked lock").
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake its thread; harmless when done before."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until it rings, for ever where no time is given; whether it did."""
        return self._lock.acquire(timeout=timeout_s)
