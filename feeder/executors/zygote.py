"""The zygote: a fresh interpreter without threads, which forks the processes of one executor.

It never imports the script that made it (`multiprocessing`'s fork server does, and an unguarded
script then runs again in each process). It ends with its parent, and its processes end with it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

import msgspec

from feeder.executors.child import answer_over
from feeder.executors.wire import (
    Come,
    Fork,
    Forked,
    HungUp,
    Left,
    Look,
    Reap,
    Reaped,
    Seen,
    Wire,
)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_LOOK = signal.SIGRTMAX
"""Has a process write its Python stacks, wherever it is: a signal that libraries leave alone."""

_FIRST_MS, _NEXT_MS = 1000, 50
"""How long a process may take to begin with its stacks, and how long a pause in them may be."""

_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> NoReturn:
    """The body of the zygote: the descriptor of its socket, its parent's process id, and the
    modules to import first."""
    _open_standard_files()
    descriptor, parent, preload = int(arguments[0]), int(arguments[1]), json.loads(arguments[2])
    # A process group of its own has no terminal: an interrupt reaches the parent alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Else it would end a process that has not come to hear it.
    signal.signal(_LOOK, signal.SIG_IGN)
    wire = Wire(socket.socket(fileno=descriptor))
    try:
        problem = _import_all(preload)
        wire.send(Forked(0, problem))
        _Zygote(wire, parent).run()
    except HungUp:
        pass  # The parent has ended, or wants no more processes.
    os._exit(0)


def _open_standard_files() -> None:
    """Where the parent has closed its standard files, a block of rows would get the number of one,
    and be written by whatever warns on it."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def _import_all(names: list[str]) -> str:
    """Import modules; what went wrong, or nothing."""
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            return f"preload names {name!r}, which cannot be imported: {error!r}"
    return ""


class _Zygote:
    """Owner: the process's one thread."""

    def __init__(self, wire: Wire, parent: int) -> None:
        self._wire = wire
        # Of each process the end of a pipe into which it writes its stacks.
        self._children: dict[int, int] = {}
        # Also where a forked child of the parent holds the other end of the socket.
        self._parent = os.pidfd_open(parent)
        if os.getppid() != parent:
            raise HungUp("the parent has ended")

    def run(self) -> None:
        """Serve the parent until it is gone; then end all processes."""
        poll = select.poll()
        poll.register(self._wire.sock, select.POLLIN)
        poll.register(self._parent, select.POLLIN)
        # What is there before the first fork is shared, and stays so.
        gc.freeze()
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self._parent in ready:
                    return
                message, _ = self._wire.receive()
                self._answer(message)
        finally:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)
            # Else they would be left to whoever has process id 1, which may not wait for them.
            for pid in self._children:
                os.waitpid(pid, 0)

    def _answer(self, message: Any) -> None:
        match message:
            case Fork():
                self._fork()
            case Reap(pid):
                # Its end of the socket is closed, and it may live nevertheless.
                os.kill(pid, signal.SIGKILL)
                _, status, usage = os.wait4(pid, 0)
                os.close(self._children.pop(pid))
                self._wire.send(Reaped(status, usage.ru_maxrss))
            case Look(pid):
                self._wire.send(Seen(self._look(pid)))

    def _fork(self) -> None:
        """Fork a process, and send the other end of its socket to the parent: that it is made here
        keeps this end out of all that the parent's threads may fork meanwhile."""
        zygote, descriptors = os.getpid(), []
        try:
            descriptors += [sock.detach() for sock in socket.socketpair()]
            descriptors += os.pipe()
            pid = os.fork()
        except OSError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            self._wire.send(Forked(0, f"a process could not be started: {error}"))
            return
        theirs, ours, stacks, writes = descriptors
        if not pid:
            self._live(zygote, ours, writes, others=[theirs, stacks, self._parent])
        self._children[pid] = stacks
        os.close(ours)
        os.close(writes)
        try:
            self._wire.send(Forked(pid, ""), [theirs])
        finally:
            os.close(theirs)

    def _live(self, zygote: int, descriptor: int, stacks: int, others: list[int]) -> NoReturn:
        """The body of a process that was forked."""
        try:
            # With the zygote, which is its parent and has one thread.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != zygote:
                raise HungUp("the zygote has ended")
            self._wire.sock.close()
            for other in [*others, *self._children.values()]:
                os.close(other)
            faulthandler.register(_LOOK, stacks)
            serve(Wire(socket.socket(fileno=descriptor)))
        except HungUp:
            pass
        except BaseException as error:
            sys.stderr.write(f"feeder: a process of an executor failed: {error!r}\n")
            os._exit(1)
        finally:
            os._exit(0)

    def _look(self, pid: int) -> str:
        """The stacks of a process, also of one that is inside a call."""
        stacks = self._children[pid]
        poll = select.poll()
        poll.register(stacks, select.POLLIN)
        os.kill(pid, _LOOK)
        parts: list[bytes] = []
        # They come in pieces, and the last of them does not say so.
        while poll.poll(_NEXT_MS if parts else _FIRST_MS):
            parts.append(os.read(stacks, 65536))
            if not parts[-1]:
                break
        return b"".join(parts).decode(errors="replace").rstrip()


def serve(wire: Wire) -> None:
    """The body of a process from its first message on: it answers its parent, or, for an actor that
    holds this process, the driver. Raises `HungUp` when whoever it answers has hung up."""
    load, descriptors = wire.receive()
    if isinstance(load, Come):
        _serve_driver(wire, load)
        return
    answer_over(wire, load, descriptors)


def _serve_driver(wire: Wire, told: Come) -> None:
    # Not at the top: processes of this host have no use for ZeroMQ.
    from feeder.executors.actor import Invitation, answer_driver

    *invitation, public, secret = msgspec.structs.astuple(told)
    error = ""
    try:
        answer_driver(Invitation(*invitation), public, secret)
    except ConnectionError as raised:
        error = str(raised)
    wire.send(Left(error))
