"""Shared memory that is mapped and holds no descriptor.

Python's `mmap` keeps a duplicate of the descriptor for as long as the mapping lives (up to 3.12
there is no way around), so a thousand chunks that somebody holds would be a thousand descriptors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
