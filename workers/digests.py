"""What tells a chunk that comes again from another: digests of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

_SAMPLED_WHOLE_BYTES = 16 * 1024
_SAMPLE_BLOCKS = 256
_SAMPLE_BLOCK_BYTES = 64

# Real and complex ones, where they have 80 bits in 12 or 16 bytes.
_LONG_DOUBLE = np.dtype(np.longdouble)
_LONG_DOUBLES = "gG" if np.finfo(np.longdouble).nmant == 63 else ""


def digest_chunk(arrays: Sequence[NDArray[Any]]) -> int:
    """A digest of a chunk: xxh3 over dtypes, shapes and a sample of the bytes.

    Columns of up to 16 KiB go in whole; of larger ones 256 evenly spaced blocks of 64 bytes do, and
    the last 64 bytes. It tells a fetch function that gives other rows, not a single changed pixel.
    The padding of structured dtypes and long doubles counts as zeros.
    """
    hasher = xxhash.xxh3_64()
    for array in arrays:
        hasher.update(f"{array.dtype.str}{array.shape}".encode())
        hasher.update(_sample(_flat(array)))
    return hasher.intdigest()


def hash_chunk(arrays: Any) -> int:
    """A digest over every byte of a chunk, of whatever it is made (the debug switch's)."""
    hasher = xxhash.xxh3_64()
    for array in arrays if isinstance(arrays, tuple) else ():
        if isinstance(array, np.ndarray) and not array.dtype.hasobject:
            hasher.update(_flat(array))
    return hasher.intdigest()


def _flat(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of an array in C order; those that are of no number are 0, as nobody has set them:
    what lies between the fields of a row, and behind the 80 bits of a long double."""
    if array.dtype.names is not None or array.dtype.char in _LONG_DOUBLES:
        cleared = np.zeros(array.shape, array.dtype)
        _copy_numbers(array, cleared)
        array = cleared
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _copy_numbers(source: NDArray[Any], target: NDArray[Any]) -> None:
    # Field by field, down to the plain ones: of whole rows NumPy may copy what lies between.
    for name in source.dtype.names or ():
        _copy_numbers(source[name], target[name])
    if source.dtype.char in _LONG_DOUBLES:
        source = source.copy()
        source.reshape(-1).view(np.uint8).reshape(-1, _LONG_DOUBLE.itemsize)[:, 10:] = 0
    if source.dtype.names is None:
        target[...] = source


def _sample(flat: NDArray[np.uint8]) -> NDArray[np.uint8] | bytes:
    if flat.size <= _SAMPLED_WHOLE_BYTES:
        return flat
    stride = (flat.size - _SAMPLE_BLOCK_BYTES) // (_SAMPLE_BLOCKS - 1)
    shape, strides = (_SAMPLE_BLOCKS, _SAMPLE_BLOCK_BYTES), (stride, 1)
    blocks = np.ndarray(shape, np.uint8, flat.data, 0, strides)
    return blocks.data.tobytes() + flat[-_SAMPLE_BLOCK_BYTES:].data
