"""Slots, the buffers that batches are written into: what the assembler asks of a device's memory.

Host memory, pinned memory of a GPU and shared memory of a server all take this form, so that the
assembler copies rows without knowing where a batch goes. The thread that makes batches owns a slot
from `take_slot` to `lease`; from then on the slot's memory is only read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray

from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.position import HasColumns

Arrays = tuple[NDArray[Any], ...]

Kept = dict[int, NDArray[Any]] | None
"""Columns that are not copied, by number; None where each column has to be copied."""

Seen = Callable[[memoryview], None] | None
"""Called with the bytes that are copied, in order; None where nobody wants them."""


class Slot(Protocol):
    """Memory that one batch is written into."""

    arrays: Arrays
    """One writable array per column."""
    # Bytes are copied through these without NumPy, which keeps the GIL.
    flats: tuple[memoryview | None, ...]
    """The memory of each as bytes, where its rows lie one after another."""
    kept: Kept
    """Where columns are put that stay in the array that they came in, by number; None where each
    column has to be copied into the slot."""
    seen: Seen
    """Called with the bytes of the only column as they are copied, where arrays are large."""

    def lease(self, rows: int) -> Arrays:
        """The first `rows` rows for the user. The slot is free again when the last of these
        arrays, and of all views of them, is gone."""


class OpenSlot(Slot, Protocol):
    """A slot that fetch functions may write to before it is leased (`placement.py`)."""

    def open(self) -> Arrays | None:
        """Arrays over it to write to; None where somebody refers to those of the last time."""

    def close(self) -> None:
        """Nobody writes to those arrays any more, and the slot will not be leased."""


class Slots(Protocol):
    """Where the slots of the batches of one stream come from, by device."""

    # What a GPU or another process reads has to lie in a slot; in host memory the array will do.
    passes: bool
    """Whether an array that nobody else holds may be handed on as it is."""
    writable: bool
    """Whether the user may write into such an array."""
    opens: bool
    """Whether slots are `OpenSlot`s, of which several may be taken before the first is leased."""
    # Host slots grow in number while the user keeps batches, so there the bound on rows has to hold
    # copies back.
    reserved: bool
    """Whether a slot is free when the reader of its batch says so. Then the slots bound what is
    copied, so that a copy needs no room beside them."""

    def take_slot(self, device: int, columns: Columns, rows: int) -> Slot | None:
        """A slot for a batch of so many rows; None where all are taken. Then the caller hands
        over what it has made, which the reader may be waiting for, and calls `wait_for_slot`."""

    def wait_for_slot(self, device: int) -> None:
        """Wait until a slot may be free for what `take_slot` was asked for last."""

    def take_back(self, device: int, batch: HasColumns) -> None:
        """A batch is thrown away before anybody was handed it: its slot is free."""


class OpenSlots(Slots, Protocol):
    """Where open slots come from (`Slots.opens`)."""

    def put_back(self, device: int, slot: OpenSlot) -> None:
        """A slot that was taken is not used: it is free."""
