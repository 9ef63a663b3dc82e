"""Fetch functions as bytes, from a process to those that it has started.

Nothing here reads bytes that come from a disk or from a stranger.
"""

from __future__ import annotations

import io
import os
import pickle  # noqa: TID251
import sys
from typing import Any, NamedTuple

import numpy as np

from feeder.errors import ConfigError

_ALIGNED_BYTES = 64
"""Each buffer begins at a multiple of it, as NumPy's own arrays do."""


class Parcel(NamedTuple):
    """A fetch function on its way: its pickle, and the large arrays that belong to it."""

    data: bytes
    is_path: bool
    buffers: tuple[memoryview, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer."""
        return [buffer.nbytes for buffer in self.buffers]


def pack_function(fetch: Any) -> Parcel:
    """A fetch function for a process that does not share this one's memory.

    Raises:
        ConfigError: it cannot be sent.
    """
    if isinstance(fetch, str):
        return Parcel(fetch.encode(), True, ())
    buffers: list[pickle.PickleBuffer] = []
    by_value = _is_of_main(fetch)
    pickler = _by_value if by_value else _by_name
    try:
        data = pickler(fetch, buffers)
    except Exception as error:
        name = getattr(fetch, "__qualname__", type(fetch).__qualname__)
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "cloudpickle"
        why = "part of it stands in the script itself, or in a notebook" if is_missing else error
        raise ConfigError(
            f"fetch_fun {name!r} cannot be sent to a process: {why}; there are three ways out: put "
            "it into a module of its own, give its place as 'MODULE:ATTR', or install cloudpickle "
            "(without files, locks and sockets inside it: give the class that has an open handle a "
            "__getstate__ that leaves it out, and open it at its first use in each process)"
        ) from error
    return Parcel(data, False, tuple(buffer.raw() for buffer in buffers))


def _is_of_main(fetch: Any) -> bool:
    """Whether a function is one that no other process can import."""
    owner = getattr(fetch, "__self__", fetch)
    owner = owner if isinstance(owner, type) or hasattr(owner, "__qualname__") else type(owner)
    name = getattr(owner, "__qualname__", "")
    return getattr(owner, "__module__", "") in ("__main__", "__mp_main__") or "<" in name


class _ByName(pickle.Pickler):
    """Functions and classes by the names under which they are imported. Owned by the thread that
    sends the function."""

    def reducer_override(self, value: Any) -> Any:
        return _reduce_mapped(value)


def _by_name(fetch: Any, buffers: list[pickle.PickleBuffer]) -> bytes:
    file = io.BytesIO()
    try:
        _ByName(file, 5, buffer_callback=_keep(buffers)).dump(fetch)
    except (pickle.PicklingError, AttributeError, TypeError):
        # Parts of it may be the script's own, such as a dataset's transforms.
        buffers.clear()
        try:
            return _by_value(fetch, buffers)
        except ModuleNotFoundError:
            pass
        raise
    data = file.getvalue()
    # What a module `__main__` gives a name to, only the script has.
    return _by_value(fetch, buffers) if b"__main__" in data else data


def _by_value(fetch: Any, buffers: list[pickle.PickleBuffer]) -> bytes:
    import cloudpickle  # noqa: TID251

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
        """Pickles functions of `__main__` by value, and arrays over files by path. The thread that
        sends the function owns it."""

        def reducer_override(self, value: Any) -> Any:
            # cloudpickle would send a copy of what a text file holds, whose place is its own.
            if isinstance(value, io.TextIOWrapper) and value not in (sys.stdout, sys.stderr):
                raise pickle.PicklingError(f"it has {value.name!r} open")
            reduced = _reduce_mapped(value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    buffers.clear()
    file = io.BytesIO()
    ByValue(file, 5, buffer_callback=_keep(buffers)).dump(fetch)
    return file.getvalue()


def _keep(buffers: list[pickle.PickleBuffer]) -> Any:
    def keep(buffer: pickle.PickleBuffer) -> bool:
        # False takes it out of the pickle. Small ones stay: each has a line in the message.
        if buffer.raw().nbytes < 4096:
            return True
        buffers.append(buffer)
        return False

    return keep


def _reduce_mapped(value: Any) -> Any:
    """A file that is mapped is opened again over there, and not read into a pickle."""
    # A subclass is more than its bytes.
    if type(value) not in (np.ndarray, np.memmap) or value.nbytes < 4096:
        return NotImplemented
    base: Any = value
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    # A view of a map knows of the file too; one that is no longer the file's bytes does not.
    if not isinstance(base, np.memmap) or base.filename is None or base.mode not in ("r", "c"):
        return NotImplemented
    if not (value.flags.c_contiguous and base.flags.c_contiguous):
        return NotImplemented
    start = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    place = os.fspath(base.filename), value.dtype, base.offset + start, value.shape
    return _map_again, (*place, type(value) is np.memmap)


def _map_again(path: str, dtype: Any, offset: int, shape: Any, is_memmap: bool) -> Any:
    mapped = np.memmap(path, dtype, "r", offset, shape)
    return mapped if is_memmap else mapped.view(np.ndarray)


def unpack_function(data: bytes, buffers: list[Any]) -> Any:
    """The reverse of `pack_function`, for what is no path."""
    return pickle.loads(data, buffers=buffers)


def place_buffers(buffers: tuple[memoryview, ...]) -> int:
    """The descriptor of a memfd that holds the buffers; the caller closes it."""
    descriptor = os.memfd_create("feeder-function", os.MFD_CLOEXEC)
    try:
        at = 0
        for buffer in buffers:
            while buffer.nbytes:
                num = os.pwrite(descriptor, buffer[: 2**30], at)
                buffer, at = buffer[num:], at + num
            at = aligned(at)
        os.ftruncate(descriptor, max(1, at))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def aligned(at: int) -> int:
    """The next place at which a buffer may begin."""
    return -(-at // _ALIGNED_BYTES) * _ALIGNED_BYTES


def dump(value: Any) -> bytes:
    """A value as a pickle, for a process of this one's own."""
    return pickle.dumps(value, 5)


def load(data: bytes) -> Any:
    """The reverse of `dump`."""
    return pickle.loads(data)
