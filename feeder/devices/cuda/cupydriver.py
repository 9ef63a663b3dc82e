"""One GPU, by way of CuPy: the CUDA runtime's calls, and CuPy's arrays over memory of ours."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from feeder.devices.cuda.driver import Found
from feeder.devices.cuda.runtime import PORTABLE, RuntimeDriver
from feeder.devices.layout import ColumnPlace, Form
from feeder.errors import ConfigError


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


class PinnedMemory:
    """Pinned memory of the host; views of it keep it. Fixed when made."""

    def __init__(self, cuda: Any, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        memory = cuda.PinnedMemory(num_bytes, PORTABLE)
        self._pointer = cuda.PinnedMemoryPointer(memory, 0)
        self.address = int(self._pointer.ptr)

    @property
    def view(self) -> memoryview:
        """All of it."""
        return memoryview(self._pointer).cast("B")[: self.num_bytes]


class CupyDriver(RuntimeDriver):
    """One GPU (`feeder.devices.cuda.driver.Driver`). Fixed when made: any thread calls it."""

    def __init__(self, cupy: Any, name: str, ordinal: int) -> None:
        super().__init__(cupy.cuda.runtime, name, ordinal)
        self._cupy = cupy
        self._cuda = cupy.cuda

    def name_and_bytes(self) -> tuple[str, int]:
        """What the device calls itself, and the bytes that it has."""
        properties = self._runtime.getDeviceProperties(self._ordinal)
        return properties["name"].decode(), int(properties["totalGlobalMem"])

    def alloc_pinned(self, num_bytes: int) -> PinnedMemory:
        """Pinned memory that every device reads, straight from the driver."""
        with self._bound():
            return PinnedMemory(self._cuda, num_bytes)

    def make_stream(self) -> Any:
        """A stream that does not wait for the default stream."""
        with self._bound():
            return self._cuda.Stream(non_blocking=True)

    def make_event(self) -> Any:
        """An event that puts a waiting thread to sleep."""
        with self._bound():
            return self._cuda.Event(block=True, disable_timing=True)

    def current_stream(self) -> Any:
        """CuPy's current stream of this device in this thread."""
        return self._shared(self._cuda.get_current_stream(self._ordinal))

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

    def working_on(self, stream: Any) -> Any:
        """The stream is CuPy's current one meanwhile."""
        return stream

    def find(self, value: Any) -> Found | None:
        """An array of CuPy on this device."""
        if not isinstance(value, self._cupy.ndarray):
            return None
        if value.device.id != self._ordinal:
            raise ValueError(f"an array on GPU {value.device.id}, expected one on {self.name}")
        value = self._cupy.ascontiguousarray(value) if value.shape else value
        form = Form(value.shape, value.dtype, value.strides, value.nbytes)
        return Found(value, int(value.data.ptr), form)

    def arrays_like(
        self, address: int, num_bytes: int, root: object, forms: Sequence[Form]
    ) -> tuple[Any, ...]:
        """CuPy's arrays over memory that `root` keeps."""
        memory = self._cuda.UnownedMemory(address, num_bytes, root, self._ordinal)
        pointer, ndarray = self._cuda.MemoryPointer, self._cupy.ndarray
        return tuple(
            ndarray(form.shape, form.dtype, pointer(memory, form.offset), form.strides)
            for form in forms
        )
