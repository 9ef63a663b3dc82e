"""Each wait for an event is needed: without it the stand-in for a GPU shows wrong batches.

Here the device is made deaf to one kind of wait at a time. `scripts/nightly planted` deletes each
wait, and each record of an event, from the code instead.
"""

from __future__ import annotations

import pytest

from feeder.devices.cuda.copier import Copier
from feeder.devices.host import HostQueue
from feeds import assert_same, running
from standin.gpu import Machine, assert_sound, installed
from standin.numbered import registered_batch, settings, wanted
from standin.reading import LateReader

NUM_BATCHES = 200
SEEDS = range(8)


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


WAYS = {
    "copy": run,  # for what the user has given his stream before he let go of the slot
    "user": run,  # for the copy, before the user's work
    "host": run,  # for the copy, before its pinned slot is written again
    "drain": leave,  # for all copies, before memory is let go of
}


@pytest.mark.parametrize("wait", WAYS)
def test_a_device_that_is_deaf_to_a_wait_is_found_out(wait: str) -> None:
    found = 0
    for seed in SEEDS:
        machine = Machine(seed=seed, deaf=frozenset({wait}), slow_s=0.001)
        try:
            WAYS[wait](machine)
        except AssertionError:
            found += 1
    assert found


@pytest.mark.parametrize("way", [run, leave])
def test_a_device_that_hears_is_not_blamed(way: object) -> None:
    assert callable(way)
    for seed in SEEDS:
        machine = Machine(seed=seed, slow_s=0.001)
        way(machine)
        assert_sound(machine)
