"""In what groups batches are handed over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import feeder
from feeder.devices.host import HostQueue
from feeder.workers.stream.batch import Batch
from small import make

NUM_BATCHES, BATCH_SIZE = 400, 4


class Whole:
    """`fetch(call)`: one chunk, which holds all batches."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes

    def __call__(self, call: feeder.Call) -> Any:
        if call.index:
            raise StopIteration
        return (np.zeros((NUM_BATCHES * BATCH_SIZE, self.row_bytes), np.uint8),)


def groups_of(row_bytes: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[int]:
    """How many batches were handed over at a time."""
    sizes: list[int] = []
    put = HostQueue.put

    def counted(queue: HostQueue, batches: list[Batch]) -> None:
        sizes.append(len(batches))
        put(queue, batches)

    monkeypatch.setattr(HostQueue, "put", counted)
    with make(Whole(row_bytes), ["x"], batch_size=BATCH_SIZE, **settings) as coordinator:
        assert sum(1 for _ in coordinator["train"]) == NUM_BATCHES
    return sizes


@pytest.mark.parametrize(
    ("row_bytes", "settings", "most"),
    [
        (2048, {"max_buffered_batches": 2 * NUM_BATCHES}, 64),
        (2**18, {"max_buffered_batches": 2 * NUM_BATCHES}, 4),
        (2**18, {"max_buffered_bytes": 4 * 2**20}, 2),
        (2048, {"max_buffered_batches": 20}, 10),
        (2048, {"max_buffered_batches": 1}, 1),
    ],
    ids=["64 batches", "4 MiB", "half the bytes", "half the batches", "one"],
)
def test_a_group_is_4_mib_and_half_the_bound_at_most(
    row_bytes: int, settings: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(groups_of(row_bytes, monkeypatch, **settings)) == most
