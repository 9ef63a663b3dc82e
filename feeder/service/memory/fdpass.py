"""Passing descriptors of arenas over a unix socket, to the process that the server means.

The kernel says whose process is at the other end, a nonce that the server gave on its main
connection says which consumer it is. The connection is kept: that it hangs up, or that the process
ends, is how the server learns of a consumer's death within milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from feeder.errors import AuthError, ConnectTimeout, ProtocolError, TransportError
from feeder.service.memory.memfd import SLOTS_PER_ARENA
from feeder.service.ratelimited_log import RateLimitedLog

# ---- A consumer's end of the unix socket that descriptors of arenas come over.


ARENA = struct.Struct("<QQQ")
"""What comes with a descriptor: number of the arena, bytes of a slot, number of slots."""

_CREDENTIALS = struct.Struct("3i")
_INT = struct.Struct("i")


class OwnLimitError(TransportError):
    """What the server gave cannot be taken here: a limit of this process is in the way."""


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel noted them when it connected."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class Given(NamedTuple):
    """An arena that the server has given: the descriptor belongs to whoever holds this."""

    descriptor: int
    number: int
    slot_bytes: int
    num_slots: int


class Attachment:
    """A consumer's end. Used by one thread."""

    def __init__(self, sock: socket.socket, path: str) -> None:
        self._sock = sock
        self._path = path

    def fileno(self) -> int:
        """The socket: readable when an arena has come, or the server has hung up."""
        return self._sock.fileno()

    def receive(self) -> Given:
        """The next arena, checked: it is as large as it is said to be, and cannot shrink.

        Raises `TransportError` where the server hangs up, `ConnectTimeout` where nothing comes
        within the time given to `attach`, `OwnLimitError`, and `ProtocolError`.
        """
        try:
            # Not socket.recv_fds, which ignores flags: a child would inherit the descriptor.
            data, ancillary, flags, _ = self._sock.recvmsg(
                ARENA.size + 1, socket.CMSG_SPACE(2 * _INT.size), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError as error:
            raise ConnectTimeout(f"no shared memory came from {self._path!r} in time") from error
        except OSError as error:
            raise TransportError(f"{self._path!r} failed: {error}") from error
        descriptors = [
            descriptor
            for level, kind, content in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for (descriptor,) in _INT.iter_unpack(content[: len(content) // _INT.size * _INT.size])
        ]
        try:
            return self._check(data, descriptors, flags)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _check(self, data: bytes, descriptors: list[int], flags: int) -> Given:
        if not data and not descriptors:
            raise TransportError(f"the server at {self._path!r} hung up")
        if flags & socket.MSG_CTRUNC and not descriptors:
            raise OwnLimitError(
                f"shared memory came from {self._path!r}, and this process has no descriptor left "
                "for it; raise its limit (ulimit -n)"
            )
        if len(data) != ARENA.size or len(descriptors) != 1 or flags & socket.MSG_CTRUNC:
            raise ProtocolError(
                f"{len(data)} bytes and {len(descriptors)} descriptors came from {self._path!r}, "
                f"expected {ARENA.size} bytes and 1"
            )
        given = Given(descriptors[0], *ARENA.unpack(data))
        _check_memory(given)
        return given

    def close(self) -> None:
        """Hang up: to the server the consumer is gone."""
        self._sock.close()


def _check_memory(given: Given) -> None:
    """Reading memory that is not there, or goes away, ends a process by a signal."""
    size = given.slot_bytes * given.num_slots
    status = os.fstat(given.descriptor)
    try:
        seals = fcntl.fcntl(given.descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if (
        not stat.S_ISREG(status.st_mode)
        or not 0 < size == status.st_size
        or not 0 < given.num_slots <= SLOTS_PER_ARENA
        or not seals & fcntl.F_SEAL_SHRINK
    ):
        raise ProtocolError(
            f"arena {given.number} has {status.st_size} bytes and seals {seals:#x}, expected "
            f"{given.num_slots} slots of {given.slot_bytes} bytes in memory that cannot shrink"
        )


def attach(path: str, nonce: bytes, timeout_s: float) -> Attachment:
    """Connect to the server's unix socket and present the nonce that it gave.

    Raises `ConnectTimeout` after `timeout_s` seconds, `TransportError` where nobody listens, and
    `AuthError` where the server is another user's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Not settimeout: with that, connecting to a full backlog fails at once.
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, limit)
        sock.connect(path)
        _, uid = peer_of(sock)
        if uid != os.geteuid():
            raise AuthError(f"the server at {path!r} is of user {uid}, expected {os.geteuid()}")
        sock.send(nonce, socket.MSG_NOSIGNAL)
    except BlockingIOError as error:
        sock.close()
        raise ConnectTimeout(f"nobody answered at {path!r} in {timeout_s} s") from error
    except OSError as error:
        sock.close()
        raise TransportError(f"cannot attach to {path!r}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return Attachment(sock, path)


__all__ = ["Attachment", "DescriptorConnection", "DescriptorListener", "Given", "attach"]

NONCE_BYTES = 16
_BACKLOG = 128
_MOST_AT_ONCE = 1024
"""Peers that are accepted before anybody else is looked after."""
_WORDS_AT_ONCE = 16
"""Messages of one consumer that are read before the same."""


class DescriptorConnection:
    """A consumer that has presented its nonce. Owned by the server's I/O thread."""

    def __init__(self, sock: socket.socket, nonce: bytes, pid: int, pidfd: int | None) -> None:
        self._sock = sock
        self.nonce = nonce
        self.pid = pid
        self.pidfd = pidfd
        """Readable once the process has ended; None where it cannot be seen from here. A child
        that it forked may keep the socket open."""

    def fileno(self) -> int:
        """The socket: readable when the consumer has hung up."""
        return self._sock.fileno()

    def is_gone(self) -> bool:
        """Whether the consumer has hung up, or its process has ended. Never waits."""
        if self.pidfd is not None and _is_readable(self.pidfd):
            return True
        try:
            # It has nothing to say: what comes is read and dropped, but the others come first.
            return not all(self._sock.recv(NONCE_BYTES) for _ in range(_WORDS_AT_ONCE))
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send_descriptor(
        self, descriptor: int, number: int, slot_bytes: int, num_slots: int
    ) -> None:
        """Give the consumer an arena. Raises `OSError` where it is gone or does not read."""
        data = ARENA.pack(number, slot_bytes, num_slots)
        socket.send_fds(self._sock, [data], [descriptor])

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class _HalfOpen(NamedTuple):
    """A peer that has not said who it is."""

    sock: socket.socket
    pid: int
    deadline: float


class DescriptorListener:
    """The unix socket at `path` that consumers fetch descriptors from. Owned by one thread.

    Its descriptor is readable when there is something to do, for the socket and for all peers that
    have not presented a nonce yet; at most `max_half_open` of these, for `limit_s` seconds each.
    `refused` is told why a peer was sent away.
    """

    def __init__(
        self,
        path: str,
        *,
        limit_s: float = 2.0,
        max_half_open: int = 64,
        clock: Callable[[], float] = time.monotonic,
        refused: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self._limit_s = limit_s
        self._max_half_open = max_half_open
        self._clock = clock
        self._refused = refused or partial(RateLimitedLog().warn, "%s")
        self._nonces: set[bytes] = set()
        self._half_open: dict[int, _HalfOpen] = {}
        self._sock = _listen(Path(path))
        self._inode = os.stat(self.path).st_ino
        self._epoll = select.epoll()
        self._epoll.register(self._sock, select.EPOLLIN)

    def fileno(self) -> int:
        """What to poll."""
        return self._epoll.fileno()

    def expect(self, nonce: bytes) -> None:
        """A peer may present this, 16 random bytes, once."""
        self._nonces.add(nonce)

    def withdraw(self, nonce: bytes) -> None:
        """A nonce is good no more."""
        self._nonces.discard(nonce)

    @property
    def deadline(self) -> float:
        """When `expire` has something to do next (the clock's time); infinite where never."""
        return min((peer.deadline for peer in self._half_open.values()), default=math.inf)

    def on_readable(self) -> list[DescriptorConnection]:
        """Accept whom there is; the peers that have now presented a good nonce."""
        connections: list[DescriptorConnection] = []
        for descriptor, _ in self._epoll.poll(0):
            peer = self._half_open.get(descriptor)
            if peer is None:
                connections += self._accept()
            elif (connection := self._greet(peer)) is not None:
                connections.append(connection)
        return connections

    def expire(self, now: float) -> None:
        """Send those away who, at this time, have had `limit_s` seconds to present a nonce."""
        for peer in [peer for peer in self._half_open.values() if peer.deadline <= now]:
            self._drop(peer, f"presented no nonce in {self._limit_s} s")

    def close(self) -> None:
        """Stop listening and remove the socket's file."""
        for peer in self._half_open.values():
            peer.sock.close()
        self._half_open.clear()
        self._epoll.close()
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)

    def _accept(self) -> list[DescriptorConnection]:
        """Let in whoever has presented a good nonce by now, and see to it that the others do. Where
        they are too many, the one that has been silent for longest makes room."""
        connections = []
        for _ in range(_MOST_AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                break
            except OSError as error:
                # No descriptor is left, or the peer is gone again: the others can be served.
                self._refused(f"a peer of {self.path!r} could not be accepted: {error}")
                break
            sock.setblocking(False)
            pid, uid = peer_of(sock)
            peer = _HalfOpen(sock, pid, self._clock() + self._limit_s)
            if uid != os.geteuid():
                self._drop(peer, f"is of user {uid}, expected {os.geteuid()}")
            elif (connection := self._greet(peer)) is not None:
                connections.append(connection)
            elif sock.fileno() >= 0:
                if len(self._half_open) >= self._max_half_open:
                    oldest = next(iter(self._half_open.values()))
                    num = self._max_half_open
                    self._drop(oldest, f"had presented no nonce when {num} others had not either")
                self._half_open[sock.fileno()] = peer
                self._epoll.register(sock, select.EPOLLIN)
        return connections

    def _greet(self, peer: _HalfOpen) -> DescriptorConnection | None:
        try:
            nonce = peer.sock.recv(NONCE_BYTES + 1)
        except BlockingIOError:
            return None
        except OSError as error:
            nonce = str(error).encode()
        if nonce not in self._nonces:
            self._drop(peer, "presented a nonce that was not offered, or has been used")
            return None
        try:
            pidfd = os.pidfd_open(peer.pid)
        except ProcessLookupError:
            self._drop(peer, "is gone")
            return None
        except OSError:
            pidfd = None
        self._nonces.discard(nonce)
        self._forget(peer)
        return DescriptorConnection(peer.sock, nonce, peer.pid, pidfd)

    def _forget(self, peer: _HalfOpen) -> None:
        if self._half_open.pop(peer.sock.fileno(), None) is not None:
            self._epoll.unregister(peer.sock)

    def _drop(self, peer: _HalfOpen, why: str) -> None:
        self._forget(peer)
        peer.sock.close()
        self._refused(f"process {peer.pid} at {self.path!r} was sent away: it {why}")


def _listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        # Before it is bound: the file must not be there for anybody else, not even at first.
        os.fchmod(sock.fileno(), 0o600)
        try:
            sock.bind(os.fspath(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or _is_alive(path):
                raise
            path.unlink(missing_ok=True)
            sock.bind(os.fspath(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise TransportError(f"cannot listen at {str(path)!r}: {error}") from error
    return sock


def _is_alive(path: Path) -> bool:
    """Whether somebody listens there; a file of a server that was killed stays behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        return sock.connect_ex(os.fspath(path)) != errno.ECONNREFUSED
