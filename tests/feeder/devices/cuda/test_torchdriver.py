"""What NVIDIA's binding of the runtime is told for PyTorch, over modules like both without a GPU.

That the real ones answer so is seen by `tests/gpu`.
"""

from __future__ import annotations

import enum
import gc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.devices.cuda import torchdriver
from feeder.devices.cuda.driver import open_driver
from feeder.devices.layout import layout
from feeder.workers.stream.chunks import Column


class Status(enum.IntEnum):
    """`cudaError_t`."""

    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorNotReady = 600


class Bindings(ModuleType):
    """`cuda.bindings.runtime`: every call is written down; some answer, and some fail."""

    cudaError_t = Status
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToDevice=3)
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrHostRegisterReadOnlySupported=113)
    cudaEventBlockingSync, cudaEventDisableTiming = 1, 2

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.calls: list[tuple[Any, ...]] = []
        self.errors: dict[str, Status] = {}
        self.device = 0
        self.pinned: list[np.ndarray] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            if name in self.errors:
                return (self.errors[name], *(None,) * len(self._answer(name, args)))
            return (Status.cudaSuccess, *self._answer(name, args))

        return call

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cudaSetDevice":
            (self.device,) = args
        if name == "cudaHostAlloc":
            self.pinned.append(np.zeros(args[0], np.uint8))
            return (self.pinned[-1].ctypes.data,)
        answers = {
            "cudaGetDevice": (self.device,), "cudaMalloc": (0x9000,), "cudaMemGetInfo": (70, 100),
            "cudaDeviceGetAttribute": (1,), "cudaEventCreateWithFlags": (0xE0,),
            "cudaGetErrorString": (b"out of memory",),
        }  # fmt: skip
        return answers.get(name, ())

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        """The calls of these names, in order."""
        return [call for call in self.calls if call[0] in names]


class Tensor:
    """`torch.Tensor`, over NumPy's memory."""

    def __init__(self, values: np.ndarray, owner: object) -> None:
        self.values, self.owner = values, owner

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.values[key], self.owner)

    def view(self, how: Any) -> Tensor:
        values = self.values.reshape(how) if isinstance(how, tuple) else self.values.view(how)
        return Tensor(values, self.owner)

    def narrow(self, axis: int, start: int, length: int) -> Tensor:
        return self[(slice(None),) * axis + (slice(start, start + length),)]


def make_torch(num_gpus: int) -> Any:
    """Return a module like PyTorch."""
    torch: Any = ModuleType("torch")
    torch.__spec__ = importlib.machinery.ModuleSpec("torch", None, origin="here")
    torch.float32, torch.int64 = np.float32, np.int64
    torch.device = lambda kind, index: (kind, index)
    torch.current = SimpleNamespace(cuda_stream=0)
    torch.cuda = SimpleNamespace(
        device_count=lambda: num_gpus,
        Stream=lambda device: SimpleNamespace(cuda_stream=0x50, device=device),
        current_stream=lambda device: torch.current,
        get_device_properties=lambda i: SimpleNamespace(name="NVIDIA H100", total_memory=80),
    )

    def as_tensor(lent: Any, device: Any) -> Tensor:
        told = lent.__cuda_array_interface__
        assert (told["typestr"], device) == ("|u1", ("cuda", 1))
        torch.lent = told["data"]
        return Tensor(np.arange(*told["shape"]).astype(np.uint8), lent)

    torch.as_tensor = as_tensor
    return torch


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = make_torch(2)
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bindings]:
    made = Bindings()
    with monkeypatch.context() as patch:
        for name in ("cuda", "cuda.bindings"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, "cuda.bindings.runtime", made)
        yield made


@pytest.fixture
def driver(torch: Any, bindings: Bindings) -> Any:
    return open_driver("torch:1")


# ---- where it cannot be had


def refused() -> str:
    with pytest.raises(feeder.ConfigError) as caught:
        open_driver("torch:2")
    return str(caught.value)


def test_without_pytorch_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchdriver.importlib.util, "find_spec", lambda name: None)
    assert refused() == (
        "device 'torch:2' needs PyTorch, which is not installed; pip install 'feedworks[torch]', "
        "or use 'cpu'"
    )


def test_without_the_binding_it_is_told_what_to_install(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert refused() == (
        "device 'torch:2' needs NVIDIA's bindings, which this PyTorch has not brought along; pip "
        "install cuda-bindings, of the driver's CUDA, or use 'cpu'"
    )


@pytest.mark.parametrize(
    ("num", "known"), [(2, "'torch:0', 'torch:1'"), (1, "'torch:0'"), (0, "none")]
)
def test_an_ordinal_out_of_range_is_told_with_those_that_there_are(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch, num: int, known: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", make_torch(num))
    assert refused() == (
        f"device 'torch:2' is none of the {num} GPUs that PyTorch sees, expected one of {known}"
    )


def test_asking_takes_no_memory_and_binds_no_thread(driver: Any, bindings: Bindings) -> None:
    assert bindings.calls == []
    assert driver.name_and_bytes() == ("NVIDIA H100", 80)


# ---- what it is told


def test_memory_and_events_are_the_drivers_own_and_go_with_the_objects(
    driver: Any, bindings: Bindings
) -> None:
    held = [driver.alloc_device(1000), driver.alloc_pinned(4096), driver.make_event()]
    held.append(driver.register(memoryview(bytearray(10))))
    pinned, registered = held[1].address, held[3].address
    held.clear()
    gc.collect()
    names = ("cudaFree", "cudaFreeHost", "cudaEventDestroy", "cudaHostUnregister")
    assert set(bindings.named(*names)) == {
        ("cudaFree", 0x9000), ("cudaFreeHost", pinned), ("cudaEventDestroy", 0xE0),
        ("cudaHostUnregister", registered),
    }  # fmt: skip
    assert bindings.named("cudaHostAlloc", "cudaHostRegister", "cudaEventCreateWithFlags") == [
        ("cudaHostAlloc", 4096, 1), ("cudaEventCreateWithFlags", 3),
        ("cudaHostRegister", registered, 4096, 9),
    ]  # fmt: skip
    assert bindings.device == 0


def test_pinned_memory_is_kept_by_views(driver: Any, bindings: Bindings) -> None:
    memory = driver.alloc_pinned(4096)
    view = memory.view
    assert (view.nbytes, view.format, view.readonly) == (4096, "B", False)
    array = np.ndarray((8,), np.int64, view, 64)
    assert array.ctypes.data == memory.address + 64
    del memory, view
    gc.collect()
    assert bindings.named("cudaFreeHost") == []
    array[:] = 7
    assert bindings.pinned[0].view(np.int64)[8:16].tolist() == [7] * 8


REFUSED: dict[str, Callable[[Any], Any]] = {
    "cudaMalloc": lambda driver: driver.alloc_device(10),
    "cudaHostAlloc": lambda driver: driver.alloc_pinned(10),
    "cudaEventCreateWithFlags": lambda driver: driver.make_event(),
    "cudaHostRegister": lambda driver: driver.register(memoryview(bytearray(10))),
    "cudaMemGetInfo": lambda driver: driver.free_bytes(),
    "cudaMemcpyAsync": lambda driver: driver.copy_in(1, 2, 3, driver.make_stream()),
    "cudaEventQuery": lambda driver: driver.is_done(driver.make_event()),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_the_driver_refuses_is_raised_and_nothing_is_freed_for_it(
    driver: Any, bindings: Bindings, call: str
) -> None:
    bindings.errors[call] = Status.cudaErrorMemoryAllocation
    with pytest.raises(RuntimeError, match=r"^cudaErrorMemoryAllocation: out of memory$"):
        REFUSED[call](driver)
    gc.collect()
    assert bindings.named("cudaFree", "cudaFreeHost", "cudaHostUnregister") == []
    assert bindings.device == 0


def test_copies_and_events_are_the_runtimes(driver: Any, bindings: Bindings) -> None:
    driver.bind()
    stream, event = driver.make_stream(), driver.make_event()
    driver.wait(stream, event)
    driver.copy_in(0xD0, 0xA0, 64, stream)
    driver.copy_within(0xD8, 0xD0, 32, stream)
    driver.record(event, stream)
    driver.drain(stream)
    assert (driver.is_done(event), driver.free_bytes()) == (True, 70)
    bindings.errors["cudaEventQuery"] = Status.cudaErrorNotReady
    assert driver.is_done(event) is False
    driver.synchronize(event)
    names = (
        "cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaEventRecord", "cudaStreamSynchronize",
        "cudaEventSynchronize",
    )  # fmt: skip
    assert bindings.named(*names) == [
        ("cudaStreamWaitEvent", 0x50, 0xE0, 0),
        ("cudaMemcpyAsync", 0xD0, 0xA0, 64, 1, 0x50),
        ("cudaMemcpyAsync", 0xD8, 0xD0, 32, 3, 0x50),
        ("cudaEventRecord", 0xE0, 0x50),
        ("cudaStreamSynchronize", 0x50),
        ("cudaEventSynchronize", 0xE0),
    ]


def test_the_current_stream_is_pytorchs(torch: Any, driver: Any) -> None:
    assert driver.current_stream().ptr == 0
    torch.current = SimpleNamespace(cuda_stream=0x70)
    assert driver.current_stream().ptr == 0x70


def test_tensors_lie_where_they_were_copied_to_and_refer_to_the_root(
    torch: Any, driver: Any
) -> None:
    columns = (
        Column(name="a", axis=0, dtype=np.dtype("f4"), shape=(3,)),
        Column(name="b", axis=1, dtype=np.dtype("i8"), shape=(2,)),
    )
    places, num_bytes = layout(columns, 10)
    root = object()
    whole = driver.arrays(0x9000, num_bytes, root, places, 10)
    assert [(t.values.shape, t.values.dtype.str) for t in whole] == [
        ((10, 3), "<f4"), ((2, 10), "<i8"),
    ]  # fmt: skip
    assert torch.lent == (0x9000, False)
    # Bytes were counted from where the memory begins.
    assert [tensor.values.reshape(-1).view(np.uint8)[0] for tensor in whole] == [0, 128]
    assert {tensor.owner._root for tensor in whole} == {root}
    short = driver.arrays(0x9000, num_bytes, root, places, 4)
    assert [tensor.values.shape for tensor in short] == [(4, 3), (2, 4)]


def test_a_forked_child_leaves_its_parents_memory_alone(
    driver: Any, bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as in_parent:
        in_parent.setattr(torchdriver.os, "getpid", lambda: -1)
        held = [driver.alloc_pinned(10), driver.make_event()]
    held.clear()
    gc.collect()
    assert bindings.named("cudaFreeHost", "cudaEventDestroy") == []
