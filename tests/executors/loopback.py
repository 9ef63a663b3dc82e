"""Processes of an executor that are threads of this one: a feed on them costs milliseconds.

All but the fork is what is shipped: tickets, messages, shared memory, and how a death is found out
and made good. What belongs to a whole process is left alone (what it prints and logs, generators of
random numbers, signals, limits): that takes real ones.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from feeder.executors import child, forking, zygote
from feeder.executors.options import Processes
from feeder.executors.wire import HungUp, Wire
from lineage import WAIT_S

_pids = itertools.count(1)
_here = threading.local()


def die() -> None:
    """Have the process that makes this call end: its connection is gone before it answers."""
    _here.wire.hang_up()
    raise SystemExit("nobody hears it")


class Deaths:
    """Ends the processes that make these calls, counted through all processes. Called before each
    call, as `fetches.make_fetch` does it with its pause."""

    counts: Iterator[int] = itertools.count()

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = frozenset(numbers)

    @staticmethod
    def begin() -> None:
        """Count from the beginning."""
        Deaths.counts = itertools.count()

    def __call__(self) -> None:
        if next(Deaths.counts) in self.numbers:
            die()


class Interpreter:
    """Stands for `forking.Zygote`: starts threads. Owner: the pool's lock."""

    def __init__(self, options: Processes) -> None:
        self._alive: dict[int, tuple[threading.Thread, Wire]] = {}

    def fork(self) -> tuple[int, Wire]:
        pid, (here, there) = next(_pids), socket.socketpair()
        wire = Wire(there)
        thread = threading.Thread(target=run_process, args=(wire,), name=f"process {pid}")
        self._alive[pid] = thread, wire
        thread.start()
        return pid, Wire(here)

    def reap(self, pid: int) -> str:
        if pid not in self._alive:
            return "ended with the interpreter"
        thread, wire = self._alive.pop(pid)
        wire.hang_up()
        thread.join(WAIT_S)
        return "was ended"

    def look(self, pid: int) -> str:
        return f"stack of process {pid}"

    def hang_up(self) -> None:
        """Nobody waits for it."""

    def close(self) -> str:
        for pid in list(self._alive):
            self.reap(pid)
        return "has ended"


class Server(child.Server):
    """One that is found by its thread."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _here.server = self


def run_process(wire: Wire) -> None:
    """The body of a process."""
    _here.wire, _here.server = wire, None
    with contextlib.suppress(HungUp):
        zygote.serve(wire)
    wire.close()
    if _here.server is not None:
        # Blocks of an answer that could not be sent: with a process they would be gone.
        _here.server.blocks.sent()


def _nothing(*args: Any, **kwargs: Any) -> None: ...


@contextmanager
def loopback() -> Iterator[None]:
    """Executors start threads for as long as the context lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forking, "Zygote", Interpreter)
        patch.setattr(child, "Server", Server)
        for owner, name in (
            (child, "_speak_through"), (child, "_forward_logs"), (child, "follow_imports"),
            (child.POOL, "lend_from"), (child.Server, "_forget"),
        ):  # fmt: skip
            patch.setattr(owner, name, _nothing)
        # It is put back at the end.
        patch.setattr(child.RECORD_SEEDS, "are_on", child.RECORD_SEEDS.are_on)
        yield
