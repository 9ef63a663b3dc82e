"""Named points in the code where a process can be told to die, for tests of what follows.

``FEEDER_FAULT=NAME:N`` kills the process (SIGKILL) when it comes to a point for the N-th time;
``FEEDER_FAULT=NAME:N:stop`` stops it there (SIGSTOP). Without the variable a point costs one
comparison.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "FEEDER_FAULT"

POINTS = (
    "server.open",
    "server.opened",
    "server.attached",
    "server.arena",
    "server.before_send",
    "server.sent",
    "server.used",
    "server.released",
    "server.before_end",
    "server.ended",
    "server.rewind",
    "server.started",
    "server.put",
    "consumer.before_open",
    "consumer.opened",
    "consumer.mapped",
    "consumer.received",
    "consumer.put",
    "consumer.handed",
    "consumer.before_used",
    "consumer.used",
    "consumer.end",
    "consumer.lost",
)
"""Every point, by the process that comes to it."""


class _Plan:
    """Where this process dies, if it does."""

    def __init__(self, text: str) -> None:
        name, _, rest = text.partition(":")
        number, _, how = rest.partition(":")
        if name not in POINTS:
            raise ValueError(f"{VARIABLE} names {name!r}, expected one of {', '.join(POINTS)}")
        self.name = name
        self.left = int(number or 1)
        self.signal = signal.SIGSTOP if how == "stop" else signal.SIGKILL

    def reach(self, name: str) -> None:
        """A point has been reached."""
        if name != self.name:
            return
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.signal)


_plan = _Plan(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def point(name: str) -> None:
    """A point where the process dies if it was told so."""
    if _plan is not None:
        _plan.reach(name)
