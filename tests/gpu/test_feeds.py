"""Feeds on a real GPU: batches copied back late, compared with what was fetched."""

from __future__ import annotations

import gc
import random
from itertools import islice
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeds import assert_same, make, note, running
from gpu.copying import LateReader, Poisoning
from standin.numbered import settings, wanted

NUM_BATCHES = 10_000
BATCH_BYTES = 256
pytestmark = [pytest.mark.usefixtures("gpu"), pytest.mark.timeout(300)]


def on_gpu(num_batches: int, **more: Any) -> Any:
    return running(**settings(num_batches, devices=("cuda:0",)) | more)


@pytest.mark.parametrize(("depth", "delays"), [(1, 0), (2, 1), (3, 4), (0, 0)])
def test_ten_thousand_batches_come_back_as_they_were_fetched(
    poisoned: list[Poisoning], depth: int, delays: int
) -> None:
    with on_gpu(NUM_BATCHES, depth=depth) as (_, feed):
        driver = poisoned[-1]
        stream = driver.make_stream()
        reader = LateReader(driver, stream, NUM_BATCHES * BATCH_BYTES, delays=delays)
        for batch in feed.on(0, stream=stream):
            reader.read(batch)
        assert_same(reader.records(), wanted(NUM_BATCHES))
    assert driver.num_copies > 0


def test_ten_thousand_batches_on_the_current_stream(poisoned: list[Poisoning]) -> None:
    with on_gpu(NUM_BATCHES, depth=2) as (_, feed):
        assert_same([note(batch) for batch in feed], wanted(NUM_BATCHES))


@pytest.mark.parametrize("way", ("registered", "bounced", "frames"))
def test_ten_thousand_batches_of_a_consumer_come_back_as_they_were_fetched(
    poisoned: list[Poisoning], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(Poisoning, "registers", way == "registered")
    plane: Any = "frames" if way == "frames" else "shared"
    with (
        serving(lambda: make(**settings(NUM_BATCHES))) as server,
        reading(server, device="cuda:0", credit=3, plane=plane) as consumer,
    ):
        stream = poisoned[-1].make_stream()
        consumer._inbox.batches.work_on(stream)
        reader = LateReader(poisoned[-1], stream, NUM_BATCHES * BATCH_BYTES)
        for batch in consumer:
            reader.read(batch)
        assert_same(reader.records(), wanted(NUM_BATCHES))
        paths = {"registered memory"} if way == "registered" else set()
        assert consumer.path in paths | {"pinned slots"}


def test_resumed_at_a_hundred_random_batches_the_rest_is_the_same() -> None:
    num = 300
    with on_gpu(num) as (coordinator, feed):
        places = [coordinator.state_dict()]
        for _ in feed:
            places.append(coordinator.state_dict())
    for step in random.Random(5).sample(range(num), 100):
        with on_gpu(num, resume=places[step]) as (_, feed):
            rest = [note(batch) for batch in islice(feed, 40)]
        assert_same(rest, wanted(num)[step : step + 40], step)


def test_a_list_of_a_feed_holds_different_batches() -> None:
    with on_gpu(500, depth=2) as (_, feed):
        batches = list(feed)
    assert_same([note(batch) for batch in batches], wanted(500))


def test_memory_comes_back_when_the_feed_and_its_batches_are_gone(
    poisoned: list[Poisoning],
) -> None:
    def run() -> None:
        with on_gpu(100, depth=200) as (_, feed):
            list(islice(feed, 20))

    run()  # Whatever CuPy and the driver take once is taken now.
    gc.collect()
    before = poisoned[-1].free_bytes()
    for _ in range(3):
        run()
    gc.collect()
    assert poisoned[-1].free_bytes() == before


def test_more_memory_than_there_is_is_told_and_nothing_is_leaked(
    poisoned: list[Poisoning],
) -> None:
    def fetch(call: feeder.Call) -> Any:
        return (np.zeros((1, 2**28), np.uint8),)

    with running(fetch, input_blob_names=["x"], batch_size=1, devices=("cuda:0",), depth=1024) as (
        _,
        feed,
    ):
        before = poisoned[-1].free_bytes()
        # The pinned slots, or those on the device.
        with pytest.raises(feeder.DeviceError, match=r"were refused.*lower depth= or"):
            next(feed)
    assert poisoned[-1].free_bytes() >= before


def test_a_feed_is_dealt_to_two_gpus(gpus: None) -> None:
    with running(**settings(400, devices=("cuda:0", "cuda:1"))) as (_, feed):
        left, right = (feed.on(i) for i in range(2))
        got = [note(batch) for pair in zip(left, right, strict=True) for batch in pair]
    assert_same(got, wanted(400))
