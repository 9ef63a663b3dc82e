"""The coordinators of this process that run: stopped at its end, and told of a fork."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Runs(Protocol):
    """What has threads."""

    def stop(self, *, deadline_s: float) -> bool:
        """End them."""

    def fork(self) -> None:
        """This is a forked child, which has none of them."""


_running: weakref.WeakSet[Runs] = weakref.WeakSet()


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
