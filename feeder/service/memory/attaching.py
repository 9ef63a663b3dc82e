"""A consumer's end of the unix socket that descriptors of arenas come over."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from typing import NamedTuple

from feeder.errors import AuthError, ConnectTimeout, ProtocolError, TransportError
from feeder.service.memory.memfd import SLOTS_PER_ARENA

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
