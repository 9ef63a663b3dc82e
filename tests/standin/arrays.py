"""Arrays of the stand-in: they have shape and dtype, and values once the device is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np


class Device(Protocol):
    """What an array lies on."""

    def read(self, values: np.ndarray) -> np.ndarray: ...

    def compute(self, function: Callable[..., np.ndarray], *arrays: Any) -> DeviceArray: ...


class DeviceArray:
    """An array on a device. Views share its root; whatever reads it waits for the current stream,
    as `cupy.asnumpy` does."""

    def __init__(self, values: np.ndarray, root: object, device: Device) -> None:
        self.values = values
        """The memory as it is now; for work that a stream is given."""
        self.root = root
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def get(self) -> np.ndarray:
        """The values, on the host."""
        return self.device.read(self.values)

    def map(self, function: Callable[..., np.ndarray], *others: Any) -> DeviceArray:
        """What a function makes of the values of arrays, once the current stream comes to it."""
        return self.device.compute(function, self, *others)

    def __getitem__(self, key: Any) -> DeviceArray:
        return DeviceArray(self.values[key], self.root, self.device)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.get(), dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)


def mapped(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """What a function makes of arrays, of the host or of a device."""
    if isinstance(first, DeviceArray):
        return first.map(function, *others)
    return function(first, *others)
