"""The verdict on real feeds in staged situations: each is right, or the test fails."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import feeder
from feeder.service.server import serve as server_module
from small import wait_until
from verdicts.stage import (
    look,
    look_for,
    make,
    only,
    rows,
    slow,
    training,
)

pytestmark = pytest.mark.served


@pytest.fixture(autouse=True)
def a_slow_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LOOK_S", 8.0)


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


TWO = {"devices": 2, "max_buffered_batches": 8}
SITUATIONS = {
    "slow fetch": Situation(
        "fetch-bound", lambda: make(slow(0.02, rows())), (0.0,),
        r"slowest, (2\d|[3-9]\d|1\d\d)[\d.]* ms a call; .*raise num_threads from 2"),
    "slow trainer": Situation(
        "trainer-bound", lambda: make(rows()), (0.02,), "the feed keeps up.*; $"),
    "one stalled queue": Situation(
        "stalled-queue", lambda: make(rows(), **TWO), (0.0,),
        "^queue 1 has batches that nobody takes, queue 0 waits behind it"),
    "fetch that fails now and then": Situation(
        "failing-fetch",
        lambda: make(fails_now_and_then(), retries=5, retry_backoff_s=0.02), (0.0,),
        "OSError: the disk is away"),
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
    with training(one.make(), *one.steps_s) as read:
        if one.kind == "stalled-queue":
            wait_until(lambda: only(read()).queues[0].wait_s > 0.1)
        verdict = look_for(one.kind, read)
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
    with (
        feeder.serve(lambda: make(rows()), "tcp://127.0.0.1:0", queues=2) as server,
        feeder.connect(server.addresses[0], queue=0),
    ):
        verdict = look(server.figures, 0.01)
    assert (verdict.kind, verdict.why) == ("waiting", "for a consumer on queue 1")
