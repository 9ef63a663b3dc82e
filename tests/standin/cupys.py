"""A module like CuPy that has no GPU and writes down what it is told."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

CONSTANTS = {
    "memcpyHostToDevice": 1, "memcpyDeviceToDevice": 3,
    "cudaDevAttrHostRegisterReadOnlySupported": 113,
}  # fmt: skip


class CUDARuntimeError(RuntimeError):
    """What CuPy raises."""


class Runtime:
    """`cupy.cuda.runtime`: every call is written down; some answer."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self, num_gpus: int) -> None:
        self.num_gpus = num_gpus
        self.device = 0
        self.calls: list[tuple[Any, ...]] = []
        self.errors: dict[str, str] = {}
        self.reads_only = 1
        self._next = 0x10000

    def __getattr__(self, name: str) -> Any:
        if name in CONSTANTS:
            return CONSTANTS[name]

        def call(*args: Any) -> Any:
            if name in self.errors:
                raise CUDARuntimeError(self.errors[name])
            self.calls.append((name, *args))
            return self._answer(name, args)

        return call

    def _answer(self, name: str, args: tuple[Any, ...]) -> Any:
        if name == "malloc":
            self._next += 0x1000
            return self._next
        if name == "setDevice":
            self.device = args[0]
        answers = {
            "getDeviceCount": self.num_gpus, "getDevice": self.device, "memGetInfo": (70, 100),
            "deviceGetAttribute": self.reads_only, "driverGetVersion": 12080,
            "runtimeGetVersion": 13010,
            "getDeviceProperties": {"name": b"NVIDIA H200", "totalGlobalMem": 141 * 2**30},
        }  # fmt: skip
        return answers.get(name)

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        """The calls of these names, in order."""
        return [call for call in self.calls if call[0] in names]


class PinnedMemoryPointer(np.ndarray):
    """`cupy.cuda.PinnedMemoryPointer`, over NumPy's memory: signed bytes, as CuPy has it."""

    def __new__(cls, mem: Any, offset: int) -> PinnedMemoryPointer:
        return mem.values[offset:].view(np.int8).view(cls)

    @property
    def ptr(self) -> int:
        return self.ctypes.data


class NDArray:
    """`cupy.ndarray`, without values."""

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, memptr: Any, strides: Any = None, *,
        base: Any = None,
    ) -> None:  # fmt: skip
        self.like = np.broadcast_to(np.empty((), dtype), shape) if base is None else base
        self.shape = self.like.shape
        self.dtype = dtype
        self.data = memptr
        self.strides = np.empty(self.shape, dtype).strides if strides is None else strides
        self.nbytes = self.like.size * self.dtype.itemsize

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=self.data.mem.device_id)

    def __getitem__(self, key: Any) -> NDArray:
        return NDArray((), self.dtype, self.data, base=self.like[key])


def make_cupy(num_gpus: int = 2) -> Any:
    """Return the module."""
    runtime = Runtime(num_gpus)

    def event(**flags: bool) -> Any:
        runtime.calls.append(("Event", flags))
        return SimpleNamespace(ptr=0xE0, done=True, synchronize=lambda: runtime.synchronize())

    def pinned(size: int, flags: int) -> Any:
        if "hostAlloc" in runtime.errors:
            raise CUDARuntimeError(runtime.errors["hostAlloc"])
        runtime.calls.append(("PinnedMemory", size, flags))
        return SimpleNamespace(values=np.zeros(size, np.uint8))

    def unowned(ptr: int, size: int, owner: object, device_id: int) -> Any:
        return SimpleNamespace(ptr=ptr, size=size, owner=owner, device_id=device_id)

    cupy: Any = ModuleType("cupy")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None, origin="here")
    cupy.__version__ = "14.2.0"
    cupy.ndarray = NDArray
    cupy.ascontiguousarray = lambda array: NDArray(array.shape, array.dtype, array.data)
    cupy.current = SimpleNamespace(ptr=0)
    cupy.cuda = SimpleNamespace(
        runtime=runtime, Event=event, PinnedMemory=pinned,
        PinnedMemoryPointer=PinnedMemoryPointer,
        Stream=lambda non_blocking: SimpleNamespace(ptr=0x50, non_blocking=non_blocking),
        UnownedMemory=unowned,
        MemoryPointer=lambda mem, offset: SimpleNamespace(mem=mem, ptr=mem.ptr + offset),
        get_current_stream=lambda device_id: cupy.current,
    )  # fmt: skip
    return cupy


@contextmanager
def imported(cupy: Any) -> Iterator[Any]:
    """Let it be what `import cupy` gives for as long as the context lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        yield cupy
