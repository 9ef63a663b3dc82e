"""One GPU by the calls of the CUDA runtime, whichever library makes them.

Nothing here is of a library's pools: device memory of a pool may be given to another stream while a
copy into it is on its way, and pinned memory of a pool comes in powers of two.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from feeder.errors import ConfigError

PORTABLE = 1
"""cudaHostAllocPortable and cudaHostRegisterPortable."""
_READ_ONLY = 8
"""cudaHostRegisterReadOnly."""

_LEGACY, _PER_THREAD = 1, 2
"""What the runtime calls its two default streams; 0 is the first of them, too."""


def is_alive(
    pid: int,
    getpid: Callable[[], int] = os.getpid,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
) -> bool:
    """Whether the driver may be called: not in a forked child, nor when the process ends. Then the
    names of the module may be gone, which is why finalisers have this one as a default."""
    return getpid() == pid and not is_finalizing()


class Allocated:
    """Memory that the driver has given. Fixed when made, and freed on whichever thread drops it."""

    def __init__(
        self, num_bytes: int, alloc: Callable[[int], Any], free: Callable[[int], Any]
    ) -> None:
        self.num_bytes = num_bytes
        self.address = 0
        self._pid = os.getpid()
        self._free = free
        self.address = int(alloc(num_bytes))

    def __del__(self, is_alive: Callable[..., bool] = is_alive) -> None:
        if self.address and is_alive(self._pid):
            self._free(self.address)


class Registration:
    """Memory of somebody else's, pinned for as long as this lives; the memory lives longer. Fixed
    when made, and unpinned on whichever thread drops it."""

    def __init__(self, runtime: Any, memory: memoryview, flags: int) -> None:
        self.address = 0
        self._pid = os.getpid()
        self._memory = memory
        self._unregister = runtime.hostUnregister
        address = np.frombuffer(memory, np.uint8).ctypes.data
        runtime.hostRegister(address, memory.nbytes + -memory.nbytes % mmap.PAGESIZE, flags)
        self.address = address

    def __del__(self, is_alive: Callable[..., bool] = is_alive) -> None:
        if self.address and is_alive(self._pid):
            self._unregister(self.address)


class Named:
    """A stream that somebody else made. Fixed when made."""

    def __init__(self, ptr: int, owner: object) -> None:
        self.ptr = ptr
        self.owner = owner


class RuntimeDriver:
    """What of a driver (`feeder.devices.cuda.driver.Driver`) is the same whoever makes the calls.
    `runtime` has them by the names that CuPy gives them. Fixed when made: any thread calls it."""

    def __init__(self, runtime: Any, name: str, ordinal: int) -> None:
        self.name = name
        self._runtime = runtime
        self._ordinal = ordinal

    def bind(self) -> None:
        """Make the device the calling thread's own."""
        self._runtime.setDevice(self._ordinal)

    @contextmanager
    def _bound(self) -> Iterator[None]:
        """The device is the calling thread's own meanwhile."""
        before = self._runtime.getDevice()
        if before == self._ordinal:
            yield
            return
        self._runtime.setDevice(self._ordinal)
        try:
            yield
        finally:
            self._runtime.setDevice(before)

    # ---- memory

    def alloc_device(self, num_bytes: int) -> Allocated:
        """Memory of the device, straight from the driver."""
        with self._bound():
            return Allocated(num_bytes, self._runtime.malloc, self._runtime.free)

    def free_bytes(self) -> int:
        """Memory of the device that is free."""
        with self._bound():
            return int(self._runtime.memGetInfo()[0])

    def register(self, memory: memoryview) -> Registration:
        """Pin memory that this process can read and not write."""
        attribute = self._runtime.cudaDevAttrHostRegisterReadOnlySupported
        with self._bound():
            reads = self._runtime.deviceGetAttribute(attribute, self._ordinal)
            return Registration(self._runtime, memory, PORTABLE | (_READ_ONLY if reads else 0))

    # ---- order

    def record(self, event: Any, stream: Any) -> None:
        """The event comes after all that the stream has been given. For threads that are bound."""
        self._runtime.eventRecord(event.ptr, stream.ptr)

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream is given from now on comes after the event."""
        if self._runtime.getDevice() == self._ordinal:
            self._runtime.streamWaitEvent(stream.ptr, event.ptr)
            return
        with self._bound():  # Another device's default stream has the same address.
            self._runtime.streamWaitEvent(stream.ptr, event.ptr)

    def synchronize(self, event: Any) -> None:
        """Wait for the event."""
        event.synchronize()

    def is_done(self, event: Any) -> bool:
        """Whether the event has come."""
        return bool(event.done)

    def drain(self, stream: Any) -> None:
        """Wait for all that the stream has been given."""
        self._runtime.streamSynchronize(stream.ptr)

    def copy_in(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        """Copy from pinned memory into the device's."""
        kind = self._runtime.memcpyHostToDevice
        self._runtime.memcpyAsync(target, source, num_bytes, kind, stream.ptr)

    def copy_within(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        """Copy within the device's memory."""
        kind = self._runtime.memcpyDeviceToDevice
        with self._bound():
            self._runtime.memcpyAsync(target, source, num_bytes, kind, stream.ptr)

    def stream_of(self, stream: Any) -> Any:
        """The stream that a CuPy or PyTorch stream, or any object with `__cuda_stream__`, names;
        or its address."""
        if hasattr(stream, "__cuda_stream__"):
            _, ptr = stream.__cuda_stream__()
        else:
            ptr = stream
            for attribute in ("ptr", "cuda_stream"):
                ptr = getattr(stream, attribute, ptr)
        if not isinstance(ptr, int) or isinstance(ptr, bool) or ptr < 0:
            raise ConfigError(
                f"stream is {stream!r}, expected a stream of CuPy or PyTorch, an object with "
                "__cuda_stream__, or the address of a cudaStream_t"
            )
        return self._shared(Named(0 if ptr == _LEGACY else ptr, stream))

    def _shared(self, stream: Any) -> Any:
        """A stream that other threads can name, too."""
        if stream.ptr == _PER_THREAD:
            raise ConfigError(
                f"the stream of {self.name!r} is the thread's own default stream, which no other "
                "thread can wait for; use another, as `cupy.cuda.Stream(non_blocking=True)` or "
                "`torch.cuda.Stream()`"
            )
        return stream
