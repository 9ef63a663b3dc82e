"""What an actor does: it answers tickets, over one of two ways to the process that has made it.

On one host this is a unix socket, and chunks lie in memory that both map, as for processes.
Between hosts it is ZeroMQ with CURVE: the actor makes its keys, and only the public one leaves it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import traceback
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import zmq

from feeder.executors.child import Server, answer_over
from feeder.executors.forking import Zygote
from feeder.executors.options import Processes
from feeder.executors.wire import (
    PROGRESS_BYTES,
    Come,
    HungUp,
    Left,
    Load,
    Made,
    Wire,
    decode,
    encode,
)

HELLO = struct.Struct("<Q")
"""An actor's first words: its generation."""

_JOIN_S = 20.0
"""How long an actor tries to reach the driver."""

_BEAT_MS, _SILENT_MS = 5_000, 20_000
"""How often ZeroMQ asks whether the other end is there, and how long that may say nothing: a host
that has lost its power says no goodbye."""

_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Greeting(NamedTuple):
    """What an actor says of itself."""

    pid: int
    node: str
    """The id that Ray gives to its node."""
    host: str
    public: bytes
    """The public key of its pair."""


class Invitation(NamedTuple):
    """Where an actor's driver is, as the driver knows it."""

    generation: int
    unix: bytes
    """The name of a unix socket in the driver's network namespace; empty where there is none."""
    tcp: str
    key: bytes
    """The driver's public key."""


class Actor:
    """One actor. Owner: Ray, which runs one method at a time, but for `stack`."""

    def __init__(self) -> None:
        self._public, self._secret = zmq.curve_keypair()
        self._ident: int | None = None

    def hello(self, node: str, generation: int) -> Greeting:
        """Say who this is."""
        return Greeting(os.getpid(), node, socket.gethostname(), self._public)

    def serve(self, told: Invitation) -> None:
        """Answer the driver until it hangs up. Raises `ConnectionError` where it cannot be
        reached."""
        self._ident = threading.get_ident()
        answer_driver(told, self._public, self._secret)

    def stack(self, generation: int) -> str:
        """Where the thread is that makes calls; another thread asks."""
        frame = sys._current_frames().get(self._ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()


# ---- An actor of several processes


class _Seat(NamedTuple):
    """A process that was forked."""

    pid: int
    wire: Wire
    zygote: Zygote
    public: bytes
    secret: bytes


class Seats:
    """An actor that holds several processes, by their generations: the driver meets each as if it
    were an actor. The actor's own process forks them, tells them where the driver is, and says how
    they ended; what they make goes from them to the driver.

    Ray calls from several threads; the lock guards the zygote and which processes there are."""

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
            how = seat.zygote.reap(seat.pid)
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


# ---- The way to the driver


def answer_driver(told: Invitation, public: bytes, secret: bytes) -> None:
    """Answer the driver until it hangs up. Raises `ConnectionError` where it cannot be reached."""
    wire = _dial(told) if told.unix else None
    if wire is not None:
        with contextlib.suppress(HungUp), contextlib.closing(wire[0]):
            answer_over(*wire)
        return
    with _Frames(told, public, secret) as frames, contextlib.suppress(HungUp):
        server = None
        while True:
            message, parts = frames.receive()
            if isinstance(message, Load):
                server = _server_of(frames, message, parts[0])
                frames.blocks = server.blocks
                continue
            assert server is not None
            message.freed = frames.take_sent()
            frames.send(*server.answer(message))


# ---- On the driver's host


def _dial(told: Invitation) -> tuple[Wire, Any, list[int]] | None:
    """Connect to the driver where it is on this host: the way, and the function that came by it.
    None where it is not, or does not want to be met here."""
    sock = socket.socket(socket.AF_UNIX)
    # Whatever hangs: the other way is still there.
    sock.settimeout(_JOIN_S)
    try:
        sock.connect(b"\0" + told.unix)
        sock.sendall(HELLO.pack(told.generation))
        wire = Wire(sock)
        load, descriptors = wire.receive()
    except (OSError, HungUp):
        sock.close()
        return None
    sock.settimeout(None)
    return wire, load, descriptors


# ---- On another host


class _Frames:
    """A DEALER that speaks CURVE, as the way to the driver. Owner: the thread that makes it; what
    other threads say goes along with the next answer."""

    def __init__(self, told: Invitation, public: bytes, secret: bytes) -> None:
        self._owner = threading.get_ident()
        self._later: deque[Any] = deque()
        # Blocks that ZeroMQ still sends from, by the answer that they went with.
        self._under_way: deque[tuple[Any, list[int]]] = deque()
        self.blocks: Any = None
        self._context: zmq.Context[Any] = zmq.Context()
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.curve_publickey, dealer.curve_secretkey = public, secret
        dealer.curve_serverkey = told.key
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.heartbeat_ivl, dealer.heartbeat_timeout = _BEAT_MS, _SILENT_MS
        dealer.ipv6 = "[" in told.tcp
        # Before it connects: nothing is missed.
        self._events = dealer.get_monitor_socket(_WATCHED)
        dealer.connect(told.tcp)
        self._poller = zmq.Poller()
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)
        self._is_joined = False
        dealer.send(HELLO.pack(told.generation))
        if not self._wait(int(_JOIN_S * 1000)):
            self.close()
            raise ConnectionError(
                f"host {socket.gethostname()!r} cannot reach the driver at {told.tcp} within "
                f"{_JOIN_S:.0f} s: open the driver's ports to the cluster's hosts"
            )

    def __enter__(self) -> _Frames:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave."""
        self._dealer.disable_monitor()
        self._events.close(linger=0)
        self._dealer.close()
        self._context.term()

    def _wait(self, most_ms: int | None = None) -> bool:
        """Wait for a message; whether there is one. Raises `HungUp`."""
        while True:
            ready = dict(self._poller.poll(most_ms))
            if self._events in ready:
                from zmq.utils.monitor import parse_monitor_message

                event = parse_monitor_message(self._events.recv_multipart())["event"]
                self._is_joined |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                # ZeroMQ would connect again, and what was under way would be lost: another actor
                # takes this one's place.
                if event == zmq.EVENT_DISCONNECTED and self._is_joined:
                    raise HungUp("the driver is gone")
            if self._dealer in ready:
                return True
            if not ready:
                return False

    def receive(self) -> tuple[Any, list[Any]]:
        """The next message, and what comes along. Raises `HungUp`."""
        self._wait()
        body, *parts = self._dealer.recv_multipart()
        return decode(body), parts

    def send(self, message: Any, descriptors: list[int] | None = None) -> None:
        """Send a message; an answer with what lies in its blocks."""
        if threading.get_ident() != self._owner:
            self._later.append(message)
            return
        while self._later:
            self._dealer.send(encode(self._later.popleft()))
        if not isinstance(message, Made) or not message.blocks:
            self._dealer.send(encode(message))
            return
        numbers = [number for number, _ in message.blocks]
        contents = [self.blocks.contents(number) for number in numbers]
        message.fresh, message.dropped = [], []
        # Part by part: `send_multipart` tells of the last part alone, and that is copied at once if
        # it is small.
        self._dealer.send(encode(message), zmq.SNDMORE)
        more = [zmq.SNDMORE] * (len(contents) - 1) + [0]
        sent = [
            self._dealer.send(part, flags, copy=False, track=True)
            for part, flags in zip(contents, more, strict=True)
        ]
        self._under_way.append((zmq.MessageTracker(*sent), numbers))
        self.blocks.sent()

    def take_sent(self) -> list[int]:
        """The blocks that ZeroMQ has let go of."""
        numbers: list[int] = []
        while self._under_way and self._under_way[0][0].done:
            numbers += self._under_way.popleft()[1]
        return numbers

    def forget(self) -> None:
        """This is a forked child: ZeroMQ's threads are not here."""


def _server_of(speaker: Any, load: Load, buffers: Any) -> Server:
    """The server of a function whose large arrays came as bytes."""
    descriptor = os.memfd_create("feeder-function", os.MFD_CLOEXEC)
    rest = memoryview(buffers)
    os.ftruncate(descriptor, max(1, rest.nbytes))
    at = 0
    while rest.nbytes:
        num = os.pwrite(descriptor, rest[: 2**30], at)
        rest, at = rest[num:], at + num
    return Server(speaker, load, descriptor, np.zeros(PROGRESS_BYTES, np.uint8))
