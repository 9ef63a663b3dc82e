"""Memory that consumers on the same host read: a sealed memfd, and the slots in it.

The server writes through its own mapping, which is made before the seals; whoever is given the
descriptor can neither write nor change the size.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.errors import TransportError
from feeder.protocol.checks import Layout
from workers.chunks import Columns
from workers.slots import Seen

logger = logging.getLogger("feeder")

SLOTS_PER_ARENA = 2**16
"""A slot's number is its arena's times this, plus its index there."""

# linux/fcntl.h; Python names it from 3.13 on.
_F_SEAL_FUTURE_WRITE = 0x10

Arrays = tuple[NDArray[Any], ...]


_WATCH_BYTES = 256 * 1024
"""Smaller batches are still in a cache when they are sent."""

_BACK_BYTES = 1024 * 1024
"""Memory is asked for by about so much at least, or by a slot."""

_PIECE_BYTES = 2 * 1024 * 1024
"""It comes in pieces of this, each of which takes a millisecond."""

_ZEROS = memoryview(bytes(1024 * 1024))
_ZEROS_AT_ONCE = 1000
"""A call takes 1,024 buffers at most."""

_AROUND_BYTES = 64 * 1024
"""What Linux maps around a byte that is read, where nobody has told it otherwise."""


class _Once:
    """Whether a thing has been said."""

    said = False


class Arena:
    """One memfd with `num_slots` slots of `slot_bytes` bytes.

    Raises `TransportError` where the system has not that much memory to give. The memory goes when
    the last array over it is gone here and the last mapping of a consumer is.
    """

    def __init__(self, slot_bytes: int, num_slots: int, number: int = 0) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.number = number
        self.num_bytes = size = slot_bytes * num_slots
        self.descriptor = os.memfd_create("feeder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The memfd; -1 when closed."""
        self._backed_bytes = 0
        try:
            os.ftruncate(self.descriptor, size)
            self.memory = memoryview(mmap.mmap(self.descriptor, size))
            """All slots, writable here and nowhere else."""
            self._bytes = np.frombuffer(self.memory, np.uint8)
            self.back(0)
            _seal(self.descriptor)
        except (OSError, OverflowError) as error:
            self.close()
            raise self._no_memory(error) from error
        except TransportError:
            self.close()
            raise

    def back(self, index: int, is_over: Callable[[], bool] = lambda: False) -> bool:
        """See that there is memory behind a slot, and all before it, ere it is written: a hole
        would be found only by a signal. Done as slots are first taken, since it takes 10 ms for
        20 MB; False where `is_over` said meanwhile that it is not needed. Raises `TransportError`.
        """
        first, end = self._backed_bytes, (index + 1) * self.slot_bytes
        if end <= first:
            return True
        num = min(-(-max(end, first + _BACK_BYTES) // self.slot_bytes), self.num_slots)
        end = num * self.slot_bytes
        try:
            if not first:
                self._write_zeros(end)
                self._backed_bytes = end
            while self._backed_bytes < end:
                if is_over():
                    return False
                at = self._backed_bytes
                piece = min(_PIECE_BYTES, end - at)
                os.posix_fallocate(self.descriptor, at, piece)
                # To clear and map each page is more than half of the time, and would be the copy's.
                self._bytes[at : at + piece : mmap.PAGESIZE] = 0
                self._backed_bytes = at + piece
        except OSError as error:
            raise self._no_memory(error) from error
        return True

    def _write_zeros(self, num_bytes: int) -> None:
        """See that there is memory at the beginning, and that it is mapped: for 20 MB that takes
        8 ms with the first copy into it, and 11 ms by `posix_fallocate`, after which the copy has
        to find each page by itself. Only before the seals: they forbid it."""
        written = 0
        while written < num_bytes:
            left = num_bytes - written
            whole = min(left // len(_ZEROS), _ZEROS_AT_ONCE)
            zeros = [_ZEROS] * whole or [_ZEROS[:left]]
            written += os.pwritev(self.descriptor, zeros, written)
        # Reading one byte maps all around it.
        self.memory[:num_bytes:_AROUND_BYTES].tobytes()

    def _no_memory(self, error: Exception) -> TransportError:
        return TransportError(
            f"no shared memory of {self.num_bytes} bytes for {self.num_slots} slots of "
            f"{self.slot_bytes} bytes: {error}; make batches or credit smaller, or give the "
            "process more memory"
        )

    def close(self) -> None:
        """Close the descriptor; arrays over the memory stay good. Done when nobody has the arena
        any more, and not before: the enqueuer may be asking for memory behind one that is retired.
        """
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the memfd itself was refused
            self.close()


def _seal(descriptor: int) -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if not _Once.said:
            _Once.said = True
            logger.warning(
                "the kernel does not seal shared memory against writers (%s): a consumer of the "
                "same user could write into batches", error.strerror,
            )  # fmt: skip
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


class Leased(tuple[NDArray[Any], ...]):
    """The arrays of a batch, which know their slot."""

    slot: ArenaSlot


class Sum:
    """A full checksum in the making. Apart from its slot, which refers to it: a slot in a cycle
    would keep its arena until the garbage is collected."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()
        self.digest = self._hasher.intdigest
        """The checksum of what was added."""
        self.num_bytes = 0
        """Bytes added."""
        self.seconds = 0.0
        """How long that took."""

    def add(self, piece: memoryview) -> None:
        """Take the next bytes."""
        began = time.monotonic()
        self._hasher.update(piece)
        self.num_bytes += len(piece)
        self.seconds += time.monotonic() - began


class ArenaSlot:
    """Memory for one batch, in an arena."""

    __slots__ = (
        "_memory", "_places", "_sum", "_views", "arena", "arrays", "checked_s", "checksum",
        "columns", "flats", "memory", "number", "rows", "seen", "sent",
    )  # fmt: skip

    def __init__(self, arena: Arena, index: int) -> None:
        self.arena = arena
        self.number = arena.number * SLOTS_PER_ARENA + index
        self._memory = arena.memory[index * arena.slot_bytes : (index + 1) * arena.slot_bytes]
        self.columns: Columns | None = None
        """The columns that it is laid out for; their shapes are those of the batch."""
        self.rows = -1
        """The rows that it is laid out for."""
        self.sent = False
        """Whether the consumer has been sent it and not given it back."""
        self.seen: Seen = None
        """Takes the bytes that are copied here into the checksum, where `watch` asked for it."""
        self.checksum: int | None = None
        """The full checksum of the batch, where it was made while that was copied."""
        self.checked_s = 0.0
        """How long that took."""

    def arrange(self, columns: Columns, rows: int, places: Layout) -> None:
        """Lay it out for batches of so many rows."""
        if columns is self.columns and rows == self.rows:
            return
        self.columns, self.rows, self._places = columns, rows, places.places
        self.memory = memory = self._memory[: places.num_bytes]
        self.arrays: Arrays = tuple(
            np.ndarray(shape, dtype, memory, offset) for shape, dtype, _, offset, _ in places.places
        )
        self.flats: tuple[memoryview | None, ...] = tuple(
            None if axis else memory[offset : offset + num_bytes]
            for _, _, axis, offset, num_bytes in places.places
        )
        readable = memory.toreadonly()
        self._views: Arrays = tuple(
            np.ndarray(shape, dtype, readable, offset)
            for shape, dtype, _, offset, _ in places.places
        )

    def watch(self, wanted: bool) -> None:
        """From now on make the full checksum of what is copied here, or do not. Done of a single
        large column alone: there it saves that all is read from memory once more."""
        self.seen = self.checksum = None
        if wanted and len(self.flats) == 1 and self.flats[0] and len(self.memory) >= _WATCH_BYTES:
            self._sum = Sum()
            self.seen = self._sum.add

    def lease(self, rows: int) -> Leased:
        """The first `rows` rows of each column, read-only."""
        if self.seen is not None and self._sum.num_bytes == self._places[0].num_bytes:
            self._sum.add(self.memory[self._sum.num_bytes :])
            self.checksum, self.checked_s = self._sum.digest(), self._sum.seconds
        arrays = self._views
        if rows != self.rows:
            arrays = tuple(
                array[(slice(None),) * place.axis + (slice(rows),)]
                for array, place in zip(arrays, self._places, strict=True)
            )
        leased = Leased(arrays)
        leased.slot = self
        return leased
