"""What a forked child of a server must not keep: sockets that say that the server lives.

A fetch function may fork, as `multiprocessing` does. The child has copies of the listening sockets,
which block a restart at the same address, and of the consumers' connections, which would not break
when the server is killed. ZeroMQ does not tell its descriptors, so they are found by where they are
bound.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

_MOST = 65_536


class Listening(Protocol):
    """A server."""

    def places(self) -> set[Any]:
        """Where its sockets are bound: ports of TCP and paths of unix sockets."""

    def fork(self) -> None:
        """This is a forked child."""


_servers: weakref.WeakSet[Any] = weakref.WeakSet()


def add(server: Listening) -> None:
    """Have the sockets of a server closed in forked children."""
    _servers.add(server)


def _close_in_child() -> None:
    servers = list(_servers)
    for server in servers:
        server.fork()
    places = set().union(*(server.places() for server in servers))
    if places:
        _close_sockets(places)


def _close_sockets(places: set[Any]) -> None:
    for descriptor in _descriptors():
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
        except OSError:
            continue  # Closed by now: it was the listing's own.
        # Looked at as it is: there may be no descriptor left for a copy.
        sock = socket.socket(fileno=descriptor)
        is_ours = _place(sock) in places
        sock.detach()
        if is_ours:
            os.close(descriptor)


def _descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # as where none is left to list them with
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return range(_MOST if limit == resource.RLIM_INFINITY else min(limit, _MOST))


def _place(sock: socket.socket) -> Any:
    try:
        name = sock.getsockname()
    except OSError:
        return None
    return name[1] if isinstance(name, tuple) else name


os.register_at_fork(after_in_child=_close_in_child)
