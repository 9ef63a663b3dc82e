"""Slots of a GPU are written again under work that is done late, and every batch is what was
fetched."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from conformance.gpus import gpus
from conformance.served import reading, serving
from feeds import assert_same, deal, make, running
from standin.gpu import Machine, assert_sound, installed
from standin.numbered import settings, wanted
from standin.reading import LateReader

pytestmark = pytest.mark.served

NUM_BATCHES = 10_000


@pytest.mark.parametrize(
    ("seed", "depth", "most_kept"),
    [
        (1, 2, 2),
        (0, 1, 0),
        (2, 3, 6),
        (4, 0, 80),
    ],
)
def test_ten_thousand_batches_are_what_was_fetched(seed: int, depth: int, most_kept: int) -> None:
    with gpus(seed) as machine, running(**settings(NUM_BATCHES, depth=depth)) as (_, feed):
        reader = LateReader(machine, seed=seed, most_kept=most_kept)
        got = reader.read_all(feed)
        del feed
    assert_same(got, wanted(NUM_BATCHES))


def test_ten_thousand_batches_of_two_gpus_on_streams_of_the_users_own() -> None:
    with gpus(7) as machine, running(**settings(NUM_BATCHES, devices=2)) as (_, feed):
        streams = [machine.clockwork.make(f"user {i}") for i in range(2)]
        reader = LateReader(machine)
        feeds = [feed.on(i, stream=stream) for i, stream in enumerate(streams)]
        for left, right in zip(*feeds, strict=True):
            reader.read(left, streams[0])
            reader.read(right, streams[1])
        got = reader.records()
        del feed, feeds, left, right
    assert_same(got, wanted(NUM_BATCHES))


@pytest.mark.parametrize("way", ("registered", "bounced", "frames"))
def test_ten_thousand_batches_of_a_consumer_are_what_was_fetched(way: str) -> None:
    machine = Machine(seed=3, registers=way == "registered")
    with (
        installed(machine),
        serving(lambda: make(**settings(NUM_BATCHES))) as server,
        reading(
            server, device="cuda:0", credit=3, plane="frames" if way == "frames" else "shared"
        ) as consumer,
    ):
        got = LateReader(machine, seed=3, most_kept=2).read_all(consumer)
        path = "registered memory" if way == "registered" else "pinned slots"
        assert consumer.stats()["path"] == consumer.path == path
    assert_same(got, wanted(NUM_BATCHES))
    del consumer
    assert_sound(machine)


def test_resumed_at_a_hundred_random_batches_of_a_gpu_the_rest_is_the_same() -> None:
    num = 300
    stream = wanted(num)
    with gpus(5) as machine:
        with running(**settings(num)) as (coordinator, feed):
            reader = LateReader(machine)
            places = [coordinator.state_dict()]
            for batch in deal(feed):
                reader.read(batch)
                places.append(coordinator.state_dict())
            got = reader.records()
            del feed, batch
        assert_same(got, stream)
        for step in random.Random(5).sample(range(num), 100):
            with running(resume=places[step], **settings(num)) as (_, feed):
                rest = LateReader(machine).read_all(islice(feed, 40))
                del feed
            assert_same(rest, stream[step : step + 40], step)
