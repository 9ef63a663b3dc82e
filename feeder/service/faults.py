"""Named points in the code at which a test can have the process killed or stopped.

``FEEDER_FAULT=NAME:N`` kills the process (SIGKILL) when it comes to a point for the N-th time;
``FEEDER_FAULT=NAME:N:stop`` stops it there (SIGSTOP). Without the variable a point costs one
comparison.
"""

from __future__ import annotations

import os
import signal

# An environment variable, since the processes that are to die are started by others.
VARIABLE = "FEEDER_FAULT"

# Around each step that the other side can see: before it, and after it.
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
"""Every point. A closed list: a test that names another one would never see its fault."""


class _Plan:
    """Where this process dies. Points are passed by several threads; a plan belongs to the one that
    comes to its point."""

    def __init__(self, text: str) -> None:
        name, _, rest = text.partition(":")
        number, _, how = rest.partition(":")
        if name not in POINTS:
            raise ValueError(f"{VARIABLE} names {name!r}, expected one of {', '.join(POINTS)}")
        self.name = name
        self.left = int(number or 1)
        self.signal = signal.SIGSTOP if how == "stop" else signal.SIGKILL

    def reach(self, name: str) -> None:
        """Count a point that was reached, and send the signal at the last."""
        if name != self.name:
            return
        self.left -= 1
        if self.left == 0:
            # SIGKILL and SIGSTOP cannot be handled: nothing of the process runs afterwards.
            os.kill(os.getpid(), self.signal)


# Read once at import: without a plan a point is one comparison, also in the path of each batch.
_plan = _Plan(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def point(name: str) -> None:
    """A point at which the process dies where the variable says so."""
    if _plan is not None:
        _plan.reach(name)
