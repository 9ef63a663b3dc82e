"""Memory of a machine with GPUs that are not there: NumPy's, at addresses that are real."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


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


class Registered:
    """Memory that is pinned for as long as this lives."""

    def __init__(self, machine: Owner, region: Region) -> None:
        self._machine = machine
        self._region = region

    def __del__(self) -> None:
        self._machine.free(self._region)
