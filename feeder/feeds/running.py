"""What runs in this process: started together, stopped at its end, and told of a fork."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from typing import Protocol


class Runs(Protocol):
    """What has threads."""

    def stop(self, *, deadline_s: float) -> bool:
        """End them."""

    def fork(self) -> None:
        """This is a forked child, which has none of them."""


class Starts(Protocol):
    """What starts threads."""

    def start(self) -> None:
        """Start them."""

    def close(self) -> None:
        """Wake them, so that they end."""

    def join(self, deadline_s: float) -> None:
        """Wait until they have."""


_running: weakref.WeakSet[Runs] = weakref.WeakSet()


def start_all(streams: Sequence[Starts], deadline_s: float) -> None:
    """Start all; where one cannot be started, as where the system has no more threads, none runs
    on: nobody leaves a `with` that was not entered."""
    try:
        for stream in streams:
            stream.start()
    except BaseException:
        for stream in streams:
            stream.close()
        for stream in streams:
            stream.join(deadline_s)
        raise


def add(runs: Runs) -> None:
    """See to one more; it is let go of when nobody else has it."""
    _running.add(runs)


def _stop_at_exit() -> None:
    """Daemon threads must not run on into a dying interpreter."""
    for runs in list(_running):
        runs.stop(deadline_s=1.0)


def _after_fork() -> None:
    for runs in list(_running):
        runs.fork()


atexit.register(_stop_at_exit)
os.register_at_fork(after_in_child=_after_fork)
