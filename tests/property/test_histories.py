"""A run that is edited gives what a naive model of it gives, over any number of edits."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

import parts
from property.histories import KINDS, run
from property.packed_histories import PackedHistory

pytestmark = pytest.mark.timeout(600)  # of many histories


@pytest.mark.parametrize("first", range(0, 100 if parts.is_full else 16, 4))
def test_histories_are_those_of_the_model(first: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "feeder")
    done = sum((run(seed, most_edits=8) for seed in range(first, first + 4)), Counter[str]())
    assert done["resumes"] > 4


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
