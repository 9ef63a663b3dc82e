"""Where batches are written: what the assembler needs of the memory that a device queue gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray

from feeder.workers.stream.chunks import Columns

Arrays = tuple[NDArray[Any], ...]

Kept = dict[int, NDArray[Any]] | None
"""Columns that are not copied, by number; None where each has to be."""

Seen = Callable[[memoryview], None] | None
"""Is told the bytes that are copied, in order, where somebody wants to know."""


class Slot(Protocol):
    """Memory that one batch is written into."""

    arrays: Arrays
    """One writable array per column."""
    flats: tuple[memoryview | None, ...]
    """The memory of each as bytes, where its rows lie one after another."""
    kept: Kept
    """Takes columns that one array is all of, where whoever reads them takes them from anywhere."""
    seen: Seen
    """To be told the bytes of the only column, if only of large arrays."""

    def lease(self, rows: int) -> Arrays:
        """The first `rows` rows for the user. The slot is free again when the last of these
        arrays, and of all views of them, is gone."""


class Slots(Protocol):
    """Where the slots of the batches of one stream come from, by device."""

    passes: bool
    """Whether an array that nobody else holds may be handed on as it is."""
    writable: bool
    """Whether the user may write into such an array."""
    reserved: bool
    """Whether the number of slots is fixed, and a slot is free when the reader of its batch says
    so. Then the slots bound what is copied, so that a copy needs no room beside them."""

    def take_slot(self, device: int, columns: Columns, rows: int) -> Slot | None:
        """A slot for a batch of so many rows; None where all are taken. Then the caller hands
        over what it has made, which the reader may be waiting for, and calls `wait_for_slot`."""

    def wait_for_slot(self, device: int) -> None:
        """Wait until a slot may be free for what `take_slot` was asked for last."""
