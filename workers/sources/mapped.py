"""Large records of a file that is mapped into memory, by where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LARGE_BYTES = 64 * 1024
"""Of smaller records it takes as long to find out where they lie as it saves."""

# Rows that follow each other at the same distance, as the pages of an LMDB do, are copied at once.
# With fewer to a copy NumPy gives the GIL up too often.
_LEAST_TOGETHER = 4


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
    """Records, as views of the memory that a file is mapped to.

    Whoever makes one sees to it that the memory stays mapped while any view of it is in use.
    """

    def __init__(self, addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        self._addresses = addresses
        self.sizes = sizes
        """Bytes of each."""
        # Where each run of rows at one distance starts, and where the last one ends.
        self._bounds = _find_bounds(addresses.tolist())

    def __len__(self) -> int:
        return len(self._addresses)

    def __getitem__(self, i: Any) -> Any:
        return _view(self._addresses[i], int(self.sizes[i]))

    @property
    def lie_evenly(self) -> bool:
        """Whether most rows follow others at the same distance."""
        return (len(self._bounds) - 1) * _LEAST_TOGETHER <= len(self)

    def take(self, which: NDArray[np.intp]) -> MappedRows:
        """Some of the rows."""
        return MappedRows(self._addresses[which], self.sizes[which])

    def cut(self, start: int, stop: int) -> MappedCut:
        """The bytes from `start` to `stop` of each row; each must have so many."""
        return MappedCut(self._addresses + start, stop - start, self._bounds)


class MappedCut(Sequence[memoryview]):
    """Equally many bytes of each of several `MappedRows`."""

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
        # Made for large records only, of which 16 bytes each are little.
        self._addresses: NDArray[np.int64] | None = None
        self._sizes: NDArray[np.int64] | None = None

    def find(self, indices: NDArray[np.int64]) -> MappedRows | None:
        """Records that were noted; None where one of them was not, or they lie unevenly."""
        if self._addresses is None or self._sizes is None:
            return None
        addresses = self._addresses[indices]
        if not addresses.all():
            return None
        return _even(MappedRows(addresses, self._sizes[indices]))

    def note(self, indices: NDArray[np.int64], values: Sequence[memoryview]) -> MappedRows | None:
        """Note where records lie; None where they are small, or lie unevenly."""
        sizes = np.fromiter(map(len, values), np.int64, len(values))
        if not len(sizes) or sizes.min() < LARGE_BYTES:
            return None
        if self._sizes is None:
            self._sizes = np.zeros(self._num_records, np.int64)
        if self._addresses is None:
            self._addresses = np.zeros(self._num_records, np.int64)
        arrays = [np.frombuffer(value, np.uint8) for value in values]
        found = [array.__array_interface__["data"][0] for array in arrays]
        addresses = np.array(found, dtype=np.int64)
        self._sizes[indices] = sizes
        self._addresses[indices] = addresses  # Last: who finds an address finds the size.
        return _even(MappedRows(addresses, sizes))


def _even(rows: MappedRows) -> MappedRows | None:
    return rows if rows.lie_evenly else None
