"""The answer at each path of the status port, and who may have it. No sockets here."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from feeder.errors import ConfigError, FeedError
from feeder.observe.status.board import Board, stacks

_TEXT = "text/plain; charset=utf-8"
_HERE = Path(__file__).parent


class Answer(NamedTuple):
    """An answer to a request."""

    status: int
    kind: str
    """Its content type."""
    body: bytes


Route = Callable[[Board], Answer]


def answer(board: Board, path: str, *, peer: str, host: str | None) -> Answer:
    """The answer at a path, for a peer at an address that sends a Host header, or none.

    A page of another site, open in a browser of this host, may have made its own name mean this
    host. Its requests come from here, and the Host header alone tells them: they get nothing.
    Stacks tell what a program is made of, so they are for this host alone.
    """
    path = path.partition("?")[0]
    names_this_host = host is not None and is_near(_name_in(host))
    if host is not None and is_near(peer) and not names_this_host:
        return _say(403, f"the Host header is {host!r}; ask for localhost or 127.0.0.1")
    if path == "/debug/threads" and not (is_near(peer) and names_this_host):
        return _say(403, "the stacks of threads are shown to this host alone")
    route = _ROUTES.get(path)
    if route is None:
        return _say(404, f"nothing here; there are {', '.join(_ROUTES)}")
    try:
        return route(board)
    except ConfigError as error:
        return _say(501, str(error))
    except FeedError as error:
        return _say(503, str(error))


def _name_in(host: str) -> str:
    """A Host header without the port."""
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.partition(":")[0] if host.count(":") == 1 else host


def is_near(host: str) -> bool:
    """Whether an address is of the loopback interface; of names "localhost" alone."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    # An IPv6 socket shows IPv4 peers as ::ffff:127.0.0.1.
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _say(status: int, text: str) -> Answer:
    return Answer(status, _TEXT, f"{text}\n".encode())


@cache
def _read(name: str) -> bytes:
    return (_HERE / name).read_bytes()


def _file(name: str, kind: str) -> Route:
    return lambda board: Answer(200, kind, _read(name))


def _stats(board: Board) -> Answer:
    return Answer(200, "application/json", board.everything())


def _metrics(board: Board) -> Answer:
    from feeder.observe.prometheus import expose

    figures = board.figures()
    kind, body = expose(figures, board.kinds(figures))
    return Answer(200, kind, body)


def _health(board: Board) -> Answer:
    # The figures of a server are asked of its I/O thread: an answer means that it lives.
    board.figures()
    return _say(200, "ok")


def _readiness(board: Board) -> Answer:
    trouble = board.trouble()
    return _say(200, "ready") if trouble is None else _say(503, trouble)


PROBES = frozenset(("/healthz", "/readyz"))
"""The paths by which orchestrators find out whether a process lives."""

_ROUTES: dict[str, Route] = {
    "/": _file("page.html", "text/html; charset=utf-8"),
    "/page.css": _file("page.css", "text/css; charset=utf-8"),
    "/page.js": _file("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": _file("icon.svg", "image/svg+xml"),
    "/stats.json": _stats,
    "/metrics": _metrics,
    "/healthz": _health,
    "/readyz": _readiness,
    "/debug/threads": lambda board: Answer(200, _TEXT, stacks().encode()),
}
