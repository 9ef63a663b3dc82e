"""A consumer's side of the memory that batches lie in: arrays over it, and when they are gone.

A slot is lent as one root array, and every column is a view of the root
(`workers/stream/loans.py`).

PyTorch writes into read-only arrays, and a write into memory that is mapped to be read ends the
process. So what a user may look at is mapped privately: who writes has a page of his own, which
hides what the server writes there later. Therefore, before a slot is given back, the kernel is
asked whether a page of it was written, and such pages are dropped. The first write into a page is a
page fault, so the process's count of faults tells first whether there is anything to ask: it costs
1 us, the question a tenth of the copy of a large slot. To drop all pages each time costs more than
the copy, since they have to be mapped again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder.devices.cuda.packed import Packed, pack
from feeder.devices.layout import ColumnPlace, Layout, arrays_over, first_rows
from feeder.devices.slots import HostSlot, HostSlots
from feeder.errors import ProtocolError
from feeder.service.memory.fdpass import OwnLimitError
from feeder.service.memory.forking import make_own
from feeder.service.memory.memfd import SLOTS_PER_ARENA
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.loans import Loan

Arrays = tuple[NDArray[Any], ...]

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Python has a name for it from 3.12 on; the number is that of linux/mman.h."""
_ENTRY_BYTES = 8
"""Of a page in `/proc/self/pagemap` (Linux, Documentation/admin-guide/mm/pagemap.rst). Its last
byte has bits that say: the page is present (0x80), or swapped out (0x40), and is of a file (0x20).
A page of one's own over a file is there, and of no file."""
_UNWRITTEN = bytes(flags for flags in range(256) if flags & 0xE0 not in (0x80, 0x40))
_LOOK_AROUND_PAGES = 512
"""Slots that are given back together are asked for in one go if they lie within so many pages: to
look at a page takes 30 ns, and to ask 1 us."""


class MappedArena:
    """An arena of the server's, mapped to be read. Takes the descriptor over and closes it.

    `is_private`: a write into a slot is seen in this process alone, until the slot is given back.
    Otherwise it ends the process, as it does if slots do not begin at pages (a server of an earlier
    version), or if the system refuses such a mapping.

    Owned by the consumer's I/O thread. When the last array over a slot is gone, its loan is put on
    `released`, for that thread to `take_back`, and then `wake()` is called: from any thread,
    perhaps from inside the garbage collector, so `wake` must take no lock that anybody may hold. An
    interrupt may end `wake`; the loan is on `released` by then. The mapping goes with the last
    array over it and with this object. Raises `OwnLimitError` where it cannot be mapped.
    """

    def __init__(
        self,
        descriptor: int,
        number: int,
        slot_bytes: int,
        num_slots: int,
        released: deque[Loan],
        wake: Callable[[], None],
        *,
        is_private: bool = False,
    ) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._first = number * SLOTS_PER_ARENA
        self._released = released
        self._wake = wake
        # The slots that are lent or released and not taken back; the weak references that wake; and
        # how many faults there had been at the last look before they were lent.
        self._loans: dict[int, tuple[Loan, weakref.ref[Any], int]] = {}
        self._num_faults = -1
        self._is_private = is_private and slot_bytes % mmap.PAGESIZE == 0
        try:
            memory = self._map(descriptor)
        except (OSError, ValueError, OverflowError) as error:
            raise OwnLimitError(
                f"{slot_bytes * num_slots} bytes of shared memory cannot be mapped: {error}"
            ) from error
        finally:
            os.close(descriptor)
        self._mapping = memory
        self._memory = memoryview(memory).toreadonly()
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self.pinned: object = None
        """What keeps the mapping pinned, so that a GPU may read it; None where it is not."""

    def _map(self, descriptor: int) -> mmap.mmap:
        num_bytes = self.slot_bytes * self.num_slots
        if self._is_private:
            # It counts as memory of the process's own, for which there may be a limit.
            with contextlib.suppress(OSError):
                both = mmap.PROT_READ | mmap.PROT_WRITE
                return mmap.mmap(descriptor, num_bytes, mmap.MAP_PRIVATE | _MAP_NORESERVE, both)
            self._is_private = False
        return mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)

    def pin(self, register: Callable[[memoryview], object]) -> None:
        """Pin the mapping for a GPU, until nothing refers to it any more."""
        self.pinned = register(self._memory)

    def pack(self, index: int, arrays: Arrays, layout: Layout, rows: int, length: int) -> Packed:
        """Return what `lend` gave, in the form that a GPU copies from a pinned mapping."""
        assert self.pinned is not None
        # Nothing to give back: the slot goes back when the arrays are gone.
        return pack(
            arrays, region=self.pinned, address=self._address + index * self.slot_bytes,
            layout=layout, rows=rows, length=length, give_back=lambda: None,
        )  # fmt: skip

    def root(self, index: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return the memory of a slot, read-only.

        Raises `ProtocolError` where there is no such slot, where it is smaller than `num_bytes`,
        or where somebody still looks at it: a server that errs must not tear a batch.
        """
        if not 0 <= index < self.num_slots or num_bytes > self.slot_bytes:
            raise ProtocolError(
                f"the server gave {num_bytes} bytes in slot {self._first + index}, expected at "
                f"most {self.slot_bytes} bytes in one of {self.num_slots} slots"
            )
        # Also where it was released and not reported yet: the server may give only what it was
        # told.
        if index in self._loans:
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
        """Return the first `length` rows of each column of a slot that is laid out for `rows` rows.

        The slot is released when the last array over `root` is gone. Raises `ProtocolError` where
        it has not so many rows.
        """
        if not 0 <= length <= rows:
            raise ProtocolError(
                f"the server gave {length} of {rows} rows in slot {self._first + index}, expected "
                "no more than it is laid out for"
            )
        # Of a root's callbacks the one that was added last is called first: the loan is on
        # `released` before the thread that looks there is woken. The first is a function in C, so
        # that no interrupt loses the slot.
        wakes = weakref.ref(root, self._on_root_gone)
        loan = Loan(root, self._released.append)
        loan.what = self._first + index
        self._loans[index] = loan, wakes, self._num_faults
        return first_rows(arrays_over(root, places), places, rows, length)

    @property
    def num_leased(self) -> int:
        """Number of slots that somebody still looks at."""
        return len(self._looked_at())

    def take_back(self, slots: Sequence[int]) -> None:
        """Released slots may be given again by the server, which is told next."""
        first, loans = self._first, self._loans
        had_faults = [loans.pop(slot - first)[2] for slot in slots]
        if not self._is_private:
            return
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._num_faults = num = usage.ru_minflt + usage.ru_majflt
        if had_faults.count(num) < len(slots):
            pairs = zip(slots, had_faults, strict=True)
            self._drop_written([slot - first for slot, had in pairs if had != num])

    def _drop_written(self, indexes: Sequence[int]) -> None:
        """Drop what was written into these slots, so that what the server writes there is seen."""
        first, last = min(indexes), max(indexes)
        num = last + 1 - first
        is_near = num * self.slot_bytes <= _LOOK_AROUND_PAGES * mmap.PAGESIZE
        if is_near and not self._is_written(first, num):
            return
        for index in indexes:
            if self._is_written(index, 1):
                at = index * self.slot_bytes
                self._mapping.madvise(mmap.MADV_DONTNEED, at, self.slot_bytes)

    def _is_written(self, index: int, num: int) -> bool:
        at = (self._address + index * self.slot_bytes) // mmap.PAGESIZE * _ENTRY_BYTES
        num_bytes = num * self.slot_bytes // mmap.PAGESIZE * _ENTRY_BYTES
        try:
            # Opened each time: it belongs to the process that opened it, and a fork makes another.
            descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            try:
                entries = os.pread(descriptor, num_bytes, at)
            finally:
                os.close(descriptor)
        except OSError:
            return True  # A system that does not tell: it may have been.
        return len(entries) < num_bytes or bool(
            entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(None, _UNWRITTEN)
        )

    def copy_for_child(self) -> None:
        """In a forked child: replace the slots that it looks at by copies of its own."""
        for index in self._looked_at():
            # Whole pages, since the kernel maps nothing smaller; a neighbour's bytes come along.
            first = index * self.slot_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            end = -(-(index + 1) * self.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            make_own(self._address + first, end - first, writable=self._is_private)

    def _looked_at(self) -> list[int]:
        # A copy first: the thread that owns this may be lending meanwhile. A loan whose root is
        # gone is released, so nobody looks at its slot.
        return [index for index, (loan, *_) in list(self._loans.items()) if loan() is not None]

    def _on_root_gone(self, root_ref: weakref.ref[Any]) -> None:
        self._wake()


def view(memories: Sequence[memoryview], layout: Layout, rows: int, length: int) -> Arrays | None:
    """Return the first `length` rows of each column, read-only, without a copy.

    `memories` one after the other make a batch laid out for `rows` rows; None where a column is cut
    in two by the end of one. A column that is not aligned as its dtype needs is copied.
    """
    starts = list(accumulate(map(len, memories), initial=0))
    # Arrays of bytes as roots: an array of a memoryview itself would refer to the whole message.
    roots = [np.frombuffer(memory.toreadonly(), np.uint8) for memory in memories]
    arrays = []
    for shape, dtype, _, offset, num_bytes in layout.places:
        # A column of no bytes may lie at the very end, hence `hi`.
        i = bisect_right(starts, offset, hi=len(memories)) - 1
        if offset + num_bytes > starts[i + 1]:
            return None
        array = np.ndarray(shape, dtype, roots[i], offset - starts[i])
        # Frames begin at multiples of 8 bytes, which is too little for a long double alone.
        if not array.flags.aligned:
            array = np.ndarray(shape, dtype, array.tobytes())
        arrays.append(array)
    return first_rows(tuple(arrays), layout.places, rows, length)


class FrameSlots:
    """A consumer's own memory, for batches that arrive in frames or that its user writes into.

    Owned by the I/O thread, which alone takes slots. They come back from any thread, by an append
    to a deque in `HostSlots`. Of free slots `keep` are kept.
    """

    def __init__(self, keep: int, *, writable: bool = False) -> None:
        self._keep, self._writable = keep, writable
        self._known: tuple[Columns | None, int] = (None, 0)
        self._slots = HostSlots(keep, writable=writable)

    def take_slot(self, device: int, columns: Columns, rows: int) -> HostSlot:
        """Return a slot laid out for `rows` rows, to be written through its `memory`."""
        # By identity: columns change once per lease, and to compare them takes too long per batch.
        if columns is not self._known[0] or rows != self._known[1]:
            self._known = (columns, rows)
            self._slots = HostSlots(self._keep, writable=self._writable)
        return self._slots.take_slot(device, columns, rows)

    @property
    def num_leased(self) -> int:
        """Number of slots of the present layout that somebody still looks at."""
        return self._slots.num_leased
