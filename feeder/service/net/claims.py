"""Claims: the right to listen at an address, which one server holds at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from feeder.closing import Closing
from feeder.errors import ConfigError
from feeder.service.net.addresses import Address, private_directory, private_path
from feeder.workers import forks

# No links are followed: in a directory that others write to, one could lead to any file of ours.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Claim(Closing):
    """The right to listen at an address, until it is closed; a context manager.

    For a unix socket it holds a lock on a file beside it, `<path>.lock`, which ends with the
    process. The file stays behind, empty: to remove it could take it from the next holder. For TCP
    it holds nothing, since the system gives a port to one server alone. Owned by the server's
    thread: no two threads may use it at once.
    """

    def __init__(self, address: Address, lock: int | None) -> None:
        self.address = address
        """The address that is claimed."""
        self._lock = lock
        forks.call_in_child(self._forget)

    def protect(self) -> None:
        """Let this user alone connect to the socket; to be called when it has been bound."""
        if self._lock is not None:
            os.chmod(self.address.path, 0o600)

    def close(self) -> None:
        """Remove the socket file and give the address up; harmless when done before.

        To be called when the socket is closed.
        """
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            # While the lock is held: afterwards the socket may be a successor's.
            with contextlib.suppress(OSError):
                _remove_socket(self.address.path)
                os.ftruncate(lock, 0)
        finally:
            # Unlocked by hand: a child that was forked just now shares the lock, and may not have
            # closed its copy yet.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def _forget(self) -> None:
        """In a forked child: let go of the lock, which the child would hold beyond the server's
        end."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def claim(address: Address) -> Claim:
    """Claim an address for a server, before it is bound.

    For a unix socket it makes the private directory if the address lies there, takes the lock, and
    removes the file of a server that was killed. ConfigError where another server holds the address
    (it names its process), or where the path cannot be used.
    """
    if address.scheme == "tcp":
        return Claim(address, None)
    if Path(address.path).parent == private_path():
        private_directory()
    lock = _take_lock(address)
    try:
        # The lock says that nobody serves there. Where somebody does, its lock file was removed
        # under it, and this is a new one.
        if _answers(address.path):
            raise ConfigError(
                f"address {str(address)!r} is held by a living server whose lock file "
                f"{address.path + '.lock'!r} was removed: stop that server, or give another address"
            )
        # Under the lock, so the socket is nobody's. The process id is for people: it says who holds
        # it.
        _remove_socket(address.path)
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    except BaseException:
        os.close(lock)
        raise
    return Claim(address, lock)


def _answers(path: str) -> bool:
    """Whether somebody listens at a unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        return sock.connect_ex(path) in (0, errno.EAGAIN)


def _take_lock(address: Address) -> int:
    path = f"{address.path}.lock"
    try:
        lock = os.open(path, _FLAGS, 0o600)
    except OSError as error:
        raise ConfigError(
            f"lock file {path!r} of the server's socket cannot be opened ({error.strerror}): "
            "give a path in a directory of yours"
        ) from error
    try:
        # Looked at through the descriptor: the path may be another file's by now.
        _check_lock(lock, path)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _holder(lock)
        os.close(lock)
        raise ConfigError(
            f"address {str(address)!r} is held by {holder}: stop it, or give another address"
        ) from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def _check_lock(lock: int, path: str) -> None:
    status = os.fstat(lock)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(
            f"lock file {path!r} belongs to uid {status.st_uid} or is no plain file, "
            f"expected a file of uid {os.geteuid()}: give another address"
        )


def _holder(lock: int) -> str:
    # Empty for a moment: the holder has the lock and has not written its number yet.
    text = os.pread(lock, 32, 0).strip()
    if not text.isdigit():
        return "another server, just starting"
    return "this process" if int(text) == os.getpid() else f"process {int(text)}"


def _remove_socket(path: str) -> None:
    """Remove the socket at a path, if any; ConfigError where something else lies there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"{path!r} is there and is no socket: remove it, or give another path")
    os.unlink(path)
