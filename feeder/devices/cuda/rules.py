"""Which copy to a GPU may begin, and what it has to wait for. Rules: no threads, no GPU.

A slot walks a table from event to event. Two orders matter. A pinned slot is written again only
when the copy out of it is done, which the host waits for. A slot on the device is written again
only after what its last reader has given its stream: that the copy itself waits for, on the device,
so that the host goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from feeder.devices.cuda.packed import Packed
from feeder.devices.layout import Forms, Layout
from feeder.errors import DeviceError
from feeder.workers.stream.batch import Batch

Table = dict[str, dict[str, str]]

PINNED: Table = {
    "free": {"take": "writing"},
    "writing": {"pack": "filled", "put_back": "free"},
    "filled": {"copied": "free"},
}
"""A pinned slot: the assembler takes it, it is filled or put back, then it is copied from."""

ON_DEVICE: Table = {
    "free": {"load": "loading"},
    "loading": {"place": "ready"},
    "ready": {"hand": "held"},
    # Let go of by the user, whose work on it may still run.
    "held": {"release": "left"},
    "left": {"load": "loading"},
}
"""A slot on the device: a copy into it is begun, placed on its stream, handed out, let go of."""

MAX_RUN = 16
"""Batches at most that go in one copy, where they lie one behind another."""

_MAX_REMEMBERED = 8


class Life:
    """Walks a table, from its first state on. One thread at a time moves it."""

    __slots__ = ("_events", "_table", "state")

    def __init__(self, table: Table) -> None:
        self._table = table
        self._events: deque[str] = deque(maxlen=_MAX_REMEMBERED)
        self.state = next(iter(table))
        """Where it is."""

    def on(self, event: str) -> None:
        """Move. Raises `DeviceError` where the table has no such move."""
        # A move that is not in the table would be a slot written under a reader: better an error.
        moves = self._table[self.state]
        if event not in moves:
            raise DeviceError(
                f"{event!r} of a slot that is {self.state!r}, expected one of "
                f"{', '.join(moves)}; events before it: {', '.join(self._events) or 'none'}"
            )
        self._events.append(event)
        self.state = moves[event]


class DeviceSlot:
    """Memory for one batch on the device, one of several in a row.

    Owned by the copier's thread. While a user holds the batch nobody writes it, and the end of
    that comes back to the copier's thread through a queue.
    """

    __slots__ = (
        "address", "block", "copied", "freed", "layout", "left", "length", "life", "on_host",
        "ready", "run",
    )  # fmt: skip

    def __init__(self, block: Block, index: int, copied: Any, freed: Any) -> None:
        self.block = block
        self.address: int = block.memory.address + index * block.slot_bytes
        self.life = Life(ON_DEVICE)
        self.copied, self.freed = copied, freed
        """Its own two events."""
        self.ready = copied
        """The event after the copy that filled it: its own, or that of the last slot filled with
        it."""
        self.left: Any = None
        """The event after its last reader's work, None where it had none: its own, or that of a
        slot let go of with it."""
        self.layout: Layout | Forms = Layout((), 0)
        """How what is in it lies there."""
        self.length = 0
        """The rows that are in it."""
        self.on_host: dict[int, Any] = {}
        """The columns of its batch that stay on the host, by number."""
        self.run = 0
        """Number of the copy that filled it."""


class Block:
    """Memory of the device for slots that lie one behind another. Fixed when made."""

    def __init__(self, memory: Any, slot_bytes: int) -> None:
        self.memory = memory
        self.slot_bytes = slot_bytes

    def slots(self, num: int, make_event: Callable[[], Any]) -> list[DeviceSlot]:
        """The slots. They refer to the block, and it to none of them."""
        return [DeviceSlot(self, i, make_event(), make_event()) for i in range(num)]


class Transfer:
    """One copy: of one batch, or of several that lie one behind another on both sides. Owned by the
    copier's thread."""

    __slots__ = ("batches", "packed", "slots")

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.packed: list[Packed] = []
        self.slots: list[DeviceSlot] = []

    @property
    def source(self) -> int:
        """Where it begins on the host."""
        return self.packed[0].address

    @property
    def target(self) -> int:
        """Where it begins on the device."""
        return self.slots[0].address

    @property
    def num_bytes(self) -> int:
        """Bytes from the begin of the first batch to the end of the last."""
        last = self.packed[-1]
        return last.address + last.layout.num_bytes - self.source

    @property
    def waits(self) -> list[Any]:
        """The events that it comes after, each once."""
        events = {id(slot.left): slot.left for slot in self.slots if slot.left is not None}
        return list(events.values())


class Traffic:
    """The batches of one device between the enqueuer and the user. Owned by the copier's thread."""

    def __init__(self) -> None:
        self.filled: deque[Batch] = deque()
        """Batches that wait for a copy."""
        self.block: Block | None = None
        """The slots that copies go into."""
        self._idle: deque[DeviceSlot] = deque()
        self._num_runs = 0

    @property
    def wants_slots_of(self) -> int:
        """Bytes of a slot that the next batch needs and no slot has; 0 where slots are fine."""
        if not self.filled:
            return 0
        packed = packed_of(self.filled[0])
        has = 0 if self.block is None else self.block.slot_bytes
        return packed.layout.num_bytes if packed.layout.num_bytes > has else 0

    def use(self, block: Block, slots: Sequence[DeviceSlot]) -> None:
        """From now on copies go into these slots of a block; those of the block before are
        forgotten as they come back."""
        self.block = block
        self._idle = deque(slots)

    @property
    def can_load(self) -> bool:
        """Whether a copy may begin."""
        return bool(self.filled and self._idle) and not self.wants_slots_of

    def next_load(self) -> Transfer:
        """The next copy, of as many batches as lie one behind another; to be begun at once."""
        transfer = Transfer()
        # Numbers copies, so that the user's stream waits once for several batches of one copy.
        self._num_runs += 1
        while self.filled and self._idle and len(transfer.slots) < MAX_RUN:
            # Both sides in their order: what is next on the host goes where it is next on the
            # device.
            packed, slot = packed_of(self.filled[0]), self._idle[0]
            if transfer.slots and not _follows(transfer, packed, slot):
                break
            slot.life.on("load")
            slot.layout, slot.length, slot.on_host = packed.layout, packed.length, packed.on_host
            slot.run = self._num_runs
            transfer.batches.append(self.filled.popleft())
            transfer.packed.append(packed)
            transfer.slots.append(self._idle.popleft())
        return transfer

    def let_go(self, slot: DeviceSlot, left: Any) -> None:
        """The user has let go of a slot; the event comes after his work on it."""
        slot.life.on("release")
        slot.left = left
        # A slot of a block that was replaced is let go of, and the block with its last slot.
        if slot.block is self.block:
            self._idle.append(slot)


def _follows(transfer: Transfer, packed: Packed, slot: DeviceSlot) -> bool:
    """Whether a batch lies behind the last one of a transfer, on the host as on the device: in the
    same memory, since two that happen to touch cannot be copied as one."""
    last, before = transfer.packed[-1], transfer.slots[-1]
    size = slot.block.slot_bytes
    return (
        packed.region is last.region
        and slot.block is before.block
        and packed.address - last.address == slot.address - before.address == size
        and packed.layout.num_bytes <= size
    )


def packed_of(batch: Batch) -> Packed:
    """The memory of a batch on the host."""
    packed = batch.columns
    assert isinstance(packed, Packed)
    return packed
