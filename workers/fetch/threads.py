"""Threads of the engine: none starts outside a `ThreadGroup`, and its `close` ends them all.

Locks and waits are here, too, since they have a condition that the standard library's do not meet:
one of the threads is the user's, and an interrupt may raise in it between any two instructions. A
lock must be free after that, and a thread that was chosen to be woken must not be lost.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from feeder.workers import forks
from feeder.workers.errors import StuckWorkerError

SWITCH_INTERVAL_S = 0.001
"""The interpreter's switch interval while threads of the engine run."""
# Beside a thread that computes in Python each hand-over waits for it. With Python's own 5 ms
# 8 KB batches came at 8,300/s, and come at 33,000/s; 2 ms gave half of that. 0.5 ms gave twice
# as much, and left the busy thread half of its pace (2026-11-22).

# ---- Locks of threads that may be interrupted

_Method = TypeVar("_Method", bound=Callable[..., Any])


def under_lock(method: _Method) -> _Method:
    """A method that runs under `self._lock`, an `RLock`, in a thread that a signal's handler may
    interrupt: whatever it raises, and wherever, the lock is free afterwards."""
    # From CPython 3.14 on `with lock:` leaves the lock taken where a handler raises right after it
    # was (python/cpython#148874): Ctrl-C then hung the feed for ever. Between the end of a body and
    # the call of `release` there is no such place. And an `RLock` knows whose it is, so that it can
    # be released where nobody knows whether it was taken.

    @wraps(method)
    def run(self: Any, *args: Any) -> Any:
        lock = self._lock
        try:
            lock.acquire()
            return method(self, *args)
        finally:
            try:  # noqa: SIM105  # a context manager is what is avoided here
                lock.release()
            except RuntimeError:
                pass  # The interrupt came before it was taken.

    return cast("_Method", run)


# ---- Waiting


class Wakes:
    """Where threads wait to be woken, one at a time. Any thread wakes, and signal handlers do.

    Owner: its lock, which is free once somebody has woken a thread that has not gone on yet.
    """

    def __init__(self) -> None:
        # A plain lock, which is taken and released in C: an interrupt in the middle of a
        # condition's `notify` would leave a thread listed that has been woken. And a `SimpleQueue`
        # of Python 3.11 may wait for ever where its time is over before it begins to wait: 1 of 500
        # feeds whose calls were made again after 0.1 ms hung (2026-11-26).
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Wake one that waits, or the next one that does."""
        if self._lock.locked():
            # Another thread may have done so in between.
            with contextlib.suppress(RuntimeError):
                self._lock.release()

    def wait(self, seconds: float = math.inf) -> None:
        """Wait to be woken, at most so long."""
        if seconds == math.inf:
            self._lock.acquire()
        else:
            self._lock.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))


# ---- The interpreter's switch interval while threads of a feeder run
#
# A thread that computes in Python gives the interpreter up once another thread has waited for the
# switch interval, which is 5 ms unless the user changes it (`sys.setswitchinterval`). Beside a busy
# thread every hand-over of rows waits for so long, and so does each call that lets go of the
# interpreter, as large copies and reads do: the trainer's loop starves the threads that feed it. So
# the interval is 1 ms while threads of the engine run. No order of wake-ups helps instead: waiters
# get the interpreter in the order in which they came, and the busy thread is always in between.


_PYTHONS_S = 0.005  # Python's own. A process with another one has chosen it.


class SwitchInterval:
    """The switch interval of the process: 1 ms while threads of the engine run, then Python's own.

    An interval that the user has set, before or meanwhile, is left alone. One that is exactly 5 ms
    or 1 ms cannot be told from nobody having set one.

    Owner: its own lock. Each thread of a group calls `thread_begins` and `thread_ends`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """No thread runs: a forked child has none of those that did."""
        self._lock = threading.Lock()
        self._num_running = 0
        self._is_ours = False

    def thread_begins(self) -> None:
        """One more thread runs."""
        with self._lock:
            self._num_running += 1
            if self._num_running == 1 and _is_set_to(_PYTHONS_S):
                # First: where a fork comes between these two, the child still puts it back.
                self._is_ours = True
                sys.setswitchinterval(SWITCH_INTERVAL_S)

    def thread_ends(self) -> None:
        """One that has begun runs no more."""
        with self._lock:
            self._num_running -= 1
            if not self._num_running:
                self._put_back()

    def _put_back(self) -> None:
        if self._is_ours and _is_set_to(SWITCH_INTERVAL_S):
            sys.setswitchinterval(_PYTHONS_S)
        self._is_ours = False

    def forget_in_child(self) -> None:
        """This is a forked child."""
        forks.call_in_child(self.forget_in_child)
        self._put_back()
        self.reset()


def _is_set_to(seconds: float) -> bool:
    # Python keeps whole microseconds.
    return round(sys.getswitchinterval() * 1e6) == round(seconds * 1e6)


TURNS = SwitchInterval()
"""The process's: there is one interpreter."""

forks.call_in_child(TURNS.forget_in_child)


class ThreadGroup:
    """Threads that end together.

    Guarantees: `close` returns when every thread has ended, or raises `StuckWorkerError` once the
    deadline has passed, naming each thread that is left, with its stack. Whoever closes a group
    wakes the threads before (closes their queues); the group does not know what they wait for.

    Owner: the thread that starts and closes it, one at a time.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, name: str, body: Callable[..., None], *args: Any) -> threading.Thread:
        """Run `body(*args)` in a thread of this group, which is returned."""
        # Daemon threads, so that a fetch function that never returns cannot hold up the exit of
        # the process; every one of them is joined nevertheless.
        thread = threading.Thread(target=_run, args=(body, *args), name=name, daemon=True)
        thread.start()
        # Threads that have ended are let go of: a group may live long, and start many.
        self._threads = [*(old for old in self._threads if old.is_alive()), thread]
        return thread

    def close(self, deadline_s: float) -> None:
        """Wait until every thread has ended, `deadline_s` seconds at most for all together."""
        end = time.monotonic() + deadline_s
        here = threading.current_thread()
        for thread in self._threads:
            if thread is not here:
                thread.join(max(0.0, end - time.monotonic()))
            else:
                LAST._threads.append(here)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        stuck = [thread for thread in self._threads if thread is not here]
        if stuck:
            report = "\n".join(f"{thread.name}:\n{stack(thread.ident)}" for thread in stuck)
            names = [thread.name for thread in stuck]
            raise StuckWorkerError(
                f"{len(stuck)} threads did not end within {deadline_s:.1f} s: {names!r}\n{report}",
                names=names,
            )


LAST = ThreadGroup()
"""Threads that the process's exit alone waits for: those that end what was forgotten, and those
that have closed their own group, as if the garbage collector forgets a feed in a call of it."""
# They would run into a dying interpreter, which aborts inside a C++ library.


def _run(body: Callable[..., None], *args: Any) -> None:
    TURNS.thread_begins()
    try:
        body(*args)
    finally:
        TURNS.thread_ends()


def stack(ident: int | None) -> str:
    """The stack of a thread of this process, innermost frame last; empty where it has ended."""
    frame = sys._current_frames().get(ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
