"""A GPU that is not there: the driver that feeder's queues are given in its place.

A double for the device, not for the queues: those are the shipped ones. Its memory is NumPy's.
Memory is poisoned where a copy into it begins and filled where it ends, so that whoever reads it
in between, or still reads what was there before, is seen; and poisoned again when it is freed.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pytest

from feeder.devices.cuda import driver as drivers
from feeder.devices.cuda.driver import Found
from feeder.devices.layout import ColumnPlace, Form
from feeder.errors import ConfigError
from standin.arrays import DeviceArray
from standin.streams import Clockwork, Event, Stream


class Owner(Protocol):
    """Whom memory goes back to."""

    def free(self, region: Region) -> None: ...


def bytes_at(address: int, num_bytes: int) -> np.ndarray:
    """The bytes at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


@dataclass(eq=False)
class Region:
    """Memory that the machine knows."""

    kind: str
    owner: str
    values: np.ndarray
    start: int
    """Where it begins."""
    num_bytes: int
    users: int = 0
    """Copies that are still to be done from it or to it."""

    def holds(self, address: int, num_bytes: int) -> bool:
        return self.start <= address and address + num_bytes <= self.start + self.num_bytes


class Held:
    """Memory as feeder holds it: given back when nothing refers to it."""

    def __init__(self, machine: Owner, region: Region) -> None:
        self.address = region.start
        self.num_bytes = region.num_bytes
        self._machine = machine
        self._region = region

    @property
    def view(self) -> memoryview:
        return memoryview(Kept(self._region.values, self)).cast("B")

    def __del__(self) -> None:
        self._machine.free(self._region)


class Kept(np.ndarray):
    """Values that keep their memory."""

    held: Any

    def __new__(cls, values: np.ndarray, held: Any) -> Kept:
        kept = values.view(cls)
        kept.held = held
        return kept


class Lent:
    """Memory of a library's pool, which goes back there."""

    def __init__(self, region: Region, free: list[Region]) -> None:
        self.region = region
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.region)


class Registered:
    """Memory that is pinned for as long as this lives."""

    def __init__(self, machine: Owner, region: Region) -> None:
        self._machine = machine
        self._region = region

    def __del__(self) -> None:
        self._machine.free(self._region)


POISON = 0xA5


class StandinError(RuntimeError):
    """What the stand-in says when it refuses."""


@dataclass(eq=False)
class Machine:
    """Several GPUs, their memory and the host's that they may read."""

    num_gpus: int = 2
    seed: int = 0
    gpu_bytes: int = 2**30
    """Memory of each."""
    pinned_bytes: int = 2**30
    """Memory of the host that may be pinned."""
    registers: bool = True
    """Whether memory that is there already may be pinned."""
    slow_s: float = 0.0
    """How long a host that waits for a copy is kept waiting at most; meanwhile others run."""
    faults: list[str] = field(default_factory=list)
    """What no device would have forgiven."""
    num_copies: int = 0
    """Copies from the host so far."""
    num_copied_bytes: int = 0

    def __post_init__(self) -> None:
        self.clockwork = Clockwork(self.seed)
        self.regions: list[Region] = []
        self.failing: dict[str, Exception] = {}
        self.drivers: list[StandinDriver] = []
        self.here = threading.local()
        self.pools: dict[tuple[str, int, int], list[Region]] = {}
        """What a library has of each device for each stream and size, and has not lent."""

    # ---- memory

    def alloc(self, kind: str, owner: str, num_bytes: int, limit: int) -> Held:
        """Memory of a kind, within what there is of it."""
        with self.clockwork.lock:
            self.raise_failing(kind)
            if num_bytes > limit - self.used(kind, owner):
                raise StandinError(f"out of {kind} memory")
            # At a multiple of 256, as a GPU's memory is.
            raw = np.empty(num_bytes + 256, np.uint8)
            start = -raw.ctypes.data % 256
            values = raw[start : start + num_bytes]
            values[:] = POISON
            region = Region(kind, owner, values, values.ctypes.data, num_bytes)
            self.regions.append(region)
            return Held(self, region)

    def used(self, kind: str, owner: str) -> int:
        """Bytes of a kind that are held."""
        return sum(r.num_bytes for r in self.regions if (r.kind, r.owner) == (kind, owner))

    def free(self, region: Region) -> None:
        """Memory comes back. As on a GPU all work is done first."""
        with self.clockwork.lock:
            if region.kind == "registered":
                if region.users:
                    self.faults.append("memory is given back that a copy is still to read")
            else:
                self.clockwork.drain_all()
                region.values[:] = POISON
            self.regions.remove(region)

    def lend(self, driver: StandinDriver, stream: Stream, num_bytes: int) -> Lent:
        """Memory of the library's pool for work of a stream."""
        with self.clockwork.lock:
            free = self.pools.setdefault((driver.name, stream.ptr, num_bytes), [])
            if not free:
                values = np.empty(num_bytes, np.uint8)
                region = Region("pool", driver.name, values, values.ctypes.data, num_bytes)
                self.regions.append(region)
                free.append(region)
            return Lent(free.pop(), free)

    def empty_pools(self) -> None:
        """What the libraries have not lent goes back to the device."""
        for free in self.pools.values():
            for region in free:
                self.regions.remove(region)
            free.clear()

    def find(self, kinds: tuple[str, ...], address: int, num_bytes: int) -> Region | None:
        """The memory that an address is in."""
        for region in self.regions:
            if region.kind in kinds and region.holds(address, num_bytes):
                return region
        self.faults.append(f"{num_bytes} bytes at {address:#x} are in no {' or '.join(kinds)}")
        return None

    def raise_failing(self, what: str) -> None:
        """Fail where a test has asked for it."""
        if what in self.failing:
            raise self.failing[what]

    # ---- work

    def copy(
        self, stream: Stream, kinds: tuple[str, ...], target: int, source: int, num_bytes: int
    ) -> None:
        """Give a stream a copy: two pieces of work, between which the target is poisoned."""
        with self.clockwork.lock:
            there = self.find(("device",), target, num_bytes)
            here = self.find(kinds, source, num_bytes)
            if there is None or here is None:
                return
            there.users += 1
            here.users += 1

            def begin() -> None:
                bytes_at(target, num_bytes)[:] = POISON

            def end() -> None:
                bytes_at(target, num_bytes)[:] = bytes_at(source, num_bytes)
                there.users -= 1
                here.users -= 1

            self.clockwork.give(stream, begin, end)

    def launch(self, work: Callable[[], None], stream: Stream | None = None) -> None:
        """Give a stream work of the user's, which is done at some time; the current stream, where
        none is named."""
        self.clockwork.give(stream or self.current(0), work)

    # ---- streams

    def current(self, ordinal: int) -> Stream:
        """The stream of the calling thread's work on a GPU."""
        streams: dict[int, Stream] = self.here.__dict__.setdefault("streams", {})
        if ordinal not in streams:
            streams[ordinal] = self.drivers_of(ordinal).default
        return streams[ordinal]

    @contextmanager
    def on(self, stream: Stream, ordinal: int = 0) -> Iterator[Stream]:
        """Work of this thread goes to another stream meanwhile."""
        before = self.current(ordinal)
        self.here.streams[ordinal] = stream
        try:
            yield stream
        finally:
            self.here.streams[ordinal] = before

    def drivers_of(self, ordinal: int) -> StandinDriver:
        """The driver of a GPU; the same for all its queues."""
        with self.clockwork.lock:
            while len(self.drivers) <= ordinal:
                self.drivers.append(StandinDriver(self, len(self.drivers)))
            return self.drivers[ordinal]

    def open(self, name: str, ordinal: int) -> StandinDriver:
        """What feeder opens a GPU with."""
        if ordinal >= self.num_gpus:
            raise ConfigError(f"device {name!r} is none of the {self.num_gpus} GPUs")
        return self.drivers_of(ordinal)


class StandinDriver:
    """One GPU of the machine (`feeder.devices.cuda.driver.Driver`)."""

    def __init__(self, machine: Machine, ordinal: int) -> None:
        self.name = f"cuda:{ordinal}"
        self.machine = machine
        self.ordinal = ordinal
        self.clockwork = machine.clockwork
        self.default = self.clockwork.make(f"{self.name} default", 0)

    def bind(self) -> None:
        self.machine.here.bound = self.ordinal
        self.machine.raise_failing("bind")

    def alloc_device(self, num_bytes: int) -> Held:
        return self.machine.alloc("device", self.name, num_bytes, self.machine.gpu_bytes)

    def alloc_pinned(self, num_bytes: int) -> Held:
        return self.machine.alloc("pinned", "", num_bytes, self.machine.pinned_bytes)

    def free_bytes(self) -> int:
        return self.machine.gpu_bytes - self.machine.used("device", self.name)

    def register(self, memory: memoryview) -> Registered:
        if not self.machine.registers:
            raise StandinError("memory cannot be registered")
        values = np.frombuffer(memory, np.uint8)
        region = Region("registered", "", values, values.ctypes.data, values.nbytes)
        with self.clockwork.lock:
            self.machine.regions.append(region)
        return Registered(self.machine, region)

    def make_stream(self) -> Stream:
        self.machine.raise_failing("stream")
        return self.clockwork.make(f"{self.name} copies")

    def make_event(self) -> Event:
        return Event()

    def record(self, event: Event, stream: Stream) -> None:
        self.machine.raise_failing("record")
        if getattr(self.machine.here, "bound", None) != self.ordinal:
            self.machine.faults.append("recorded by a thread that is not bound to the device")
        self.clockwork.record(event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self.machine.raise_failing("wait")
        self.clockwork.wait(stream, event)

    def synchronize(self, event: Event) -> None:
        self.machine.raise_failing("synchronize")
        if self.machine.slow_s:
            threading.Event().wait(self.machine.slow_s * self.clockwork.random.random())
        self.clockwork.until(event)

    def is_done(self, event: Event) -> bool:
        self.clockwork.tick()
        return event.has_come

    def drain(self, stream: Stream) -> None:
        self.clockwork.drain(stream)

    def copy_in(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self.machine.raise_failing("copy")
        self.machine.num_copies += 1
        self.machine.num_copied_bytes += num_bytes
        self.machine.copy(stream, ("pinned", "registered"), target, source, num_bytes)

    def copy_within(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self.machine.copy(stream, ("device", "pool"), target, source, num_bytes)

    def current_stream(self) -> Stream:
        return self.machine.current(self.ordinal)

    def stream_of(self, stream: Any) -> Stream:
        if not isinstance(stream, Stream):
            raise ConfigError(f"stream is {stream!r}, expected a stream of the stand-in")
        return stream

    def arrays(
        self, address: int, num_bytes: int, root: object, places: Sequence[ColumnPlace], length: int
    ) -> tuple[DeviceArray, ...]:
        memory = bytes_at(address, num_bytes)
        made = []
        for shape, dtype, axis, offset, _ in places:
            values = np.ndarray(shape, dtype, memory.data, offset)
            made.append(DeviceArray(values, root, self)[(slice(None),) * axis + (slice(length),)])
        return tuple(made)

    # ---- what functions make

    def working_on(self, stream: Stream) -> AbstractContextManager[Stream]:
        return self.machine.on(stream, self.ordinal)

    def find(self, value: Any) -> Found | None:
        if not isinstance(value, DeviceArray):
            return None
        if value.device is not self:
            raise ValueError(f"an array on {value.device}, expected one on {self.name}")
        if not value.values.flags.c_contiguous:
            value = value.map(np.ascontiguousarray)
        values = value.values
        form = Form(values.shape, values.dtype, values.strides, values.nbytes)
        return Found(value, values.ctypes.data, form)

    def arrays_like(
        self, address: int, num_bytes: int, root: object, forms: Sequence[Form]
    ) -> tuple[DeviceArray, ...]:
        memory = bytes_at(address, num_bytes)
        return tuple(
            DeviceArray(
                np.ndarray(form.shape, form.dtype, memory.data, form.offset, form.strides),
                root, self,
            )
            for form in forms
        )  # fmt: skip

    def compute(self, function: Callable[..., np.ndarray], *arrays: Any) -> DeviceArray:
        """Give the current stream the making of an array, in memory of the library's pool. It is
        as those of CuPy and PyTorch are: what comes back to it is lent again to work of the same
        stream at once, whoever else still reads it."""
        values = [one.values if isinstance(one, DeviceArray) else one for one in arrays]
        like = function(*(np.zeros_like(value) for value in values))
        stream = self.current_stream()
        lent = self.machine.lend(self, stream, max(like.nbytes, 1))
        target = np.ndarray(like.shape, like.dtype, lent.region.values.data)

        def begin() -> None:
            lent.region.values[:] = POISON

        def end() -> None:
            target[...] = function(*values)

        self.clockwork.give(stream, begin, end)
        return DeviceArray(target, lent, self)

    def read(self, values: np.ndarray) -> np.ndarray:
        """What an array holds when the work given to the current stream is done."""
        found: list[np.ndarray] = []
        self.clockwork.give(self.current_stream(), lambda: found.append(values.copy()))
        self.clockwork.drain(self.current_stream())
        return found[0]


@contextmanager
def installed(machine: Machine) -> Iterator[Machine]:
    """Let feeder find this machine's GPUs for as long as the context lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(drivers.OPENERS, "cuda", machine.open)
        yield machine


def assert_sound(machine: Machine) -> None:
    """See that nothing was done that a device would not have forgiven, and that nothing is
    held."""
    machine.clockwork.drain_all()
    assert machine.faults == []
    gc.collect()
    machine.empty_pools()
    assert [(region.kind, region.num_bytes) for region in machine.regions] == []
