"""Sockets that are ZeroMQ's, looked at from outside: it hands over whole messages alone.

A number may be another connection's by the time that it is looked at. So a socket is known by its
inode too, and is looked at through a copy of its descriptor, which nobody else closes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import socket
import struct
import sys
import termios
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_RECEIVED = struct.Struct("=Q")
# Of SO_LINGER: to close is to reset the connection, without the wait after its end.
_RESET = struct.pack("ii", 1, 0)
# `tcpi_bytes_received` of Linux' struct tcp_info, since 4.1.
_RECEIVED_AT = 128


@cache
def boot_id() -> str:
    """What tells this boot of this kernel from any other; empty where the kernel has no such
    thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class SocketRef(NamedTuple):
    """A connected socket of somebody else's in this process."""

    descriptor: int
    """Its number."""
    inode: int
    """What tells it from one that has this number later; -1 where it is gone already."""

    @classmethod
    def at(cls, descriptor: int) -> SocketRef:
        """The one that has this number now."""
        return cls(descriptor, _inode(descriptor))

    def reset_if_own(self) -> bool:
        """Whether it is a TCP socket that is connected to itself: two ends of one connection that
        began at once, since the system chose the port that it was to connect to as its own. Such a
        one leaves nothing behind when it is closed, which would keep a server from that port."""
        with contextlib.suppress(OSError):
            if self.inode == -1 or _inode(self.descriptor) != self.inode:
                return False
            sock = socket.socket(fileno=self.descriptor)
            try:
                if sock.family == socket.AF_UNIX or sock.getsockname() != sock.getpeername():
                    return False
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                return True
            finally:
                sock.detach()
        return False

    def close(self, endpoint: str) -> None:
        """Close it, in a forked child, where nobody else uses it, and it leads there: its number
        may have been a file's or another socket's by the time that it was noted."""
        if self.inode == -1 or _inode(self.descriptor) != self.inode:
            return
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=self.descriptor)
            try:
                name = sock.getpeername()
            finally:
                sock.detach()
            told = f":{name[1]}" if isinstance(name, tuple) else f"ipc://{os.fsdecode(name)}"
            if name and endpoint.endswith(told):
                os.close(self.descriptor)


class SocketInspector:
    """What such sockets are looked at through, and shut: two descriptors, so that it can be done
    where none is left. Used by one thread."""

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.dup(self._nothing)
        self.close = weakref.finalize(self, _close, self._nothing, self._copy)
        """Nothing is looked at any more; harmless when done before."""

    def received(self, socket_ref: SocketRef) -> int | None:
        """Bytes that it has received since it was connected; None where the system does not count
        them, as of unix sockets, or it is gone."""
        size = _RECEIVED_AT + _RECEIVED.size
        with contextlib.suppress(OSError), self._open(socket_ref) as sock:
            if sock.family != socket.AF_UNIX:
                told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
                return _RECEIVED.unpack_from(told, _RECEIVED_AT)[0] if len(told) == size else None
        return None

    def unread(self, socket_ref: SocketRef) -> int:
        """Bytes that have come and lie there unread; 0 where it is gone."""
        with contextlib.suppress(OSError), self._open(socket_ref) as sock:
            return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)
        return 0

    def hang_up(self, socket_ref: SocketRef) -> None:
        """Shut it down, where it is still there: who owns it finds that and closes it."""
        with contextlib.suppress(OSError), self._open(socket_ref) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _open(self, socket_ref: SocketRef) -> Iterator[socket.socket]:
        """A copy of it. Raises `OSError` where it is gone."""
        gone = OSError(errno.EBADF, "another has its number now")
        # Before it is copied too: to close the copy of a file would end its locks.
        if _inode(socket_ref.descriptor) != socket_ref.inode:
            raise gone
        os.dup2(socket_ref.descriptor, self._copy, inheritable=False)
        try:
            if _inode(self._copy) != socket_ref.inode:
                raise gone
            sock = socket.socket(fileno=self._copy)
            try:
                yield sock
            finally:
                sock.detach()
        finally:
            # Else its peer would not see that its owner closes it.
            os.dup2(self._nothing, self._copy, inheritable=False)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _inode(descriptor: int) -> int:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return -1


# ---- How many descriptors a server may have. A consumer takes six; and where none is left for the
# next connection to a unix socket, libzmq ends the process (`ipc_listener.cpp`, up to 4.3.5).


_WANTED = 65536
_IN_A_CROWD = 512


def raise_limit() -> None:
    """Let the process have as many descriptors as it may, up to 65,536, as the runtime of Go does:
    the limit that programs begin with is kept low for those that call select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def are_few_left(descriptor: int) -> bool:
    """Whether a descriptor that was just made is of the last eighth, or the last 512: the lowest
    that is free is taken, so about as many are in use. ZeroMQ accepts some hundreds of connections
    before a thread that waits for the interpreter learns of the first."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    kept = max(limit // 8, min(_IN_A_CROWD, limit // 2))
    return limit != resource.RLIM_INFINITY and descriptor >= limit - kept
