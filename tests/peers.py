"""Raw peers of a server, which say anything."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from feeder import Server
from feeder.service.net.addresses import parse
from feeder.service.protocol import messages as say
from feeder.service.protocol.coding import decode, encode
from feeder.service.server.group import ConsumerGroup
from watching import around

WAIT_S = 8.0
OPEN: dict[str, Any] = {
    "version": say.PROTOCOL_VERSION, "feed": "plain", "queue": 0, "token": None, "credit": 4,
    "hold": 1, "intent": "start", "undecided": True, "takeover": False, "consumer": b"c" * 16,
    "attempt": 0, "ended": (), "who": "somebody", "boot_id": "", "checksum": "auto",
}  # fmt: skip


def used(generation: bytes, sequence: int, slots: tuple[int, ...] = ()) -> say.Used:
    """Return what a consumer says that has seen nothing worth telling."""
    report = say.Report(0.0, 0.0, 0, 0)
    return say.Used(
        generation=generation, sequence=sequence, pending=0, begun=False, slots=slots, report=report
    )


class Peer:
    """A DEALER that says anything."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket

    def say(self, *frames: Any) -> None:
        parts = [frame if isinstance(frame, bytes) else encode(frame) for frame in frames]
        self.socket.send_multipart(parts)

    def hear(self, kind: type[say.Message]) -> Any:
        """Return the next message of a kind; other messages are passed over."""
        while self.socket.poll(WAIT_S * 1000):
            message = decode(self.socket.recv_multipart()[0], from_consumer=False)
            if isinstance(message, kind):
                return message
            assert not isinstance(message, say.Fault), message.text
        pytest.fail(f"no {kind.__name__} came within {WAIT_S} s")

    def opens(self, **fields: Any) -> say.Opened:
        self.say(say.Open(**(OPEN | {"consumer": random.randbytes(16)} | fields)))
        return self.hear(say.Opened)

    def streams(self) -> bytes:
        """Take the queue and a batch in frames; return the generation."""
        generation = self.opens().generation
        self.say(say.Attached(generation=generation, plane="frames", reason=""))
        self.hear(say.Batches)
        return generation

    def is_refused(self, kind: str, *words: str) -> None:
        fault = self.hear(say.Fault)
        assert fault.kind == kind, fault.text
        for word in words:
            assert word in fault.text
        assert fault.sequence is None


@contextmanager
def peer_of(address: str) -> Iterator[Peer]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        yield Peer(dealer)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
_MORE, _LONG, _COMMAND = 1, 2, 4


def raw_socket(address: str) -> socket.socket:
    place = parse(address)
    if place.scheme == "tcp":
        return socket.create_connection((place.host, place.port), WAIT_S)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.connect(place.path)
        sock.settimeout(WAIT_S)
        stack.pop_all()
    return sock


def is_hung_up(sock: socket.socket) -> bool:
    """Read to the end of a connection."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


class RawPeer(Peer):
    """A peer that speaks ZMTP by hand: what ZeroMQ would not send, such as half a message."""

    def __init__(self, address: str) -> None:
        self.sock = raw_socket(address)
        self._file = self.sock.makefile("rb")
        self.sock.sendall(GREETING)
        self._file.read(len(GREETING))
        self.sock.sendall(READY)
        self._frame()

    def say(self, *frames: Any, more: bool = False) -> None:
        """Send frames; where there are `more` to come the message does not end."""
        for i, frame in enumerate(frames):
            data = frame if isinstance(frame, bytes) else encode(frame)
            flags = _LONG | (_MORE if more or i < len(frames) - 1 else 0)
            self.sock.sendall(bytes([flags]) + len(data).to_bytes(8, "big") + data)

    def hear(self, kind: type[say.Message]) -> Any:
        while True:
            flags, data = self._frame()
            if not flags & _COMMAND and isinstance(
                message := decode(data, from_consumer=False), kind | say.Fault
            ):
                assert isinstance(message, kind), message
                return message
            while flags & _MORE:
                flags, _ = self._frame()

    def goes_on_until_hung_up(self, num_bytes: int = 60_000) -> None:
        """Send frames of one message, always one more, until the server hangs up."""
        ends = time.monotonic() + WAIT_S
        self.sock.settimeout(0.1)
        with contextlib.suppress(ConnectionError):
            while not self._has_ended():
                assert time.monotonic() < ends, "nobody hung up"
                # A server that has closed may leave the bytes that were sent before unread.
                with contextlib.suppress(TimeoutError):
                    self.say(bytes(num_bytes), more=True)

    def _has_ended(self) -> bool:
        while select.select([self.sock], [], [], 0)[0]:
            if not self.sock.recv(1 << 16):
                return True
        return False

    def _frame(self) -> tuple[int, bytes]:
        (flags,) = self._file.read(1)
        size = int.from_bytes(self._file.read(8 if flags & _LONG else 1), "big")
        return flags, self._file.read(size)

    def close(self) -> None:
        self._file.close()
        self.sock.close()


class Stalled:
    """A server whose I/O thread is held up once: after it has heard a `Used`, until `go_on` is set
    and somebody has said more, which lies in its socket then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.expired: list[int] = []
        """How many leases had run out, at each `Used`."""
        (door,) = server._loop._listeners

        def note(group: ConsumerGroup, *_: Any) -> None:
            self.expired.append(group.feed.stats.expired)

        def hold(group: ConsumerGroup) -> None:
            if self.expired and not self.entered.is_set():
                self.entered.set()
                self.go_on.wait(WAIT_S)
                door.router.poll(WAIT_S * 1000)

        around(monkeypatch, ConsumerGroup, "use", before=note)
        around(monkeypatch, ConsumerGroup, "pump", before=hold)
