"""The status port: a socket, a thread that accepts, and a thread for each request."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from time import monotonic
from typing import Any, Literal

from feeder.closing import Closing
from feeder.errors import ConfigError
from feeder.observe.figures import Figures
from feeder.observe.status.board import Board
from feeder.observe.status.routes import PROBES, Answer, answer
from feeder.workers import forks
from feeder.workers.fetch.threads import ThreadGroup

logger = logging.getLogger("feeder")

LOOPBACK = "127.0.0.1"
# From the first byte to the last, whatever a client does in between.
_REQUEST_S = 5.0
# After a failed accept, as without a free descriptor: else the thread would spin.
_TROUBLE_S = 0.1
# Requests end as soon as they are hung up on; one that is reading figures may take a moment.
_STOP_S = 2.0
# More than all places together have; a probe must get in behind a crowd that connects at once.
_BACKLOG = 64

_Phase = Literal["reading", "answering", "probing"]

# So many connections each phase of a request has places for. A client that is slow to ask, or slow
# to read, takes the places of its own phase alone, so that a probe that asks at once is answered.
_PLACES: dict[_Phase, int] = {"reading": 32, "answering": 16, "probing": 4}

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


class StatusPort(Closing):
    """Serves the figures that `read_figures` reads, until it is closed, in threads of its own.

    Whoever made it closes it; `_open` has a lock of its own. A socket and `BaseHTTPRequestHandler`,
    not `socketserver`: that one polls, and its threads belong to nobody.

    Port 0 is the system's choice. Raises `ConfigError` where it cannot listen.
    """

    def __init__(self, place: str | int, read_figures: Callable[[], Figures]) -> None:
        host, port = parse_place(place)
        self._board = Board(read_figures)
        self._requests = ThreadGroup()
        self._open = _Connections()
        self._listener = _listen(host, port)
        name, number = self._listener.getsockname()[:2]
        shown = f"[{name}]" if ":" in name else name
        self.url = f"http://{shown}:{number}/"
        """The address of the page."""
        self._threads = ThreadGroup()
        self._threads.start(
            "feeder status", run_port, self._listener, self._open, self._take, self._board.pause
        )
        self._threads.start("feeder status sampler", self._board.run_sampler)
        forks.call_in_child(self.after_fork)

    def after_fork(self) -> None:
        """This is a forked child: the port is the parent's."""
        self._listener.close()
        self._open.close()

    def close(self) -> None:
        """End at once, requests under way included. Harmless when done before."""
        # In this order: no new connection, then no waiting one, then no thread.
        self._board.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads.close(_STOP_S)
        self._listener.close()
        self._open.end_all()
        self._requests.close(_STOP_S)

    def _take(self, connection: socket.socket) -> None:
        # Counted here and not in its own thread, which may not have begun when the next one comes.
        self._open.enter("reading", connection)
        try:
            self._requests.start("feeder status request", self._serve, connection)
        except RuntimeError:
            # No thread can be had just now. The next request may be a probe that gets one.
            self._open.leave(connection)
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            # A peer that hangs up, or says nothing, is of no interest.
            with contextlib.suppress(OSError):
                _Request(connection, connection.getpeername(), self._board, self._open)
        finally:
            self._open.leave(connection)
            connection.close()


class _Connections:
    """The open connections, each in one phase of its request, until its deadline. If a phase has no
    place left, its oldest connection ends. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The first one of a phase has been in it for longest.
        self._open: dict[socket.socket, tuple[_Phase, float]] = {}

    def enter(self, phase: _Phase, connection: socket.socket) -> None:
        """A connection begins a phase; with its first one its time begins."""
        with self._lock:
            _, deadline = self._open.pop(connection, (phase, monotonic() + _REQUEST_S))
            others = [other for other, (its, _) in self._open.items() if its == phase]
            if len(others) >= _PLACES[phase]:
                self._end(others[0])
            self._open[connection] = phase, deadline

    def leave(self, connection: socket.socket) -> None:
        """A connection ends; to be called before it is closed."""
        with self._lock:
            self._open.pop(connection, None)

    def end_late(self) -> float | None:
        """End the connections whose time is over. Returns for how long the others have time, in
        seconds; None without others."""
        with self._lock:
            now = monotonic()
            for connection, (_, deadline) in list(self._open.items()):
                if deadline <= now:
                    self._end(connection)
            left = [deadline - now for _, deadline in self._open.values()]
            return min(left, default=None)

    def end_all(self) -> None:
        """End all connections."""
        with self._lock:
            for connection in list(self._open):
                self._end(connection)

    def close(self) -> None:
        """Close all connections in a forked child, where no other thread is, whose lock may be held
        for ever."""
        for connection in self._open:
            # Not by `close`, which would wait for the file of a thread that is not here.
            os.close(connection.detach())

    def _end(self, connection: socket.socket) -> None:
        # Whoever reads from it, or writes to it, stops at once.
        del self._open[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def run_port(
    listener: socket.socket,
    connections: _Connections,
    take: Callable[[socket.socket], None],
    pause: Callable[[float], bool],
) -> None:
    """Thread body: accept connections, and end those that are late, until `pause` says that the
    port is closed."""
    while True:
        # By the clock here and not in the requests' threads: a timeout of a connection begins anew
        # with each byte.
        listener.settimeout(connections.end_late())
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
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
    """One request: parsed, answered, done, on a thread of its own."""

    server_version, sys_version = "feeder", ""

    def __init__(
        self, connection: socket.socket, peer: Any, board: Board, places: _Connections
    ) -> None:
        self._board = board
        self._places = places
        super().__init__(connection, peer, board)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        is_probe = self.path.partition("?")[0] in PROBES
        self._places.enter("probing" if is_probe else "answering", self.connection)
        try:
            found = answer(
                self._board, self.path, peer=self.client_address[0], host=self.headers.get("Host")
            )
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
