"""An actor that holds several processes: each is met by the driver as if it were an actor.

The actor's own process forks them, tells them where the driver is, and says how they ended. What
they make goes from them to the driver.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any, NamedTuple

import zmq

from feeder.executors.actor import Greeting, Invitation
from feeder.executors.options import Processes
from feeder.executors.pool import Zygote
from feeder.executors.wire import Come, HungUp, Left, Wire


class _Seat(NamedTuple):
    """A process that was forked."""

    pid: int
    wire: Wire
    zygote: Zygote
    public: bytes
    secret: bytes


class Seats:
    """The processes of one actor, by their generations. Ray calls from several threads; the lock
    guards the zygote and which processes there are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygote: Zygote | None = None
        self._seats: dict[int, _Seat] = {}

    def hello(self, node: str, generation: int) -> Greeting:
        """Fork a process, and say who it is."""
        with self._lock:
            zygote, pid, wire = self._fork()
            seat = self._seats[generation] = _Seat(pid, wire, zygote, *zmq.curve_keypair())
        return Greeting(pid, node, socket.gethostname(), seat.public)

    def _fork(self) -> tuple[Zygote, int, Wire]:
        if self._zygote is not None:
            try:
                return self._zygote, *self._zygote.fork()
            except HungUp:
                # Whoever ended it has ended its processes.
                self._zygote.close()
        zygote = self._zygote = Zygote(Processes(1))
        return zygote, *zygote.fork()

    def serve(self, told: Invitation) -> str:
        """Have a process answer the driver; returns how it ended, nothing where it has left.

        Raises `ConnectionError` where it does not reach the driver."""
        with self._lock:
            seat = self._seats[told.generation]
        left: Any = None
        try:
            seat.wire.send(Come(*told, seat.public, seat.secret))
            left, _ = seat.wire.receive()
        except HungUp:
            pass  # It has ended.
        with self._lock:
            del self._seats[told.generation]
            seat.wire.close()
            how = seat.zygote.reap(seat.pid).how
        if isinstance(left, Left):
            if left.error:
                raise ConnectionError(left.error)
            return ""
        return how

    def end(self, generation: int) -> None:
        """End a process, whatever it does; `serve` returns."""
        with self._lock:
            # It is there until it was waited for, so its id is its own.
            if (seat := self._seats.get(generation)) is not None:
                os.kill(seat.pid, 9)

    def stack(self, generation: int) -> str:
        """Where a process is."""
        with self._lock:
            seat = self._seats.get(generation)
            return "" if seat is None else seat.zygote.look(seat.pid)
