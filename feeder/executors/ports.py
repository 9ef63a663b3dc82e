"""Where actors come in at the driver's end, by a unix socket or by ZeroMQ, and what the receiving
thread waits for. The ways of those that have come in are `lines.py`'s.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from typing import Any

import numpy as np
import zmq
from zmq.utils import z85

from feeder.executors.actor import HELLO
from feeder.executors.wire import Wire

_WORD_S = 30.0
"""How long an actor on this host may take for one message that it has begun."""

_COPIED_BYTES = 64 * 1024
"""Blocks of fewer bytes are copied out of ZeroMQ's memory, where arrays may lie unaligned."""


def memory_of(frame: Any) -> Any:
    """The bytes of a frame as they lie there; copied where they are few, or lie unaligned."""
    memory = np.frombuffer(frame.buffer, np.uint8)
    address = memory.__array_interface__["data"][0]
    return memory.copy() if memory.nbytes < _COPIED_BYTES or address % 8 else memory


class Ports:
    """Where actors come in: a unix socket, and a ROUTER that knows their keys.

    Owner: the receiving thread, but for `wake` and `allowed`, which the pool's lock guards.
    """

    def __init__(self, host: str, way: str) -> None:
        self.public, self._secret = zmq.curve_keypair()
        self.allowed: dict[bytes, int] = {}
        """Who may come in, by public key: the actor's generation."""
        self.name = b""
        """Of the unix socket."""
        # Of the actors that have come in, by generation, and the reverse by descriptor.
        self._wires: dict[int, Wire] = {}
        self._by_descriptor: dict[int, int] = {}
        self._strangers: dict[int, socket.socket] = {}
        self._wakes = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._listener: socket.socket | None = None
        if way == "mapped":
            self._listen()
        self._context: zmq.Context[Any] = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        router = self._router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.curve_secretkey, router.curve_server = self._secret, True
        router.zap_domain = b"feeder"
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.sndhwm = router.rcvhwm = 0
        router.handshake_ivl = 5000
        router.backlog = 1024
        router.ipv6 = ":" in host
        router.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        """Of the ROUTER."""
        for sock in (self._zap, router):
            self._poller.register(sock, zmq.POLLIN)

    def _listen(self) -> None:
        # In the abstract namespace: it is gone with this process, whatever ends that.
        self.name = b"feeder-" + secrets.token_hex(16).encode()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(b"\0" + self.name)
        listener.listen(128)
        listener.setblocking(False)
        self._listener = listener
        self._poller.register(listener.fileno(), zmq.POLLIN)

    def wake(self) -> None:
        """Have `wait` return. Any thread."""
        with self._wakes:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def wait(self, most_s: float) -> list[tuple[str, Any]]:
        """What came."""
        found: list[tuple[str, Any]] = []
        for ready, _ in self._poller.poll(int(most_s * 1000)):
            if ready is self._zap:
                self._answer_newcomers()
            elif ready is self._router:
                found += self._take_frames()
            elif ready == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            elif self._listener is not None and ready == self._listener.fileno():
                self._accept()
            elif ready in self._strangers:
                found += self._hear(ready)
            elif ready in self._by_descriptor:
                found.append(("line", self._by_descriptor[ready]))
        return found

    def _answer_newcomers(self) -> None:
        """ZAP (rfc.zeromq.org/spec/27): who may come in is whose key is known."""
        with contextlib.suppress(zmq.Again):
            while True:
                parts = self._zap.recv_multipart(zmq.NOBLOCK)
                version, request, mechanism = parts[0], parts[1], parts[5]
                key = z85.encode(parts[6]) if mechanism == b"CURVE" else b""
                generation = self.allowed.get(key)
                is_in = generation is not None
                status = [b"200", b"OK"] if is_in else [b"400", b"unknown key"]
                user = str(generation).encode() if is_in else b""
                self._zap.send_multipart([version, request, *status, user, b""])

    def _take_frames(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        with contextlib.suppress(zmq.Again):
            while len(found) < 256:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
                if frames:
                    # ZeroMQ says whose connection it is, by the key that it has proved to have.
                    who = str(frames[0].get("User-Id"))
                    found.append(("frames", (identity.bytes, who, frames)))
        return found

    def send(self, parts: list[bytes]) -> None:
        """Send frames; those of an actor that is gone are dropped."""
        self._router.send_multipart(parts)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, OSError):
            sock, _ = self._listener.accept()
            pid_uid_gid = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, uid, _ = struct.unpack("3i", pid_uid_gid)
            # The name is no secret on this host.
            if uid != os.getuid():
                sock.close()
                return
            sock.settimeout(_WORD_S)
            self._strangers[sock.fileno()] = sock
            self._poller.register(sock.fileno(), zmq.POLLIN)

    def _hear(self, descriptor: int) -> list[tuple[str, Any]]:
        """The first words of somebody on this host."""
        sock = self._strangers.pop(descriptor)
        self._poller.unregister(descriptor)
        try:
            (generation,) = HELLO.unpack(sock.recv(HELLO.size))
        except (OSError, struct.error):
            sock.close()
            return []
        return [("caller", (generation, Wire(sock)))]

    def add(self, wire: Wire, generation: int) -> None:
        """Listen to an actor on this host."""
        self._wires[generation] = wire
        self._by_descriptor[wire.sock.fileno()] = generation
        self._poller.register(wire.sock.fileno(), zmq.POLLIN)

    def remove(self, generation: int) -> None:
        """Listen to it no more."""
        wire = self._wires.pop(generation, None)
        if wire is not None and (descriptor := wire.sock.fileno()) >= 0:
            del self._by_descriptor[descriptor]
            self._poller.unregister(descriptor)

    def drop_sockets(self) -> None:
        """Close what the receiving thread owns."""
        for sock in self._strangers.values():
            sock.close()
        self._strangers.clear()
        if self._listener is not None:
            self._listener.close()
        self._context.destroy(linger=0)

    def close(self) -> None:
        """Close the rest, when no thread is here."""
        with self._wakes:
            os.close(self._wake_fd)
            self._wake_fd = -1
