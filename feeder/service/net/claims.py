"""The right to listen at an address: one server holds it, and takes away what a killed one left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import weakref
from pathlib import Path
from types import TracebackType

from feeder.errors import ConfigError
from feeder.service.net.addresses import Address, private_directory, private_path

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Claim:
    """The right to listen at an address, until it is closed; a context manager.

    Of a unix socket it holds a lock file beside it, `<path>.lock`, which stays behind empty: to
    remove it could take it away from the next holder. Of TCP it holds nothing, since the system
    gives a port to one server alone. Not to be used by two threads at once.
    """

    def __init__(self, address: Address, lock: int | None) -> None:
        self.address = address
        """What is claimed."""
        self._lock = lock

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

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
            with contextlib.suppress(OSError):
                _remove_socket(self.address.path)
                os.ftruncate(lock, 0)
        finally:
            # A child forked just now may not have let go yet: unlocked, it holds nothing.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def _forget(self) -> None:
        """Let go in a forked child, which would hold the lock beyond the server's death."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


_held: weakref.WeakSet[Claim] = weakref.WeakSet()


def _forget_all() -> None:
    for held in list(_held):
        held._forget()


os.register_at_fork(after_in_child=_forget_all)


def claim(address: Address) -> Claim:
    """Claim an address for a server, before it is bound.

    Of a unix socket: makes the private directory where the address lies in it, takes the lock,
    and removes the file of a server that was killed. ConfigError where another server holds the
    address (it names its process), or where the path cannot be used.
    """
    if address.scheme == "tcp":
        return Claim(address, None)
    if Path(address.path).parent == private_path():
        private_directory()
    lock = _take_lock(address)
    try:
        _remove_socket(address.path)
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    except BaseException:
        os.close(lock)
        raise
    claimed = Claim(address, lock)
    _held.add(claimed)
    return claimed


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
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"socket {path!r} belongs to uid {status.st_uid}, expected {os.geteuid()}: "
            "give another path"
        )
    os.unlink(path)
