"""A consumer's side of the memory that batches lie in, which tells when it is free again.

A lease is one root array over the slot, and every column is a view of the root. NumPy lets a view
of a view refer to the root as well, so as long as any array over the slot is alive, so is the
root. The memory belongs to the mapping and not to an array: else views would refer to that array,
and the slot would be written again under them.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder.devices.cuda.packed import Packed, pack
from feeder.devices.layout import ColumnPlace, Layout
from feeder.devices.slots import HostSlot, HostSlots
from feeder.errors import ProtocolError
from feeder.service.memory.fdpass import OwnLimitError
from feeder.service.memory.forking import make_own
from feeder.service.memory.memfd import SLOTS_PER_ARENA
from feeder.workers.stream.chunks import Columns

Arrays = tuple[NDArray[Any], ...]


class Lease(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a root array that knows the number of its slot."""

    __slots__ = ("bell", "slot")
    slot: int
    bell: weakref.ref[Any]


class MappedArena:
    """An arena of the server's, mapped to be read. Takes the descriptor over and closes it.

    One thread calls it. When the last array over a slot is gone, its lease is put on `released`,
    for that thread to `take_back`, and then `wake()` is called: from any thread, perhaps from
    inside the garbage collector, so `wake` must take no lock that anybody may hold. An interrupt
    may end `wake`, but the lease is on `released` by then, as no Python code puts it there. The
    mapping goes with the last array over it and with this. Raises `OwnLimitError` where it cannot
    be mapped.
    """

    def __init__(
        self,
        descriptor: int,
        number: int,
        slot_bytes: int,
        num_slots: int,
        released: deque[Lease],
        wake: Callable[[], None],
    ) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._first = number * SLOTS_PER_ARENA
        self._released = released
        self._wake = wake
        self._leases: dict[int, Lease] = {}
        try:
            memory = mmap.mmap(descriptor, slot_bytes * num_slots, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise OwnLimitError(
                f"{slot_bytes * num_slots} bytes of shared memory cannot be mapped: {error}"
            ) from error
        finally:
            os.close(descriptor)
        self._memory = memoryview(memory)
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self.pinned: object = None
        """What pins the mapping, so that a GPU may read it; None while nothing does."""

    def pin(self, register: Callable[[memoryview], object]) -> None:
        """Have the mapping pinned until nothing refers to it any more."""
        self.pinned = register(self._memory)

    def pack(self, index: int, arrays: Arrays, layout: Layout, rows: int, length: int) -> Packed:
        """What `lend` gave, as a GPU reads it from a mapping that is pinned."""
        assert self.pinned is not None
        # The slot goes back when the arrays are gone, and nothing else has to be done for that.
        return pack(
            arrays, region=self.pinned, address=self._address + index * self.slot_bytes,
            layout=layout, rows=rows, length=length, give_back=lambda: None,
        )  # fmt: skip

    def root(self, index: int, num_bytes: int) -> NDArray[np.uint8]:
        """The memory of a slot, read-only. Raises `ProtocolError` where there is no such slot, or
        it is smaller, or somebody looks at it already."""
        if not 0 <= index < self.num_slots or num_bytes > self.slot_bytes:
            raise ProtocolError(
                f"the server gave {num_bytes} bytes in slot {self._first + index}, expected at "
                f"most {self.slot_bytes} bytes in one of {self.num_slots} slots"
            )
        if index in self._leases:
            raise ProtocolError(
                f"the server gave slot {self._first + index}, which is looked at; expected one "
                "that was released"
            )
        return np.frombuffer(self._memory, np.uint8, num_bytes, index * self.slot_bytes)

    def lend(
        self,
        index: int,
        root: NDArray[np.uint8],
        places: Sequence[ColumnPlace],
        rows: int,
        length: int,
    ) -> Arrays:
        """The first `length` rows of each column in a slot that is laid out for `rows` rows. The
        slot is released when the last array over `root` is gone. Raises `ProtocolError` where it
        has not so many rows."""
        if not 0 <= length <= rows:
            raise ProtocolError(
                f"the server gave {length} of {rows} rows in slot {self._first + index}, expected "
                "no more than it is laid out for"
            )
        # Of a root's callbacks the one that was added last is called first.
        bell = weakref.ref(root, self._ring)
        lease = Lease(root, self._released.append)
        lease.bell, lease.slot = bell, self._first + index
        self._leases[index] = lease
        arrays = tuple([np.ndarray(shape, dtype, root, at) for shape, dtype, _, at, _ in places])
        return _first(arrays, places, rows, length)

    @property
    def num_leased(self) -> int:
        """Slots that somebody still looks at."""
        return len(self._looked_at())

    def take_back(self, lease: Lease) -> int:
        """The number of a slot that was released; it may be given again."""
        del self._leases[lease.slot - self._first]
        return lease.slot

    def keep(self) -> None:
        """In a forked child: have what is looked at lie in this process's own memory."""
        for index in self._looked_at():
            first = index * self.slot_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            end = -(-(index + 1) * self.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            make_own(self._address + first, end - first)

    def _looked_at(self) -> list[int]:
        return [index for index, lease in list(self._leases.items()) if lease() is not None]

    def _ring(self, bell: weakref.ref[Any]) -> None:
        self._wake()


def view(memories: Sequence[memoryview], layout: Layout, rows: int, length: int) -> Arrays | None:
    """The first `length` rows of each column, read-only, where it lies in memories that make a
    batch laid out for `rows` rows; None where one is cut in two. A column that does not lie as its
    dtype wants is copied."""
    starts = list(accumulate(map(len, memories), initial=0))
    # Arrays of bytes: one of a memoryview itself would refer to what that is a view of.
    roots = [np.frombuffer(memory.toreadonly(), np.uint8) for memory in memories]
    arrays = []
    for shape, dtype, _, offset, num_bytes in layout.places:
        i = bisect_right(starts, offset, hi=len(memories)) - 1
        if offset + num_bytes > starts[i + 1]:
            return None
        array = np.ndarray(shape, dtype, roots[i], offset - starts[i])
        if not array.flags.aligned:
            array = np.ndarray(shape, dtype, array.tobytes())
        arrays.append(array)
    return _first(tuple(arrays), layout.places, rows, length)


def _first(arrays: Arrays, places: Sequence[ColumnPlace], rows: int, length: int) -> Arrays:
    if length == rows:
        return arrays
    return tuple(
        array[(slice(None),) * place.axis + (slice(length),)]
        for array, place in zip(arrays, places, strict=True)
    )


def keep_freed_memory() -> None:
    """Have glibc's malloc keep up to 64 MiB of what is freed. Else messages of some megabytes are
    made of new pages again and again, which takes as long as to copy them: it maps what is larger
    than 128 KiB, or than the largest of up to 32 MiB that was ever mapped and freed."""
    np.empty(32 * 2**20 - 2**16, np.uint8)  # Nothing is written: it costs some microseconds.


class FrameSlots:
    """A consumer's own memory, for batches that arrive as frames or that its user writes into; of
    free slots `keep` are kept.

    One thread takes; slots come back from any.
    """

    def __init__(self, keep: int, *, writable: bool = False) -> None:
        self._keep, self._writable = keep, writable
        self._known: tuple[Columns | None, int] = (None, 0)
        self._slots = HostSlots(keep, writable=writable)

    def take_slot(self, device: int, columns: Columns, rows: int) -> HostSlot:
        """A slot laid out for `rows` rows, to be written through its `memory`."""
        if columns is not self._known[0] or rows != self._known[1]:
            self._known = (columns, rows)
            self._slots = HostSlots(self._keep, writable=self._writable)
        return self._slots.take_slot(device, columns, rows)

    @property
    def num_leased(self) -> int:
        """Slots of the present layout that somebody still looks at."""
        return self._slots.num_leased
