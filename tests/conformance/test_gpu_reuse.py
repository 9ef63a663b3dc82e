"""Slots of a GPU are written again under work that is done late, and every batch is what was
fetched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conformance.served import reading, serving
from feeds import assert_same, make, running
from standin.gpu import Machine, assert_sound, installed
from standin.numbered import settings, wanted
from standin.reading import LateReader

pytestmark = pytest.mark.served

NUM_BATCHES = 2000


def on_gpus(num: int, depth: int) -> dict[str, Any]:
    """The settings of a feed on so many GPUs, of so many slots each."""
    return settings(NUM_BATCHES, devices=[f"cuda:{i}" for i in range(num)], depth=depth)


@contextmanager
def gpus(seed: int) -> Iterator[Machine]:
    """Stand-ins that work late and out of step, for as long as the context lasts."""
    machine = Machine(num_gpus=4, seed=seed)
    with installed(machine):
        yield machine
    assert_sound(machine)


@pytest.mark.parametrize(
    ("seed", "depth", "most_kept"),
    [
        (1, 2, 2),
        (0, 1, 0),
        (2, 3, 6),
        (4, 0, 80),
    ],
)
def test_thousands_of_batches_are_what_was_fetched(seed: int, depth: int, most_kept: int) -> None:
    with gpus(seed) as machine, running(**on_gpus(1, depth=depth)) as (_, feed):
        reader = LateReader(machine, seed=seed, most_kept=most_kept)
        got = reader.read_all(feed)
        del feed
    assert_same(got, wanted(NUM_BATCHES))


def test_thousands_of_batches_of_two_gpus_on_streams_of_the_users_own() -> None:
    with gpus(7) as machine, running(**on_gpus(2, depth=2)) as (_, feed):
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
def test_thousands_of_batches_of_a_consumer_are_what_was_fetched(way: str) -> None:
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
