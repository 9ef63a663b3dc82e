"""Which copy to a GPU may begin: rules without threads and without a device."""

from __future__ import annotations

import pytest

from feeder import DeviceError
from feeder.devices.cuda.rules import (
    ON_DEVICE,
    PINNED,
    Life,
    Traffic,
    Transfer,
)


def load(traffic: Traffic) -> Transfer:
    """Begin the next copy and hand its batches out."""
    transfer = traffic.next_load()
    for slot in transfer.slots:
        slot.life.on("place")
        slot.life.on("hand")
    return transfer


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


@pytest.mark.parametrize("table", [ON_DEVICE, PINNED])
def test_every_state_can_be_left_for_another(table: dict[str, dict[str, str]]) -> None:
    reached = {state for moves in table.values() for state in moves.values()} | {"free"}
    assert set(table) == reached
    assert all(table.values())
