"""A monitor: it asks a server for the figures of its feeds, or edits one, and takes no queue.

A monitor has a state of the protocol of its own: after its first question nothing but questions is
legal, so that a monitor can never take a queue from a trainer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from fractions import Fraction

import msgspec

from feeder.closing import Closing
from feeder.errors import ConfigError, ConnectTimeout, ProtocolError, TransportError
from feeder.observe.figures import Figures, from_json
from feeder.service.client.remote import error_of
from feeder.service.net.addresses import check_connects, default_address, parse
from feeder.service.net.connection import Connection
from feeder.service.net.keys import ClientKeys
from feeder.service.net.security import Security
from feeder.service.protocol import messages as say
from feeder.service.protocol.coding import decode, encode
from feeder.service.protocol.fields import SEEN_BYTES
from feeder.service.protocol.session import CONSUMER, Session

# The longest answer, and what its message holds beside the figures. ZeroMQ drops a peer that sends
# a longer frame, before its bytes take memory here.
_MAX_BYTES = SEEN_BYTES + 1024


class Monitor(Closing):
    """Asks one server, over one connection at a time. A context manager.

    Owned by the thread that calls it: no two threads may use it at once.

    Raises `ConfigError` if the address or the keys are wrong.
    """

    def __init__(
        self, address: str | None = None, keys: str | os.PathLike[str] | None = None
    ) -> None:
        self._address = default_address() if address is None else parse(address)
        check_connects([self._address])
        self._security = Security(None if keys is None else ClientKeys.from_directory(keys))
        self._connection: Connection | None = None
        self._session = Session(CONSUMER)
        self._receipt = b""

    @property
    def address(self) -> str:
        """The address of the server."""
        return str(self._address)

    def fetch(self, timeout_s: float = 5.0) -> Figures:
        """Return what the server's feeds have done.

        Raises `ConnectTimeout`, `AuthError` and other `TransportError`s; after an error the next
        call connects again.
        """
        # The receipt proves that the last answer was read: otherwise a peer that asks and never
        # reads would have the server hold its answers in memory.
        seen = self._ask(
            lambda: say.Look(version=say.PROTOCOL_VERSION, receipt=self._receipt), timeout_s
        )
        assert isinstance(seen, say.Seen)
        self._receipt = seen.receipt
        return _figures(seen.data)

    def edit(
        self, why: str, *, feed: str = "", weights: Mapping[str, Fraction] | None = None,
        batch_size: int | None = None, global_batch_size: int | None = None,
        seed: int | None = None, timeout_s: float = 30.0,
    ) -> int:  # fmt: skip
        """Have a feed go on with other numbers; returns the first step that they are for. Raises as
        `fetch` does, and what the server says against it."""
        message = say.Edit(
            version=say.PROTOCOL_VERSION, feed=feed, why=why, batch_size=batch_size,
            weights=tuple((name, str(weight)) for name, weight in (weights or {}).items()),
            global_batch_size=global_batch_size, seed=seed,
        )  # fmt: skip
        try:
            decode(encode(message), from_consumer=True)
        except (OverflowError, ProtocolError) as error:
            raise ConfigError(f"no server can take this edit: {error}") from error
        answer = self._ask(lambda: message, timeout_s)
        assert isinstance(answer, say.Edited)
        return answer.step

    def _ask(self, question: Callable[[], say.Message], timeout_s: float) -> say.Message:
        try:
            return self._answer(question, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            # An answer may still be on its way, and would be taken for that of the next question.
            self._drop()
            raise

    def _answer(
        self, question: Callable[[], say.Message], ends: float, timeout_s: float
    ) -> say.Message:
        connection = self._connection
        if connection is None:
            connection = self._connection = Connection(self._security, self._address, _MAX_BYTES)
            # A receipt is worth something over the connection that it came over, and no other.
            self._session, self._receipt = Session(CONSUMER), b""
            self._session.on("connect")
        message = question()
        self._session.on(type(message).__name__)
        connection.send(encode(message))
        while (left_s := ends - time.monotonic()) > 0:
            ready = connection.poll(left_s)
            if ready.messages and (answer := self._receive(connection)) is not None:
                return answer
            if ready.trouble and (error := connection.trouble()) is not None:
                raise error
        raise ConnectTimeout(
            f"no answer from {self.address} within {timeout_s:g} s; does `feeder serve` run there?"
        )

    def _receive(self, connection: Connection) -> say.Message | None:
        for data, _ in connection.receive():
            try:
                message = decode(data, from_consumer=False)
            except ProtocolError:
                if connection.leads_to_itself():
                    raise TransportError(f"nobody listens at {self.address}") from None
                raise
            # Raises if the message may not come now, so the cases below are all there are.
            self._session.on(type(message).__name__)
            match message:
                case say.Seen() | say.Edited():
                    return message
                case say.Fault():
                    raise error_of(message)
                case say.Farewell():
                    raise TransportError(f"the server stopped: {message.reason}")
        return None

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """End the connection. Closing twice is harmless."""
        self._drop()
        self._security.close()


def _figures(data: bytes) -> Figures:
    try:
        return from_json(data)
    except msgspec.MsgspecError as error:
        # Figures have no version: both ends are expected to run one release.
        raise ProtocolError(
            f"the server's figures cannot be read: {error}; use the same feeder on both sides"
        ) from error
