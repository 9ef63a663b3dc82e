"""Waking a thread that polls, from any other thread."""

from __future__ import annotations

import contextlib
import math
import os
import select
from typing import Protocol


class Readable(Protocol):
    """Anything with a descriptor."""

    def fileno(self) -> int:
        """The descriptor."""


def wait_for(waker: Readable, timeout_s: float) -> None:
    """Wait until the waker is woken, at most so long."""
    poll = select.poll()  # select() takes no descriptor above 1023.
    poll.register(waker, select.POLLIN)
    poll.poll(None if timeout_s == math.inf else math.ceil(1000 * timeout_s))


class Waker:
    """A descriptor that becomes readable when somebody calls `wake`.

    Finalisers of arrays call `wake`, from any thread and perhaps inside the garbage collector, and
    long after what they wake has been closed. So the descriptor is closed when the last reference
    to the waker is gone and not before: a number closed earlier could be another file's by then.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = self._is_silent = False

    def fileno(self) -> int:
        """What to poll."""
        return self._descriptor

    def silence(self) -> None:
        """In a forked child: wake nobody, since the number may become a file's."""
        self._is_silent = True

    def wake(self) -> None:
        """Make the descriptor readable."""
        if not self._awake and not self._is_silent:
            self._awake = True
            os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """To be called before looking for what there is to do."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)
        self._awake = False

    def __del__(self) -> None:
        os.close(self._descriptor)
