"""A monitor: it asks a server what its feeds do, and takes nothing from it."""

from __future__ import annotations

import os
import time
from types import TracebackType

import msgspec

from feeder.errors import ConnectTimeout, ProtocolError, TransportError
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

_MAX_BYTES = SEEN_BYTES + 1024


class Monitor:
    """Asks one server, over one connection at a time; used by one thread. A context manager.

    Raises `ConfigError` where the address or the keys are wrong.
    """

    def __init__(
        self, address: str | None = None, keys: str | os.PathLike[str] | None = None
    ) -> None:
        self._address = default_address() if address is None else parse(address)
        check_connects([self._address])
        self._security = Security(None if keys is None else ClientKeys.read(keys))
        self._wire: Connection | None = None
        self._session = Session(CONSUMER)
        self._receipt = b""

    @property
    def address(self) -> str:
        """The server's."""
        return str(self._address)

    def look(self, timeout_s: float = 5.0) -> Figures:
        """What the server's feeds have done. Raises `ConnectTimeout`, `AuthError` and other
        `TransportError`s; the next call connects again."""
        try:
            return self._look(time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self._drop()
            raise

    def _look(self, ends: float, timeout_s: float) -> Figures:
        wire = self._wire
        if wire is None:
            wire = self._wire = Connection(self._security, self._address, _MAX_BYTES)
            self._session, self._receipt = Session(CONSUMER), b""
            self._session.on("connect")
        message = say.Look(version=say.PROTOCOL_VERSION, receipt=self._receipt)
        self._session.on("Look")
        wire.send(encode(message))
        while (left_s := ends - time.monotonic()) > 0:
            ready = wire.poll(left_s)
            if ready.messages and (figures := self._receive(wire)) is not None:
                return figures
            if ready.trouble and (error := wire.trouble()) is not None:
                raise error
        raise ConnectTimeout(
            f"no answer from {self.address} within {timeout_s:g} s; does `feeder serve` run there?"
        )

    def _receive(self, wire: Connection) -> Figures | None:
        for data, _ in wire.receive():
            message = decode(data, from_consumer=False)
            self._session.on(type(message).__name__)
            match message:
                case say.Seen():
                    self._receipt = message.receipt
                    return _figures(message.data)
                case say.Fault():
                    raise error_of(message)
                case say.Farewell():
                    raise TransportError(f"the server stopped: {message.reason}")
        return None

    def _drop(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def close(self) -> None:
        """End the connection. Harmless when done before."""
        self._drop()
        self._security.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _figures(data: bytes) -> Figures:
    try:
        return from_json(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"the server's figures cannot be read: {error}; use the same feeder on both sides"
        ) from error
