"""Memory that can be given to other processes: a memfd, its mapping here, and the pages behind it.

A page that is first asked for while something is copied to it costs several times the copy, and
one that the system does not have is found out by a signal. So they are asked for before.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
from collections.abc import Callable

import numpy as np

logger = logging.getLogger("feeder")

# linux/fcntl.h; Python names it from 3.13 on.
_F_SEAL_FUTURE_WRITE = 0x10

_PIECE_BYTES = 2 * 1024 * 1024
"""Memory is asked for in pieces of this, each of which takes a millisecond."""

_ZEROS = memoryview(bytes(1024 * 1024))
_ZEROS_AT_ONCE = 1000
"""A call takes 1,024 buffers at most."""

_AROUND_BYTES = 64 * 1024
"""What Linux maps around a byte that is read, where nobody has told it otherwise."""


def _never() -> bool:
    return False


class _Once:
    """Whether a thing has been said."""

    said = False


class Pages:
    """A memfd of `num_bytes` bytes, mapped to be written.

    `write` and `resize` are for the time before `seal`, `back` for the time after it. The first two
    and the constructor raise `OSError` where the system has not that much, `back` does too. One
    thread at a time. The memory goes when the last array over it is gone here, and the last mapping
    elsewhere is.
    """

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("feeder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The memfd; -1 when closed."""
        self.num_backed = 0
        """Bytes at the beginning that are known to have memory."""
        try:
            os.ftruncate(self.descriptor, num_bytes)
            self._mapping = mmap.mmap(self.descriptor, num_bytes)
        except BaseException:
            self.close()
            raise

    def write(self, end: int) -> None:
        """See that there is memory up to `end`, and that it is mapped: for 20 MB that takes 8 ms
        with the first copy into it, and 11 ms by `posix_fallocate`, after which the copy has to
        find each page by itself."""
        first = self.num_backed
        while self.num_backed < end:
            left = end - self.num_backed
            whole = min(left // len(_ZEROS), _ZEROS_AT_ONCE)
            zeros = [_ZEROS] * whole or [_ZEROS[:left]]
            self.num_backed += os.pwritev(self.descriptor, zeros, self.num_backed)
        with memoryview(self._mapping) as memory:
            # Reading one byte maps all around it.
            memory[first:end:_AROUND_BYTES].tobytes()

    def resize(self, num_bytes: int) -> None:
        """Make it larger or smaller; what has memory keeps it."""
        self._mapping.resize(num_bytes)
        self.num_backed = min(self.num_backed, num_bytes)

    def seal(self) -> memoryview:
        """Whoever is given the descriptor from now on can neither write nor change the size;
        returns all of it, writable."""
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError as error:
            if not _Once.said:
                _Once.said = True
                logger.warning(
                    "the kernel does not seal shared memory against writers (%s): a consumer of "
                    "the same user could write into batches", error.strerror,
                )  # fmt: skip
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        return memoryview(self._mapping)

    def back(self, end: int, is_over: Callable[[], bool] = _never) -> bool:
        """See that there is memory up to `end` after the seals, which forbid writing; False where
        `is_over` said meanwhile that it is not needed."""
        while self.num_backed < end:
            if is_over():
                return False
            at = self.num_backed
            piece = min(_PIECE_BYTES, end - at)
            os.posix_fallocate(self.descriptor, at, piece)
            # To clear and map each page is more than half of the time, and would be the copy's.
            self._bytes[at : at + piece : mmap.PAGESIZE] = 0
            self.num_backed = at + piece
            # Others may have been woken on this CPU, as those who bring a consumer its batch.
            os.sched_yield()
        return True

    def close(self) -> None:
        """Let go of the memory; while there are arrays over it, it stays mapped."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            with contextlib.suppress(AttributeError, BufferError):
                self._mapping.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the memfd itself was refused
            self.close()
