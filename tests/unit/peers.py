"""Raw peers of a server, which say anything."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from feeder import Server
from feeder.protocol import messages as say
from feeder.protocol.coding import decode, encode
from feeder.transport.desk import Desk

WAIT_S = 8.0
OPEN: dict[str, Any] = {
    "version": say.PROTOCOL_VERSION, "feed": "plain", "queue": 0, "token": None, "credit": 4,
    "hold": 1, "intent": "start", "takeover": False, "consumer": b"c" * 16,
    "attempt": 0, "ended": (), "who": "somebody", "boot_id": "", "checksum": "auto",
}  # fmt: skip


def used(generation: bytes, sequence: int, slots: tuple[int, ...] = ()) -> say.Used:
    """Return what a consumer says that has seen nothing worth telling."""
    report = say.Report(0.0, 0.0, 0, 0)
    return say.Used(generation=generation, sequence=sequence, slots=slots, report=report)


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


class Stalled:
    """A server whose I/O thread is held up once: after it has heard a `Used`, until `go_on` is set
    and somebody has said more, which lies in its socket then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.expired: list[int] = []
        """How many leases had run out, at each `Used`."""
        (door,) = server._serving._doors
        use, pump = Desk.use, Desk.pump

        def note(desk: Desk, lease: Any, message: say.Used) -> None:
            self.expired.append(desk.feed.account.expired)
            use(desk, lease, message)

        def hold(desk: Desk) -> None:
            if self.expired and not self.entered.is_set():
                self.entered.set()
                self.go_on.wait(WAIT_S)
                door.router.poll(WAIT_S * 1000)
            pump(desk)

        monkeypatch.setattr(Desk, "use", note)
        monkeypatch.setattr(Desk, "pump", hold)
