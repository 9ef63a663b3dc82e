"""One GPU, by way of CuPy: the CUDA runtime's calls, and CuPy's arrays over memory of ours.

Nothing here is of CuPy's pools: its device memory may be given to another stream while a copy into
it is on its way, and its pinned memory comes in powers of two.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from feeder.devices.layout import ColumnPlace
from feeder.errors import ConfigError

_PORTABLE, _READ_ONLY = 1, 8
"""cudaHostRegisterPortable and cudaHostRegisterReadOnly, which CuPy does not name."""

_LEGACY, _PER_THREAD = 1, 2
"""What the runtime calls its two default streams; 0 is the first of them, too."""


def import_cupy(name: str) -> Any:
    """CuPy; raises `ConfigError` where it cannot be had."""
    if importlib.util.find_spec("cupy") is None:
        raise ConfigError(
            f"device {name!r} needs CuPy, which is not installed; "
            "pip install 'feedworks[cuda12]' or 'feedworks[cuda13]', as the driver is, or use 'cpu'"
        )
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigError(f"device {name!r} needs CuPy, which cannot be imported: {error}") from (
            error
        )


def count_gpus(cupy: Any, name: str) -> int:
    """How many GPUs there are; raises `ConfigError` with the driver's reason where none can be
    had."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(
            f"device {name!r} cannot be had, the driver says {str(error)!r}; use 'cpu', or see "
            "`feeder doctor`"
        ) from error


def open_gpu(name: str, ordinal: int) -> CupyDriver:
    """The GPU of that number. Raises `ConfigError`; touches no GPU's memory."""
    cupy = import_cupy(name)
    num = count_gpus(cupy, name)
    if ordinal >= num:
        known = ", ".join(repr(f"cuda:{i}") for i in range(num)) or "none"
        raise ConfigError(
            f"device {name!r} is none of the {num} GPUs that this process sees, expected one of "
            f"{known}"
        )
    return CupyDriver(cupy, name, ordinal)


def _is_alive(
    pid: int,
    getpid: Callable[[], int] = os.getpid,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
) -> bool:
    """Whether the driver may be called: not in a forked child, nor when the process ends. Then the
    names of the module may be gone, which is why finalisers have this one as a default."""
    return getpid() == pid and not is_finalizing()


class DeviceMemory:
    """Memory of one GPU. Fixed when made, and freed on whichever thread drops it."""

    def __init__(self, runtime: Any, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.address = 0
        self._pid = os.getpid()
        self._free = runtime.free
        self.address = int(runtime.malloc(num_bytes))

    def __del__(self, is_alive: Callable[..., bool] = _is_alive) -> None:
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

    def __del__(self, is_alive: Callable[..., bool] = _is_alive) -> None:
        if self.address and is_alive(self._pid):
            self._unregister(self.address)


class PinnedMemory:
    """Pinned memory of the host; views of it keep it. Fixed when made."""

    def __init__(self, cuda: Any, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        memory = cuda.PinnedMemory(num_bytes, _PORTABLE)
        self._pointer = cuda.PinnedMemoryPointer(memory, 0)
        self.address = int(self._pointer.ptr)

    @property
    def view(self) -> memoryview:
        """All of it."""
        return memoryview(self._pointer).cast("B")[: self.num_bytes]


class Named:
    """A stream that somebody else made. Fixed when made."""

    def __init__(self, ptr: int, owner: object) -> None:
        self.ptr = ptr
        self._owner = owner


class CupyDriver:
    """One GPU (`feeder.devices.cuda.driver.Driver`). Fixed when made: any thread calls it."""

    def __init__(self, cupy: Any, name: str, ordinal: int) -> None:
        self.name = name
        self._cupy = cupy
        self._cuda = cupy.cuda
        self._runtime = cupy.cuda.runtime
        self._ordinal = ordinal

    def name_and_bytes(self) -> tuple[str, int]:
        """What the device calls itself, and the bytes that it has."""
        properties = self._runtime.getDeviceProperties(self._ordinal)
        return properties["name"].decode(), int(properties["totalGlobalMem"])

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

    def alloc_device(self, num_bytes: int) -> DeviceMemory:
        """Memory of the device, straight from the driver."""
        with self._bound():
            return DeviceMemory(self._runtime, num_bytes)

    def alloc_pinned(self, num_bytes: int) -> PinnedMemory:
        """Pinned memory that every device reads, straight from the driver."""
        with self._bound():
            return PinnedMemory(self._cuda, num_bytes)

    def free_bytes(self) -> int:
        """Memory of the device that is free."""
        with self._bound():
            return int(self._runtime.memGetInfo()[0])

    def register(self, memory: memoryview) -> Registration:
        """Pin memory that this process can read and not write."""
        attribute = self._runtime.cudaDevAttrHostRegisterReadOnlySupported
        with self._bound():
            reads = self._runtime.deviceGetAttribute(attribute, self._ordinal)
            return Registration(self._runtime, memory, _PORTABLE | (_READ_ONLY if reads else 0))

    # ---- order

    def make_stream(self) -> Any:
        """A stream that does not wait for the default stream."""
        with self._bound():
            return self._cuda.Stream(non_blocking=True)

    def make_event(self) -> Any:
        """An event that puts a waiting thread to sleep."""
        with self._bound():
            return self._cuda.Event(block=True, disable_timing=True)

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

    def current_stream(self) -> Any:
        """CuPy's current stream of this device in this thread."""
        return self._shared(self._cuda.get_current_stream(self._ordinal))

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
                "thread can wait for; use a stream: `with cupy.cuda.Stream(non_blocking=True):`"
            )
        return stream

    # ---- arrays

    def arrays(
        self, address: int, num_bytes: int, root: object, places: Sequence[ColumnPlace], length: int
    ) -> tuple[Any, ...]:
        """CuPy's arrays over memory that `root` keeps."""
        memory = self._cuda.UnownedMemory(address, num_bytes, root, self._ordinal)
        pointer, ndarray = self._cuda.MemoryPointer, self._cupy.ndarray
        arrays = []
        for shape, dtype, axis, offset, _ in places:
            array = ndarray(shape, dtype, pointer(memory, offset))
            if shape[axis] != length:
                array = array[(slice(None),) * axis + (slice(length),)]
            arrays.append(array)
        return tuple(arrays)
