"""Which copy to a GPU may begin: rules without threads and without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from feeder import Batch, DeviceError
from feeder.devices.cuda.packed import pack
from feeder.devices.cuda.rules import (
    ON_DEVICE,
    PINNED,
    Block,
    DeviceSlot,
    Life,
    Traffic,
    Transfer,
)
from feeder.devices.layout import layout
from feeder.workers.stream.chunks import Column

STRIDE = 128
BYTES = Column(name="x", axis=0, dtype=np.dtype(np.uint8), shape=())


def batch(index: int, *, region: object = "here", num_bytes: int = 100) -> Batch:
    """Return a batch that lies in the slot of that number, of slots of `STRIDE` bytes."""
    place: Any = None
    packed = pack(
        (np.zeros(num_bytes, np.uint8),), region=region, address=index * STRIDE,
        layout=layout((BYTES,), num_bytes), rows=num_bytes, length=num_bytes,
        give_back=lambda: None,
    )  # fmt: skip
    return Batch(("x",), packed, place, 0, index, index, num_bytes)


def traffic_of(num_slots: int, slot_bytes: int = STRIDE) -> tuple[Traffic, list[DeviceSlot]]:
    """Return traffic with so many free slots, the first of them at 1,000,000."""
    traffic, block = Traffic(), Block(SimpleNamespace(address=1_000_000), slot_bytes)
    slots = block.slots(num_slots, object)
    traffic.use(block, slots)
    return traffic, slots


def load(traffic: Traffic) -> Transfer:
    """Begin the next copy and hand its batches out."""
    transfer = traffic.next_load()
    for slot in transfer.slots:
        slot.life.on("place")
        slot.life.on("hand")
    return transfer


def steps(transfer: Transfer) -> list[int]:
    return [batch.step for batch in transfer.batches]


@pytest.mark.parametrize(
    "batches",
    [
        [batch(0), batch(2)],
        [batch(1), batch(0)],
        [batch(0), batch(1, region="elsewhere")],
    ],
    ids=["a gap", "backwards", "memory that happens to touch"],
)
def test_batches_that_do_not_lie_one_behind_another_go_in_copies_of_their_own(
    batches: list[Batch],
) -> None:
    traffic, _ = traffic_of(8)
    traffic.filled.extend(batches)
    assert [len(load(traffic).slots), len(load(traffic).slots)] == [1, 1]


def test_a_batch_that_the_slot_does_not_hold_is_no_part_of_a_copy() -> None:
    traffic, _ = traffic_of(8)
    traffic.filled.extend([batch(0), batch(1, num_bytes=200)])
    assert steps(load(traffic)) == [0]
    assert (traffic.can_load, traffic.wants_slots_of) == (False, 256)


def test_a_copy_comes_after_all_who_left_its_slots_each_event_once() -> None:
    traffic, slots = traffic_of(4)
    traffic.filled.extend(batch(i) for i in range(4))
    assert load(traffic).waits == []
    first, second = object(), object()
    for slot, left in zip(slots, (first, first, second, first), strict=True):
        traffic.let_go(slot, left)
    traffic.filled.extend(batch(i) for i in range(4))
    assert load(traffic).waits == [first, second]


@pytest.mark.parametrize(
    ("table", "events", "told"),
    [
        (ON_DEVICE, ["release"], "'release' of a slot that is 'free', expected one of load; events "
         "before it: none"),
        (ON_DEVICE, ["load", "place", "hand", "load"], "'load' of a slot that is 'held', expected "
         "one of release; events before it: load, place, hand"),
        (PINNED, ["take", "pack", "take"], "'take' of a slot that is 'filled', expected one of "
         "copied; events before it: take, pack"),
    ],
)  # fmt: skip
def test_a_move_that_may_not_be_made_is_told_with_those_before_it(
    table: dict[str, dict[str, str]], events: list[str], told: str
) -> None:
    life = Life(table)
    for event in events[:-1]:
        life.on(event)
    with pytest.raises(DeviceError) as caught:
        life.on(events[-1])
    assert str(caught.value) == told
