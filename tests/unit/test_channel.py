"""How many fetchers compute at once, beside a merge that has enough to do."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import feeder
from unit.small import WAIT_S
from workers import dispatch as dispatch_module
from workers.channel import Channel
from workers.ledger import Ledger
from workers.position import Lanes
from workers.rota import Lane, Rota
from workers.silence import Silence
from workers.stats import StreamStats

NUM_LANES = 4


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Channel:
    """Four lanes; one fetcher may compute while the merge is busy."""
    monkeypatch.setattr(dispatch_module, "MOST_COMPUTING", 1)
    monkeypatch.setattr(Silence, "check", lambda *_: WAIT_S)
    lanes = Lanes(num_lanes=NUM_LANES, pure=False, arrival=False)
    return Channel(
        Rota(lanes, lanes.origin(), 1),
        Ledger(1000, None, 1),
        StreamStats(NUM_LANES, 1),
        timeout_s=WAIT_S,
        marked=False,
        describe=lambda lane, call: (lane, call),
        waited_since=lambda: None,
    )


def acquire(channel: Channel) -> Lane:
    lane = channel.acquire()
    assert lane is not None
    return lane


def release(channel: Channel, lane: Lane) -> None:
    lane.chunks.append((np.zeros(1),))
    channel.release(lane, 1, 8)


class Fetcher(threading.Thread):
    """Waits for a lane in a thread of its own."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(daemon=True)
        self._channel = channel
        self.lane: Lane | None = None
        self.has_one = threading.Event()
        self.start()

    def run(self) -> None:
        self.lane = self._channel.acquire()
        self.has_one.set()


def make_busy(channel: Channel) -> None:
    """Have the merge find what it wants, so that it does not wait."""
    lanes = [acquire(channel) for _ in range(2)]
    for lane in lanes:
        release(channel, lane)
    assert len(channel.collect(lanes[0].number)) == 2


def test_before_the_merge_has_anything_all_may_compute(channel: Channel) -> None:
    assert {acquire(channel).number for _ in range(NUM_LANES)} == set(range(NUM_LANES))


def test_beside_a_busy_merge_one_computes(channel: Channel) -> None:
    make_busy(channel)
    first = acquire(channel)
    second = Fetcher(channel)
    assert not second.has_one.wait(0.05)
    release(channel, first)
    third = acquire(channel)
    assert third is not first
    # A merge that has to wait lets all of them go on.
    collected: list[Any] = []
    merge = threading.Thread(target=lambda: collected.extend(channel.collect(third.number)))
    merge.start()
    assert second.has_one.wait(WAIT_S)
    release(channel, third)
    merge.join(WAIT_S)
    assert [bundle.lane for bundle in collected] == [first.number, third.number]
    channel.close()
    second.join(WAIT_S)


def test_beside_a_busy_merge_any_number_wait(channel: Channel) -> None:
    make_busy(channel)
    lanes = {acquire(channel).number}
    for lane in channel._rota.lanes:
        lane.waits = True
    lanes |= {acquire(channel).number for _ in range(NUM_LANES - 1)}
    assert lanes == set(range(NUM_LANES))


class Waiting:
    """Calls that wait until all of them are under way."""

    def __init__(self, num: int) -> None:
        self.together = threading.Barrier(num)

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        self.together.wait(WAIT_S)
        return (np.full((batch_size, 1), worker_id),)


def test_calls_that_wait_for_each_other_are_made_together() -> None:
    fetch = Waiting(NUM_LANES)
    coordinator = feeder.init_data_input_workers(
        ["x"], fetch, 4, NUM_LANES, epochs=None, coordinator=feeder.Coordinator()
    )
    with coordinator:
        feed = coordinator["train"]
        workers = [int(next(feed)["x"][0, 0]) for _ in range(50 * NUM_LANES)]
        fetch.together.abort()
    assert workers == list(range(NUM_LANES)) * 50
