"""What a forked child keeps of the batches that its parent was looking at.

A slot of shared memory is the server's, which writes it again once the consumer has let go of it:
the child is no consumer, and would see that. So the child first of all puts copies where the slots
were, and until it has, or is dead, its parent tells of no slot that it is free.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import resource
import select
import socket
import stat
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

logger = logging.getLogger("feeder")

_COPY_S = 10.0
"""How long a child may take."""
_BLIND_S = 1.0
"""How long it is taken to, where no descriptor is left for a pipe to it."""
_MAP_FIXED = 0x10

_T = TypeVar("_T")


class Lent(Protocol):
    """Memory of a server's that is looked at."""

    def freeze(self, why: object) -> None:
        """Tell of none that it is free, until it is told to thaw; from any thread."""

    def thaw(self, why: object) -> None:
        """The contrary."""

    def copy_for_child(self) -> None:
        """Have what is looked at lie in this process's own memory, where it was."""


class Owner(Protocol):
    """What belongs to the parent."""

    def abandon_in_child(self) -> None:
        """This is a forked child: batches that were not handed out are let go of, and connections
        too."""


class _Fork:
    """A fork under way. The child has the other end of a pipe until it is ready, or dead."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._lent: list[Lent] = []
        self._is_over = False
        self._ends: tuple[int, ...] = ()

    def freeze_all(self, lent: list[Lent]) -> None:
        """Freeze it."""
        if lent:
            with contextlib.suppress(OSError):
                self._ends = os.pipe()
        for each in lent:
            self.freeze(each)

    def freeze(self, lent: Lent) -> None:
        """Also what is lent while it is under way."""
        self._lent.append(lent)
        lent.freeze(self)
        if self._is_over:
            lent.thaw(self)

    def finish_in_parent(self) -> None:
        """Wait for the child, in a thread of its own."""
        if not self._lent:
            self._is_over = True
            if not self._lent:  # Nothing was lent just then.
                return
        if self._ends:
            os.close(self._ends[1])
        try:
            threading.Thread(target=self._wait, name="feeder fork", daemon=True).start()
        except RuntimeError:
            self._wait()  # No thread can be started.

    def finish_in_child(self) -> None:
        """It is ready."""
        for descriptor in self._ends:
            os.close(descriptor)

    def _wait(self) -> None:
        poll = select.poll()
        if self._ends:
            poll.register(self._ends[0], 0)
            if not poll.poll(_COPY_S * 1000):
                logger.warning("a forked child did not copy the batches that it has in %.0f s: "
                               "they are written again under it", _COPY_S)  # fmt: skip
            os.close(self._ends[0])
        else:
            poll.poll(_BLIND_S * 1000)
        self._is_over = True
        for lent in self._lent:
            lent.thaw(self)


_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
_lent: weakref.WeakValueDictionary[int, Lent] = weakref.WeakValueDictionary()
_fork_lock = threading.RLock()
"""From before a fork until both ends of the pipe are where they belong: another thread's child
would keep the pipe open for as long as it lives."""
_under_way: list[_Fork] = []


def register_owner(owner: Owner) -> None:
    """Tell it of forks, for as long as it is there."""
    _owners[id(owner)] = owner


def unregister_owner(owner: Owner) -> None:
    """It is closed."""
    _owners.pop(id(owner), None)


def register_lent(lent: Lent) -> None:
    """See to memory in forked children, for as long as it is there; from any thread."""
    _lent[id(lent)] = lent
    for fork in list(_under_way):
        fork.freeze(lent)


def unregister_lent(lent: Lent) -> None:
    """It is not written again."""
    _lent.pop(id(lent), None)


def _those_in(known: weakref.WeakValueDictionary[int, _T]) -> list[_T]:
    # At once: other threads make such, and end them.
    return [each for ref in known.valuerefs() if (each := ref()) is not None]


def _before_fork() -> None:
    """This thread is about to fork."""
    _fork_lock.acquire()
    # Known first: what is lent from here on is frozen by who lends it.
    _under_way.append(fork := _Fork())
    fork.freeze_all(_those_in(_lent))


def _after_fork_in_parent() -> None:
    """It has forked, or could not."""
    try:
        # An interrupt may have come before the lock was taken, and it is another thread's.
        if _under_way and _under_way[-1].thread == threading.get_ident():
            _under_way.pop().finish_in_parent()
    finally:
        with contextlib.suppress(RuntimeError):
            _fork_lock.release()


def _after_fork_in_child() -> None:
    global _fork_lock
    _fork_lock = threading.RLock()
    try:
        for do in (*(each.abandon_in_child for each in _those_in(_owners)),
                   *(each.copy_for_child for each in _those_in(_lent))):  # fmt: skip
            try:
                do()
            except Exception:
                logger.exception("a forked child does not let go of what is its parent's")
    finally:
        _owners.clear()
        _lent.clear()
        while _under_way:
            _under_way.pop().finish_in_child()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)


def make_own(address: int, num_bytes: int) -> None:
    """Put a copy of whole pages where they are. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    copy = ctypes.string_at(address, num_bytes)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(address, num_bytes, prot, kind, -1, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    ctypes.memmove(address, copy, num_bytes)
    libc.mprotect(address, num_bytes, mmap.PROT_READ)


# ---- What a forked child of a server must not keep: sockets that say that the server lives.
#
# A fetch function may fork, as `multiprocessing` does. The child has copies of the listening
# sockets, which block a restart at the same address, and of the consumers' connections, which
# would not break when the server is killed. ZeroMQ does not tell its descriptors, so they are
# found by where they are bound.


_MOST = 65_536


class Listening(Protocol):
    """A server."""

    def places(self) -> set[Any]:
        """Where its sockets are bound: ports of TCP and paths of unix sockets."""

    def abandon_in_child(self) -> None:
        """This is a forked child."""


_servers: weakref.WeakSet[Any] = weakref.WeakSet()


def add_server(server: Listening) -> None:
    """Have the sockets of a server closed in forked children."""
    _servers.add(server)


def _close_in_child() -> None:
    servers = list(_servers)
    for server in servers:
        server.abandon_in_child()
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
