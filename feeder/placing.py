"""Arrays as raw bytes beside a header, and what a header says of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder import codec


def place(array: NDArray[Any], blobs: list[Any]) -> list[Any]:
    """Add the bytes of an array to `blobs` and say what they are: dtype, shape and size."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    blobs.append(flat.data if flat.size else b"")
    return [dtype_fields(array.dtype), array.shape, flat.size]


def shaped(raw: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The array whose bytes are `raw`."""
    return raw.view(dtype).reshape(shape)


def size_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """The bytes of an array. Raises `ValueError` for what no array has: objects, or less than
    nothing of something."""
    if dtype.hasobject or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"no array has dtype {dtype} and shape {shape!r}")
    return math.prod(shape) * dtype.itemsize


def dtype_fields(dtype: np.dtype[Any]) -> Any:
    """A dtype as a header holds it."""
    return dtype.str if dtype.names is None else codec.pack(dtype.descr)


def read_dtype(fields: Any) -> np.dtype[Any]:
    """The reverse of `dtype_fields`."""
    if isinstance(fields, str):
        return np.dtype(fields)
    # NumPy's own reader of what `descr` is knows gaps between fields for what they are.
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(codec.unpack(fields))
    return dtype
