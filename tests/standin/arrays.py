"""Arrays of the stand-in: they have shape and dtype, and values once the device is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


class DeviceArray:
    """An array on a device. Views share its root; whatever reads it waits for the current stream,
    as `cupy.asnumpy` does."""

    def __init__(
        self, values: np.ndarray, root: object, read: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        self.values = values
        """The memory as it is now; for work that a stream is given."""
        self.root = root
        self._read = read

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
        return self._read(self.values)

    def __getitem__(self, key: Any) -> DeviceArray:
        return DeviceArray(self.values[key], self.root, self._read)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.get(), dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.get(), name)
