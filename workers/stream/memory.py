"""Memory for large chunks, which is used again when nobody looks at it any more.

The memory of a large new array comes from the system, page by page as it is first written, and
goes back with the array: that takes as long as reading the rows of an LMDB does. So a few blocks
are kept.

A block is lent as an array over a `Memory`, and what is handed out is a view of that array. Its
loan is over when the `Memory` goes, with the last array over the block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from feeder.workers.stream.loans import Loans

_LEAST_BYTES = 512 * 1024
_MOST_BYTES = 8 * 1024 * 1024
"""Sources make chunks of these sizes in memory that is used again."""
# malloc does so by itself for smaller ones; free blocks count in no bound, so larger ones are
# not kept (2026-11-21).

_KEEP_BLOCKS = 4
"""So many free blocks are kept: at most 32 MiB."""
# Free blocks count in no bound, so they are few; the number was not measured (2026-11-21).

_POOL_BLOCK_TIMES = 2
"""A free block that is more than so many times too large is left for larger arrays."""
# Else it would serve small arrays, and hold memory that counts in no bound; not measured
# (2026-11-21).

_LARGEST_FOLLOWED_BYTES = 32 * 1024 * 1024 - 64 * 1024
"""malloc is shown a block of this size, so that it keeps what is freed."""
# glibc follows freed blocks up to 32 MiB, its own few bytes included. 1 MB batches came at
# 9,000/s in a fresh process, and come at 19,500/s (2026-11-21).


Block = NDArray[np.uint8]


class Memory:
    """A block as its arrays refer to it. Fixed when made."""

    __slots__ = ("__weakref__", "_block")

    def __init__(self, block: Block) -> None:
        self._block = block

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # It names the block by its address: arrays are to refer to this, and not to the block.
        interface: dict[str, Any] = self._block.__array_interface__
        return interface


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, up to 64 MiB, for the arrays that are made next.

    glibc returns freed memory to the system at once while all that it has seen freed is small, and
    fetched chunks are then paged in anew by each call. Its thresholds follow the largest block
    that was freed (mallopt(3), "dynamic mmap threshold"): an array of 32 MiB, never written, takes
    them to where any program that frees large arrays has them. They stay where the user has set
    one of them, and another malloc is none the wiser.
    """
    np.empty(_LARGEST_FOLLOWED_BYTES, np.uint8)


class Pool:
    """Makes arrays, large ones in memory that came back where there is some. Any thread."""

    def __init__(self) -> None:
        # The oldest makes room.
        self._free: deque[Block] = deque(maxlen=_KEEP_BLOCKS)
        self._lent = Loans(self._free.append)
        self._lent_empty: Callable[[tuple[int, ...], DTypeLike], NDArray[Any]] | None = None

    def lend_from(self, empty: Callable[[tuple[int, ...], DTypeLike], NDArray[Any]]) -> None:
        """Make large arrays by another function from now on: in a process that fetches for
        another one they are made where that one reads them."""
        self._lent_empty = empty

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """What `numpy.empty` gives: a contiguous array with anything in it."""
        dtype = np.dtype(dtype)
        size = prod(shape) * dtype.itemsize
        if size >= _LEAST_BYTES and self._lent_empty is not None:
            return self._lent_empty(shape, dtype)
        if not _LEAST_BYTES <= size <= _MOST_BYTES:
            return np.empty(shape, dtype)
        block = self._take(size)
        memory = Memory(block)
        self._lent.lend(memory, block)
        # A view of the root, never the root itself: the root's end is the end of all views.
        return np.ndarray(shape, dtype, np.asarray(memory))

    def _take(self, size: int) -> Block:
        """A free block that is neither too small nor much too large, the one that came back last,
        which the cache may still hold; or a new one."""
        # At most once around: other threads take and give back meanwhile.
        for _ in range(len(self._free)):
            try:
                block = self._free.pop()
            except IndexError:
                break
            # Else a large block would serve small arrays, and hold memory that counts nowhere.
            if size <= block.nbytes <= _POOL_BLOCK_TIMES * size:
                return block
            self._free.appendleft(block)
        return np.empty(size, np.uint8)


POOL = Pool()
"""The process's: however many sources there are, it keeps no more."""
