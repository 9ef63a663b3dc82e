"""What CuPy is told, over a module like it without a GPU; and what is said where it cannot be had.

That CuPy has what is used of it is seen by `tests/gpu`.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.devices.cuda import cupydriver, runtime
from feeder.devices.cuda.driver import open_driver
from feeder.devices.layout import lay_out, layout
from feeder.workers.stream.chunks import Column
from small import Pure, make
from standin.cupys import imported, make_cupy


@pytest.fixture
def cupy() -> Iterator[Any]:
    with imported(make_cupy()) as made:
        yield made


@pytest.fixture
def driver(cupy: Any) -> Any:
    return open_driver("cuda:1")


# ---- where it cannot be had


def refuse(device: str) -> str:
    """Ask for a device both ways; return what is told."""
    told = []
    coordinator = feeder.Coordinator()
    with pytest.raises(feeder.ConfigError) as caught:
        make(Pure(), devices=(device,), coordinator=coordinator)
    assert list(coordinator) == []
    told.append(str(caught.value))
    with pytest.raises(feeder.ConfigError) as caught:
        feeder.connect("tcp://127.0.0.1:1", device=device, timeout=0.1)
    told.append(str(caught.value))
    assert told[0] == told[1]
    return told[0]


def test_without_cupy_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupydriver.importlib.util, "find_spec", lambda name: None)
    assert refuse("cuda:0") == (
        "device 'cuda:0' needs CuPy, which is not installed; pip install 'feedworks[cuda12]' or "
        "'feedworks[cuda13]', as the driver is, or use 'cpu'"
    )


def test_a_cupy_that_cannot_be_imported_is_told_with_its_reason(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> Any:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(cupydriver.importlib, "import_module", fail)
    with pytest.raises(feeder.ConfigError) as caught:
        cupydriver.open_gpu("cuda:0", 0)
    assert str(caught.value) == (
        "device 'cuda:0' needs CuPy, which cannot be imported: libcudart.so.12: cannot open shared "
        "object file"
    )
    assert isinstance(caught.value.__cause__, ImportError)


def test_without_a_driver_its_reason_is_told(cupy: Any) -> None:
    why = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"
    cupy.cuda.runtime.errors["getDeviceCount"] = why
    assert refuse("cuda:0") == (
        f"device 'cuda:0' cannot be had, the driver says {why!r}; use 'cpu', or see `feeder doctor`"
    )


@pytest.mark.parametrize(
    ("num", "known"), [(2, "'cuda:0', 'cuda:1'"), (1, "'cuda:0'"), (0, "none")]
)
def test_an_ordinal_out_of_range_is_told_with_those_that_there_are(
    cupy: Any, num: int, known: str
) -> None:
    cupy.cuda.runtime.num_gpus = num
    assert refuse("cuda:2") == (
        f"device 'cuda:2' is none of the {num} GPUs that this process sees, expected one of {known}"
    )


def test_asking_takes_no_memory_and_binds_no_thread(cupy: Any) -> None:
    make(Pure(), devices=("cuda:0", "cuda:1"))
    assert cupy.cuda.runtime.calls == [("getDeviceCount",)] * 2


# ---- what it is told


def test_device_memory_is_the_drivers_own_and_goes_with_the_object(cupy: Any, driver: Any) -> None:
    memory = driver.alloc_device(1000)
    assert memory.num_bytes == 1000
    address = memory.address
    del memory
    assert cupy.cuda.runtime.named("malloc", "free", "setDevice") == [
        ("setDevice", 1), ("malloc", 1000), ("setDevice", 0), ("free", address),
    ]  # fmt: skip


def test_pinned_memory_is_portable_and_kept_by_views(cupy: Any, driver: Any) -> None:
    memory = driver.alloc_pinned(4096)
    assert ("PinnedMemory", 4096, 1) in cupy.cuda.runtime.calls
    view = memory.view
    assert (view.nbytes, view.format, view.readonly) == (4096, "B", False)
    array = np.ndarray((8,), np.int64, view, 64)
    assert array.ctypes.data == memory.address + 64
    del memory, view
    array[:] = 7
    assert array.tolist() == [7] * 8


@pytest.mark.parametrize(("reads_only", "flags"), [(1, 9), (0, 1)])
def test_memory_is_registered_in_whole_pages_read_only_where_that_can_be(
    cupy: Any, driver: Any, reads_only: int, flags: int
) -> None:
    cupy.cuda.runtime.reads_only = reads_only
    mapping = mmap.mmap(-1, mmap.PAGESIZE + 10)
    registered = driver.register(memoryview(mapping).toreadonly())
    address = registered.address
    calls = cupy.cuda.runtime.named("deviceGetAttribute", "hostRegister")
    assert calls == [
        ("deviceGetAttribute", 113, 1), ("hostRegister", address, 2 * mmap.PAGESIZE, flags),
    ]  # fmt: skip
    with pytest.raises(BufferError):
        mapping.close()  # It stays mapped for as long as it is registered.
    del registered
    gc.collect()
    assert cupy.cuda.runtime.calls[-1] == ("hostUnregister", address)
    mapping.close()


def test_copies_and_events_are_the_runtimes(cupy: Any, driver: Any) -> None:
    driver.bind()
    stream, event = driver.make_stream(), driver.make_event()
    assert stream.non_blocking is True
    assert cupy.cuda.runtime.named("Event") == [("Event", {"block": True, "disable_timing": True})]
    driver.wait(stream, event)
    driver.copy_in(0xD0, 0xA0, 64, stream)
    driver.copy_within(0xD8, 0xD0, 32, stream)
    driver.record(event, stream)
    driver.drain(stream)
    assert (driver.is_done(event), driver.free_bytes()) == (True, 70)
    driver.synchronize(event)
    calls = cupy.cuda.runtime.named(
        "streamWaitEvent", "memcpyAsync", "eventRecord", "streamSynchronize", "synchronize"
    )
    assert calls == [
        ("streamWaitEvent", 0x50, 0xE0),
        ("memcpyAsync", 0xD0, 0xA0, 64, 1, 0x50),
        ("memcpyAsync", 0xD8, 0xD0, 32, 3, 0x50),
        ("eventRecord", 0xE0, 0x50),
        ("streamSynchronize", 0x50),
        ("synchronize",),
    ]


def test_a_wait_of_another_devices_thread_is_this_devices(cupy: Any, driver: Any) -> None:
    """The default streams of all devices have the same address."""
    driver.wait(SimpleNamespace(ptr=0), SimpleNamespace(ptr=0xE0))
    calls = cupy.cuda.runtime.named("setDevice", "streamWaitEvent")
    assert calls == [("setDevice", 1), ("streamWaitEvent", 0, 0xE0), ("setDevice", 0)]


# ---- streams


class WithProtocol:
    """A stream as CUDA's stream protocol has it."""

    cuda_stream = 0xBAD

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0x70


@pytest.mark.parametrize(
    ("stream", "ptr"),
    [
        (0x60, 0x60),
        (0, 0),
        (1, 0),
        (SimpleNamespace(ptr=0x61), 0x61),
        (SimpleNamespace(cuda_stream=0x62), 0x62),
        (WithProtocol(), 0x70),
    ],
    ids=["address", "default", "default by its other name", "cupy", "torch", "protocol"],
)
def test_a_stream_may_be_of_any_framework(driver: Any, stream: Any, ptr: int) -> None:
    assert driver.stream_of(stream).ptr == ptr


@pytest.mark.parametrize("stream", ["mine", -1, True, 1.5, object(), SimpleNamespace(ptr="x")])
def test_what_names_no_stream_is_refused(driver: Any, stream: Any) -> None:
    with pytest.raises(feeder.ConfigError) as caught:
        driver.stream_of(stream)
    assert str(caught.value) == (
        f"stream is {stream!r}, expected a stream of CuPy or PyTorch, an object with "
        "__cuda_stream__, or the address of a cudaStream_t"
    )


def test_a_threads_own_default_stream_is_refused(cupy: Any, driver: Any) -> None:
    """The copier's thread would name its own by it."""
    cupy.current = SimpleNamespace(ptr=2)
    for take in (driver.current_stream, lambda: driver.stream_of(2)):
        with pytest.raises(feeder.ConfigError, match="the thread's own default stream, which no"):
            take()


# ---- arrays


def test_arrays_lie_where_they_were_copied_to_and_refer_to_the_root(driver: Any) -> None:
    columns = (
        Column(name="a", axis=0, dtype=np.dtype("f4"), shape=(3,)),
        Column(name="b", axis=1, dtype=np.dtype("i8"), shape=(2,)),
    )
    places, num_bytes = layout(columns, 10)
    root = object()
    whole = driver.arrays(0x9000, num_bytes, root, places, 10)
    assert [(array.shape, array.dtype.str) for array in whole] == [
        ((10, 3), "<f4"), ((2, 10), "<i8"),
    ]  # fmt: skip
    assert [array.data.ptr for array in whole] == [0x9000, 0x9000 + 128]
    memories = {id(array.data.mem): array.data.mem for array in whole}
    (memory,) = memories.values()
    assert (memory.ptr, memory.size, memory.owner, memory.device_id) == (0x9000, 256 + 64, root, 1)
    short = driver.arrays(0x9000, num_bytes, root, places, 4)
    assert [array.shape for array in short] == [(4, 3), (2, 4)]


def test_what_a_function_makes_is_found_and_laid_out_again(cupy: Any, driver: Any) -> None:
    root = object()

    def array(shape: tuple[int, ...], device: int = 1, strides: Any = None) -> Any:
        memory = cupy.cuda.UnownedMemory(0x5000, 256, root, device)
        pointer = cupy.cuda.MemoryPointer(memory, 64)
        return cupy.ndarray(shape, np.dtype("f4"), pointer, strides)

    assert driver.find(np.zeros(3)) is None
    with pytest.raises(ValueError, match=r"^an array on GPU 0, expected one on cuda:1$"):
        driver.find(array((2,), device=0))
    given = [array((2, 3)), array(()), array((2, 3), strides=(4, 8))]
    found = [driver.find(one) for one in given]
    assert [one.address for one in found] == [0x5040] * 3
    # One with gaps is copied; one without axes would get one.
    assert [one.array is its for one, its in zip(found, given, strict=True)] == [False, True, False]
    forms, num_bytes = lay_out(one.form for one in found)
    assert [(form.offset, form.num_bytes, form.strides) for form in forms] == [
        (0, 24, (12, 4)), (64, 4, ()), (128, 24, (12, 4)),
    ]  # fmt: skip
    made = driver.arrays_like(0x9000, num_bytes, root, forms)
    assert [one.data.ptr for one in made] == [0x9000, 0x9040, 0x9080]
    assert [(one.shape, one.strides) for one in made] == [
        (form.shape, form.strides) for form in forms
    ]
    assert {id(one.data.mem.owner) for one in made} == {id(root)} and num_bytes == 192
    stream = driver.make_stream()
    assert driver.working_on(stream) is stream


def test_a_forked_child_leaves_its_parents_memory_alone(
    cupy: Any, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as in_parent:
        in_parent.setattr(runtime.os, "getpid", lambda: -1)
        held = [driver.alloc_device(10), driver.register(memoryview(bytearray(10)))]
    held.clear()
    gc.collect()
    assert cupy.cuda.runtime.named("free", "hostUnregister") == []
