"""What the kernel knows of sockets that are ZeroMQ's, of descriptors, and of this boot.

ZeroMQ hands over whole messages alone; what a peer has sent of one is seen only from outside. Its
descriptor's number may be another connection's by the time that it is looked at. So a socket is
known by its inode too, and is looked at through a copy of its descriptor, which nobody else closes.
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

from feeder.errors import ConfigError

_RECEIVED = struct.Struct("=Q")
# For SO_LINGER: closing resets the connection, without the minute of TIME_WAIT that keeps its port.
_RESET = struct.pack("ii", 1, 0)
# Offset of `tcpi_bytes_received` in Linux' struct tcp_info, since 4.1.
_RECEIVED_AT = 128


@cache
def boot_id() -> str:
    """Return what tells this boot of this kernel from any other; empty where the kernel has none.

    Two processes with one boot id share a kernel, and so can share memory. A host name would not
    do: containers have their own, and two hosts may have the same.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class SocketRef(NamedTuple):
    """A connected socket of this process that another library owns. Immutable."""

    descriptor: int
    """Its descriptor's number."""
    inode: int
    """Tells it from a socket that has the number later; -1 where it was gone already."""

    @classmethod
    def at(cls, descriptor: int) -> SocketRef:
        """Return the socket that has this number now."""
        return cls(descriptor, _inode(descriptor))

    def reset_if_own(self) -> bool:
        """Whether it is a TCP socket that is connected to itself; then its closing will reset it.

        That happens when the system chooses as its own port the one that it is to connect to. An
        ordinary close would keep the port for a minute, and a server from it.
        """
        # A socket that is gone by now answers with an error: it is nobody's then, so not its own.
        with contextlib.suppress(OSError), self.open() as sock:
            if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                return True
        return False

    def close(self, endpoint: str) -> None:
        """Close it in a forked child, where nobody else uses it, if it leads to `endpoint`.

        The number may have been another socket's already when the inode was noted, so both are
        compared.
        """
        with contextlib.suppress(OSError):
            with self.open() as sock:
                name = sock.getpeername()
            # The end of ZeroMQ's text is compared: a host may be written in several ways.
            told = f":{name[1]}" if isinstance(name, tuple) else f"ipc://{os.fsdecode(name)}"
            if name and endpoint.endswith(told):
                os.close(self.descriptor)

    @contextlib.contextmanager
    def open(self) -> Iterator[socket.socket]:
        """Give it, for as long as the block runs; `OSError` where it is gone."""
        self.check()
        sock = socket.socket(fileno=self.descriptor)
        try:
            yield sock
        finally:
            sock.detach()

    def check(self) -> None:
        """Raise `OSError` where another has its number now."""
        if _inode(self.descriptor) != self.inode:
            raise OSError(errno.EBADF, "another has its number now")


class SocketInspector:
    """Looks at sockets of another library, and shuts them down.

    It holds two descriptors from the start, so that it works where none is left: just then peers
    must be hung up on. Owned by the server's I/O thread.
    """

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.dup(self._nothing)
        self.close = weakref.finalize(self, _close, self._nothing, self._copy)
        """Closes both descriptors, at the latest when this object goes; harmless when done
        before."""

    def received(self, socket_ref: SocketRef) -> int | None:
        """Return the bytes that it has received since it was connected.

        None where the system does not count them, as of unix sockets, or where the socket is gone.
        """
        with contextlib.suppress(OSError), self._open(socket_ref) as sock:
            return received_by(sock)
        return None

    def unread(self, socket_ref: SocketRef) -> int:
        """Return the bytes that have come and lie there unread; 0 where the socket is gone."""
        with contextlib.suppress(OSError), self._open(socket_ref) as sock:
            return unread_by(sock)
        return 0

    def hang_up(self, socket_ref: SocketRef) -> None:
        """Shut it down if it is still there: its owner, ZeroMQ, finds that and closes it."""
        with contextlib.suppress(OSError), self._open(socket_ref) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _open(self, socket_ref: SocketRef) -> Iterator[socket.socket]:
        """Give a copy of it, for as long as the block runs; `OSError` where it is gone."""
        # Compared before the copying too: to close the copy of a file would end that file's locks.
        socket_ref.check()
        os.dup2(socket_ref.descriptor, self._copy, inheritable=False)
        try:
            # From here on the copy is sure to be of that socket, whoever closes it.
            with SocketRef(self._copy, socket_ref.inode).open() as sock:
                yield sock
        finally:
            # The copy is ended at once: else the peer would not see when ZeroMQ closes the socket.
            os.dup2(self._nothing, self._copy, inheritable=False)


def received_by(sock: socket.socket) -> int | None:
    """The bytes that a socket has received since it was connected; None if the system does not
    count them, as of unix sockets."""
    if sock.family == socket.AF_UNIX:
        return None
    size = _RECEIVED_AT + _RECEIVED.size
    told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    # An older kernel gives a shorter struct.
    return _RECEIVED.unpack_from(told, _RECEIVED_AT)[0] if len(told) == size else None


def unread_by(sock: socket.socket) -> int:
    """The bytes that lie unread in a socket: of unix sockets too, whose bytes nobody counts."""
    return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _inode(descriptor: int) -> int:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return -1


# ---- The limit of a server's descriptors
#
# A consumer takes six. Where none is left for the next connection to a unix socket, libzmq ends the
# process (`ipc_listener.cpp`, up to 4.3.5).


_WANTED = 65536
"""Enough for ten thousand consumers; more makes programs slow that close all numbers after a
fork."""
_IN_A_CROWD = 512
"""Descriptors that are kept free in any case: ZeroMQ accepts some hundreds of connections before a
thread that waits for the interpreter learns of the first. An eighth alone was too few (of 200 free
descriptors a burst of 400 connections takes all)."""


_OF_A_SERVER, _OF_A_SEAT = 32, 7
"""Descriptors that a server takes (23 to 28, by what it listens at), and each of its consumers."""


def check_limit(num_seats: int) -> None:
    """Raise `ConfigError` where this process may not have the descriptors that a server for so
    many consumers takes."""
    raise_limit()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # The system gives the lowest number that is free, so about as many are open.
    probe = os.dup(2)
    os.close(probe)
    needed = probe + _OF_A_SERVER + _OF_A_SEAT * num_seats
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ConfigError(
            f"this process may have {limit} descriptors, and a server for {num_seats} consumers "
            f"needs {needed}: raise the limit (ulimit -n {needed}, or LimitNOFILE={needed})"
        )


def raise_limit() -> None:
    """Let the process have as many descriptors as it may, up to 65,536, as Go's runtime does.

    The limit that programs begin with is kept low for those that call select(), which this does
    not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def are_few_left(descriptor: int) -> bool:
    """Whether a descriptor that was just made is among the last eighth, or the last 512.

    The kernel gives the lowest number that is free, so about as many are in use as its number says.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # Of a small limit at most half: else nobody at all would be let in.
    kept = max(limit // 8, min(_IN_A_CROWD, limit // 2))
    return limit != resource.RLIM_INFINITY and descriptor >= limit - kept
