"""In what groups batches are handed over."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.devices.host import HostQueue
from feeder.workers.enqueuer import RoundRobinRouter
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


def made_before(num_devices: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[int]:
    """How many batches had been made when each device was given its first."""
    num_made, first = 0, {}
    route, put = RoundRobinRouter.route, HostQueue.put

    def counted(router: RoundRobinRouter, batch: Batch) -> None:
        nonlocal num_made
        num_made += 1
        route(router, batch)

    def noted(queue: HostQueue, batches: list[Batch]) -> None:
        first.setdefault(batches[0].step % num_devices, num_made)
        put(queue, batches)

    monkeypatch.setattr(RoundRobinRouter, "route", counted)
    monkeypatch.setattr(HostQueue, "put", noted)
    settings = {"max_buffered_batches": 2 * NUM_BATCHES, "devices": num_devices, **settings}
    with make(Whole(2048), ["x"], batch_size=BATCH_SIZE, **settings) as coordinator:
        for device in range(num_devices):
            next(coordinator["train"].on(device))
    return [first[device] for device in range(num_devices)]


def test_the_first_batch_goes_at_once_and_groups_grow_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who connects waits for one batch, not for a group of 16 MiB."""
    sizes = groups_of(2048, monkeypatch, max_buffered_batches=2 * NUM_BATCHES)
    assert sizes[:4] == [1, 2, 4, 8]
    assert max(sizes) == 64
    assert all(later <= max(1, 2 * sooner) for sooner, later in pairwise(sizes))


@pytest.mark.parametrize(
    ("last_round", "wanted"),
    [
        ("uneven", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("pad", [2, 3, 4, 5, 6, 7, 8, 8]),
        ("drop", [8] * 8),
    ],
)
def test_each_devices_first_batch_goes_as_soon_as_it_may(
    last_round: str, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may have to be repeated waits for the next, what may be dropped for its round."""
    assert made_before(8, monkeypatch, last_round=last_round) == wanted


@pytest.mark.parametrize(
    ("row_bytes", "settings", "most"),
    [
        (2**18, {"max_buffered_batches": 2 * NUM_BATCHES}, 16),
        (2**18, {"max_buffered_bytes": 8 * 2**20}, 4),
        (2**18, {"max_buffered_batches": 20}, 10),
        (2**18, {"max_buffered_batches": 1}, 1),
    ],
    ids=["16 MiB", "half the bytes", "half the batches", "one"],
)
def test_a_group_is_16_mib_and_half_the_bound_at_most(
    row_bytes: int, settings: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(groups_of(row_bytes, monkeypatch, **settings)) == most
