"""What tells a chunk that comes again from another: digests of its rows.

A resumed stream joins the rest of a chunk to rows of a run that is gone. The only proof that both
are of one chunk is what the position holds of it, so a position holds a digest. It is of a sample:
a digest of everything would read each chunk once more, only to find a function that gives other
rows after a restart, and such a function changes nearly all of them. The numbers of the sample are
part of every position that was ever stored, and never change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

# Part of what positions hold: with other numbers the digests of old ones would not be met.
_SAMPLED_WHOLE_BYTES = 16 * 1024
_SAMPLE_BLOCKS = 256
_SAMPLE_BLOCK_BYTES = 64

# Also part of them: with other numbers old positions could not be replayed.
_SAMPLED_CALLS = 16
_SAMPLE_EVERY = 256

_LONG_DOUBLE = np.dtype(np.longdouble)
_HAS_80_BITS = np.finfo(np.longdouble).nmant == 63


Prints = dict[tuple[int, int, int], int]
"""Digests of chunks as their calls returned them, by partition, epoch and call (the debug switch).
A fetcher adds each one before its chunk is handed over, and the merge takes it out: two threads
never touch the same key, and single operations of a dict are atomic."""

OTHER_ROWS = -1
"""In place of a digest: a pure function gave other rows when it was called again."""


def digest_chunk(arrays: Sequence[NDArray[Any]]) -> int:
    """A digest of a chunk: xxh3 over dtypes, shapes and a sample of the bytes.

    Columns of up to 16 KiB go in whole; of larger ones 256 evenly spaced blocks of 64 bytes do, and
    the last 64 bytes. It tells a fetch function that gives other rows, not a single changed pixel.
    The padding of structured dtypes and long doubles counts as zeros.
    """
    hasher = xxhash.xxh3_64()
    for array in arrays:
        # The digest is of the values in order, not of how a view happens to lie in memory.
        array = np.ascontiguousarray(array)
        hasher.update(f"{array.dtype.str}{array.shape}".encode())
        hasher.update(_sample(array.reshape(-1).view(np.uint8), _padding(array.dtype)))
    return hasher.intdigest()


def digest_last_rows(arrays: Sequence[NDArray[Any]], axes: Sequence[int], most: int) -> int:
    """The digest of the last rows of columns: of `most` rows, or of all where there are fewer."""
    return digest_chunk(
        [_last(array, axis, most) for array, axis in zip(arrays, axes, strict=True)]
    )


def _last(array: NDArray[Any], axis: int, most: int) -> NDArray[Any]:
    size = array.shape[axis]
    return array[(slice(None),) * axis + (slice(max(0, size - most), size),)]


def hash_chunk(arrays: Any) -> int:
    """A digest over every byte of a chunk, of whatever it is made (the debug switch's)."""
    hasher = xxhash.xxh3_64()
    for array in arrays if isinstance(arrays, tuple) else ():
        if isinstance(array, np.ndarray) and not array.dtype.hasobject:
            hasher.update(f"{array.dtype.str}{array.shape}".encode())
            hasher.update(octets_of(array))
    return hasher.intdigest()


def has_padding(array: NDArray[Any]) -> bool:
    """Whether some bytes of an array are of no number."""
    return _padding(array.dtype) is not None


def octets_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """All bytes of an array in C order, with zeros where there is padding."""
    octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return _without_padding(octets, _padding(array.dtype))


@lru_cache
def _padding(dtype: np.dtype[Any]) -> NDArray[np.bool_] | None:
    """Which bytes of an item are of no number, so that nobody has set them: between the fields of
    a row, and beside the 80 bits of a long double. None where all are."""
    # Nobody sets padding, and what is in it differs from run to run: a feed would be refused after
    # a restart although its rows are the same.
    found = _find_padding(dtype)
    return found if found.any() else None


def _find_padding(dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    if dtype.subdtype is not None:
        inner, shape = dtype.subdtype
        return np.tile(_find_padding(inner), math.prod(shape))
    # 80 bits in 16 bytes: six of them are padding.
    if dtype.type in (np.longdouble, np.clongdouble) and _HAS_80_BITS:
        of_one = np.arange(_LONG_DOUBLE.itemsize) >= 10
        of_one = of_one if dtype.isnative else of_one[::-1]
        return np.tile(of_one, dtype.itemsize // len(of_one))
    padding = np.full(dtype.itemsize, dtype.names is not None)
    for name in dtype.names or ():
        field, offset = dtype.fields[name][:2]  # type: ignore[index]
        padding[offset : offset + field.itemsize] &= _find_padding(field)
    return padding


def _without_padding(
    octets: NDArray[np.uint8], padding: NDArray[np.bool_] | None
) -> NDArray[np.uint8]:
    """The bytes of items, with zeros where there is padding."""
    if padding is None:
        return octets
    cleared = octets.reshape(-1, len(padding)).copy()
    cleared[:, padding] = 0
    return cleared.reshape(-1)


def _sample(
    flat: NDArray[np.uint8], padding: NDArray[np.bool_] | None
) -> NDArray[np.uint8] | bytes:
    if flat.size <= _SAMPLED_WHOLE_BYTES:
        return _without_padding(flat, padding)
    # Evenly spaced over the whole array, both ends included: rows in another order differ.
    stride = (flat.size - _SAMPLE_BLOCK_BYTES) // (_SAMPLE_BLOCKS - 1)
    shape, strides = (_SAMPLE_BLOCKS, _SAMPLE_BLOCK_BYTES), (stride, 1)
    blocks = np.ndarray(shape, np.uint8, flat.data, 0, strides)
    # The overlapping view costs nothing; only the sampled bytes are copied.
    sample = blocks.data.tobytes() + flat[-_SAMPLE_BLOCK_BYTES:].data
    if padding is None:
        return sample
    # Only what was sampled is cleared: clearing the whole array would take longer than reading it.
    begins = np.append(np.arange(_SAMPLE_BLOCKS) * stride, flat.size - _SAMPLE_BLOCK_BYTES)
    places = (begins[:, np.newaxis] + np.arange(_SAMPLE_BLOCK_BYTES)).ravel()
    cleared = np.frombuffer(sample, np.uint8).copy()
    cleared[padding[places % len(padding)]] = 0
    return cleared


def chain_marks(
    mark: bytes | None, first: int, columns: Sequence[Sequence[Any]], places: range
) -> list[bytes]:
    """The running digests of a worker after each of some calls, the first of them `first`, whose
    chunks are at these places of the columns.

    Of the first calls every one is sampled, later every 256th, so that the cost of a one-row
    chunk is not the digest. Replay compares them; rows are counted beside them for every call.
    """
    marks: list[bytes] = []
    current = mark or b""
    i, num = 0, len(places)
    while i < num:
        number = first + i
        if number < _SAMPLED_CALLS or number % _SAMPLE_EVERY == 0:
            arrays = tuple([column[places[i]] for column in columns])
            current = _chain(current, number, arrays)
            marks.append(current)
            i += 1
        else:
            gap = min(num - i, _SAMPLE_EVERY - number % _SAMPLE_EVERY)
            marks.extend([current] * gap)
            i += gap
    return marks


def _chain(mark: bytes, number: int, arrays: tuple[Any, ...]) -> bytes:
    words = (number.to_bytes(8, "little"), digest_chunk(arrays).to_bytes(8, "little"))
    return xxhash.xxh3_64_digest(b"".join((mark, *words)))
