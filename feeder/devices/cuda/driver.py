"""What the queues need of a GPU: a few calls, which `cupydriver` makes with CuPy, and
`torchdriver` for PyTorch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from feeder.devices.layout import ColumnPlace, Form
from feeder.errors import ConfigError

_NAME = re.compile(r"(cuda|torch):(0|[1-9][0-9]*)")


class Memory(Protocol):
    """Memory of a device, or pinned on the host. It goes when nothing refers to this object."""

    address: int
    """Where it begins."""
    num_bytes: int
    """How much it is."""


class HostMemory(Memory, Protocol):
    """Pinned memory of the host."""

    @property
    def view(self) -> memoryview:
        """All of it, to be written; views keep it."""


class Stream(Protocol):
    """A queue of work of a device; any object that names one."""

    @property
    def ptr(self) -> int:
        """What tells it from the other streams of its device."""


class Found(NamedTuple):
    """An array that lies on the device, without gaps."""

    array: Any
    """It, which keeps its memory."""
    address: int
    """Where it begins."""
    form: Form
    """How it lies there."""


class Driver(Protocol):
    """One GPU. Every method may be called by any thread; they raise what the device says.

    Events say when the work before them is done: they are recorded on a stream, and waited for by
    another stream or by the host.
    """

    name: str
    """The device as the user named it."""

    def bind(self) -> None:
        """Make the device the calling thread's own, once."""

    def alloc_device(self, num_bytes: int) -> Memory:
        """Memory of the device."""

    def alloc_pinned(self, num_bytes: int) -> HostMemory:
        """Memory of the host that the device reads by itself."""

    def free_bytes(self) -> int:
        """Memory of the device that is free."""

    def register(self, memory: memoryview) -> object:
        """Pin memory that is there already, in whole pages, for as long as the returned object
        lives; the device only reads it."""

    def make_stream(self) -> Stream:
        """A stream of its own, which waits for no other."""

    def make_event(self) -> Any:
        """An event, not recorded."""

    def record(self, event: Any, stream: Stream) -> None:
        """The event comes after all that the stream has been given; called by a thread that is
        bound to the device."""

    def wait(self, stream: Stream, event: Any) -> None:
        """What the stream is given from now on comes after the event."""

    def synchronize(self, event: Any) -> None:
        """Let the calling thread wait for the event."""

    def is_done(self, event: Any) -> bool:
        """Whether the event has come."""

    def drain(self, stream: Stream) -> None:
        """Let the calling thread wait for all that the stream has been given."""

    def copy_in(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Copy from pinned memory into the device's; the host goes on meanwhile."""

    def copy_within(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Copy within the device's memory; the host goes on meanwhile."""

    def current_stream(self) -> Stream:
        """The stream that the calling thread's work on the device goes to. Raises `ConfigError`
        where that cannot be told to other threads."""

    def stream_of(self, stream: Any) -> Stream:
        """A stream that the user named; raises `ConfigError` for what names none."""

    def arrays(
        self, address: int, num_bytes: int, root: object, places: Sequence[ColumnPlace], length: int
    ) -> tuple[Any, ...]:
        """Arrays over the device's memory, of their first `length` rows; `root` lives for as long
        as any of them does, or a view of one."""

    # ---- what functions make

    def working_on(self, stream: Stream) -> AbstractContextManager[object]:
        """Work that the calling thread gives the device meanwhile goes to a stream."""

    def find(self, value: Any) -> Found | None:
        """An array of the device; one with gaps is copied, on the calling thread's stream. None for
        what is no array of the library; raises `ValueError` for one that lies elsewhere."""

    def arrays_like(
        self, address: int, num_bytes: int, root: object, forms: Sequence[Form]
    ) -> tuple[Any, ...]:
        """Arrays over the device's memory; `root` lives for as long as any of them does."""


def is_gpu(device: str) -> bool:
    """Whether a device's name is that of a GPU."""
    return _NAME.fullmatch(device) is not None


def _open_cupy(name: str, ordinal: int) -> Driver:
    module = importlib.import_module("feeder.devices.cuda.cupydriver")
    driver: Driver = module.open_gpu(name, ordinal)
    return driver


def _open_torch(name: str, ordinal: int) -> Driver:
    module = importlib.import_module("feeder.devices.cuda.torchdriver")
    driver: Driver = module.open_gpu(name, ordinal)
    return driver


OPENERS: dict[str, Callable[[str, int], Driver]] = {"cuda": _open_cupy, "torch": _open_torch}
"""By the kind of device what opens it, given its name and its number: "cuda:0" gives arrays of
CuPy, "torch:0" tensors of PyTorch on the same GPU."""


def open_driver(device: str) -> Driver:
    """The driver of the GPU of that name. Raises `ConfigError`, with the driver's own reason,
    where there is none; nothing is allocated yet."""
    kind, _, ordinal = device.partition(":")
    if not is_gpu(device):
        raise ConfigError(f"device is {device!r}, expected 'cuda:<number>' or 'torch:<number>'")
    return OPENERS[kind](device, int(ordinal))
