"""Arrays over a slot of a GPU, which tell when the last of them is gone.

Every array over the slot, every view of one and whatever DLPack makes of it refers to the memory
object that was made for this lease alone, and that to the root of its loan
(`workers/stream/loans.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from feeder.devices.cuda.driver import Driver, Memory, Stream
from feeder.devices.cuda.rules import DeviceSlot
from feeder.devices.layout import Forms
from feeder.workers.stream.loans import Loans


class Root:
    """What all arrays of one lease refer to; keeps the memory. Never changed after it is made."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: Any) -> None:
        self.memory = memory


class Lease:
    """What becomes free when the last array over it is gone. Written by the thread that lends, then
    the copier's."""

    __slots__ = ("memory", "slot", "stream")

    def __init__(self, slot: DeviceSlot | None, stream: Stream, memory: Any = None) -> None:
        self.slot = slot
        """The slot; None for memory of the user's own."""
        self.stream = stream
        """The stream that the user's work is on."""
        self.memory = memory
        """The memory that is the user's own."""


class Leases:
    """What the user of one device holds. Once a lease ends `on_end` is called, on any thread."""

    def __init__(self, driver: Driver, on_end: Callable[[Lease], None]) -> None:
        self._driver = driver
        self._on_end = on_end
        self._slots, self._own = Loans(on_end), Loans(on_end)

    @property
    def num_slots(self) -> int:
        """Slots that somebody looks at."""
        return len(self._slots)

    @property
    def num_own(self) -> int:
        """Batches in memory of their own that somebody looks at."""
        return len(self._own)

    def lend(self, slot: DeviceSlot, stream: Stream) -> tuple[Any, ...]:
        """Arrays over a slot."""
        root = Root(slot.block.memory)
        self._slots.lend(root, Lease(slot, stream))
        return self._arrays(slot.address, slot, root)

    def give(self, memory: Memory, slot: DeviceSlot, stream: Stream) -> tuple[Any, ...]:
        """Arrays over memory that holds what the slot holds, and nothing else."""
        root = Root(memory)
        self._own.lend(root, Lease(None, stream, memory))
        return self._arrays(memory.address, slot, root)

    def give_back(self, slot: DeviceSlot, stream: Stream) -> None:
        """Nobody is to look at a slot."""
        # The slot takes the same way back as one that the user held.
        self._on_end(Lease(slot, stream))

    def _arrays(self, address: int, slot: DeviceSlot, root: Root) -> tuple[Any, ...]:
        layout = slot.layout
        if isinstance(layout, Forms):
            return self._driver.arrays_like(address, layout.num_bytes, root, layout.places)
        return self._driver.arrays(address, layout.num_bytes, root, layout.places, slot.length)
