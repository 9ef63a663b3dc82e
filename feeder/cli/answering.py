"""Does a server answer at an address? Looked at without taking anything from it."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from feeder.service.net.addresses import check_connects, parse
from feeder.service.net.keys import ClientKeys
from feeder.service.net.security import Security, Socket, connect, meaning, read_event, unwatch, watch

ANSWER_S = 2.0
SILENCE = "nobody listens there"


def why_not(text: str, keys: Path | None) -> str | None:
    """Why nobody answers at an address, within 2 s; None where a server does.

    It greets the server as a consumer does, keys and all, and opens no queue. Raises `ConfigError`
    where the address or the keys are wrong.
    """
    address = parse(text)
    check_connects([address])
    with Security(None if keys is None else ClientKeys.read(keys)) as security:
        curve = security.encrypts(address)
        dealer = security.make_dealer(1, max_message_bytes=1024, curve=curve)
        monitor = watch(dealer)
        try:
            connect(dealer, address)
            return _greet(monitor)
        finally:
            unwatch(dealer, monitor)


def _greet(monitor: Socket) -> str | None:
    """Follow a connection until it stands, is refused with a reason, or 2 s have passed."""
    ends = time.monotonic() + ANSWER_S
    reason = SILENCE
    while (left_s := ends - time.monotonic()) > 0 and monitor.poll(int(left_s * 1000) + 1):
        event = read_event(monitor)
        if event is None:
            continue
        if event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return None
        if (refusal := meaning(event)) is not None:
            reason = str(refusal)
            # Without detail it may be that the server was faster to hang up: ask it again.
            if event.kind != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                return reason
        elif event.kind == zmq.EVENT_CONNECTED and reason == SILENCE:
            reason = "somebody listens there, but does not answer as a server does"
    return f"{reason} ({ANSWER_S:g} s waited)"
