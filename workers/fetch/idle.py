"""Threads that have nothing to do, woken one at a time."""

from __future__ import annotations

import threading


class Idle:
    """Threads that wait under one lock, of which the one that came last is woken first: what it
    freed is in a cache still, and malloc keeps memory by thread, so that the fewer take turns the
    less memory goes round.

    Every method is called with the lock held.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._waiting: list[threading.Condition] = []
        self.coming = 0
        """Those that were woken and have not gone on yet."""

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, seconds: float | None) -> None:
        """Wait to be woken, for so long at most where that is said."""
        own = threading.Condition(self._lock)
        self._waiting.append(own)
        try:
            own.wait(seconds)
        finally:
            if own in self._waiting:
                self._waiting.remove(own)
            else:
                self.coming -= 1

    def notify(self) -> None:
        """Wake the one that came last."""
        if self._waiting:
            # In this order: it is the user's thread too, and an interrupt comes after a call.
            self._waiting[-1].notify()
            self.coming += 1
            del self._waiting[-1]

    def notify_all(self) -> None:
        """Wake all."""
        while self._waiting:
            self.notify()
