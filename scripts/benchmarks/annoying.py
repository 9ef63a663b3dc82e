"""A peer of a server that says what it may not say, again and again, at a steady pace.

Each kind is one of the ways to be wrong that a server has to withstand: over raw connections, of
which there is a new one each time, or as messages over one connection, whose answers are read.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import select
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

PER_SECOND = 100
"""Connections that are opened, or messages that are sent."""
_OPEN_AT_MOST = 200
"""Raw connections that are kept open; the oldest one makes room."""
_ANSWER_MS = 10_000
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def _frame(declared: int) -> bytes:
    return _GREETING + _READY + b"\x02" + declared.to_bytes(8, "big")


RAW: Mapping[str, tuple[bytes, bytes]] = {
    "garbage": (random.Random(1).randbytes(10_000), b"garbage"),
    "half-open handshakes": (_GREETING[:11], b""),
    "handshakes without a word": (_GREETING + _READY, b""),
    "oversize frames": (_frame(2**62), bytes(1000)),
    "frames that never end": (_frame(100_000), b"x"),
}
"""What a new connection sends, and what the oldest one sends at each turn."""


def annoying(kind: str, address: str) -> Iterator[None]:
    """One connection or message more at each step; the first answer has been read at the first.

    Raises RuntimeError where that is no refusal.
    """
    if kind in RAW:
        return _connections(address, *RAW[kind])
    return _messages(address, MESSAGES[kind]())


def go_on(turns: Iterator[None]) -> None:
    """Take a turn again and again, until the parent lets go of the pipe."""
    while not select.select([sys.stdin], [], [], 1 / PER_SECOND)[0]:
        next(turns)


# ---- connections


def _connections(address: str, first: bytes, then: bytes) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        opened: deque[socket.socket] = deque()
        while True:
            opened.append(stack.enter_context(_connect(address)))
            # Either may have been hung up on meanwhile.
            for sock, data in ((opened[-1], first), (opened[0], then)):
                with contextlib.suppress(ConnectionError):
                    sock.sendall(data)
            if len(opened) > _OPEN_AT_MOST:
                opened.popleft().close()
            yield


def _connect(address: str) -> socket.socket:
    scheme, _, place = address.partition("://")
    if scheme == "ipc":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(place)
        return sock
    host, _, port = place.rpartition(":")
    return socket.create_connection((host, int(port)))


# ---- messages


def _messages(address: str, messages: Iterator[bytes]) -> Iterator[None]:
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.connect(address)
        dealer.send(next(messages))
        if not dealer.poll(_ANSWER_MS) or b"Fault" not in dealer.recv():
            raise RuntimeError("the server took what it has to refuse")
        while True:
            yield
            dealer.send(next(messages))
            with contextlib.suppress(zmq.Again):
                while True:
                    dealer.recv(zmq.DONTWAIT)


def _opens(**fields: Any) -> Iterator[bytes]:
    """A question for a queue with other values in some fields; `...` leaves one out."""
    import msgpack

    from feeder.service.protocol import messages as say

    open_ = {
        "type": "Open", "version": say.PROTOCOL_VERSION, "feed": "", "queue": 0, "token": None,
        "credit": 4, "hold": 1, "intent": "start", "undecided": True, "takeover": False,
        "consumer": b"c" * 16, "attempt": 0, "ended": (), "who": "a bad peer", "boot_id": "",
        "checksum": "auto",
    } | fields  # fmt: skip
    data = msgpack.packb({name: value for name, value in open_.items() if value is not ...})
    return itertools.repeat(data)


def _malformed() -> Iterator[bytes]:
    wrong = ({"load": "os.system"}, {"hold": ...}, {"queue": "0"}, {"queue": 2**64 - 1})
    return itertools.cycle([next(_opens(**fields)) for fields in wrong])


def _early() -> Iterator[bytes]:
    from feeder.service.protocol import messages as say
    from feeder.service.protocol.coding import encode

    return itertools.repeat(encode(say.Bye(generation=b"g" * 24)))


def _foreign() -> Iterator[bytes]:
    from contenders import make_coordinator
    from feeder.checkpoint.resuming import find_position
    from fetches import SMALL, constant

    load = SMALL.in_chunks_of(1)
    with make_coordinator(load, constant(load)) as coordinator:
        position = find_position(coordinator.state_dict(), None).position
    assert position is not None
    return _opens(token=bytes(position))


MESSAGES: Mapping[str, Callable[[], Iterator[bytes]]] = {
    "no messages": lambda: itertools.repeat(b"\xc1" * 1000),
    "another version": lambda: _opens(version=99),
    "wrong keys and types": _malformed,
    "huge declared lengths": lambda: itertools.repeat(b"\xdd\xff\xff\xff\xff"),
    "messages in the wrong state": _early,
    "tokens of another feed": _foreign,
    "queues out of range": lambda: _opens(queue=7),
    "the queue of another": _opens,
}
"""What is said, by kind."""
KINDS = (*RAW, *MESSAGES)
