"""The verdict on real feeds in staged situations: each is right, or the test fails."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import feeder
from feeder.service.protocol.batches import checksum
from feeder.service.server import serve as server_module
from verdicts.stage import (
    LOOK_S,
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


def of_workers(seconds: Callable[[int], float]) -> Callable[[int, int], Any]:
    """A fetch function whose workers take their time."""
    return lambda worker_id, batch_size: slow(seconds(worker_id), rows())(worker_id)


def every(num: int, otherwise: Callable[[], Any]) -> Callable[[int, int], Any]:
    """A fetch function that gives rows at one of so many calls."""
    turns = itertools.count()
    return lambda worker_id, batch_size: otherwise() if next(turns) % num else rows()(worker_id)


def fails_now_and_then() -> Callable[[Any], Any]:
    turns = itertools.count()

    def fetch(call: Any) -> Any:
        if next(turns) % 3 == 2:
            raise OSError("the disk is away")
        return rows()(call)

    return fetch


class Situation(NamedTuple):
    """A feed of this process, whose trainers take so long for a step, and what is said of it."""

    kind: str
    make: Callable[[], feeder.Coordinator]
    steps_s: tuple[float, ...]
    says: str
    """A pattern for the reason and the advice."""
    burst: int = 1
    seconds: float = LOOK_S


TWO = {"devices": 2, "max_buffered_batches": 8}
SITUATIONS = {
    "slow fetch": Situation(
        "fetch-bound", lambda: make(slow(0.02, rows())), (0.0,),
        r"slowest, (2\d|[3-9]\d|1\d\d)[\d.]* ms a call; .*raise num_threads from 2"),
    "fewer threads than workers": Situation(
        "fetch-bound",
        lambda: make(of_workers(lambda worker: 0.01), num_worker_threads=4, num_threads=1), (0.0,),
        r"; raise num_threads from 1 to 4$"),
    "one slow worker": Situation(
        "slow-worker",
        lambda: make(of_workers(lambda i: 0.06 if i == 3 else 0.002), num_worker_threads=4), (0.0,),
        r"worker 3, ([5-9]\d|[1-4]\d\d)[\d.]* ms a call"),
    "slow trainer": Situation(
        "trainer-bound", lambda: make(rows()), (0.02,), "the feed keeps up.*; $"),
    "tiny batches": Situation(
        "tiny-batches", lambda: make(rows(16, 16), max_buffered_batches=100), (0.0,),
        r"^1.02 kB each.*; raise batch_size$"),
    # Chunks of 3 rows of 1 MB at no cost, which the batcher has to copy into batches of 8.
    "copying": Situation(
        "copy-bound", lambda: make(rows(3, 250_000), batch_size=8), (0.0,),
        "chunks of 3 rows into batches of 8"),
    "one stalled queue": Situation(
        "stalled-queue", lambda: make(rows(), **TWO), (0.0,),
        "^queue 1 has batches that nobody takes, queue 0 waits behind it"),
    "one slower trainer": Situation(
        "slow-queue", lambda: make(rows(), **TWO), (0.005, 0.03),
        "^queue 1 is full, and queue 0 waits behind it"),
    "fetch that fails now and then": Situation(
        "failing-fetch",
        lambda: make(fails_now_and_then(), retries=5, retry_backoff_s=0.02), (0.0,),
        "OSError: the disk is away"),
    "source that has nothing": Situation(
        "source-bound", lambda: make(every(8, lambda: None), num_worker_threads=1), (0.0,), ""),
    # Ten batches at once and then a long step; the feed could have made them meanwhile.
    "bursts that the buffer is too small for": Situation(
        "small-buffer", lambda: make(slow(0.005, rows()), max_buffered_batches=2), (0.15,),
        "max_buffered_batches", burst=10, seconds=1.0),
}  # fmt: skip


def nightly_but(name: str) -> list[Any]:
    """The names of the situations, of which one alone is looked at by day: each takes its time."""
    return [
        one if one == name else pytest.param(one, marks=pytest.mark.nightly) for one in SITUATIONS
    ]


@pytest.mark.parametrize("name", nightly_but("slow fetch"))
@pytest.mark.usefixtures("exact_bound")
def test_a_feed_of_this_process(name: str) -> None:
    one = SITUATIONS[name]
    with training(one.make(), *one.steps_s, burst=one.burst) as read:
        if one.kind == "stalled-queue":
            wait_until(lambda: only(read()).queues[0].wait_s > 0.1)
        verdict = look_for(one.kind, read, one.seconds)
    assert verdict.kind == one.kind
    assert re.search(one.says, f"{verdict.why}; {verdict.advice}"), verdict


def test_fetch_that_fails_for_good() -> None:
    def fetch(call: Any) -> Any:
        if call.index == 5:
            raise OSError("the disk is gone")
        return rows()(call)

    with training(make(fetch), 0.0) as read:
        verdict = look(read, 0.05)
    assert verdict.kind == "failed"
    assert "call 5: fetch function raised OSError: the disk is gone" in verdict.why


# ---- served


def test_one_trainer_is_missing() -> None:
    with serving(lambda: make(rows()), [0.0], queues=2) as read:
        verdict = look(read, 0.01)
    assert (verdict.kind, verdict.why) == ("waiting", "for a consumer on queue 1")


@pytest.mark.nightly
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
