"""The owner of threads: none starts outside a `Scope`, and leaving it ends them all."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from feeder.workers.errors import StuckWorkerError
from feeder.workers.fetch.turns import TURNS


class Scope:
    """Threads that end together.

    Guarantees: `close` returns when every thread has ended, or raises `StuckWorkerError` once the
    deadline has passed, naming each that is left with its stack. Whoever closes a scope first
    wakes the threads (closes their queues); a scope does not know what they wait for.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, name: str, body: Callable[..., None], *args: Any) -> None:
        """Run `body(*args)` in a thread of this scope."""
        # Daemon threads, so that a fetch function that never returns cannot hold up the exit of
        # the process; every one of them is joined nevertheless.
        thread = threading.Thread(target=_run, args=(body, *args), name=name, daemon=True)
        thread.start()
        # Those that have ended are let go of: a scope may live long, and start many.
        self._threads = [*(old for old in self._threads if old.is_alive()), thread]

    def close(self, deadline_s: float) -> None:
        """Wait until every thread has ended, `deadline_s` seconds at most for all together."""
        end = time.monotonic() + deadline_s
        here = threading.current_thread()
        for thread in self._threads:
            if thread is not here:
                thread.join(max(0.0, end - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        stuck = [thread for thread in self._threads if thread is not here]
        if stuck:
            report = "\n".join(f"{thread.name}:\n{stack(thread.ident)}" for thread in stuck)
            names = [thread.name for thread in stuck]
            raise StuckWorkerError(
                f"{len(stuck)} threads did not end within {deadline_s:.1f} s: {names!r}\n{report}",
                names=names,
            )


def _run(body: Callable[..., None], *args: Any) -> None:
    TURNS.begin()
    try:
        body(*args)
    finally:
        TURNS.end()


def stack(ident: int | None) -> str:
    """The stack of a thread of this process, innermost frame last; empty where it has ended."""
    frame = sys._current_frames().get(ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
