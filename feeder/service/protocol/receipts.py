"""Answers that may be large, of which nobody is owed more than one."""

from __future__ import annotations

import secrets

from feeder.errors import ProtocolError
from feeder.service.protocol.fields import RECEIPT_BYTES


class Receipts:
    """What one asker was answered. ZeroMQ bounds how many messages wait for a peer, not their
    bytes: so the next answer is given to whoever shows that it has read the last."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = b""

    def check(self, receipt: bytes) -> None:
        """A question has come. Raises `ProtocolError` where the last answer was not read."""
        if receipt != self._last:
            raise ProtocolError("a question came before the answer to the last one was read")

    def make(self) -> bytes:
        """What goes with the answer."""
        self._last = secrets.token_bytes(RECEIPT_BYTES)
        return self._last
