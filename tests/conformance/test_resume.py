"""A feed resumed at any batch goes on with exactly the batches that would have come."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import feeder
from feeder import Coordinator, ReplayWarning, init_data_input_workers
from feeds import (
    CARRIERS,
    Record,
    assert_same,
    deal,
    digest,
    drain,
    expected,
    make,
    running,
)
from fetches import BATCH_SIZE, COLUMNS, FORMS, PATTERNS, make_fetch

CHILD = Path(__file__).parents[1] / "resume_child.py"
THREADS = (2,)
"""Other numbers are drawn (`tests/property`)."""
LAST_BATCH = ("keep", "drop", "pad", "carry")


def stream_of(form: str, pattern: str, **settings: Any) -> list[Record]:
    return expected(make_fetch(form, pattern), pure=form == "pure", **settings)


def positions(form: str, pattern: str, **settings: Any) -> list[dict[str, Any]]:
    """Run a feed; return the position after each batch, by what it travels in.

    Each is taken right after its batch was handed out, while the feed runs on.
    """
    with running(make_fetch(form, pattern), **settings) as (coordinator, feed):
        return [
            {name: take(coordinator, batch) for name, take in CARRIERS.items()}
            for batch in deal(feed)
        ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("last_batch", LAST_BATCH)
def test_resumed_at_every_batch(form: str, pattern: str, last_batch: str) -> None:
    settings: dict[str, Any] = {"epochs": 2, "last_batch": last_batch}
    stream = stream_of(form, pattern, **settings)
    for turn, threads in enumerate(THREADS):
        settings["num_threads"] = threads
        taken = positions(form, pattern, **settings)
        assert len(taken) == len(stream)
        for i, position in enumerate(taken, 1):
            # Over the numbers of threads each place is resumed by value and by reference.
            carrier = ("snapshot", "token", "bytes", "state dict")[(i + turn) % 4]
            rest = drain(make_fetch(form, pattern), resume=position[carrier], **settings)
            assert_same(rest, stream[i:], i, carrier, threads)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_snapshot_before_the_first_batch_is_the_one_resumed_from(form: str, carrier: str) -> None:
    stream = stream_of(form, "ragged", epochs=2)
    for i, position in enumerate(positions(form, "ragged", epochs=2), 1):
        with make(make_fetch(form, "ragged"), resume=position[carrier], epochs=2) as coordinator:
            again = coordinator.snapshot()
            state = coordinator.state_dict()
        stopped = coordinator.snapshot()
        unstarted = make(make_fetch(form, "ragged"), resume=position[carrier], epochs=2)
        for second in (again, bytes(again), state, stopped, unstarted.snapshot()):
            rest = drain(make_fetch(form, "ragged"), resume=second, epochs=2)
            assert_same(rest, stream[i:], i, type(second))


@pytest.mark.parametrize("form", FORMS)
def test_snapshot_before_the_first_batch_of_all_is_the_start(form: str) -> None:
    stream = stream_of(form, "ragged", epochs=2)
    unstarted = make(make_fetch(form, "ragged"), epochs=2)
    with running(make_fetch(form, "ragged"), epochs=2) as (coordinator, _):
        taken = [coordinator.snapshot(), coordinator.state_dict()]
    for position in (*taken, unstarted.snapshot(), unstarted.state_dict()):
        assert_same(drain(make_fetch(form, "ragged"), resume=position, epochs=2), stream)


@pytest.mark.parametrize("form", FORMS)
def test_snapshot_does_not_change_when_the_feed_goes_on(form: str) -> None:
    with running(make_fetch(form, "ragged"), epochs=2) as (coordinator, feed):
        taken = []
        for _ in feed:
            snapshot = coordinator.snapshot()
            taken.append((snapshot, bytes(snapshot)))
    assert all(bytes(snapshot) == before for snapshot, before in taken)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_place_is_the_same_token_whatever_the_feed_is_run_with(form: str) -> None:
    for pattern, last_batch in product(PATTERNS, LAST_BATCH):
        tokens = []
        for threads, most in ((1, 1), (2, 100), (8, 2)):
            with running(
                make_fetch(form, pattern),
                epochs=2, last_batch=last_batch, num_threads=threads, max_buffered_batches=most,
            ) as (_, feed):  # fmt: skip
                tokens.append([batch.cut.token() for batch in list(feed)])
        assert tokens.count(tokens[0]) == len(tokens), (pattern, last_batch)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_resumed_feed_stamps_the_same_cuts(form: str, pattern: str) -> None:
    settings = {"epochs": 2, "last_batch": "carry"}
    with running(make_fetch(form, pattern), **settings) as (_, feed):
        cuts = [batch.cut for batch in list(feed)]
    taken = positions(form, pattern, **settings)
    for (i, position), carrier in product(enumerate(taken, 1), ("bytes", "token")):
        fetch = make_fetch(form, pattern)
        with running(fetch, resume=position[carrier], **settings) as (_, feed):
            again = [batch.cut for batch in list(feed)]
        assert [cut.token() for cut in again] == [cut.token() for cut in cuts[i:]], (i, carrier)
        assert [(cut.epoch, cut.index, cut.step, cut.finished) for cut in again] == [
            (cut.epoch, cut.index, cut.step, cut.finished) for cut in cuts[i:]
        ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("takes", ("00011011", "11100100", "2210012102"))
def test_position_is_the_newest_round_that_every_device_has_taken(form: str, takes: str) -> None:
    stream = stream_of(form, "ragged", epochs=2)
    num = len(set(takes))
    with running(make_fetch(form, "ragged"), epochs=2, devices=num) as (coordinator, feed):
        taken = []
        for device in takes:
            next(feed.on(int(device)))
            taken.append(coordinator.snapshot())
    for i, snapshot in enumerate(taken, 1):
        rounds = min(takes[:i].count(device) for device in set(takes))
        rest = drain(make_fetch(form, "ragged"), resume=snapshot, epochs=2)
        assert_same(rest, stream[rounds * num :], i)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carrier", ("bytes", "state dict", "token"))
def test_resumed_in_a_fresh_process(form: str, carrier: str) -> None:
    stream = stream_of(form, "ragged", epochs=2)
    taken = positions(form, "ragged", epochs=2)
    i = len(taken) // 2
    position = taken[i - 1][carrier]
    child = subprocess.run(
        [sys.executable, "-W", "error", CHILD, form, "ragged", '{"epochs": 2, "num_threads": 8}'],
        input=position["feeder"] if isinstance(position, dict) else position,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(feeder.__file__).parents[1])},
        timeout=30,
        check=True,
    )
    assert child.stdout.decode().strip() == digest(stream[i:])


def test_resuming_by_replay_warns() -> None:
    position = positions("replay", "ragged")[3]["snapshot"]
    told = "resumed by replay: [0-9]+ calls are made again"
    with pytest.warns(ReplayWarning, match=told) as caught:
        init_data_input_workers(
            list(COLUMNS), make_fetch("replay", "ragged"), BATCH_SIZE, 3, resume=position,
            coordinator=Coordinator(),
        )  # fmt: skip
    assert [warning.filename for warning in caught] == [__file__]
