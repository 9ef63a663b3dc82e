"""One writer at a time: a lock on a file that names who has it."""

from __future__ import annotations

import errno
import logging
import os

from feeder import durable
from feeder.durable import Fs
from feeder.errors import CheckpointError

logger = logging.getLogger("feeder")

_NO_LOCKS = {errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK}
_NAME_BYTES = 128


class WriterLock:
    """The right of one writer to write into a folder, taken when it is first needed. It ends
    with its process; used by one thread at a time."""

    def __init__(self, fs: Fs, path: str, writer: str) -> None:
        self._fs = fs
        self._path = path
        self._writer = writer
        self._file: int | None = None

    def take(self, folder: int) -> bool:
        """Take it, once; returns whether another process may have had it since this one did.
        Raises `CheckpointError` naming who has it, and `OSError`."""
        if self._file is not None:
            return False
        file = self._fs.open(f".writer-{self._writer}.lock", folder, os.O_RDWR | os.O_CREAT)
        try:
            is_changed = self._lock(file)
        except BaseException:
            self._fs.close(file)
            raise
        self._file = file
        return is_changed

    def _lock(self, file: int) -> bool:
        try:
            self._fs.lock(file)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{self._path!r} has a writer {self._writer!r} already, {self._holder(file)}; end "
                "it, or close its store, or give this one another writer="
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "%r lies on a file system without locks (%s): see to it that one process alone "
                "writes there", self._path, error.strerror,
            )  # fmt: skip
            is_exclusive = False
        else:
            is_exclusive = True
        name = f"process {os.getpid()} on {os.uname().nodename}".encode()[: _NAME_BYTES - 1]
        line, found = name.ljust(_NAME_BYTES - 1) + b"\n", bytearray(_NAME_BYTES)
        self._fs.read_into(file, memoryview(found), 0)
        durable.write_all(self._fs, file, line)
        return not is_exclusive or found != line

    def _holder(self, file: int) -> str:
        buffer = bytearray(_NAME_BYTES)
        num = self._fs.read_into(file, memoryview(buffer), 0)
        return bytes(buffer[:num]).decode(errors="replace").strip() or "a process not known"

    def release(self) -> None:
        """Let others write."""
        file, self._file = self._file, None
        if file is not None:
            try:
                self._fs.unlock(file)
            finally:
                self._fs.close(file)

    def forget(self) -> None:
        """This is a forked child: the lock is the parent's."""
        file, self._file = self._file, None
        if file is not None:
            self._fs.close(file)
