"""The verdict on real feeds in staged situations: each is right, or the test fails."""

from __future__ import annotations

import itertools
import re
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.service.protocol.batches import checksum
from feeder.service.server import serve as server_module
from verdicts.slow_wire import slow_wire
from verdicts.stage import (
    let_pass,
    look,
    look_for,
    make,
    only,
    rows,
    serving,
    slow,
    training,
    wait_until,
)

pytestmark = pytest.mark.served


@pytest.fixture(autouse=True)
def a_slow_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LOOK_S", 8.0)


def told_ms(before: str, why: str) -> float:
    """Return the milliseconds a call that stand behind some words."""
    found = re.search(rf"{re.escape(before)}([\d.]+) ms a call", why)
    assert found is not None, why
    return float(found[1])


def test_slow_fetch() -> None:
    with training(make(slow(0.02, rows())), 0.0) as read:
        verdict = look(read)
    assert verdict.kind == "fetch-bound"
    assert 20 <= told_ms("slowest, ", verdict.why) <= 200, "some 20 ms a call are told"
    assert "raise num_threads from 2" in verdict.advice
    assert "num_worker_threads" not in verdict.advice


def test_fewer_threads_than_workers() -> None:
    def fetch(worker_id: int, batch_size: int) -> Any:
        return slow(0.01, rows())(worker_id)

    coordinator = make(fetch, num_worker_threads=4, num_threads=1)
    with training(coordinator, 0.0) as read:
        verdict = look(read)
    assert verdict.kind == "fetch-bound"
    assert verdict.advice == "raise num_threads from 1 to 4"


def test_one_slow_worker() -> None:
    def fetch(worker_id: int, batch_size: int) -> Any:
        return slow(0.06 if worker_id == 3 else 0.002, rows())(worker_id)

    with training(make(fetch, num_worker_threads=4), 0.0) as read:
        verdict = look(read)
    assert verdict.kind == "slow-worker"
    assert 50 <= told_ms("worker 3, ", verdict.why) <= 500


def test_slow_trainer() -> None:
    with training(make(rows()), 0.02) as read:
        verdict = look(read)
    assert verdict.kind == "trainer-bound"
    assert "the feed keeps up" in verdict.why
    assert verdict.advice == ""


def test_trainer_that_takes_nothing() -> None:
    coordinator = make(rows())
    with coordinator:
        next(coordinator["train"])
        wait_until(lambda: only(coordinator.figures()).age_s > 0.05)
        verdict = look(coordinator.figures, 0.1)
    assert verdict.kind == "trainer-bound"
    assert "took no batch" in verdict.why


def test_tiny_batches() -> None:
    with training(make(rows(16, 16), max_buffered_batches=100), 0.0) as read:
        verdict = look_for("tiny-batches", read)
    assert verdict.kind == "tiny-batches"
    assert verdict.why.startswith("1.02 kB each")
    assert verdict.advice == "raise batch_size"


def test_copying() -> None:
    """Chunks of 3 rows of 1 MB at no cost, which the batcher has to copy into batches of 8."""
    with training(make(rows(3, 250_000), batch_size=8), 0.0) as read:
        verdict = look(read)
    assert verdict.kind == "copy-bound"
    assert "chunks of 3 rows into batches of 8" in verdict.why


def test_one_stalled_queue() -> None:
    coordinator = make(rows(), devices=2, max_buffered_batches=8)
    with training(coordinator, 0.0) as read:
        wait_until(lambda: only(read()).queues[0].wait_s > 0.1)
        verdict = look(read)
    assert verdict.kind == "stalled-queue"
    assert verdict.why == "queue 1 has batches that nobody takes, queue 0 waits behind it"


def test_one_slower_trainer() -> None:
    coordinator = make(rows(), devices=2, max_buffered_batches=8)
    with training(coordinator, 0.005, 0.03) as read:
        verdict = look(read)
    assert verdict.kind == "slow-queue"
    assert verdict.why.startswith("queue 1 is full, and queue 0 waits behind it")


def test_fetch_that_fails_now_and_then() -> None:
    turns = itertools.count()

    def fetch(call: Any) -> Any:
        if next(turns) % 3 == 2:
            raise OSError("the disk is away")
        return rows()(call)

    coordinator = make(fetch, retries=5, retry_backoff_s=0.02)
    with training(coordinator, 0.0) as read:
        verdict = look(read)
    assert verdict.kind == "failing-fetch"
    assert "OSError: the disk is away" in verdict.why


def test_fetch_that_fails_for_good() -> None:
    def fetch(call: Any) -> Any:
        if call.index == 5:
            raise OSError("the disk is gone")
        return rows()(call)

    with training(make(fetch), 0.0) as read:
        verdict = look(read, 0.05)
    assert verdict.kind == "failed"
    assert "call 5: fetch function raised OSError: the disk is gone" in verdict.why


def test_source_that_has_nothing() -> None:
    turns = itertools.count()

    def fetch(worker_id: int, batch_size: int) -> Any:
        return rows()(worker_id) if next(turns) % 8 == 0 else None

    with training(make(fetch, num_worker_threads=1), 0.0) as read:
        verdict = look(read)
    assert verdict.kind == "source-bound"


@pytest.mark.usefixtures("exact_bound")
def test_bursts_that_the_buffer_is_too_small_for() -> None:
    """Ten batches at once and then a long step; the feed could have made them meanwhile."""
    coordinator = make(slow(0.005, rows()), max_buffered_batches=2)
    with training(coordinator, 0.15, burst=10) as read:
        verdict = look_for("small-buffer", read, 1.0)
    assert verdict.kind == "small-buffer"
    assert "max_buffered_batches" in verdict.advice


def test_stream_that_has_ended() -> None:
    coordinator = make(lambda call: [np.ones((16, 4))] if call.index < 5 else _stop(), epochs=1)
    with training(coordinator, 0.0) as read:
        wait_until(lambda: only(read()).state == "ended")
        verdict = look(read, 0.01)
    assert (verdict.kind, verdict.why) == ("ended", "all 5 batches are made")


def _stop() -> None:
    raise StopIteration


# ---- served


def test_slow_fetch_served() -> None:
    with serving(lambda: make(slow(0.02, rows())), [0.0]) as read:
        verdict = look(read)
    assert verdict.kind == "fetch-bound"


def test_slow_trainer_served() -> None:
    with serving(lambda: make(rows()), [0.02]) as read:
        wait_until(lambda: only(read()).queues[0].batches >= 3)
        verdict = look(read, 1.2)
    assert verdict.kind == "trainer-bound"


def test_one_trainer_is_missing() -> None:
    with serving(lambda: make(rows()), [0.0], queues=2) as read:
        verdict = look(read, 0.01)
    assert (verdict.kind, verdict.why) == ("waiting", "for a consumer on queue 1")


def test_a_trainer_that_is_gone_for_good() -> None:
    with feeder.serve(lambda: make(rows()), "tcp://127.0.0.1:0") as server:
        with feeder.connect(server.addresses[0]) as consumer:
            for _ in range(3):
                next(consumer)
        wait_until(lambda: only(server.figures()).queues[0].waiting > 3)
        verdict = look(server.figures, 0.1)
    assert (verdict.kind, verdict.why) == ("waiting", "for a consumer on queue 0")


def test_one_stalled_trainer_served() -> None:
    stalled = threading.Event()
    with serving(lambda: make(rows(), devices=2), [0.0, 3600.0]) as read:
        wait_until(lambda: only(read()).queues[0].wait_s > 0.1)
        verdict = look(read)
        stalled.set()
    assert verdict.kind == "stalled-queue"
    assert "queue 1 has batches" in verdict.why


def test_slow_network() -> None:
    """58 kB batches at 0.5 MB/s: some eight a second arrive, and thousands could be made."""
    through = partial(slow_wire, bytes_per_s=5e5)
    fetch = rows(16, 900)
    with serving(lambda: make(fetch), [0.0], through=through, plane="frames", credit=4) as read:
        verdict = look(read, 1.2)
    assert verdict.kind == "network-bound"
    assert "credit=" in verdict.advice


@pytest.mark.parametrize(("mode", "kind"), [("full", "checksum-bound"), ("off", "trainer-bound")])
def test_checksums_on_a_slow_machine(mode: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same feed and trainer, with checksums of 20 ms a batch and without."""

    def slow_checksum(memory: memoryview, how: Any) -> int:
        let_pass(0.02)
        return checksum(memory, how)

    monkeypatch.setattr("feeder.service.client.lease.checksum", slow_checksum)
    with serving(lambda: make(rows()), [0.005], checksum=mode) as read:
        wait_until(lambda: only(read()).queues[0].batches >= 3)
        # What is under way takes a second to be checked, and the trainer's waits are told then.
        verdict = look_for(kind, read, 3.0)
    assert verdict.kind == kind
