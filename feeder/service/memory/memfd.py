"""An arena: a sealed memfd that consumers on the same host read, and the slots that it is cut into.

The server writes through its own mapping, which is made before the seals. Whoever is given the
descriptor can neither write nor change the size. A page that is first touched by a copy costs
several times the copy, and one that the system does not have is found out by a signal: so pages are
asked for before they are written.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.devices.layout import LaidOut
from feeder.errors import TransportError
from feeder.service.protocol.batches import full_checksum
from feeder.workers.stream.buffers import Kept, Seen

logger = logging.getLogger("feeder")

# Of linux/fcntl.h, since Linux 5.1; Python has a name for it from 3.13 on.
_F_SEAL_FUTURE_WRITE = 0x10

_PIECE_BYTES = 2 * 1024 * 1024
"""Memory is asked for in pieces of this size. A piece takes a millisecond and cannot be
interrupted. Between two the enqueuer looks whether it is still needed, so that the next consumer
does not wait for the memory of the one before."""

_ZEROS = memoryview(bytes(1024 * 1024))
_ZEROS_AT_ONCE = 1000
"""Buffers per call of `pwritev`, which takes 1,024 at most (IOV_MAX)."""

_AROUND_BYTES = 64 * 1024
"""What Linux maps around a page that is read, by default (fault_around_bytes): one byte read maps
sixteen pages, which is how the first slot is mapped in 8 ms and not in 11."""


def _never() -> bool:
    return False


class _Once:
    """Whether the warning about seals was logged: once per process, from any thread."""

    said = False


class Pages:
    """A memfd of `num_bytes` bytes, mapped to be written.

    `write` and `resize` may be called before `seal`, `back` after it. They and the constructor
    raise `OSError` where the system has not so much memory. Owned by one thread at a time: the one
    that starts the feed, then the enqueuer. The memory goes when the last array over it is gone
    here and the last mapping elsewhere is.
    """

    descriptor = -1
    """The memfd; -1 when closed, or where it was refused."""
    # At the interpreter's exit the names of the module may be gone before this is.
    _close = staticmethod(os.close)

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("feeder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.num_backed = 0
        """Bytes at the beginning that are known to have memory."""
        try:
            os.ftruncate(self.descriptor, num_bytes)
            # Shared and writable, made before the seal that forbids any new mapping of the kind.
            self._mapping = mmap.mmap(self.descriptor, num_bytes)
        except BaseException:
            self.close()
            raise

    def write(self, end: int) -> None:
        """Get memory up to `end`, and map it.

        For 20 MB that takes 8 ms with the first copy into it. By `posix_fallocate` it takes 11 ms,
        since the copy then clears and maps each page by a fault of its own.
        """
        # Written as zeros through the descriptor, which the seal against writers forbids later.
        first = self.num_backed
        while self.num_backed < end:
            left = end - self.num_backed
            whole = min(left // len(_ZEROS), _ZEROS_AT_ONCE)
            zeros = [_ZEROS] * whole or [_ZEROS[:left]]
            self.num_backed += os.pwritev(self.descriptor, zeros, self.num_backed)
        with memoryview(self._mapping) as memory:
            # Reading one byte maps all pages around it.
            memory[first:end:_AROUND_BYTES].tobytes()

    def resize(self, num_bytes: int) -> None:
        """Make it larger or smaller; what has memory already keeps it."""
        self._mapping.resize(num_bytes)
        self.num_backed = min(self.num_backed, num_bytes)

    def seal(self) -> memoryview:
        """Forbid writers and changes of size from now on; returns all of it, writable here."""
        # Against shrinking: a consumer that reads beyond the end would be killed by a signal.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError as error:
            # Linux before 5.1. Consumers are of the same user, so this guards against mistakes.
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
        """Get memory up to `end` after `seal`, which forbids writing through the descriptor.

        Returns False where `is_over` said meanwhile that it is not needed.
        """
        while self.num_backed < end:
            if is_over():
                return False
            at = self.num_backed
            piece = min(_PIECE_BYTES, end - at)
            os.posix_fallocate(self.descriptor, at, piece)
            # One byte of each page: to clear and map the page is more than half of the time, and
            # would fall into the copy, which nothing can interrupt.
            self._bytes[at : at + piece : mmap.PAGESIZE] = 0
            self.num_backed = at + piece
            # The I/O thread may have been woken on this CPU, to send a consumer its batch, and
            # Linux lets this thread go on for milliseconds (next consumers: 8.7 ms for 11.7).
            os.sched_yield()
        return True

    def close(self) -> None:
        """Let go of the memory; as long as there are arrays over it, it stays mapped."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            # Arrays over the mapping refuse its closing, and keep it; without a mapping there is
            # nothing to close.
            with contextlib.suppress(AttributeError, BufferError):
                self._mapping.close()

    def __del__(self) -> None:
        if self.descriptor >= 0:
            self._close(self.descriptor)


SLOTS_PER_ARENA = 2**16
"""A slot's number is its arena's number times this, plus its index there: one number on the wire,
which names a slot for good, since arenas are numbered once."""

Arrays = tuple[NDArray[Any], ...]


_WATCH_BYTES = 256 * 1024
"""Only batches from this size on are summed up while they are copied: smaller ones are still in a
cache when they are sent, and then summed up at no greater cost."""

_BACK_BYTES = 1024 * 1024
"""Memory is asked for by about so much at least, as a system call per 8 KB slot costs too much."""


class Arena:
    """One memfd with `num_slots` slots of `slot_bytes` bytes, made of `reserve` if it is given.

    Raises `TransportError` where the system has not so much memory. The enqueuer makes it and asks
    for its memory; its sizes never change, and any thread may read them. The memory goes when the
    last array over it is gone here and the last mapping of a consumer is.
    """

    def __init__(
        self, slot_bytes: int, num_slots: int, number: int = 0, reserve: Pages | None = None
    ) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.number = number
        self.num_bytes = size = slot_bytes * num_slots
        try:
            self._pages = pages = reserve or Pages(size)
        except (OSError, OverflowError) as error:
            raise self._no_memory(error) from error
        try:
            if reserve is not None:
                pages.resize(size)
            # The first slot is what a new consumer waits for, so it gets the fast way, before the
            # seals; later slots get memory as they are first taken.
            pages.write(self._end(0))
            self.memory = pages.seal()
            """The memory of all slots, writable here and nowhere else."""
        except (OSError, OverflowError) as error:
            # Closed by hand: the error holds this frame, and with it the memory.
            pages.close()
            raise self._no_memory(error) from error

    @property
    def descriptor(self) -> int:
        """The memfd. It is closed when nobody has the arena any more, and not before.

        The enqueuer may be asking for memory behind an arena that has just been retired; a closed
        descriptor would fail the feed, and with it the trainers of other queues.
        """
        return self._pages.descriptor

    def back(self, index: int, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Get memory behind a slot and all slots before it; writing to a hole ends in a signal.

        Called as slots are first taken, since it takes 10 ms for 20 MB: for all slots at once, the
        first batch would wait 35 ms. Returns False where `is_over` said meanwhile that it is not
        needed. Raises `TransportError`.
        """
        try:
            return self._pages.back(self._end(index), is_over)
        except OSError as error:
            raise self._no_memory(error) from error

    def _end(self, index: int) -> int:
        """Return up to where memory is asked for, for a slot; of small slots several at once."""
        backed, end = self._pages.num_backed, (index + 1) * self.slot_bytes
        if end <= backed:
            return backed
        # Whole slots, rounded up: a slot with half its memory would still end in a signal.
        num = -(-max(end, backed + _BACK_BYTES) // self.slot_bytes)
        return min(num, self.num_slots) * self.slot_bytes

    def _no_memory(self, error: Exception) -> TransportError:
        return TransportError(
            f"no shared memory of {self.num_bytes} bytes for {self.num_slots} slots of "
            f"{self.slot_bytes} bytes: {error}; make batches or credit smaller, or give the "
            "process more memory"
        )


class Wanted(NamedTuple):
    """What a queue's consumer wants done with its batches. Immutable."""

    sums: bool = False
    """Whether full checksums are made."""
    keeps: bool = False
    """Whether large columns stay where they were fetched to, and are sent from there."""


NOTHING = Wanted()
"""Each column is copied, and that is all."""


def wanted_by_all(wishes: Sequence[Wanted]) -> Wanted:
    """What serves all consumers of a queue: sums where one wants them, and columns in the slot
    where one reads the slot."""
    both = Wanted(any(one.sums for one in wishes), all(one.keeps for one in wishes))
    return NOTHING if both == NOTHING else both


class Sum:
    """A full checksum in the making. Owned by the thread that copies the batch.

    Apart from its slot, which refers to its `add`: a slot in a reference cycle would keep its arena
    until the garbage collector runs.
    """

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()
        self.digest = self._hasher.intdigest
        """Returns the checksum of what was added."""
        self.num_bytes = 0
        """Bytes added."""
        self.seconds = 0.0
        """How long that took."""

    def add(self, piece: memoryview) -> None:
        """Add the next bytes."""
        began = time.monotonic()
        self._hasher.update(piece)
        self.num_bytes += len(piece)
        self.seconds += time.monotonic() - began


class ArenaSlot(LaidOut):
    """Memory for one batch, in an arena.

    One owner at a time: the enqueuer from `take` until the batch is put into the outbox, then the
    I/O thread, and with `sent` set the consumers, until the last one gives the slot back.
    """

    __slots__ = (
        "_sum", "arena", "checked_s", "checksum", "elsewhere", "kept", "left", "number", "seen",
        "sent", "wanted",
    )  # fmt: skip

    def __init__(self, arena: Arena, index: int, replicas: int = 1) -> None:
        super().__init__(arena.memory[index * arena.slot_bytes : (index + 1) * arena.slot_bytes])
        self.arena = arena
        self.left = replicas
        """How many replicas of the queue still want its batch; under the slots' lock."""
        self.number = arena.number * SLOTS_PER_ARENA + index
        self.sent = 0
        """The replicas that were sent it and have not given it back, a bit for each. The I/O
        thread's, until none has it."""
        self.wanted = NOTHING
        """What the consumer of its queue wants."""
        self.kept: Kept = None
        """Takes columns, where they will be sent from where they lie."""
        self.elsewhere: tuple[int, ...] = ()
        """Columns of the batch, by number, that lie where they were fetched to and not here."""
        self.seen: Seen = None
        """Called with the bytes that are copied here, to sum them up, where that is wanted."""
        self.checksum: int | None = None
        """The full checksum of the batch, where it was made while the batch was copied."""
        self.checked_s = 0.0
        """How long the checksum took."""

    def prepare(self, wanted: Wanted) -> None:
        """Make ready for the next batch, as its queue's consumer wants it.

        Bytes of a single large column alone are summed up while they are copied: the chunk is in a
        cache then, and later all would be read from memory once more.
        """
        self.wanted = wanted
        self.seen = self.checksum = None
        self.kept, self.elsewhere = {} if wanted.keeps else None, ()
        is_single = len(self.flats) == 1 and self.flats[0] and len(self.memory) >= _WATCH_BYTES
        if wanted.sums and is_single:
            self._sum = Sum()
            self.seen = self._sum.add

    def lease(self, rows: int) -> Arrays:
        """The first `rows` rows of each column, read-only."""
        if self.seen is not None and self._sum.num_bytes == self.layout.places[0].num_bytes:
            self._sum.add(self.memory[self._sum.num_bytes :])
            self.checksum, self.checked_s = self._sum.digest(), self._sum.seconds
        if self.kept:
            return self._lease_kept(self.kept)
        return self.views(rows)

    def _lease_kept(self, kept: dict[int, NDArray[Any]]) -> Arrays:
        """A batch of which some columns are elsewhere: what is here is the memory between them."""
        views = list(self._views)
        for number, array in kept.items():
            views[number] = array.view(np.ndarray)
            views[number].flags.writeable = False
        # Only the numbers stay here: the arrays are to go with the batch, before the slot is free.
        self.kept, self.elsewhere = None, tuple(kept)
        arrays = tuple(views)
        if self.wanted.sums:
            began = time.monotonic()
            self.checksum = full_checksum(self.memories(arrays))
            self.checked_s = time.monotonic() - began
        return arrays

    def memories(self, arrays: Arrays) -> list[memoryview]:
        """The memory of the batch that has these arrays, as it is laid out, in order."""
        parts, at = [], 0
        for number in self.elsewhere:
            place = self.layout.places[number]
            parts += [
                self.memory[at : place.offset],
                arrays[number].reshape(-1).view(np.uint8).data,
            ]
            at = place.offset + place.num_bytes
        return [part for part in (*parts, self.memory[at:]) if part]
