"""Passing descriptors of arenas over a unix socket, to the one process that the server means.

The kernel says which user's process is at the other end; a nonce, which the server gave over its
main connection, says which consumer it is. The connection is kept: when it hangs up, or the process
ends, the server knows of a consumer's death within milliseconds.
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
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from feeder.errors import AuthError, ConnectTimeout, ProtocolError, TransportError
from feeder.service.memory.memfd import SLOTS_PER_ARENA
from feeder.service.ratelimited_log import RateLimitedLog

ARENA = struct.Struct("<QQQ")
"""What comes with a descriptor: the arena's number, the bytes of a slot, the number of slots."""

_CREDENTIALS = struct.Struct("3i")
_INT = struct.Struct("i")


class OwnLimitError(TransportError):
    """A limit of this process (descriptors, address space) forbids to take what the server gave.

    A class of its own, since another server would not help: the consumer takes frames instead.
    """


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end, as the kernel noted them on connecting."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class Given(NamedTuple):
    """An arena that the server has given; whoever holds this owns the descriptor."""

    descriptor: int
    number: int
    slot_bytes: int
    num_slots: int


class Attachment:
    """A consumer's end of the connection. Owned by the consumer's I/O thread."""

    def __init__(self, sock: socket.socket, path: str) -> None:
        self._sock = sock
        self._path = path

    def fileno(self) -> int:
        """Return the socket, which is readable when an arena has come or the server has hung up."""
        return self._sock.fileno()

    def receive(self) -> Given:
        """Return the next arena, checked: it is as large as it is said to be, and cannot shrink.

        Raises `TransportError` where the server hangs up, `ConnectTimeout` where nothing comes
        within the time given to `attach`, `OwnLimitError`, and `ProtocolError`.
        """
        try:
            # Not socket.recv_fds, which ignores flags: a child would inherit the descriptor. Room
            # for a byte and a descriptor too many, so that too much is seen and not cut off.
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
            # Cut to whole numbers: what the kernel truncated must not raise, with descriptors open.
            for (descriptor,) in _INT.iter_unpack(content[: len(content) // _INT.size * _INT.size])
        ]
        try:
            return self._check(data, descriptors, flags)
        except BaseException:
            # Whatever came is this process's to close, an arena that is refused too.
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _check(self, data: bytes, descriptors: list[int], flags: int) -> Given:
        if not data and not descriptors:
            raise TransportError(f"the server at {self._path!r} hung up")
        # The kernel drops descriptors that the process has no room for, and says so with this flag.
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
        """Hang up: for the server the consumer is gone then."""
        self._sock.close()


def _check_memory(given: Given) -> None:
    """Check memory before it is mapped: reading what is not there ends a process by a signal."""
    size = given.slot_bytes * given.num_slots
    status = os.fstat(given.descriptor)
    try:
        # Only a memfd has seals; any other file is refused below.
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
        # Not settimeout, which makes the socket non-blocking: connecting to a full backlog would
        # fail at once, and many consumers come at the same time after a restart.
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, limit)
        sock.connect(path)
        _, uid = peer_of(sock)
        # Else another user who had put a socket there would feed batches of their own.
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

# ---- The server's end


NONCE_BYTES = 16
"""As many random bytes as nobody guesses: the nonce is the only proof of which consumer it is."""
_BACKLOG = 128
"""Connections that wait to be accepted, and as many are accepted in one go: a flood of them must
not keep the I/O thread from its consumers. The next ones wait in `connect`."""


class DescriptorConnection:
    """A connection whose consumer has presented its nonce. Owned by the server's I/O thread."""

    def __init__(self, sock: socket.socket, nonce: bytes, pid: int, pidfd: int | None) -> None:
        self._sock = sock
        self.nonce = nonce
        self.pid = pid
        self.pidfd = pidfd
        """Readable once the process has ended; None where it cannot be seen from here.

        Needed beside the socket, which a forked child of the consumer may keep open.
        """

    def fileno(self) -> int:
        """Return the socket, which is readable when the consumer has hung up."""
        return self._sock.fileno()

    def is_gone(self) -> bool:
        """Whether the consumer has hung up, or its process has ended. Never waits."""
        if self.pidfd is not None and _is_readable(self.pidfd):
            return True
        try:
            # A consumer has nothing to say here. What comes is dropped, one message each time: the
            # other consumers come first.
            return not self._sock.recv(NONCE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send_descriptor(
        self, descriptor: int, number: int, slot_bytes: int, num_slots: int
    ) -> None:
        """Give the consumer an arena; `OSError` where it is gone or does not read."""
        # The socket does not block: a consumer that reads nothing fills it and loses its lease.
        data = ARENA.pack(number, slot_bytes, num_slots)
        socket.send_fds(self._sock, [data], [descriptor])

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)


def _is_readable(descriptor: int) -> bool:
    # select() takes no descriptor above 1023.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class _HalfOpen(NamedTuple):
    """A peer that has not presented a nonce yet."""

    sock: socket.socket
    pid: int
    deadline: float


class DescriptorListener:
    """The unix socket at `path` that consumers fetch descriptors from.

    Owned by the server's I/O thread. Its descriptor, an epoll's, is readable when the socket or a
    peer without a nonce has something to do. There are at most `max_half_open` such peers, for
    `limit_s` seconds each. `refused` is told why a peer was sent away.
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
        self._withdrawn: deque[bytes] = deque(maxlen=max_half_open)
        self._half_open: dict[int, _HalfOpen] = {}
        self._sock = _listen(Path(path))
        self._epoll = select.epoll()
        self._epoll.register(self._sock, select.EPOLLIN)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._epoll.fileno()

    def expect(self, nonce: bytes) -> None:
        """Let a peer present this nonce, 16 random bytes, once."""
        self._nonces.add(nonce)

    def withdraw(self, nonce: bytes) -> None:
        """Void a nonce that was not presented: its consumer has left. What it has sent before may
        still be on its way, and is no stranger's."""
        self._nonces.discard(nonce)
        self._withdrawn.append(nonce)

    @property
    def deadline(self) -> float:
        """When `expire` has something to do next (the clock's time); infinite if never."""
        return min((peer.deadline for peer in self._half_open.values()), default=math.inf)

    def on_readable(self) -> list[DescriptorConnection]:
        """Accept peers; returns the connections of those that have now presented a good nonce."""
        connections: list[DescriptorConnection] = []
        for descriptor, _ in self._epoll.poll(0):
            peer = self._half_open.get(descriptor)
            if peer is None:
                connections += self._accept()
            elif (connection := self._greet(peer)) is not None:
                connections.append(connection)
        return connections

    def expire(self, now: float) -> None:
        """Send away the peers that have had `limit_s` seconds to present a nonce."""
        for peer in [peer for peer in self._half_open.values() if peer.deadline <= now]:
            self._drop(peer, f"presented no nonce in {self._limit_s} s")

    def close(self) -> None:
        """Stop listening and remove the socket's file."""
        for peer in self._half_open.values():
            peer.sock.close()
        self._half_open.clear()
        self._epoll.close()
        self._sock.close()
        # Still its own: the server's address, which the path follows from, is given up later.
        Path(self.path).unlink(missing_ok=True)

    def _accept(self) -> list[DescriptorConnection]:
        """Accept who waits: a peer with a good nonce comes in at once, the others are waited for.

        Where they are too many, the peer that has been silent for longest makes room.
        """
        connections = []
        for _ in range(_BACKLOG):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                break
            except OSError as error:
                # No descriptor is left, or the peer is gone again. Raising would end all others.
                self._refused(f"a peer of {self.path!r} could not be accepted: {error}")
                break
            sock.setblocking(False)
            pid, uid = peer_of(sock)
            peer = _HalfOpen(sock, pid, self._clock() + self._limit_s)
            if uid != os.geteuid():
                self._drop(peer, f"is of user {uid}, expected {os.geteuid()}")
            elif (connection := self._greet(peer)) is not None:
                connections.append(connection)
            elif sock.fileno() >= 0:  # `_greet` closes a peer with a bad nonce.
                if len(self._half_open) >= self._max_half_open:
                    oldest = next(iter(self._half_open.values()))
                    num = self._max_half_open
                    self._drop(oldest, f"had presented no nonce when {num} others had not either")
                self._half_open[sock.fileno()] = peer
                self._epoll.register(sock, select.EPOLLIN)
        return connections

    def _greet(self, peer: _HalfOpen) -> DescriptorConnection | None:
        """Read a peer's nonce; None where it has not come, or is bad and the peer is sent away."""
        try:
            # A byte more than a nonce has: one that is too long must not pass for its beginning.
            nonce = peer.sock.recv(NONCE_BYTES + 1)
        except BlockingIOError:
            return None
        except OSError as error:
            nonce = str(error).encode()
        if nonce in self._withdrawn:
            self._forget(peer)
            peer.sock.close()
            return None
        if nonce not in self._nonces:
            self._drop(peer, "presented a nonce that was not offered, or has been used")
            return None
        try:
            pidfd = os.pidfd_open(peer.pid)
        except OSError:
            # It is gone, or of another pid namespace: its hanging up has to be enough.
            pidfd = None
        self._nonces.discard(nonce)  # Good once: one that leaks later is worth nothing.
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
        # Before it is bound, so that other users cannot connect even in the first moment.
        os.fchmod(sock.fileno(), 0o600)
        try:
            sock.bind(os.fspath(path))
        except OSError as error:
            # A server that was killed leaves its file behind, which is taken away.
            if error.errno != errno.EADDRINUSE or _is_alive(path):
                raise
            path.unlink(missing_ok=True)
            sock.bind(os.fspath(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise TransportError(f"cannot listen at {str(path)!r}: {error}") from error
    return sock


STALE_S = 60.0
"""From this age on a socket where nobody listens is a killed server's: a younger one may be of a
server that is about to listen there."""


def remove_stale(folder: Path) -> None:
    """Remove the sockets of killed servers, each of which had a name of its own."""
    for path in folder.glob("*.arenas"):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            is_old = time.time() - status.st_mtime > STALE_S
            if stat.S_ISSOCK(status.st_mode) and is_old and not _is_alive(path):
                os.unlink(path)


def _is_alive(path: Path) -> bool:
    """Whether somebody listens there: at the file of a killed server connecting is refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        return sock.connect_ex(os.fspath(path)) != errno.ECONNREFUSED
