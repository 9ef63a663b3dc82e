"""Where batches are written: what the assembler needs of the memory that a device queue gives."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from workers.chunks import Columns

Arrays = tuple[NDArray[Any], ...]


class Slot(Protocol):
    """Memory that one batch is written into."""

    arrays: Arrays
    """One writable array per column."""
    flats: tuple[memoryview | None, ...]
    """The memory of each as bytes, where its rows lie one after another."""

    def lease(self, rows: int) -> Arrays:
        """The first `rows` rows for the user. The slot is free again when the last of these
        arrays, and of all views of them, is gone."""


class Slots(Protocol):
    """Where the slots of the batches of one stream come from, by device."""

    passes: bool
    """Whether an array that nobody else holds may be handed on as it is."""

    def take(self, device: int, columns: Columns, rows: int) -> Slot:
        """A free slot for a batch of so many rows."""

    def adopt(self, device: int, columns: Columns, arrays: Arrays) -> Arrays:
        """Arrays made ready for the user: the feeder's own where `passes`, else copied."""
