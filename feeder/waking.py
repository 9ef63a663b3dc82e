"""How one thread wakes another that polls, or that the user may interrupt at any moment."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
from typing import Protocol


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


class Readable(Protocol):
    """Anything with a descriptor."""

    def fileno(self) -> int:
        """Return the descriptor."""


def wait_for(waker: Readable, timeout_s: float) -> None:
    """Wait until the waker is woken, at most so long."""
    # select() takes no descriptor above 1023, and a training process may have many.
    poll = select.poll()
    poll.register(waker, select.POLLIN)
    poll.poll(None if timeout_s == math.inf else math.ceil(1000 * timeout_s))


class Waker:
    """A descriptor that becomes readable when somebody calls `wake`.

    Any thread may call `wake`, also a finaliser inside the garbage collector, and long after the
    woken thread has ended. So `wake` takes no lock, and the descriptor is closed when the last
    reference to the waker is gone: a number that was closed earlier could be another file's by
    then. `clear` is called by the thread that polls, which owns the waker.
    """

    # At the interpreter's exit the names of the module may be gone before the last batch is.
    _write, _close = staticmethod(os.eventfd_write), staticmethod(os.close)

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Whether a wake-up is on its way: it saves the system call for those that follow it.
        self._awake = self._is_silent = False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._descriptor

    def silence(self) -> None:
        """In a forked child: wake nobody. The parent has the other end, and the number may be
        reused."""
        self._is_silent = True

    def wake(self) -> None:
        """Make the descriptor readable."""
        if not self._awake and not self._is_silent:
            # Two threads may both come here, and write twice: the thread wakes once for both.
            self._awake = True
            self._write(self._descriptor, 1)

    def clear(self) -> None:
        """Forget wake-ups. To be called before the look for work: work that comes later wakes
        again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)
        # After the reading: a wake-up in between is one that the look for work finds anyhow.
        self._awake = False

    def __del__(self) -> None:
        self._close(self._descriptor)
