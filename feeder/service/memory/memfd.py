"""Memory that consumers on the same host read: a sealed memfd, and the slots in it.

The server writes through its own mapping, which is made before the seals; whoever is given the
descriptor can neither write nor change the size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.errors import TransportError
from feeder.service.protocol.checks import Layout, full_checksum
from feeder.service.memory.pages import Pages
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.buffers import Kept, Seen

SLOTS_PER_ARENA = 2**16
"""A slot's number is its arena's times this, plus its index there."""

Arrays = tuple[NDArray[Any], ...]


_WATCH_BYTES = 256 * 1024
"""Smaller batches are still in a cache when they are sent."""

_BACK_BYTES = 1024 * 1024
"""Memory is asked for by about so much at least, or by a slot."""


class Arena:
    """One memfd with `num_slots` slots of `slot_bytes` bytes, made of the pages in `reserve` where
    there are any.

    Raises `TransportError` where the system has not that much memory to give. The memory goes when
    the last array over it is gone here and the last mapping of a consumer is.
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
            pages.write(self._end(0))
            self.memory = pages.seal()
            """All slots, writable here and nowhere else."""
        except (OSError, OverflowError) as error:
            pages.close()  # The error holds this frame.
            raise self._no_memory(error) from error

    @property
    def descriptor(self) -> int:
        """The memfd. Closed when nobody has the arena any more, and not before: the enqueuer may be
        asking for memory behind one that is retired."""
        return self._pages.descriptor

    def back(self, index: int, is_over: Callable[[], bool] = lambda: False) -> bool:
        """See that there is memory behind a slot, and all before it, ere it is written: a hole
        would be found only by a signal. Done as slots are first taken, since it takes 10 ms for
        20 MB; False where `is_over` said meanwhile that it is not needed. Raises `TransportError`.
        """
        try:
            return self._pages.back(self._end(index), is_over)
        except OSError as error:
            raise self._no_memory(error) from error

    def _end(self, index: int) -> int:
        """Up to where there has to be memory for a slot: for small ones some at once."""
        backed, end = self._pages.num_backed, (index + 1) * self.slot_bytes
        if end <= backed:
            return backed
        num = -(-max(end, backed + _BACK_BYTES) // self.slot_bytes)
        return min(num, self.num_slots) * self.slot_bytes

    def _no_memory(self, error: Exception) -> TransportError:
        return TransportError(
            f"no shared memory of {self.num_bytes} bytes for {self.num_slots} slots of "
            f"{self.slot_bytes} bytes: {error}; make batches or credit smaller, or give the "
            "process more memory"
        )


class Wanted(NamedTuple):
    """What is to be done with the batches of a queue."""

    sums: bool = False
    """Whether full checksums of them are to be made."""
    keeps: bool = False
    """Whether large columns may stay where they were fetched to."""


NOTHING = Wanted()
"""Each column is copied, and that is all."""


class Leased(tuple[NDArray[Any], ...]):
    """The arrays of a batch, which know their slot."""

    slot: ArenaSlot
    parts: Sequence[memoryview] = ()
    """The memory of the batch in order, where columns lie where they were fetched to."""

    @property
    def memories(self) -> Sequence[memoryview]:
        """The memory of the batch as it is laid out, in order."""
        return self.parts or (self.slot.memory,)


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
        "columns", "flats", "kept", "memory", "number", "rows", "seen", "sent",
        "wanted",
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
        self.wanted = NOTHING
        """What the consumer of its queue wants."""
        self.kept: Kept = None
        """Takes columns, where they will be sent from where they lie."""
        self.seen: Seen = None
        """Takes the bytes that are copied here into the checksum, where that is wanted."""
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

    def prepare(self, wanted: Wanted) -> None:
        """Take the next batch as its queue's consumer wants it. Bytes are told to `seen` of a
        single large column alone: there it saves that all is read from memory once more."""
        self.wanted = wanted
        self.seen = self.checksum = None
        self.kept = {} if wanted.keeps else None
        is_single = len(self.flats) == 1 and self.flats[0] and len(self.memory) >= _WATCH_BYTES
        if wanted.sums and is_single:
            self._sum = Sum()
            self.seen = self._sum.add

    def lease(self, rows: int) -> Leased:
        """The first `rows` rows of each column, read-only."""
        if self.seen is not None and self._sum.num_bytes == self._places[0].num_bytes:
            self._sum.add(self.memory[self._sum.num_bytes :])
            self.checksum, self.checked_s = self._sum.digest(), self._sum.seconds
        if self.kept:
            return self._lease_kept(self.kept)
        arrays = self._views
        if rows != self.rows:
            arrays = tuple(
                array[(slice(None),) * place.axis + (slice(rows),)]
                for array, place in zip(arrays, self._places, strict=True)
            )
        leased = Leased(arrays)
        leased.slot = self
        return leased

    def _lease_kept(self, kept: dict[int, NDArray[Any]]) -> Leased:
        """A batch of which some columns are elsewhere: what is here is the memory between them."""
        arrays, parts, at = list(self._views), [], 0
        for number, array in kept.items():
            place = self._places[number]
            arrays[number] = array.view(np.ndarray)
            arrays[number].flags.writeable = False
            parts += [self.memory[at : place.offset], array.reshape(-1).view(np.uint8).data]
            at = place.offset + place.num_bytes
        self.kept = None
        leased = Leased(arrays)
        leased.slot, leased.parts = self, [part for part in (*parts, self.memory[at:]) if part]
        if self.wanted.sums:
            began = time.monotonic()
            self.checksum = full_checksum(leased.parts)
            self.checked_s = time.monotonic() - began
        return leased
