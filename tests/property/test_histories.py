"""A run that is edited gives what a naive model of it gives, over any number of edits."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import pytest

import parts
from feeder import Call
from feeder.state.history import described
from feeder.state.snapshot import Snapshot
from property.histories import KINDS, History, run
from property.packed_histories import PackedHistory

pytestmark = pytest.mark.timeout(600)  # of many histories


@pytest.mark.parametrize("first", range(0, 100 if parts.is_full else 16, 2))
def test_histories_are_those_of_the_model(first: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "feeder")
    done = sum((run(seed, most_edits=8) for seed in range(first, first + 2)), Counter[str]())
    assert done["resumes"] > 2


@pytest.mark.served  # as much work as feeds that are served
@pytest.mark.parametrize("first", range(0, 100 if parts.is_full else 8, 2))
def test_packed_histories_are_those_of_the_model(
    first: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "feeder")
    seeds = range(first, first + 2)
    done = sum((run(seed, most_edits=6, of=PackedHistory) for seed in seeds), Counter[str]())
    assert done["resumes"] > 3


def test_a_history_is_that_of_the_model_at_each_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "feeder")
    done = run(17, most_edits=20, each_step=True)
    assert set(done) & set(KINDS)
    assert done["resumes"] > 10


@pytest.mark.parametrize("seed", range(200, 240 if parts.is_full else 212))
def test_what_has_come_of_each_source_is_counted(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "feeder")
    history = History(seed)
    history.run(2, edits=False)
    for _ in range(6):
        history.run(2, edits=True)
    (state,) = Snapshot.from_bytes(
        history.state["feeder"] if isinstance(history.state, dict) else history.state
    ).states
    route = described(state.fingerprint).run.route  # type: ignore[attr-defined]
    for epoch in range(max(chapter.epoch for chapter in route.chapters) + 2):
        records = np.arange(route.length(epoch))
        parts_of = route(records, Call(0, epoch, 0, 1, 0)).parts
        for num in range(len(records) + 1):
            counts = np.bincount(parts_of[:num], minlength=route.num_parts)
            assert route.counts(num, epoch).tolist() == counts.tolist(), (epoch, num)
