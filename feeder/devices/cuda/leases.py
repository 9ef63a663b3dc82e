"""Arrays over a slot of a GPU, which tell when the last of them is gone.

Every array over the slot, every view of one and whatever DLPack makes of it refers to the memory
object that was made for this lease alone, and that to the lease's root. So the root goes when the
last of them does, and not before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from feeder.devices.cuda.driver import Driver, Memory, Stream
from feeder.devices.cuda.rules import DeviceSlot


class Root:
    """What all arrays of one lease refer to; keeps the memory. Never changed after it is made."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: Any) -> None:
        self.memory = memory


class Lease(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a root, which knows what becomes free when the root is gone. Written
    once, by the thread that lends; ends in any thread."""

    __slots__ = ("memory", "slot", "stream")
    slot: DeviceSlot | None
    """The slot; None for memory of the user's own."""
    memory: Any
    """The memory that is the user's own."""
    stream: Stream
    """The stream that the user's work is on."""


class Leases:
    """What the user of one device holds. A lease ends in any thread, perhaps inside the garbage
    collector: then `on_end` is called, which must neither wait nor take a lock."""

    def __init__(self, driver: Driver, on_end: Callable[[Lease], None]) -> None:
        self._driver = driver
        self._on_end = on_end
        self._slots: dict[int, Lease] = {}
        self._own: dict[int, Lease] = {}

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
        # CuPy and DLPack keep what they are given as owner: the root, and so the lease, lives as
        # long as any array of theirs.
        root = Root(slot.block.memory)
        lease = Lease(root, self._end_slot)
        lease.slot, lease.stream, lease.memory = slot, stream, None
        # Held here, else the weak reference would go before its root.
        self._slots[id(lease)] = lease
        return self._arrays(slot.address, slot, root)

    def give(self, memory: Memory, slot: DeviceSlot, stream: Stream) -> tuple[Any, ...]:
        """Arrays over memory that holds what the slot holds, and nothing else."""
        root = Root(memory)
        lease = Lease(root, self._end_own)
        lease.slot, lease.stream, lease.memory = None, stream, memory
        self._own[id(lease)] = lease
        return self._arrays(memory.address, slot, root)

    def give_back(self, slot: DeviceSlot, stream: Stream) -> None:
        """Nobody is to look at a slot."""
        # Ends at once: the slot takes the same way back as one that the user held.
        lease = Lease(Root(None))
        lease.slot, lease.stream, lease.memory = slot, stream, None
        self._on_end(lease)

    def _arrays(self, address: int, slot: DeviceSlot, root: Root) -> tuple[Any, ...]:
        layout = slot.layout
        return self._driver.arrays(address, layout.num_bytes, root, layout.places, slot.length)

    def _end_slot(self, lease: Any) -> None:
        # One operation of a dict: a finaliser may interrupt any line, so it takes no lock. No name
        # of the module: at the interpreter's exit they may be gone before the batches are.
        del self._slots[id(lease)]
        self._on_end(lease)

    def _end_own(self, lease: Any) -> None:
        del self._own[id(lease)]
        self._on_end(lease)
