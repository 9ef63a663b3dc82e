"""In what groups batches are handed over."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from feeder.devices.host import HostQueue
from unit.small import make
from workers.batch import Batch

NUM_BATCHES, BATCH_SIZE = 400, 4


def groups_of(row_bytes: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[int]:
    """How many batches were handed over at a time, of a chunk that holds all of them."""
    sizes: list[int] = []
    put = HostQueue.put

    def counted(queue: HostQueue, batches: list[Batch]) -> None:
        sizes.append(len(batches))
        put(queue, batches)

    def fetch(call: Any) -> Any:
        if call.index:
            raise StopIteration
        return (np.zeros((NUM_BATCHES * BATCH_SIZE, row_bytes), np.uint8),)

    monkeypatch.setattr(HostQueue, "put", counted)
    with make(fetch, ["x"], batch_size=BATCH_SIZE, **settings) as coordinator:
        assert sum(1 for _ in coordinator["train"]) == NUM_BATCHES
    return sizes


def test_the_first_batch_goes_at_once_and_groups_grow_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who connects waits for one batch, not for a group of 16 MiB."""
    sizes = groups_of(2048, monkeypatch, max_buffered_batches=2 * NUM_BATCHES)
    assert sizes[:4] == [1, 2, 4, 8]
    assert max(sizes) == 64
    assert all(later <= max(1, 2 * sooner) for sooner, later in pairwise(sizes))


@pytest.mark.parametrize(
    ("row_bytes", "settings", "most"),
    [
        (2**18, {"max_buffered_batches": 2 * NUM_BATCHES}, 16),
        (2**18, {"max_buffered_bytes": 8 * 2**20}, 4),
        (2048, {"max_buffered_batches": 20}, 10),
        (2048, {"max_buffered_batches": 1}, 1),
    ],
    ids=["16 MiB", "half the bytes", "half the batches", "one"],
)
def test_a_group_is_16_mib_and_half_the_bound_at_most(
    row_bytes: int, settings: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(groups_of(row_bytes, monkeypatch, **settings)) == most
