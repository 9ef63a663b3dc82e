"""A pseudo-random permutation that can be indexed: position → record in constant time and memory.

It is the generalised Feistel network of Black and Rogaway, "Ciphers with Arbitrary Finite
Domains" (CT-RSA 2002): the positions 0 to N - 1 are laid out in a rectangle of a × b ≥ N cells,
both sides near √N, and in each round one coordinate is turned by a keyed hash of the other. That
permutes the cells; a position that lands on a cell outside 0 to N - 1 is sent through again until
it lands inside (cycle walking), which is rare because the rectangle has less than √N + 1 cells too
many. The hash is a multiply-xorshift mix and keeps no secrets: this is for shuffling.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy as np
import xxhash
from numpy.typing import NDArray

KEEPS_GIL_ELEMENTS = 500
"""Random numbers are drawn for so many elements at a time."""
# For more NumPy lets go of the interpreter in every operation, and waits 1 to 5 ms for it
# beside a busy thread (2026-11-21).

_KEPT_BLOCKS = 4
"""So many blocks of a permutation are kept, since calls of some threads share a block."""
# Not measured apart (2026-11-24).


_ROUNDS = 8
# With few cells there are few ways to turn them, and the permutations are about equally likely
# only after more rounds.
_SMALL_SIZE = 256
_SMALL_ROUNDS = 24


def _constant(value: int) -> NDArray[np.uint64]:
    # An array of no dimensions: NumPy takes half as long with it as with a scalar.
    return np.array(value, dtype=np.uint64)


_MIX_1 = _constant(0x9E3779B97F4A7C15)
_MIX_2 = _constant(0xBF58476D1CE4E5B9)
_HALF = _constant(32)

_BLOCK, _KEPT_BLOCKS = KEEPS_GIL_ELEMENTS, _KEPT_BLOCKS

MAX_SIZE = 2**62
"""The largest number of records that can be permuted."""


class Permutation:
    """The permutation of 0 to `size` - 1 that a key stands for. Any thread may call it."""

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        rounds = _SMALL_ROUNDS if size < _SMALL_SIZE else _ROUNDS
        rows = isqrt(size - 1) + 1
        self._rows = _constant(rows)
        self._columns = _constant(-(-size // rows))
        self._keys = tuple(
            _constant(xxhash.xxh3_64_intdigest(f"{key}/{number}".encode()))
            for number in range(rounds)
        )
        # Nearly all of the time for a block goes to NumPy's calls, and calls of a few rows come one
        # after the other: the blocks that were made last are kept for the next of them.
        self._block = lru_cache(maxsize=_KEPT_BLOCKS)(self._images)

    def __call__(self, start: int, stop: int) -> NDArray[np.int64]:
        """The images of the positions from `start` to `stop` - 1."""
        images = np.empty(stop - start, dtype=np.int64)
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            first = number * _BLOCK
            begin, end = max(start, first), min(stop, first + _BLOCK)
            images[begin - start : end - start] = self._block(number)[begin - first : end - first]
        return images

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The images of any positions."""
        images = np.empty(len(positions), dtype=np.int64)
        for start in range(0, len(positions), _BLOCK):
            part = slice(start, start + _BLOCK)
            images[part] = self._walk(positions[part].astype(np.uint64))
        return images

    def find(self, images: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions that have these images."""
        positions = self._decrypt(images.astype(np.uint64))
        outside = np.flatnonzero(positions >= self._size)
        while len(outside):
            positions[outside] = self._decrypt(positions[outside])
            outside = outside[positions[outside] >= self._size]
        return positions.astype(np.int64)

    def _images(self, number: int) -> NDArray[np.uint64]:
        start, stop = number * _BLOCK, min((number + 1) * _BLOCK, self._size)
        return self._walk(np.arange(start, stop, dtype=np.uint64))

    def _walk(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        cells = self._encrypt(positions)
        outside = np.flatnonzero(cells >= self._size)
        while len(outside):
            cells[outside] = self._encrypt(cells[outside])
            outside = outside[cells[outside] >= self._size]
        return cells

    def _encrypt(self, cells: NDArray[np.uint64]) -> NDArray[np.uint64]:
        row = cells // self._columns
        column = cells - row * self._columns
        work = np.empty_like(row)
        for number in range(0, len(self._keys), 2):
            _turn(row, column, self._keys[number], self._rows, work)
            _turn(column, row, self._keys[number + 1], self._columns, work)
        row *= self._columns
        row += column
        return row

    def _decrypt(self, cells: NDArray[np.uint64]) -> NDArray[np.uint64]:
        row = cells // self._columns
        column = cells - row * self._columns
        work = np.empty_like(row)
        for number in range(len(self._keys) - 2, -1, -2):
            _turn(column, row, self._keys[number + 1], self._columns, work, back=True)
            _turn(row, column, self._keys[number], self._rows, work, back=True)
        row *= self._columns
        row += column
        return row


def _turn(
    coordinate: NDArray[np.uint64],
    other: NDArray[np.uint64],
    key: NDArray[np.uint64],
    side: NDArray[np.uint64],
    work: NDArray[np.uint64],
    *,
    back: bool = False,
) -> None:
    """Add to a coordinate, modulo its side, a hash of the other one; or take it away."""
    np.bitwise_xor(other, key, out=work)
    work *= _MIX_1
    work ^= work >> _HALF
    work *= _MIX_2
    # The high half of (32 random bits × side) is a number below side, without a division.
    work >>= _HALF
    work *= side
    work >>= _HALF
    if back:
        np.subtract(side, work, out=work)
    coordinate += work
    # Below side the difference wraps around to a huge number, which loses.
    np.subtract(coordinate, side, out=work)
    np.minimum(coordinate, work, out=coordinate)
