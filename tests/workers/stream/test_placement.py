"""Which slot a batch gets, and which rows of it each call writes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from calls import call
from feeder.devices.slots import PrivateSlots
from feeder.workers.stream.chunks import Column, Schema
from feeder.workers.stream.placement import Place, Placement, writing_to

COLUMNS = (
    Column("id", 0, np.dtype(np.int64), ()),
    Column("image", 1, np.dtype(np.uint8), (3, 5)),
)
ROWS, BATCH = 2, 6


class FewSlots:
    """So many slots of each device; those that are given back come again."""

    passes, writable, reserved, opens = False, False, True, True

    def __init__(self, num: int, num_devices: int = 1) -> None:
        self.free = [[FewSlot(device) for _ in range(num)] for device in range(num_devices)]

    def take_slot(self, device: int, columns: Any, rows: int) -> Any:
        return self.free[device].pop() if self.free[device] else None

    def wait_for_slot(self, device: int) -> None:
        raise AssertionError("nobody waits here")

    def put_back(self, device: int, slot: Any) -> None:
        self.free[device].append(slot)

    def take_back(self, device: int, batch: Any) -> None:
        raise AssertionError("no batch is thrown away here")


class FewSlot:
    """A slot that may be looked at by the calls of an earlier batch."""

    kept = seen = None

    def __init__(self, device: int) -> None:
        self.device = device
        self.is_kept = self.is_closed = False
        self.arrays = PrivateSlots().take_slot(0, COLUMNS, BATCH).arrays

    def open(self) -> Any:
        return None if self.is_kept else self.arrays

    def close(self) -> None:
        self.is_closed = True


def make(slots: Any, num_devices: int = 1, *, known: bool = True) -> Placement:
    schema = Schema(("id", "image"), (0, 1), known=COLUMNS if known else None)
    return Placement(schema, slots, rows_per_call=ROWS, batch_size=BATCH, num_devices=num_devices)


def begun(slots: Any, num_devices: int = 1, turn: int = 0) -> Placement:
    places = make(slots, num_devices)
    places.begin(places.plan(0, 0, turn))
    return places


@pytest.mark.parametrize("num_devices", (1, 3))
@pytest.mark.parametrize("seed", range(20))
def test_a_slot_is_promised_to_the_batches_in_order(seed: int, num_devices: int) -> None:
    """Whatever calls ask for, in whatever order: the next batch has a slot of its own device, and
    no two batches have the same one."""
    chance, slots = random.Random(seed), FewSlots(3, num_devices)
    turn = chance.randrange(10)
    places = begun(slots, num_devices, turn)
    out: list[Any] = []
    in_use: dict[int, Any] = {}
    for _ in range(200):
        while not places.provide(chance.randrange(1, 8)):
            back = out.pop(chance.randrange(len(out)))
            slots.free[back.device].append(back)
        _, end = places.allowed(0) or (0, 0)
        first = 3 * (turn - places._plan.first_turn)  # type: ignore[union-attr]
        for _ in range(chance.randrange(5)):
            number = chance.randrange(first, end)
            place = places.place(0, number)
            assert place is not None
            at = place.arrays[0].ctypes.data - 16 * (number % 3)
            assert in_use.setdefault(at, number // 3) == number // 3
        if chance.random() < 0.2:
            places.pass_by(turn, None)
        else:
            slot: Any = places.take(turn)
            assert slot is not None and slot.device == turn % num_devices
            at = slot.arrays[0].ctypes.data
            assert in_use.get(at, first // 3) == first // 3
            places.pass_by(turn, slot)
            out.append(slot)
        in_use = {at: batch for at, batch in in_use.items() if batch != first // 3}
        turn += 1


def test_what_calls_beyond_the_end_were_given_serves_the_next_epoch() -> None:
    slots = FewSlots(3)
    places = begun(slots)
    assert places.provide(10) and places.allowed(0) == (0, 9)
    assert not slots.free[0]
    places.begin(places.plan(1, 0, 1))
    assert places.provide(10) and places.allowed(0) == (1, 9)
    # Or the slots are given back, for a batch that no call writes to.
    places.begin(places.plan(2, 0, 1))
    places.give_back(0)
    assert len(slots.free[0]) == 3


def test_a_slot_that_is_looked_at_waits_until_nobody_does() -> None:
    slots = FewSlots(3)
    kept = slots.free[0][-1]
    kept.is_kept = True
    places = begun(slots)
    assert places.provide(4) and places.allowed(0) == (0, 6)
    kept.is_kept = False
    assert places.provide(4) and places.allowed(0) == (0, 9)


def test_columns_are_found_by_what_they_are_like() -> None:
    arrays = (np.zeros((4, 2)), np.zeros((4, 2)), np.zeros((3, 4), np.int32))
    place = Place(["a", "b", "c"], (0, 0, 1), arrays)
    assert place.out.keys() == {"a", "b", "c"}
    for shape, dtype in (
        ((5, 2), float), ((4, 3), float), ((4, 2), np.float32), ((4,), float), ((4, 2, 1), float),
        ((4, 3), np.int32), ((3, 5), np.int32), ((3, 2), ">f8"),
    ):  # fmt: skip
        assert place.find(shape, dtype) is None
    found = place.find((3, 2), "=f8"), place.find((4, 2), float), place.find((3, 2), np.int32)
    assert place.find((4, 2), float) is None
    for got, array in zip(found, arrays, strict=True):
        assert got is not None and np.shares_memory(got, array)
    place.close()
    with pytest.raises(ValueError, match="read-only"):
        arrays[0][:] = 1


def test_a_call_has_its_place_for_as_long_as_the_function_runs() -> None:
    arrays = (np.zeros(4),)
    one = call(0, 4)
    assert one.out is None
    with pytest.raises(OSError, match="gone"), writing_to(Place(["a"], (0,), arrays), one):
        assert one.out is not None and one.out["a"] is arrays[0]
        assert one.empty(4, float) is not None
        raise OSError("gone")
    assert one.out is None and not arrays[0].flags.writeable
    again = type(one)(*one)
    assert again == one and one.__reduce__() == (type(one), (0, 0, 0, 4, 0))
