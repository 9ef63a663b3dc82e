"""One GPU for PyTorch, without CuPy: NVIDIA's own binding of the CUDA runtime, which PyTorch brings
along, and tensors over memory of ours."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from feeder.devices.cuda.driver import Found
from feeder.devices.cuda.runtime import PORTABLE, Allocated, Named, RuntimeDriver, is_alive
from feeder.devices.layout import ColumnPlace, Form
from feeder.errors import ConfigError

_BINDINGS = "cuda.bindings.runtime"


class Runtime:
    """The calls of NVIDIA's binding by the names that CuPy gives them; an error is raised. Fixed
    when made: any thread calls it."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        self._done = bindings.cudaError_t.cudaSuccess
        self._not_ready = bindings.cudaError_t.cudaErrorNotReady
        self.memcpyHostToDevice = bindings.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.memcpyDeviceToDevice = bindings.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self.cudaDevAttrHostRegisterReadOnlySupported = (
            bindings.cudaDeviceAttr.cudaDevAttrHostRegisterReadOnlySupported
        )
        self.setDevice = self._raising(bindings.cudaSetDevice)
        self.getDevice = self._raising(bindings.cudaGetDevice)
        self.deviceGetAttribute = self._raising(bindings.cudaDeviceGetAttribute)
        self.memGetInfo = self._raising(bindings.cudaMemGetInfo)
        self.malloc = self._raising(bindings.cudaMalloc)
        self.free = self._raising(bindings.cudaFree)
        self.hostAlloc = self._raising(bindings.cudaHostAlloc)
        self.freeHost = self._raising(bindings.cudaFreeHost)
        self.hostRegister = self._raising(bindings.cudaHostRegister)
        self.hostUnregister = self._raising(bindings.cudaHostUnregister)
        self.memcpyAsync = self._raising(bindings.cudaMemcpyAsync)
        self.eventRecord = self._raising(bindings.cudaEventRecord)
        self.eventSynchronize = self._raising(bindings.cudaEventSynchronize)
        self.eventDestroy = self._raising(bindings.cudaEventDestroy)
        self.streamSynchronize = self._raising(bindings.cudaStreamSynchronize)
        self._create_event = self._raising(bindings.cudaEventCreateWithFlags)
        self._wait_event = self._raising(bindings.cudaStreamWaitEvent)
        self._event_flags = bindings.cudaEventBlockingSync | bindings.cudaEventDisableTiming

    def _raising(self, call: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        done = self._done

        def checked(*args: Any) -> Any:
            error, *found = call(*args)
            if error != done:
                raise self._error(error)
            return found[0] if len(found) == 1 else found

        return checked

    def _error(self, error: Any) -> RuntimeError:
        _, text = self._bindings.cudaGetErrorString(error)
        return RuntimeError(f"{error.name}: {text.decode()}")

    def eventCreate(self) -> int:
        """An event that puts a waiting thread to sleep."""
        return int(self._create_event(self._event_flags))

    def eventQuery(self, event: int) -> bool:
        """Whether it has come."""
        (error,) = self._bindings.cudaEventQuery(event)
        if error not in (self._done, self._not_ready):
            raise self._error(error)
        return bool(error == self._done)

    def streamWaitEvent(self, stream: int, event: int) -> None:
        """What the stream is given from now on comes after the event."""
        self._wait_event(stream, event, 0)


def import_bindings() -> Any:
    """NVIDIA's binding of the runtime; None where it is not installed."""
    try:
        return importlib.import_module(_BINDINGS)
    except ImportError:
        return None


def open_gpu(name: str, ordinal: int) -> TorchDriver:
    """The GPU of that number. Raises `ConfigError`; touches no GPU's memory."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"device {name!r} needs PyTorch, which is not installed; pip install "
            "'feedworks[torch]', or use 'cpu'"
        )
    torch = importlib.import_module("torch")
    bindings = import_bindings()
    if bindings is None:
        raise ConfigError(
            f"device {name!r} needs NVIDIA's bindings, which this PyTorch has not brought along; "
            "pip install cuda-bindings, of the driver's CUDA, or use 'cpu'"
        )
    num = torch.cuda.device_count()
    if ordinal >= num:
        known = ", ".join(repr(f"torch:{i}") for i in range(num)) or "none"
        raise ConfigError(
            f"device {name!r} is none of the {num} GPUs that PyTorch sees, expected one of {known}"
        )
    return TorchDriver(torch, Runtime(bindings), name, ordinal)


class Event:
    """An event, destroyed on whichever thread drops it. Fixed when made."""

    def __init__(self, runtime: Runtime) -> None:
        self._pid = os.getpid()
        self._runtime = runtime
        self.ptr = runtime.eventCreate()

    @property
    def done(self) -> bool:
        """Whether it has come."""
        return self._runtime.eventQuery(self.ptr)

    def synchronize(self) -> None:
        """Let the calling thread sleep until it has come."""
        self._runtime.eventSynchronize(self.ptr)

    def __del__(self, is_alive: Callable[..., bool] = is_alive) -> None:
        if hasattr(self, "ptr") and is_alive(self._pid):
            self._runtime.eventDestroy(self.ptr)


class PinnedMemory(Allocated):
    """Pinned memory of the host; views of it keep it. Fixed when made."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For NumPy, whose array over it refers to it."""
        return {
            "shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False),
            "version": 3,
        }  # fmt: skip

    @property
    def view(self) -> memoryview:
        """All of it."""
        return memoryview(np.asarray(self))


class _Lent:
    """Memory of the device as PyTorch takes it: the tensor over it refers to this, and this to the
    root. Fixed when made."""

    def __init__(self, address: int, num_bytes: int, root: object) -> None:
        self._root = root
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None,
            "version": 2,
        }  # fmt: skip


class TorchDriver(RuntimeDriver):
    """One GPU (`feeder.devices.cuda.driver.Driver`). Fixed when made: any thread calls it."""

    def __init__(self, torch: Any, runtime: Runtime, name: str, ordinal: int) -> None:
        super().__init__(runtime, name, ordinal)
        self._torch = torch
        self._device = torch.device("cuda", ordinal)

    def name_and_bytes(self) -> tuple[str, int]:
        """What the device calls itself, and the bytes that it has."""
        properties = self._torch.cuda.get_device_properties(self._ordinal)
        return properties.name, int(properties.total_memory)

    def alloc_pinned(self, num_bytes: int) -> PinnedMemory:
        """Pinned memory that every device reads, straight from the driver."""
        runtime = self._runtime
        with self._bound():
            return PinnedMemory(
                num_bytes, lambda size: runtime.hostAlloc(size, PORTABLE), runtime.freeHost
            )

    def make_stream(self) -> Named:
        """A stream that does not wait for the default stream."""
        stream = self._torch.cuda.Stream(self._device)
        return Named(stream.cuda_stream, stream)

    def make_event(self) -> Event:
        """An event that puts a waiting thread to sleep."""
        with self._bound():
            return Event(self._runtime)

    def current_stream(self) -> Any:
        """PyTorch's current stream of this device in this thread."""
        return self.stream_of(self._torch.cuda.current_stream(self._device))

    def arrays(
        self, address: int, num_bytes: int, root: object, places: Sequence[ColumnPlace], length: int
    ) -> tuple[Any, ...]:
        """Tensors over memory that `root` keeps."""
        torch = self._torch
        # One tensor over all, whose storage the others share: whichever is left keeps the root.
        whole = torch.as_tensor(_Lent(address, num_bytes, root), device=self._device)
        tensors = []
        for shape, dtype, axis, offset, size in places:
            raw = whole[offset : offset + size]
            tensor = raw.view(getattr(torch, dtype.name)).view(shape)
            tensors.append(tensor if shape[axis] == length else tensor.narrow(axis, 0, length))
        return tuple(tensors)

    @contextmanager
    def working_on(self, stream: Any) -> Iterator[None]:
        """The stream is PyTorch's current one meanwhile, and no gradients are kept."""
        with self._torch.no_grad(), self._torch.cuda.stream(stream.owner):
            yield

    def find(self, value: Any) -> Found | None:
        """A tensor on this device."""
        torch = self._torch
        if not isinstance(value, torch.Tensor):
            return None
        if value.device != self._device or value.layout is not torch.strided:
            raise ValueError(
                f"a tensor on {value.device} of layout {value.layout}, expected a dense one on "
                f"{self._device}"
            )
        value = value.detach().resolve_conj().resolve_neg()
        if not value.is_contiguous(memory_format=torch.channels_last):
            value = value.contiguous()
        size = value.numel() * value.element_size()
        return Found(
            value, value.data_ptr(), Form(tuple(value.shape), value.dtype, value.stride(), size)
        )

    def arrays_like(
        self, address: int, num_bytes: int, root: object, forms: Sequence[Form]
    ) -> tuple[Any, ...]:
        """Tensors over memory that `root` keeps."""
        whole = self._torch.as_tensor(_Lent(address, num_bytes, root), device=self._device)
        return tuple(
            whole[form.offset : form.offset + form.num_bytes]
            .view(form.dtype).as_strided(form.shape, form.strides)
            for form in forms
        )  # fmt: skip
