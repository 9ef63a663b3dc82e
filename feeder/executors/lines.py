"""Lines: the ways over which processes are asked and answer, at the end of whoever asks.

A line of this host is a socket, with shared memory beside it: the process may be this one's own
child, or an actor's. A line to another host is ZeroMQ's (`ports.py`), and chunks come as frames.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder.executors import pickles, plain
from feeder.executors.blocks import Reader, map_shared
from feeder.executors.wire import PROGRESS_BYTES, HungUp, Load, Made, Wire, encode
from feeder.state import codec
from feeder.workers.stream.dtypes import read_dtype

logger = logging.getLogger("feeder")


class Line:
    """The way to one process. What comes is read by one thread at a time; the pool's lock guards
    what is sent."""

    unpickles = False
    """Whether a pickle that comes is read: of this process's own children alone."""

    def __init__(self) -> None:
        self.blocks = Reader()

    def send(self, ticket: Any) -> None:
        """Send a ticket."""

    def take(self, made: Made, parts: list[Any]) -> None:
        """The memory of an answer's blocks has come along: descriptors, or frames."""

    def progress(self) -> tuple[int, int]:
        """The number of the ticket that the process is at, and how many of its calls were begun;
        zeros where nobody knows."""
        return 0, 0

    def num_begun(self, number: int, place: int, most_calls: int) -> int:
        """How many calls of a ticket were begun, as far as anybody knows: of several the first may
        have gone well, so they are made one by one before one is blamed."""
        return 0 if place else min(2, most_calls)

    def hang_up(self) -> None:
        """Who reads need not wait any longer. Any thread."""

    def close(self) -> None:
        """Hang up, when nobody reads any more."""


class Mapped(Line):
    """A process on this host, over a socket."""

    def __init__(self, wire: Wire, load: Load, descriptor: int) -> None:
        """Tell a process what it needs first; `descriptor` comes along, and stays open here. Raises
        `OSError` where this process may not have more memory or descriptors."""
        super().__init__()
        self.wire = wire
        self.unpickles = not load.is_far
        page = os.memfd_create("feeder-progress", os.MFD_CLOEXEC)
        try:
            os.ftruncate(page, PROGRESS_BYTES)
            # Where the process notes which call it has begun.
            self._progress: NDArray[np.uint64] = map_shared(page, PROGRESS_BYTES).view(np.uint64)
            with contextlib.suppress(HungUp):  # It is found out where the answer is read.
                wire.send(load, [descriptor, page])
        finally:
            os.close(page)

    def send(self, ticket: Any) -> None:
        ticket.freed = self.blocks.freed()
        with contextlib.suppress(HungUp):  # As above.
            self.wire.send(ticket)

    def take(self, made: Made, parts: list[Any]) -> None:
        self.blocks.add(made.fresh, parts)

    def progress(self) -> tuple[int, int]:
        number, begun = self._progress[:2].tolist()
        return number, begun

    def num_begun(self, number: int, place: int, most_calls: int) -> int:
        at, begun = self.progress()
        return begun if at == number else 0

    def hang_up(self) -> None:
        self.wire.hang_up()

    def close(self) -> None:
        self.wire.close()


class Framed(Line):
    """A process on another host, over ZeroMQ."""

    def __init__(self, post: Callable[[list[bytes]], None], identity: bytes) -> None:
        super().__init__()
        self._post = post
        self._identity = identity

    def send(self, ticket: Any) -> None:
        ticket.freed = []
        self.blocks.freed()
        self._post([self._identity, encode(ticket)])

    def take(self, made: Made, parts: list[Any]) -> None:
        for (number, _), memory in zip(made.blocks, parts, strict=False):
            self.blocks.hold(number, memory)
        made.dropped = [number for number, _ in made.blocks]


def unpacked(line: Line, made: Made, parts: list[Any]) -> Made:
    """An answer with its chunks as arrays over the memory that came along."""
    blocks = line.blocks
    line.take(made, parts)
    blocks.learn([read_dtype(codec.unpack(dtype)) for dtype in made.dtypes])
    if not line.unpickles and any(isinstance(chunk, bytes) for chunk in made.chunks):
        raise ValueError("a pickle came from another host")
    roots = blocks.open(made.blocks)
    array = blocks.array
    chunks: Any = [
        pickles.load(chunk)
        if isinstance(chunk, bytes)
        else tuple([array(place, roots) for place in chunk])
        for chunk in made.chunks
    ]
    made.chunks = chunks
    # After the arrays have been made: they lie there no longer than they are referred to.
    blocks.drop(made.dropped)
    return made


def say(is_error: bool, text: str) -> None:
    """Print what a process has printed."""
    stream = sys.stderr if is_error else sys.stdout
    # It may be closed, or a pipe that nobody reads: no fault of the process, which goes on.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.write(text)
        stream.flush()


def log(record: bytes) -> None:
    """Log what a process has logged."""
    try:
        made = plain.read_record(record)
        to = logging.getLogger(made.name)
        if to.isEnabledFor(made.levelno):
            to.handle(made)
    except Exception as error:
        # Such as a class that only the process has; its answer is still to be read.
        logger.warning("a log record of a process cannot be read: %r", error)
