"""Points of a process that fetches at which it is killed, once each: preload this in the zygote.

Variables of the environment name the point, and a file that says that somebody has come by.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feeder.executors import child
from feeder.executors.blocks import Writer
from feeder.executors.wire import Made, Wire
from remote import once

POINTS = (
    "before the function", "after the function", "before a call", "after a call", "in a chunk",
    "before the answer", "in the answer", "after the answer",
)  # fmt: skip
POINT, MARK, COUNT = "FEEDER_DEADLY_POINT", "FEEDER_DEADLY_MARK", "FEEDER_DEADLY_COUNT"

_passed: dict[str, int] = {}


def come_to(point: str) -> bool:
    """Whether this is where it ends: a process comes by so often before."""
    if os.environ.get(POINT) != point:
        return False
    _passed[point] = _passed.get(point, 0) + 1
    return _passed[point] == int(os.environ[COUNT]) and once(Path(os.environ[MARK]))


def end_at(point: str) -> None:
    """End here if it is the point."""
    if come_to(point):
        os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, before: str = "", after: str = "") -> None:
    """Have a function be a point."""
    function: Callable[..., Any] = getattr(owner, name)

    def pointed(*args: Any, **kwargs: Any) -> Any:
        end_at(before)
        result = function(*args, **kwargs)
        end_at(after)
        return result

    setattr(owner, name, pointed)


def send(self: Wire, message: Any, descriptors: list[int] | None = None) -> None:
    """Send, and end in the middle."""
    if isinstance(message, Made) and come_to("in the answer"):
        self.sock = Half(self.sock)  # type: ignore[assignment]
    _send(self, message, descriptors)


class Half:
    """A socket that sends half of a message, and ends the process."""

    def __init__(self, sock: Any) -> None:
        self.sock = sock

    def sendmsg(self, parts: list[bytes], ancillary: Any) -> int:
        whole = b"".join(parts)
        self.sock.sendmsg([whole[: len(whole) // 2]], ancillary)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


_send = Wire.send
if POINT in os.environ:
    Wire.send = send  # type: ignore[method-assign]
    around(child._Function, "__init__", "before the function", "after the function")
    around(child, "as_tuple", "after a call")
    around(child._Function, "_make", "before a call")
    around(child._Function, "_place", after="in a chunk")
    around(Writer, "lend", "before the answer")
    around(Writer, "sent", after="after the answer")
