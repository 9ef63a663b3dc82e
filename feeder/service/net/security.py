"""Who may connect, and what a socket takes: authentication, limits, and events of connections.

With keys every TCP port speaks CURVE, on loopback too, as other users of the host reach it. Unix
sockets stay plain: the kernel guards them by directory and mode. A ROUTER speaks one mechanism, so
a server that listens at both kinds of address has two ROUTERs.
"""

from __future__ import annotations

import itertools
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from feeder.closing import Closing
from feeder.errors import AuthError, ConfigError
from feeder.service.net.addresses import Address
from feeder.service.net.keys import AllowedClients, ClientKeys, ServerKeys
from feeder.service.protocol.fields import ROWS_BYTES

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

DOMAIN = "feeder"
"""The ZAP domain of every socket. Having one also refuses peers of ZMTP 1.0, which need no
handshake: garbage would pass for their messages."""
# The version that the limits below were tried with; the wheels of pyzmq bring it.
NEEDED_LIBZMQ = (4, 3, 5)
MAX_REQUEST_BYTES = 128 * 1024
"""The longest frame that a server takes from a peer that it does not know: a control message, with
a token of 64 KiB in it. A longer one is refused by ZeroMQ before it takes memory."""
MAX_POSITION_BYTES = ROWS_BYTES + MAX_REQUEST_BYTES
"""The longest frame from peers that are let in by their user or their keys: they may bring
positions with leftover rows."""
HANDSHAKE_MS = 2000
"""A peer that has not finished its handshake after so long is dropped: until then nobody knows who
it is, and it costs a descriptor."""
HWM_SLACK = 16
"""Messages that a peer may be behind beyond its credit: what is not a batch (columns, arenas,
states). To exceed it means a bug, as the credit bounds all else."""
RECEIVE_HWM = 64
"""Messages that ZeroMQ reads ahead of one peer. Few, since they take memory before anybody has
looked at them."""
STALLED_TCP_MS = 10_000
"""A TCP peer that acknowledges nothing for so long is dropped: shorter than a lease, so that a host
that has lost its power is known to be gone before its trainer's lease is over."""
BACKLOG = 128
"""Connections that wait to be accepted: all trainers of a job come at once after a restart."""
RECONNECT_MS, MAX_RECONNECT_MS = 10, 100
"""How often ZeroMQ tries to connect again, at first and at last. Servers may be there for less than
a second at a time, and tries half a second apart missed a tenth of them."""
CONNECT_MS = 2000
"""How long one try to connect may take: packets that a firewall drops are not answered at all."""

# The events that are read; each costs a message to the thread that reads. Not ACCEPT_FAILED:
# without descriptors libzmq says that in an endless stream, which would be all that the thread ever
# reads.
_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# Names of monitors' endpoints, which must differ within a context. `next` is one operation in C, so
# any thread may draw one.
_monitor_numbers = itertools.count()

Socket = zmq.Socket[bytes]


def check_zmq(*, curve: bool = False) -> None:
    """Raise ConfigError unless libzmq is new enough, and can encrypt where `curve` is wanted."""
    if (found := zmq.zmq_version_info()) < NEEDED_LIBZMQ:
        needed = ".".join(map(str, NEEDED_LIBZMQ))
        raise ConfigError(
            f"libzmq is {'.'.join(map(str, found))}, expected {needed} or newer: "
            "install the wheel of pyzmq, which brings its own"
        )
    if curve and not zmq.has("curve"):
        raise ConfigError(
            "keys are given, and this libzmq is built without CURVE: "
            "install the wheel of pyzmq, which has it"
        )


class Security(Closing):
    """A ZeroMQ context of our own, with rules of who may connect; a context manager.

    `keys`: a server's, a client's, or None for plain sockets. With `is_server` ZAP's thread answers
    for every newcomer. The context may be used by all threads, each socket by one. Sockets are made
    and the object is closed by one thread at a time: a consumer's I/O thread, or the server's own.
    """

    def __init__(
        self,
        keys: ServerKeys | ClientKeys | None = None,
        *,
        is_server: bool | None = None,
    ) -> None:
        check_zmq(curve=keys is not None)
        self.keys = keys
        """The keys; None where sockets are plain."""
        self.context: zmq.Context[Socket] = zmq.Context()
        """The context of all sockets; not shared with the user's own use of ZeroMQ."""
        # Every socket that may be open; see `_make_socket`.
        self._sockets: list[Socket] = []
        self._authenticator: ThreadAuthenticator | None = None
        self.allowed = AllowedClients(keys) if isinstance(keys, ServerKeys) else None
        """A server's clients that may connect, where it has keys."""
        if isinstance(keys, ServerKeys) if is_server is None else is_server:
            self._authenticator = _start_authenticator(self.context, self.allowed)

    def encrypts(self, address: Address) -> bool:
        """Whether peers at `address` speak CURVE: with keys, over TCP."""
        return self.keys is not None and address.scheme == "tcp"

    def most_request_bytes(self, address: Address) -> int:
        """Return the longest frame that a server takes at `address`."""
        # At a unix socket peers are the user's own processes, with keys they are on the list.
        is_known = address.scheme == "ipc" or self.encrypts(address)
        return MAX_POSITION_BYTES if is_known else MAX_REQUEST_BYTES

    def make_router(
        self, credit: int, *, curve: bool = False, max_message_bytes: int = MAX_REQUEST_BYTES
    ) -> Socket:
        """Make a server's ROUTER, unbound, for peers that are sent `credit` messages at most.

        `send` never waits: zmq.Again where a peer is too far behind, EHOSTUNREACH where it is
        gone. `curve` takes a server's keys; see `encrypts`.
        """
        socket = self._make_socket(zmq.ROUTER, credit, max_message_bytes)
        socket.rcvhwm = RECEIVE_HWM
        # Else a message to a peer that is gone is dropped without a word.
        socket.router_mandatory = 1
        socket.backlog = BACKLOG
        # If the thread that answers for newcomers should die, nobody comes in, instead of anybody.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if curve:
            assert isinstance(self.keys, ServerKeys), "a ROUTER with CURVE takes a server's keys"
            socket.curve_secretkey = self.keys.secret
            socket.curve_server = True
        return socket

    def make_dealer(self, credit: int, *, max_message_bytes: int, curve: bool = False) -> Socket:
        """Make a consumer's DEALER, unconnected, that takes `credit` messages at most at once.

        `max_message_bytes`: of one frame. It connects again by itself, and never waits in `send`.
        """
        socket = self._make_socket(zmq.DEALER, RECEIVE_HWM, max_message_bytes)
        # All of its credit may arrive at once.
        socket.rcvhwm = credit + HWM_SLACK
        socket.reconnect_ivl = RECONNECT_MS
        socket.reconnect_ivl_max = MAX_RECONNECT_MS
        socket.connect_timeout = CONNECT_MS
        if curve:
            assert isinstance(self.keys, ClientKeys), "a DEALER with CURVE takes a client's keys"
            socket.curve_publickey = self.keys.public
            socket.curve_secretkey = self.keys.secret
            socket.curve_serverkey = self.keys.server
        return socket

    def _make_socket(self, kind: int, credit: int, max_message_bytes: int) -> Socket:
        socket = self.context.socket(kind)
        # Neither closing nor sending ever waits: one peer would hold up all others of the thread.
        socket.linger = 0
        socket.sndtimeo = 0
        socket.sndhwm = credit + HWM_SLACK
        socket.maxmsgsize = max_message_bytes
        socket.handshake_ivl = HANDSHAKE_MS
        socket.tcp_maxrt = STALLED_TCP_MS
        socket.zap_domain = DOMAIN.encode()
        # Held here, so that none is closed by the garbage collector, which runs in any thread,
        # while a socket belongs to one.
        self._sockets = [*(held for held in self._sockets if not held.closed), socket]
        return socket

    def close(self) -> None:
        """End ZAP's thread, close all sockets, and end the context; harmless when done before.

        To be called when no other thread uses a socket of it any more. Unsent messages are lost.
        """
        # The thread first: it has a socket of this context, and would keep it from ending.
        authenticator, self._authenticator = self._authenticator, None
        if authenticator is not None:
            authenticator.stop()
        self.context.destroy(linger=0)
        self._sockets.clear()


def _start_authenticator(
    context: zmq.Context[Socket], allowed: AllowedClients | None
) -> ThreadAuthenticator:
    """Start the thread that says who may connect: anybody where plain, the list with CURVE."""
    # Imported here, since it brings asyncio along, which consumers do not need.
    from zmq.auth.thread import ThreadAuthenticator

    authenticator = ThreadAuthenticator(context)
    # Set, not loaded from files by it: it would read a directory whose modes nobody has checked.
    # It asks for each newcomer whether its key is in there.
    certs: dict[str, Any] = authenticator.certs
    certs[DOMAIN] = {} if allowed is None else allowed
    authenticator.start()
    return authenticator


def bind(socket: Socket, address: Address) -> Address:
    """Bind a socket; returns the address with the port that the system chose, if it did.

    ConfigError where the system refuses.
    """
    socket.ipv6 = address.is_ipv6
    try:
        socket.bind(str(address))
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen at {str(address)!r} ({os.strerror(error.errno or 0).lower()}): "
            "give a free port on an interface of this host"
        ) from error
    if address.scheme == "ipc":
        return address
    # The host stays as the user wrote it: a name says more than the number it was resolved to.
    port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    return Address(scheme="tcp", host=address.host, port=port)


def connect(socket: Socket, address: Address) -> None:
    """Connect a socket to where a server listens or will listen; returns at once."""
    socket.ipv6 = address.is_ipv6
    try:
        socket.connect(str(address))
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot connect to {str(address)!r} ({os.strerror(error.errno or 0).lower()})"
        ) from error


class Event(NamedTuple):
    """Something that happened to a connection. Immutable."""

    kind: zmq.Event
    """What happened."""
    value: int
    """A number whose meaning depends on the kind: a file descriptor, an errno, a status."""
    endpoint: str
    """The address, as ZeroMQ writes it."""


def watch(socket: Socket) -> Socket:
    """Return a PAIR socket on which the events of `socket` arrive; see `read_event`.

    It never fills: ZeroMQ's I/O thread stands still where an event cannot be delivered, and with it
    every connection of the context. So end it with `unwatch`, never by closing it alone.
    """
    endpoint = f"inproc://feeder-monitor-{next(_monitor_numbers)}"
    socket.monitor(endpoint, _WATCHED)
    monitor: Socket = socket.context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.rcvhwm = 0  # Without a bound; see above.
    monitor.connect(endpoint)
    return monitor


def unwatch(socket: Socket, monitor: Socket) -> None:
    """Stop the events of `socket`, then close their PAIR; before `socket` is closed."""
    socket.disable_monitor()
    monitor.close(linger=0)


# A plain number: `&` with a flag of ZeroMQ's makes another flag, which takes a microsecond.
_READABLE = int(zmq.POLLIN)


def has_message(socket: Socket) -> bool:
    """Whether a message can be read: asked after each but not before the first, which a poll has
    found. To ask takes 3 µs, and the exception of an empty socket twice as long."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


def read_event(monitor: Socket) -> Event | None:
    """Return the next event; None where there is none now, or none any more."""
    try:
        frames = monitor.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None
    # ZeroMQ's own layout, in the machine's byte order: 16 bits of event, 32 of value.
    number, value = struct.unpack("=Hi", frames[0])
    kind = zmq.Event(number)
    if kind == zmq.EVENT_MONITOR_STOPPED:
        return None
    return Event(kind=kind, value=value, endpoint=frames[1].decode(errors="replace"))


def refusal_of(event: Event) -> AuthError | None:
    """Return the error that an event of a consumer's socket stands for; None if it is no refusal.

    A server that ends a handshake without a word (HANDSHAKE_FAILED_NO_DETAIL) has another key than
    the consumer knows. A server that is being killed looks the same. So that event is to be
    believed only when it comes again, and no handshake has succeeded before.
    """
    match event.kind:
        case zmq.Event.HANDSHAKE_FAILED_AUTH:
            why = "it does not know this client's key: add its .key file to the server's clients"
        case zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            why = _PROTOCOL.get(event.value, "it does not speak as a feeder's server does")
        case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            why = (
                "it ended the handshake: it may want keys, or server.key here is not the one of "
                "that server"
            )
        case _:
            return None
    return AuthError(f"the server at {event.endpoint!r} refuses: {why}")


_PROTOCOL: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: (
        "one side has keys and the other has none: give keys to both or to neither"
    ),
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "its key does not match: is server.key the one of it?",
}
