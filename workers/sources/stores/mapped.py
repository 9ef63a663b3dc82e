"""Large records of a file that is mapped into memory, by where they lie.

A large record is passed on as a view of the map, and what costs then is to find it. So what was
found is kept as an address and a size, and records at equal distances become one array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LARGE_BYTES = 64 * 1024
"""Where records of this size and larger lie in the map of an LMDB is found out and kept."""
# To find out where a record lies takes 2 us, as long as to copy 50 KB. Found out once, 100 KB
# records come 1.25 to 1.4 times as fast (2026-11-22).

_LEAST_TOGETHER = 4
"""So many records that lie at the same distance are copied at once, and no fewer."""
# With fewer NumPy lets go of the interpreter too often (2026-11-22).

_MOST_IN_VAIN = 8
"""After so many calls whose records lie unevenly, more than others, no more is found out."""
# Then it costs and gains nothing; not measured (2026-11-22).


class _Span(NamedTuple):
    """Bytes at an address, as NumPy takes them."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self.address, True)
        return {"version": 3, "typestr": "|u1", "data": data, "shape": self.shape,
                "strides": self.strides}  # fmt: skip


class MappedRows(Sequence[memoryview]):
    """Records, as views of the memory that a file is mapped to. Never changes.

    Whoever makes one sees to it that the memory stays mapped while any view of it is in use.
    """

    def __init__(self, addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        self.addresses = addresses
        """Where each begins."""
        self.sizes = sizes
        """Bytes of each."""
        # Where each run of rows at one distance starts, and where the last one ends.
        self._bounds = _find_bounds(addresses.tolist())

    @classmethod
    def of(cls, values: Sequence[memoryview]) -> MappedRows:
        """Values by where they lie, which takes a microsecond for each."""
        arrays = [np.frombuffer(value, np.uint8) for value in values]
        addresses = [array.__array_interface__["data"][0] for array in arrays]
        sizes = np.fromiter(map(len, values), np.int64, len(values))
        return cls(np.array(addresses, dtype=np.int64), sizes)

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, i: Any) -> Any:
        return _view(self.addresses[i], int(self.sizes[i]))

    @property
    def lie_evenly(self) -> bool:
        """Whether most rows follow others at the same distance."""
        return (len(self._bounds) - 1) * _LEAST_TOGETHER <= len(self)

    @property
    def are_one_run(self) -> bool:
        """Whether all rows follow each other at the same distance."""
        return len(self._bounds) <= 2

    def take(self, which: NDArray[np.intp]) -> MappedRows:
        """Some of the rows."""
        return MappedRows(self.addresses[which], self.sizes[which])

    def cut(self, start: int, stop: int) -> MappedCut:
        """The bytes from `start` to `stop` of each row; each must have so many."""
        return MappedCut(self.addresses + start, stop - start, self._bounds)


class MappedCut(Sequence[memoryview]):
    """Equally many bytes of each of several `MappedRows`. Read-only."""

    def __init__(self, addresses: NDArray[np.int64], size: int, bounds: Sequence[int]) -> None:
        self._addresses = addresses
        self._size = size
        self._bounds = bounds

    def __len__(self) -> int:
        return len(self._addresses)

    def __getitem__(self, i: Any) -> Any:
        return _view(self._addresses[i], self._size)

    def arrays(self) -> Iterator[NDArray[np.uint8]]:
        """The rows as arrays of two axes, one after the other."""
        for start, stop in pairwise(self._bounds):
            first, *rest = self._addresses[start : min(start + 2, stop)].tolist()
            step = rest[0] - first if rest else 0
            yield np.asarray(_Span(first, (stop - start, self._size), (step, 1)))

    def octets(self) -> NDArray[np.uint8]:
        """The rows as one new array."""
        return np.concatenate(list(self.arrays()))


def _view(address: Any, size: int) -> memoryview:
    return np.asarray(_Span(int(address), (size,), (1,))).data


def _find_bounds(addresses: list[int]) -> list[int]:
    steps = [after - before for before, after in pairwise(addresses)]
    bounds, start = [0], 0
    for i in range(1, len(steps)):
        if steps[i] != steps[start] and i > start:
            start = i + 1
            bounds.append(start)
    bounds.append(len(addresses))
    return bounds


class RowMap:
    """Where the large records of a store lie, as far as they were read. Any thread."""

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records
        # Addresses and sizes, 0 where a record was not read. Made for large records only, of which
        # 16 bytes each are little.
        self._places: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._num_in_vain = 0
        self._lock = Lock()

    def find(self, indices: NDArray[np.int64]) -> MappedRows | None:
        """Records that were noted; None where one of them was not, or they lie unevenly."""
        if self._places is None:
            return None
        addresses, sizes = self._places
        found = addresses[indices]
        if not found.all():
            return None
        rows = MappedRows(found, sizes[indices])
        return rows if rows.lie_evenly else None

    def note(self, indices: NDArray[np.int64], values: Sequence[memoryview]) -> MappedRows | None:
        """Note where records lie; None where they are small, or lie unevenly."""
        # The first one tells of most stores, without a look at all the others.
        if not values or len(values[0]) < LARGE_BYTES or self._num_in_vain > _MOST_IN_VAIN:
            return None
        if min(map(len, values)) < LARGE_BYTES:
            return None
        rows = MappedRows.of(values)
        with self._lock:
            if not rows.lie_evenly:
                self._num_in_vain += 1
                return None
            self._num_in_vain = max(0, self._num_in_vain - 1)
            if self._places is None:
                addresses, sizes = np.zeros((2, self._num_records), np.int64)
                self._places = addresses, sizes
            addresses, sizes = self._places
            sizes[indices] = rows.sizes
            addresses[indices] = rows.addresses  # Last: who finds an address finds the size.
        return rows
