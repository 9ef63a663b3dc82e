"""Host memory for batches, which comes back when nobody looks at it any more.

A lease is one root array over the slot's memory, and every column is a view of the root: when the
root goes, the slot is free (`workers/stream/loans.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from feeder.devices.layout import ALIGNMENT, arrays_over, first_rows, flats_over, layout
from feeder.errors import ConfigError
from feeder.workers.stream.buffers import Kept, OpenSlot, Seen
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.loans import Loans
from feeder.workers.stream.position import HasColumns

# Free slots count in no bound, so few are kept: as many as take 16 MiB, which is what the enqueuer
# hands over at once, and two more. Of two batches that a user lets go of while a third is being
# made both come back.
_KEEP_BYTES = 16 * 1024 * 1024
_KEEP_SLOTS = 2
_KEEP_TINY_SLOTS = 256

Arrays = tuple[NDArray[Any], ...]
Made = TypeVar("Made")


def _made(make: Callable[[], Made], columns: Columns, rows: int) -> Made:
    """A new slot; raises `ConfigError` where there is no memory for it."""
    try:
        return make()
    except (MemoryError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"a batch of {rows} rows takes {layout(columns, rows).num_bytes} bytes of memory, "
            f"which the system does not give ({type(error).__name__}); make batch_size smaller"
        ) from error


class HostSlot:
    """Memory for one batch on the host.

    The merging thread's from `take_slot` to `lease`, then the user's until the last array over it
    is gone.
    """

    __slots__ = (
        "_memory", "_places", "_pool", "_root", "_shown", "arrays", "columns", "flats", "num_bytes",
        "rows",
    )  # fmt: skip

    kept: Kept = None
    """What is handed out lies here."""
    seen: Seen = None
    """Nobody asks."""

    def __init__(self, columns: Columns, rows: int, pool: HostSlots) -> None:
        self.columns, self.rows = columns, rows
        self._pool = pool
        self._places, size = layout(columns, rows)
        self.num_bytes = size
        # Through a memoryview: NumPy lets a view refer to the array that owns the memory. That
        # would be this one, and not the lease's root, whose end frees the slot.
        memory = np.empty(size + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self._memory = memory.data[start : start + size]
        self._shown = self._memory if pool.writable else self._memory.toreadonly()
        # The root that calls write through, from `open` to `lease`.
        self._root: NDArray[Any] | None = None
        self.arrays = arrays_over(self._memory, self._places)
        self.flats = flats_over(self._memory, self._places)

    @property
    def memory(self) -> memoryview:
        """All of its memory, to be written by whoever took it."""
        return self._memory

    def open(self) -> Arrays:
        """Arrays for calls to write to. The slot is not free before the last of them is gone, so a
        fetch function that keeps one sees the same rows for as long."""
        self._root = root = np.frombuffer(self._memory, np.uint8)
        self._pool.watch(root, self)
        return arrays_over(root, self._places)

    def close(self) -> None:
        """It will not be leased: it is free when the last of those arrays is gone."""
        self._root = None

    def lease(self, rows: int) -> Arrays:
        """The first `rows` rows of each column, read-only unless the pool is of writable slots;
        the slot is free again when the last array over them is gone."""
        # A root for each lease: its weak reference fires once, for this batch alone.
        written, self._root = self._root, None
        if written is None:
            root = np.frombuffer(self._shown, np.uint8)
            self._pool.watch(root, self)
        else:
            # It refers to the root that was written through, and that one is watched.
            shown = written.data if self._pool.writable else written.data.toreadonly()
            root = np.frombuffer(shown, np.uint8)
        return first_rows(arrays_over(root, self._places), self._places, self.rows, rows)


class HostSlots:
    """Slots of host memory; they grow in number while the user keeps batches.

    Owned by the thread that merges, which alone takes slots and watches over them. A slot comes
    back from any thread. At least `keep` free slots are kept.
    """

    # An array that nobody else holds becomes the batch; only what is shared is copied.
    passes, reserved, opens = True, False, True

    def __init__(self, keep: int = _KEEP_SLOTS, *, writable: bool = False) -> None:
        self.writable = writable
        """Whether what is handed out may be written into: until the slot comes back it is the
        user's alone."""
        self._least = self._keep = keep
        self._free: deque[HostSlot] = deque()
        self._lent = Loans(self._give_back)
        self.num_made = 0
        """Slots made so far."""

    def take_slot(self, device: int, columns: Columns, rows: int) -> HostSlot:
        """A slot for a batch of `rows` rows: the one that came back last, which the cache may
        still hold, or a new one. Raises `ConfigError` where there is no memory for it."""
        try:
            return self._free.pop()
        except IndexError:
            self.num_made += 1
            slot = _made(lambda: HostSlot(columns, rows, self), columns, rows)
            # Known with the first slot only: how many slots are kept follows from their size.
            some = _KEEP_SLOTS + _KEEP_BYTES // slot.num_bytes
            self._keep = max(self._least, min(some, _KEEP_TINY_SLOTS))
            return slot

    def wait_for_slot(self, device: int) -> None:
        """Never needed: where no slot is free one is made."""

    def take_back(self, device: int, batch: HasColumns) -> None:
        """Nothing: its memory comes back when its last array is gone."""

    def put_back(self, device: int, slot: OpenSlot) -> None:
        """A slot is not used: it comes back when the arrays over it are gone."""
        slot.close()

    def watch(self, root: NDArray[Any], slot: HostSlot) -> None:
        """Take the slot back when `root` is gone."""
        self._lent.lend(root, slot)

    def _give_back(self, slot: HostSlot) -> None:
        # Beyond that the memory goes back to the system: it counts in no bound.
        if len(self._free) < self._keep:
            self._free.append(slot)

    @property
    def num_leased(self) -> int:
        """Slots that somebody still looks at."""
        return len(self._lent)


class PrivateSlots:
    """Batches that are the user's to write: each column has memory of its own, so that labels that
    are kept for an epoch keep no pictures. Without any state, so any thread may call it."""

    passes, writable, reserved, opens = True, True, False, True

    def take_slot(self, device: int, columns: Columns, rows: int) -> PrivateSlot:
        """New memory for a batch of `rows` rows. Raises `ConfigError` where there is none."""
        return _made(lambda: PrivateSlot(columns, rows), columns, rows)

    def wait_for_slot(self, device: int) -> None:
        """Never needed: each batch has new memory."""

    def take_back(self, device: int, batch: HasColumns) -> None:
        """Nothing: its memory comes back when its last array is gone."""

    def put_back(self, device: int, slot: OpenSlot) -> None:
        """Nothing: its memory goes with its arrays."""


class PrivateSlot:
    """Memory for one batch, given away with it: first the merging thread's, then the user's."""

    __slots__ = ("arrays", "axes", "columns", "flats", "rows")

    kept: Kept = None
    """What is handed out lies here."""
    seen: Seen = None
    """Nobody asks."""

    def __init__(self, columns: Columns, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.axes = tuple(column.axis for column in columns)
        self.arrays: Arrays = tuple(
            np.empty(
                (*column.shape[: column.axis], rows, *column.shape[column.axis :]), column.dtype
            )
            for column in columns
        )
        self.flats: tuple[memoryview | None, ...] = tuple(
            None if axis else memoryview(array.reshape(-1).view(np.uint8))
            for array, axis in zip(self.arrays, self.axes, strict=True)
        )

    def open(self) -> Arrays:
        """The arrays themselves: nobody else will ever have this memory."""
        return self.arrays

    def close(self) -> None:
        """Nothing: its memory goes with its arrays."""

    def lease(self, rows: int) -> Arrays:
        """The first `rows` rows of each column."""
        if rows == self.rows:
            return self.arrays
        return tuple(
            array[(slice(None),) * axis + (slice(rows),)].copy()
            for array, axis in zip(self.arrays, self.axes, strict=True)
        )
