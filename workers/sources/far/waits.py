"""How long the calls of a source wait for blocks.

Blocks are shared by all sources of a process, and do not know for whom they wait. So the thread
that makes a call notes whose call it is, and the blocks count a wait there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, local

from feeder.workers.forks import call_in_child
from feeder.workers.stats import Crowd


class StoreWaits:
    """Seconds for which calls of one source wait for blocks. Any thread."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._lock, self._crowd = Lock(), Crowd()
        call_in_child(self._start)

    def seconds(self) -> float:
        """In all, those of calls that wait now included."""
        return self._crowd.seconds(time.monotonic())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count those of this thread."""
        before, _THREAD.waits = _THREAD.waits, self
        try:
            yield
        finally:
            _THREAD.waits = before

    def change(self, num: int) -> None:
        """So many threads begin to wait, or, if negative, end."""
        with self._lock:
            self._crowd.change(num, time.monotonic())


class _Thread(local):
    waits: StoreWaits | None = None
    """Those of the source whose call the thread makes."""


_THREAD = _Thread()


@contextmanager
def waiting() -> Iterator[None]:
    """Count the time of a wait for the source whose call the thread makes, if it makes one."""
    if (waits := _THREAD.waits) is None:
        yield
        return
    waits.change(1)
    try:
        yield
    finally:
        waits.change(-1)
