"""A consumer on a GPU: on what way its batches come, what it keeps, and what it leaves behind."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from standin.gpu import Machine, assert_sound, installed
from standin.reading import LateReader
from standin.serving import NUM_BATCHES, ROWS, factory

pytestmark = pytest.mark.served

WAYS = {
    "registered": (True, "shared", "registered memory"),
    "bounced": (False, "shared", "pinned slots"),
    "frames": (True, "frames", "pinned slots"),
}


def assert_is(batch: feeder.Batch, step: int) -> None:
    assert batch.step == step
    assert set(batch["value"].get().ravel().tolist()) == {step + 1}
    assert batch["id"].tolist() == [1000 * step + row for row in range(ROWS)]


class Way:
    """How batches come to a GPU."""

    def __init__(self, machine: Machine, plane: Any, path: str) -> None:
        self.machine = machine
        self.path = path
        self.settings = {"plane": plane, "device": "cuda:0", "credit": 3}


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    registers, plane, path = request.param
    with installed(Machine(seed=2, registers=registers)) as machine:
        yield Way(machine, plane, path)
    assert_sound(machine)


def test_on_the_host_it_says_nothing_of_that() -> None:
    with serving(factory) as server, reading(server) as consumer:
        assert (consumer.path, consumer.stats()["path"]) == ("", "")
        assert repr(consumer).endswith(", shared>")


def test_why_memory_is_not_registered_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "feeder")
    machine = Machine(registers=False)
    with (
        installed(machine),
        serving(factory) as server,
        reading(server, device="cuda:0", plane="shared") as consumer,
    ):
        next(consumer)
    told = [record.getMessage() for record in caplog.records if "registered" in record.message]
    assert told == [
        "consumer: the server's memory cannot be registered with cuda:0 (StandinError: memory "
        "cannot be registered): batches go by way of pinned slots"
    ]


def test_the_server_gets_its_slots_back_while_batches_are_kept(way: Way) -> None:
    """Those that the user looks at are the GPU's."""
    with serving(factory) as server, reading(server, hold=8, **way.settings) as consumer:
        kept = [next(consumer) for _ in range(8)]
        lease = consumer._inbox.lease
        assert lease is not None and not lease.lends
        for step in range(8, NUM_BATCHES - 1):
            assert_is(next(consumer), step)
        for step, batch in enumerate(kept):
            assert_is(batch, step)
        del batch


def test_a_consumer_that_is_left_with_copies_under_way_gives_memory_back_after_them(
    way: Way,
) -> None:
    for num in range(12):
        with serving(factory) as server, reading(server, **way.settings) as consumer:
            for _ in range(num):
                next(consumer)
    assert way.machine.faults == []


def test_a_consumer_that_is_forgotten_leaves_no_thread(way: Way) -> None:
    with serving(factory) as server:
        consumer = feeder.connect(server.addresses[0], **way.settings)
        next(consumer)
        threads = consumer._thread_group._threads + consumer._inbox.batches._scope._threads
        del consumer
        gc.collect()
        for thread in threads:
            thread.join(10.0)
            assert not thread.is_alive()


@contextmanager
def child(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a process of its own, which is killed at the end if not before."""
    with subprocess.Popen(
        [sys.executable, "-m", "standin.serving", address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as server:  # fmt: skip
        try:
            yield server
        finally:
            server.kill()


@pytest.mark.process
def test_a_server_that_is_killed_and_started_again_is_not_noticed(way: Way, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/feed.sock"
    with child(address) as first:
        assert first.stdout is not None and first.stdout.readline()
        with feeder.connect(address, **way.settings) as consumer:
            reader = LateReader(way.machine, seed=1, most_kept=2)
            for _ in range(50):
                reader.read(next(consumer))
            assert consumer.stats()["path"] == consumer.path == way.path
            first.kill()
            with child(address):
                for step in range(50, NUM_BATCHES):
                    batch = next(consumer)
                    assert batch.step == step
                    reader.read(batch)
                assert consumer.stats()["reconnects"] == 1
                del batch
                got = [columns[0][2] for *_, columns in reader.records()]
    wanted = [np.full((ROWS, 100), step + 1).tobytes() for step in range(NUM_BATCHES)]
    assert got == wanted
