"""The status port: a socket, a thread that accepts, and a thread for each request."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any

from feeder.errors import ConfigError
from feeder.metrics.figures import Figures
from feeder.status.board import Board
from feeder.status.routes import Answer, answer
from workers.scope import Scope

logger = logging.getLogger("feeder")

LOOPBACK = "127.0.0.1"
_REQUEST_S = 5.0
_TROUBLE_S = 0.1
_STOP_S = 2.0
_MAX_REQUESTS = 32
_BACKLOG = 64
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src 'self'; "
    "script-src 'self'; style-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def parse_place(text: object) -> tuple[str, int]:
    """Host and port of ``[HOST:]PORT``; the loopback interface where no host is given. Raises
    `ConfigError`."""
    host, _, port = str(text).rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not isinstance(text, (str, int)) or isinstance(text, bool) or not _is_port(port):
        raise ConfigError(
            f"status is {text!r}, expected [HOST:]PORT, as in '9478' or '0.0.0.0:9478'"
        )
    return host or LOOPBACK, int(port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) < 2**16


_ports: weakref.WeakSet[StatusPort] = weakref.WeakSet()


class StatusPort:
    """Serves the figures that `look` reads, until it is closed. Threads of its own, a `Scope`'s.

    Port 0 is the system's choice. Raises `ConfigError` where it cannot listen.
    """

    def __init__(self, place: str | int, look: Callable[[], Figures]) -> None:
        host, port = parse_place(place)
        self._board = Board(look)
        self._requests = Scope()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = _listen(host, port)
        name, number = self._listener.getsockname()[:2]
        shown = f"[{name}]" if ":" in name else name
        self.url = f"http://{shown}:{number}/"
        """The address of the page."""
        self._scope = Scope()
        self._scope.start("feeder status", run_port, self._listener, self._take, self._board.pause)
        self._scope.start("feeder status sampler", self._board.run_sampler)
        _ports.add(self)

    def __enter__(self) -> StatusPort:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def fork(self) -> None:
        """This is a forked child: the port is the parent's."""
        self._listener.close()
        for connection in self._open:
            connection.close()

    def close(self) -> None:
        """End at once, requests under way included. Harmless when done before."""
        self._board.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._scope.close(_STOP_S)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._requests.close(_STOP_S)

    def _take(self, connection: socket.socket) -> None:
        with self._lock:
            is_full = len(self._open) >= _MAX_REQUESTS
            if not is_full:
                self._open.add(connection)
        if is_full:
            connection.close()
        else:
            self._requests.start("feeder status request", self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            # A peer that hangs up, or says nothing, is of no interest.
            with contextlib.suppress(OSError):
                _Request(connection, connection.getpeername(), self._board)
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


def run_port(
    listener: socket.socket,
    take: Callable[[socket.socket], None],
    pause: Callable[[float], bool],
) -> None:
    """Thread body: accept connections until `pause` says that the port is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            # It was shut down, the peer has gone again, or there are too many open files.
            if not pause(_TROUBLE_S):
                return
            continue
        take(connection)


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"status host {host!r} is not known here: {_why(error)}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot show the status at {host}:{port} ({_why(error)}): give a free port on an "
            "interface of this host"
        ) from error
    return listener


def _why(error: Exception) -> str:
    number = getattr(error, "errno", None)
    is_system = isinstance(error, OSError) and not isinstance(error, socket.gaierror)
    return os.strerror(number).lower() if is_system and number else str(error).lower()


class _Request(BaseHTTPRequestHandler):
    """One request: parsed, answered, done."""

    server_version, sys_version = "feeder", ""
    timeout = _REQUEST_S

    def __init__(self, connection: socket.socket, peer: Any, board: Board) -> None:
        self._board = board
        super().__init__(connection, peer, board)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        try:
            # By name too: a page of another host may have made its own name mean this one.
            host = self.headers.get("Host", "")
            named = (host.rpartition(":")[0] or host).strip("[]")
            near = is_near(self.client_address[0]) and is_near(named)
            found = answer(self._board, self.path, is_near=near)
        except Exception as error:
            logger.exception("the status page failed")
            found = Answer(500, "text/plain", f"{type(error).__name__}\n".encode())
        self.send_response(found.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", found.kind)
        self.send_header("Content-Length", str(len(found.body)))
        self.end_headers()
        if with_body:
            self.wfile.write(found.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def is_near(host: str) -> bool:
    """Whether an address is of the loopback interface; of names "localhost" alone."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _after_fork() -> None:
    for port in list(_ports):
        port.fork()


os.register_at_fork(after_in_child=_after_fork)
