"""In what order the work of streams comes, over a stand-in for a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import feeder
from feeder.devices.cuda.copier import Copier
from feeder.devices.host import HostQueue
from feeds import assert_same, note, running
from small import Pure, make
from standin.gpu import Machine, assert_sound, installed
from standin.numbered import registered_batch, settings, wanted
from standin.reading import LateReader

SEEDS = range(8)


def feed_of(num_batches: int, **more: Any) -> Any:
    return running(**settings(num_batches, devices=("cuda:0",), depth=4) | more)


def test_cupys_current_stream_comes_after_the_copy_too() -> None:
    """What DLPack hands to other frameworks is put after CuPy's current stream."""
    for seed in SEEDS:
        machine = Machine(seed=seed, slow_s=0.002)
        with installed(machine), feed_of(60) as (_, feed):
            mine = machine.clockwork.make("mine")
            got = [note(batch) for batch in feed.on(0, stream=mine)]
            assert_same(got, wanted(60), seed)


def test_batches_of_one_copy_on_different_streams_all_come_after_it() -> None:
    for seed in SEEDS:
        machine = Machine(seed=seed, slow_s=0.002)
        with installed(machine), feed_of(100, depth=16) as (_, feed):
            streams = [machine.clockwork.make(f"mine {i}") for i in range(2)]
            reader = LateReader(machine)
            for step in range(100):
                with machine.on(streams[step % 2]) as stream:
                    reader.read(next(feed), stream)
            assert_same(reader.records(), wanted(100))
        assert machine.num_copies < 100


def test_a_stream_that_is_none_is_refused() -> None:
    with installed(Machine()), feed_of(10) as (_, feed):
        with pytest.raises(feeder.ConfigError, match="expected a stream of the stand-in"):
            feed.on("cuda:0", stream="mine")
        assert next(feed).step == 0


def test_a_stream_for_the_host_is_refused() -> None:
    with make(Pure()) as coordinator, pytest.raises(feeder.ConfigError) as caught:
        coordinator["train"].on("cpu", stream=7)
    assert str(caught.value) == "stream is 7, but 'cpu' is no GPU; leave it out"


def test_a_batch_that_another_thread_lets_go_of_comes_back_after_its_users_stream() -> None:
    machine = Machine(seed=4)
    with installed(machine), feed_of(200, depth=1) as (_, feed):
        reader = LateReader(machine)
        for batch in feed:
            reader.read(batch)
            last = [batch]
            del batch
            dropper = threading.Thread(target=last.clear)
            dropper.start()
            dropper.join()
        assert_same(reader.records(), wanted(200))
    del feed
    assert_sound(machine)


@pytest.mark.parametrize(
    ("seed", "depth", "most_kept"), [(1, 2, 2), (0, 1, 0), (2, 3, 6), (4, 0, 80)]
)
def test_batches_are_what_was_fetched_whatever_is_kept(
    seed: int, depth: int, most_kept: int
) -> None:
    machine = Machine(seed=seed)
    with installed(machine), feed_of(400, depth=depth) as (_, feed):
        reader = LateReader(machine, seed=seed, most_kept=most_kept)
        assert_same(reader.read_all(feed), wanted(400))
        del feed
    assert_sound(machine)


def test_so_are_those_of_two_gpus_on_streams_of_the_users_own() -> None:
    machine = Machine(num_gpus=2, seed=7)
    devices = ("cuda:0", "cuda:1")
    with installed(machine), feed_of(400, devices=devices, depth=2) as (_, feed):
        streams = [machine.clockwork.make(f"user {i}") for i in range(2)]
        reader = LateReader(machine)
        feeds = [feed.on(i, stream=stream) for i, stream in enumerate(streams)]
        for batches in zip(*feeds, strict=True):
            for batch, stream in zip(batches, streams, strict=True):
                reader.read(batch, stream)
        assert_same(reader.records(), wanted(400))
        del feed, feeds, batches, batch
    assert_sound(machine)


# ---- each wait for an event is needed: without it the stand-in for a GPU shows wrong batches, as
# `scripts/nightly planted` sees, which deletes each wait, and each record of an event


NUM_BATCHES = 200


def run(machine: Machine) -> None:
    """Read a feed, two slots ahead; raises AssertionError where a batch is wrong."""
    with installed(machine), running(**settings(NUM_BATCHES, devices=("cuda:0",), depth=2)) as (
        _, feed
    ):  # fmt: skip
        assert_same(LateReader(machine).read_all(feed), wanted(NUM_BATCHES))


def leave(machine: Machine) -> None:
    """End a copier with a copy under way, which reads memory that goes then; raises
    AssertionError where it goes too early."""
    driver = machine.open("cuda:0", 0)
    copier = Copier(driver, 2, 2, "nothing")
    copier.open_stream()
    copier.inbox.put([registered_batch(driver)])
    assert copier.step(HostQueue(9, str))
    copier.inbox.put(None)
    assert not copier.step(HostQueue(9, str))
    copier.drain()
    assert machine.faults == []


@pytest.mark.parametrize("way", [run, leave])
def test_a_device_that_hears_is_not_blamed(way: object) -> None:
    assert callable(way)
    for seed in SEEDS:
        machine = Machine(seed=seed, slow_s=0.001)
        way(machine)
        assert_sound(machine)
