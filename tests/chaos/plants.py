"""Bugs that a process of the campaign can be given, to see that the campaign catches them.

They are planted from outside, by replacing a method when the process starts: nothing of them is in
the product.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

VARIABLE = "CHAOS_PLANT"


def drop_offset() -> None:
    """A resume gives the rows again that were taken of the chunk which the cut stands in."""
    from feeder.workers.stream.assembler import Assembler

    take_up = Assembler._take_up

    def forgetful(self: Any, run: Any) -> tuple[int, int]:
        first, _ = take_up(self, run)
        return first, 0

    Assembler._take_up = forgetful  # type: ignore[method-assign]


def head() -> None:
    """A consumer's state is that of the last batch received, not of the last handed out."""
    from feeder.service.client.consumer import Consumer
    from feeder.service.client.remote import RemotePosition
    from feeder.state.state_dict import STATE_KEY

    init, state_dict = RemotePosition.__init__, Consumer.state_dict
    received: list[Any] = []

    def remember(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        received[:] = [self]

    def of_the_head(self: Any) -> dict[str, bytes]:
        if self._position is None:
            return state_dict(self)
        return {STATE_KEY: received[0].state(None)}

    RemotePosition.__init__ = remember  # type: ignore[method-assign]
    Consumer.state_dict = of_the_head  # type: ignore[method-assign]


def no_discard() -> None:
    """A server gives a queue again what it had, when the feed goes back for another queue."""
    from feeder.service.server.run import Outbox

    put = Outbox.put

    def put_all(self: Any, batches: list[Any]) -> None:
        self._first_step = 0
        put(self, batches)

    Outbox.put = put_all  # type: ignore[method-assign]


def stale() -> None:
    """A consumer that looks for a server again names the place where it first did."""
    from msgspec.structs import replace

    from feeder.service.net.connection import Connection
    from feeder.service.protocol import messages as say
    from feeder.service.protocol.coding import decode, encode

    send = Connection.send
    named: list[bytes | None] = []

    def forgetful(self: Any, data: bytes) -> None:
        message = decode(data, from_consumer=True)
        if isinstance(message, say.Open):
            named.append(message.token)
            data = encode(replace(message, token=named[0]))
        send(self, data)

    Connection.send = forgetful  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    "drop-offset": drop_offset,
    "head": head,
    "no-discard": no_discard,
    "stale": stale,
}
"""Every bug by its name; its docstring says what it does."""


def plant_what_was_asked() -> None:
    """Plant the bug that the environment names, if any."""
    if name := os.environ.get(VARIABLE):
        PLANTS[name]()
