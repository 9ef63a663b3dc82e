"""What a lease says to the server that sends its batches: slots that it needs, and whose batches
were used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from feeder.devices.layout import MAX_ARENA_BYTES
from feeder.service.server.delivery import Lease

KIB, MIB, GIB = 2**10, 2**20, 2**30


def make(credit: int = 4, hold: int = 1) -> Lease:
    peer: Any = None
    return Lease(
        seat=0, queue=0, replica=0, name="queue 0", peer=peer, generation=b"", credit=credit,
        hold=hold, checksum="off",
    )  # fmt: skip


def batch() -> Any:
    return SimpleNamespace(place=None)


@pytest.mark.parametrize(
    ("slot_bytes", "credit", "hold", "num", "is_too_much"),
    [
        (1 * KIB, 8, 2, 18, False),
        (1 * MIB, 8, 2, 14, False),
        (1 * GIB, 8, 2, 12, False),
        (1 * GIB, 10, 4, 16, False),
        (1 * GIB, 10, 5, 4, True),
        # Larger than the bound with what everybody has: nothing special was asked for.
        (MAX_ARENA_BYTES, 0, 1, 7, False),
        (MAX_ARENA_BYTES, 0, 2, 4, True),
    ],
)
def test_so_many_slots_are_needed_and_too_many_are_told_of(
    slot_bytes: int, credit: int, hold: int, num: int, is_too_much: bool
) -> None:
    lease = make(credit, hold)
    assert lease.num_slots(slot_bytes) == num
    assert (lease.excess is not None) == is_too_much


def test_used_batches_of_earlier_runs_are_told_apart() -> None:
    lease = make()
    earlier: Any = SimpleNamespace()
    later: Any = SimpleNamespace()
    lease.note([batch() for _ in range(3)], earlier)
    lease.note([batch()], earlier)
    assert lease.take_used(1).num_stale == 0
    lease.note([batch(), batch()], later)
    assert [(len(news.batches), news.num_stale) for news in map(lease.take_used, (2, 2, 1))] == [
        (2, 3), (2, 1), (1, 0),
    ]  # fmt: skip
