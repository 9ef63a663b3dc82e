"""Memory in which the chunks of a process reach the process that asked for them, without a name.

A block is a memfd that both ends map. The process that fetches makes it, writes chunks into it and
sends it with them; it writes there again only after all arrays over it have gone, at both ends.
Without a name there is nothing left behind, whoever is killed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from feeder.executors.wire import Place
from feeder.workers.stream.loans import Loans
from feeder.workers.stream.memory import Memory

_BLOCK_BYTES = 1024 * 1024
"""What a block has at least: many small chunks lie in one."""
_ALIGNED_BYTES = 64
_MOST_FREE = 16
"""Blocks that are kept while nobody uses them; the smallest go first."""
_SPARSE = 4
"""A block is copied where it arrives if only one in so many of its bytes is used."""
_OWN_MEMORY_BYTES = 64 * 1024
"""From this size on an array is lent out as one that may be passed on uncopied."""

# ---- Memory that is mapped and holds no descriptor: Python's `mmap` keeps a duplicate of the
# descriptor for as long as the mapping lives (up to 3.12 there is no way around), so a thousand
# chunks that somebody holds would be a thousand descriptors.

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """What an array over shared memory refers to; fixed when made."""

    __slots__ = ("_address", "_num_bytes", "_unmap")

    def __init__(self, address: int, num_bytes: int) -> None:
        self._address = address
        self._num_bytes = num_bytes
        # At the interpreter's exit names of the module may be gone before this is.
        self._unmap: Callable[[int, int], int] = _munmap

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self._address, False)
        return {"shape": (self._num_bytes,), "typestr": "|u1", "data": data, "version": 3}

    def __del__(self) -> None:
        self._unmap(self._address, self._num_bytes)


def map_shared(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """The bytes of a memfd, mapped until the last array over them goes. Raises `OSError`."""
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    address = _mmap(None, num_bytes, prot, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{num_bytes} bytes cannot be mapped: {os.strerror(number)}")
    return np.asarray(_Mapping(address, num_bytes))


# ---- Which blocks are looked at


class _Lent:
    """Which blocks have arrays over them. Owner: whoever owns the blocks; arrays go anywhere."""

    def __init__(self) -> None:
        self._num: dict[int, int] = {}
        self._back: deque[int] = deque()
        self._loans = Loans(self._back.append)

    def lend(self, number: int, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """An array over memory of a block; it and its views are counted as one."""
        self._num[number] = self._num.get(number, 0) + 1
        root = Memory(memory)
        self._loans.lend(root, number)
        return np.asarray(root)

    def settle(self) -> list[int]:
        """The blocks whose last array has gone since this was asked last."""
        gone = []
        # No more than are there now: other threads go on.
        for _ in range(len(self._back)):
            number = self._back.popleft()
            self._num[number] -= 1
            if not self._num[number]:
                del self._num[number]
                gone.append(number)
        return gone

    def __contains__(self, number: int) -> bool:
        return number in self._num


class _Block:
    """One memfd, mapped. Owner: the process that writes it."""

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("feeder-chunks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            # Memory that the system does not have is told here, and not by a signal.
            os.posix_fallocate(self.descriptor, 0, num_bytes)
            self.bytes = map_shared(self.descriptor, num_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.address = int(self.bytes.__array_interface__["data"][0])
        self.used = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    def begin(self) -> None:
        """It is written anew."""
        self.used = 0
        self._starts.clear()
        self._ends.clear()

    def take(self, num_bytes: int) -> int | None:
        """Room for so many bytes: where it begins; None where there is none."""
        offset = self.used
        if offset + num_bytes > self.num_bytes:
            return None
        self.used = -(-(offset + num_bytes) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return offset

    def claim(self, array: NDArray[Any]) -> int | None:
        """Where an array of this block begins, if no other one that is sent lies over it: the other
        end may write into what it is given. None where it is not of this block."""
        start = int(array.__array_interface__["data"][0]) - self.address
        end = start + array.nbytes
        if not (start >= 0 and end <= self.num_bytes and array.nbytes):
            return None
        at = bisect_left(self._starts, start)
        is_under = at > 0 and self._ends[at - 1] > start
        is_over = at < len(self._starts) and self._starts[at] < end
        if is_under or is_over:
            return None
        self._starts.insert(at, start)
        self._ends.insert(at, end)
        return start

    def sent(self) -> None:
        """The other end has the descriptor; the mapping stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Writer:
    """The blocks of a process that fetches. A fetch function's threads may make arrays at any time;
    all else is done by the thread that calls it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = 0
        # A block is in one of these: it takes chunks of the next answer; the other end has it; it
        # came back, and a fetch function still has an array over it; nobody uses it.
        self._open: list[_Block] = []
        self._lent: dict[int, _Block] = {}
        self._kept: dict[int, _Block] = {}
        self._free: dict[int, _Block] = {}
        self._arrays = _Lent()
        self._dropped: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A contiguous array with anything in it, in a block that is sent with the next answer."""
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            return np.empty(shape, dtype)  # Objects are sent as pickles.
        num_bytes = prod(shape) * dtype.itemsize
        with self._lock:
            block, offset = self._take(num_bytes)
            root = self._arrays.lend(block.number, block.bytes[offset : offset + num_bytes])
        return np.ndarray(shape, dtype, root)

    def place(self, array: NDArray[Any], dtype: int, *, is_kept: bool = False) -> Place:
        """Where an array lies for the other end; it is copied unless it lies in an open block and
        nobody here keeps it: the other end may write into what it is given."""
        with self._lock:
            if array.flags.c_contiguous and not is_kept:
                for block in reversed(self._open):
                    offset = block.claim(array)
                    if offset is not None:
                        return Place(block.number, offset, dtype, array.shape)
            block, offset = self._take(array.nbytes)
        np.copyto(np.ndarray(array.shape, array.dtype, block.bytes, offset), array)
        return Place(block.number, offset, dtype, array.shape)

    def _take(self, num_bytes: int) -> tuple[_Block, int]:
        if self._open:
            block = self._open[-1]
            offset = block.take(num_bytes)
            if offset is not None:
                return block, offset
        block = self._block_of(num_bytes)
        block.begin()
        self._open.append(block)
        offset = block.take(num_bytes)
        assert offset is not None
        return block, offset

    def _block_of(self, num_bytes: int) -> _Block:
        fits = [block for block in self._free.values() if block.num_bytes >= num_bytes]
        if fits:
            # The smallest: a large one is kept for a large array.
            block = min(fits, key=lambda one: one.num_bytes)
            return self._free.pop(block.number)
        # Larger ones the more there are: an answer has room for some 250 descriptors.
        size = max(_BLOCK_BYTES * (1 + len(self._open)), num_bytes)
        block = _Block(self._num + 1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._num += 1
        return block

    def lend(
        self,
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[int], list[int]]:
        """Close what is open: the blocks that go with an answer, with the bytes used of them, those
        of them that are new, with their bytes, the descriptors of these, and the blocks that are
        gone."""
        with self._lock:
            blocks, self._open = self._open, []
            dropped, self._dropped = self._dropped, []
            self._lent.update((block.number, block) for block in blocks)
        fresh = [block for block in blocks if block.descriptor >= 0]
        return (
            [(block.number, block.used) for block in blocks],
            [(block.number, block.num_bytes) for block in fresh],
            [block.descriptor for block in fresh],
            dropped,
        )

    def contents(self, number: int) -> memoryview:
        """What lies in a block that is lent, for an end that does not map it."""
        block = self._lent[number]
        return memoryview(block.bytes)[: block.used]

    def sent(self) -> None:
        """What was lent has been sent."""
        for block in self._lent.values():
            block.sent()

    def free(self, numbers: list[int]) -> None:
        """The other end has let go of these blocks."""
        with self._lock:
            gone = self._arrays.settle()
            self._kept.update((number, self._lent.pop(number)) for number in numbers)
            for number in (*numbers, *gone):
                # A fetch function may keep an array, and give it away in a later call.
                if number in self._kept and number not in self._arrays:
                    self._free[number] = self._kept.pop(number)
            while len(self._free) > _MOST_FREE:
                smallest = min(self._free.values(), key=lambda block: block.num_bytes)
                del self._free[smallest.number]
                self._dropped.append(smallest.number)


class Reader:
    """The blocks of one process as the other end maps them. Any thread, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[int, NDArray[np.uint8]] = {}
        self._dtypes: list[np.dtype[Any]] = []
        self._arrays = _Lent()

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        with self._lock:
            return sum([block.nbytes for block in self._mapped.values()])

    def add(self, fresh: list[tuple[int, int]], descriptors: list[int]) -> None:
        """Map blocks that are new; the descriptors are closed."""
        try:
            for (number, num_bytes), descriptor in zip(fresh, descriptors, strict=True):
                mapped = map_shared(descriptor, num_bytes)
                with self._lock:
                    self._mapped[number] = mapped
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def hold(self, number: int, memory: NDArray[np.uint8]) -> None:
        """The bytes of a block came here as a copy of their own."""
        with self._lock:
            self._mapped[number] = memory

    def learn(self, dtypes: list[np.dtype[Any]]) -> None:
        """Dtypes that are new."""
        self._dtypes += dtypes

    def drop(self, numbers: list[int]) -> None:
        """Blocks that are gone; their memory goes with the last array over them."""
        with self._lock:
            for number in numbers:
                self._mapped.pop(number, None)

    def open(self, blocks: list[tuple[int, int]]) -> dict[int, NDArray[Any]]:
        """The memory of an answer's blocks, for its arrays."""
        with self._lock:
            return {number: self._root(number, used) for number, used in blocks}

    def _root(self, number: int, used: int) -> NDArray[Any]:
        memory = self._mapped[number]
        lent = self._arrays.lend(number, memory)
        if used > memory.nbytes // _SPARSE:
            return lent
        # Rows that wait would hold many times their bytes: the block goes back at once instead.
        return lent[:used].copy()

    def array(self, place: Place, roots: dict[int, NDArray[Any]]) -> NDArray[Any]:
        """An array of an answer."""
        dtype = self._dtypes[place.dtype]
        num_bytes = prod(place.shape) * dtype.itemsize
        root = roots[place.block]
        if num_bytes < _OWN_MEMORY_BYTES or root.flags.owndata:
            return np.ndarray(place.shape, dtype, root, place.offset)
        # A root of its own: whoever is handed it may see that nobody else holds it.
        with self._lock:
            part = self._mapped[place.block][place.offset : place.offset + num_bytes]
            root = self._arrays.lend(place.block, part)
        return np.ndarray(place.shape, dtype, root)

    def freed(self) -> list[int]:
        """The blocks that nobody refers to any more, since this was asked last."""
        with self._lock:
            return self._arrays.settle()
