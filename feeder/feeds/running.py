"""What runs for a coordinator: started together, and ended by a stop, at the process's exit, or
when nobody can ask for a batch any more."""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from feeder.checkpoint.policy import Checkpointing
from feeder.checkpoint.saving import Saver
from feeder.errors import FeedError, StuckWorkerError
from feeder.feeds.stream import Stream
from feeder.state.snapshot import Snapshot
from feeder.workers import forks
from feeder.workers.fetch.threads import LAST

logger = logging.getLogger("feeder")

STOP_DEADLINE_S = 5.0
"""How long a stop waits for fetch functions to return, all together. A thread that is inside a
user's function cannot be ended; it is named instead, with its stack."""

_SAVE_S = 10.0
"""How long a stop waits at least for a checkpoint that is being written: a slow disk is no reason
to lose the last position, a disk that hangs is no reason to hang."""


class Reader(Protocol):
    """Who takes batches of the streams, as a `DeviceFeed` does."""

    def drop(self) -> None:
        """Forget the batches at hand: the stream has been stopped, or this is a forked child."""


Streams = dict[str, list[Stream]]
"""The streams of each feed, by its name; those of stopped feeds too."""


def _stop(streams: list[Stream], saver: Saver | None, deadline_s: float) -> None:
    # All are woken before one is waited for, so that they end at the same time.
    for stream in streams:
        stream.close()
    end = time.monotonic() + deadline_s
    stuck = []
    for stream in streams:
        try:
            stream.join(max(0.0, end - time.monotonic()))
        except StuckWorkerError as error:
            stuck.append(error)
    if saver is not None:
        try:
            saver.close(max(_SAVE_S, end - time.monotonic()))
        except StuckWorkerError as error:
            stuck.append(error)
    if stuck:
        threads = [thread for error in stuck for thread in error.names]
        raise StuckWorkerError("\n".join(map(str, stuck)), names=threads)


def run_end(streams: list[Stream], saver: Saver | None) -> None:
    """Thread body: stop what was dropped without a stop."""
    try:
        _stop(streams, saver, STOP_DEADLINE_S)
    except StuckWorkerError as error:
        logger.error("%s", error)


def _end(streams: list[Stream], saver: Saver | None) -> None:
    # In a thread: a finaliser may be inside the garbage collector, in a thread that holds the very
    # locks that a stop takes.
    LAST.start("feeder forgotten", run_end, streams, saver)


class Running:
    """The streams of a coordinator, and the thread that stores their positions.

    The coordinator, its feeds and their devices refer to it; no thread does. So it goes when nobody
    can ask for a batch any more, and then the threads are ended. The thread that adds, starts and
    stops owns it; any thread may ask for `all_streams`.
    """

    def __init__(self, checkpoints: Checkpointing | None) -> None:
        self.streams: Streams = {}
        # The saver's thread is to refer to the streams alone.
        streams = self.streams
        self.saver: Saver | None = None
        if checkpoints is not None:
            self.saver = Saver(
                checkpoints, lambda: take_snapshot(streams), lambda error: _fail(streams, error),
                lambda: sync(streams),
            )  # fmt: skip
        self.devices: weakref.WeakSet[Reader] = weakref.WeakSet()
        """Who reads the streams."""
        self.forked = False
        """Whether this is a forked child's copy of what runs in its parent."""

    def all_streams(self) -> list[Stream]:
        """The streams of all feeds."""
        return _all(self.streams)

    def start(self, streams: list[Stream]) -> None:
        """Start these, and the thread that stores positions. If one cannot be started, as when
        the system has no more threads, no stream runs on."""
        # Noted before threads start: an interrupt from here on still finds them at the exit.
        _running.add(self)
        forks.call_in_child(self.after_fork)
        if self.saver is not None and not self.saver.is_running:
            self.saver.start()
        try:
            for stream in streams:
                stream.start()
        except BaseException:
            for stream in streams:
                stream.close()
            for stream in streams:
                stream.join(STOP_DEADLINE_S)
            raise

    def stop(self, streams: list[Stream], deadline_s: float, *, is_all: bool) -> None:
        """Stop these; with `is_all` also the thread that stores positions. Raises
        `StuckWorkerError`, when all others have ended."""
        if not self.forked:
            _stop(streams, self.saver if is_all else None, deadline_s)

    def after_fork(self) -> None:
        """This is a forked child: nothing of the parent's can be used here."""
        self.forked = True
        if self.saver is not None:
            self.saver.after_fork()
        for stream in self.all_streams():
            stream.after_fork()
        for device in list(self.devices):
            device.drop()

    def __del__(self, end: Callable[[list[Stream], Saver | None], None] = _end) -> None:
        # After `_stop_at_exit` there is nothing left. No name of the module: they may be gone then.
        left = [
            stream
            for streams in self.streams.values()
            for stream in streams
            if stream.started and not stream.stopped
        ]
        is_saving = self.saver is not None and self.saver.is_running
        if (left or is_saving) and not self.forked:
            end(left, self.saver)


def _all(streams: Streams) -> list[Stream]:
    return [stream for of_feed in list(streams.values()) for stream in of_feed]


def take_snapshot(streams: Streams) -> Snapshot:
    """Where all streams stand, with their leftover rows."""
    return Snapshot(tuple(stream.state(with_rows=True) for stream in _all(streams)))


def sync(streams: Streams) -> None:
    """Have all that was handed out in the transcripts for good. Raises `TranscriptError`."""
    for stream in _all(streams):
        stream.sync()


def _fail(streams: Streams, error: FeedError) -> None:
    """Checkpoints cannot be written, and `on_save_error="raise"` lets that end the feeds."""
    for stream in _all(streams):
        if not stream.stopped:
            stream.fail(error)


# ---- Ended at the process's exit


_running: weakref.WeakSet[Running] = weakref.WeakSet()


def _stop_at_exit() -> None:
    """Daemon threads must not run on into a dying interpreter."""
    for running in list(_running):
        try:
            running.stop(running.all_streams(), 1.0, is_all=True)
        except StuckWorkerError as error:
            logger.error("%s", error)
    try:
        LAST.close(1.0)
    except StuckWorkerError as error:
        logger.error("%s", error)


atexit.register(_stop_at_exit)
