"""Arrays as raw bytes beside a header that says their dtype, shape and size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder.state import codec
from feeder.workers.stream import dtypes


def pack_array(array: NDArray[Any], blobs: list[Any]) -> list[Any]:
    """Append the bytes of an array to `blobs`; returns dtype, shape and size for the header."""
    dtype = dtype_fields(array.dtype)
    # A view where the array is contiguous: large leftovers are not copied to be written.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    blobs.append(flat.data if flat.size else b"")
    return [dtype, array.shape, flat.size]


def restore_array(
    raw: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    """The array whose bytes are `raw`."""
    return raw.view(dtype).reshape(shape)


def num_bytes_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """The bytes of an array. Raises `ValueError` for what no array has: objects, or less than
    nothing of something."""
    # Checked before anything is allocated: a header from elsewhere may say any numbers.
    if dtype.hasobject or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"no array has dtype {dtype} and shape {shape!r}")
    return math.prod(shape) * dtype.itemsize


def dtype_fields(dtype: np.dtype[Any]) -> Any:
    """A dtype as a header holds it. Raises `TypeError` for one that cannot be read back."""
    # Structured dtypes are nested lists, which only `codec` brings back as the tuples NumPy wants.
    fields = dtypes.write_dtype(dtype)
    return fields if isinstance(fields, str) else codec.pack(fields)


def read_dtype(fields: Any) -> np.dtype[Any]:
    """The reverse of `dtype_fields`."""
    return dtypes.read_dtype(_unpacked(fields))


def is_nameless(fields: Any) -> bool:
    """Whether what a header holds lacks the name of a dtype of ml_dtypes."""
    return dtypes.is_nameless(_unpacked(fields))


def _unpacked(fields: Any) -> Any:
    return fields if isinstance(fields, str) else codec.unpack(fields)
