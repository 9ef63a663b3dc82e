"""Which consumers are on the server's host, over unix sockets, and which of them are gone."""

from __future__ import annotations

import math
import secrets
from typing import Any

import zmq

from feeder.service.protocol import messages as say
from feeder.service.memory.fdpass import NONCE_BYTES, Connection, Listener
from feeder.service.server.lease import Peer
from feeder.service.net.sockets import boot_id


class Presence:
    """The unix connections of consumers, in the server's poll. Belongs to the I/O thread."""

    def __init__(self, listener: Listener, poller: zmq.Poller) -> None:
        self._listener = listener
        self._poller = poller
        self._nonces: dict[bytes, Peer] = {}
        # Connections and processes, by their descriptors: readable when they are gone.
        self._watched: dict[int, tuple[Peer, Connection]] = {}
        poller.register(listener.fileno(), zmq.POLLIN)

    def offer(self, peer: Peer, kernel: str) -> say.Offer | None:
        """Where a consumer on a kernel may fetch descriptors; None where that is another's."""
        if not kernel or kernel != boot_id():
            return None
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces[nonce] = peer
        self._listener.expect(nonce)
        return say.Offer(path=self._listener.path, nonce=nonce)

    def admit(self) -> list[tuple[Peer, Connection]]:
        """The connections that have said whose they are since last asked."""
        # Once to accept a connection, once to read what it has presented by then.
        new = [*self._listener.on_readable(), *self._listener.on_readable()]
        found = [(self._nonces.pop(connection.nonce), connection) for connection in new]
        for peer, connection in found:
            for descriptor in (connection.fileno(), connection.pidfd):
                if descriptor is not None:
                    self._watched[descriptor] = peer, connection
                    self._poller.register(descriptor, zmq.POLLIN)
        return found

    def gone(self, ready: dict[Any, int]) -> set[Peer]:
        """Of those whose descriptors a poll found, the peers that are gone."""
        peers = set()
        for descriptor in ready:
            peer, connection = self._watched.get(descriptor, (None, None))
            # Asked, since the number may be another connection's than when the poll returned.
            if peer is not None and connection is not None and connection.is_gone():
                peers.add(peer)
        return peers

    def has_news(self, ready: dict[Any, int]) -> bool:
        """Whether a poll found somebody who comes."""
        return self._listener.fileno() in ready

    def forget(self, peer: Peer) -> None:
        """A peer's lease is over: look at it no more. Before its connection is closed."""
        for nonce in [nonce for nonce, owner in self._nonces.items() if owner == peer]:
            del self._nonces[nonce]
            self._listener.withdraw(nonce)
        for descriptor, (owner, _) in list(self._watched.items()):
            if owner == peer:
                del self._watched[descriptor]
                self._poller.unregister(descriptor)

    def expire(self, now: float) -> float:
        """Send those away who took too long to say who they are; when to look again."""
        self._listener.expire(now)
        deadline = self._listener.deadline
        return math.inf if deadline is None else deadline

    def close(self) -> None:
        """Hang up on everybody who is left."""
        for _, connection in self._watched.values():
            connection.close()
        self._watched.clear()
