"""Transcripts of consumers: each queue has its file, and all of them are those of one run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import feeder
from feeder import sources
from feeder.checkpoint.transcript import compare, read_run
from feeder.errors import ConfigError
from served import outside, reading, serving

pytestmark = [pytest.mark.served, pytest.mark.usefixtures("world")]


def feed(folder: Path | None = None) -> feeder.Coordinator:
    return feeder.init_data_input_workers(
        ["x"], sources.arrays(np.arange(97)).shuffle(seed=1), 4, transcript=folder,
        coordinator=feeder.Coordinator(),
    )  # fmt: skip


def test_two_consumers_write_what_the_feed_in_process_writes(tmp_path: Path) -> None:
    with outside(), feed(tmp_path / "one") as coordinator:
        for _ in coordinator["train"]:
            pass
    folder, resume = tmp_path / "two", None
    for most in (2, 3, 100):
        with (
            serving(feed, queues=2) as server,
            reading(server, queue=0, resume=resume, transcript=folder) as left,
            reading(server, queue=1, resume=resume, transcript=folder) as right,
        ):
            for number in range(most):
                batches = [next(left, None), next(right, None)]
                if None in batches:
                    break
                # What comes after the position comes again.
                if not number or most > 3:
                    resume = right.state_dict()
    one, two = read_run(tmp_path / "one")["train[0]"], read_run(folder)["train[0]"]
    assert compare(one, two).is_equal and len(one.steps) == 25
    assert len(list(folder.iterdir())) == 2


def test_steps_that_a_consumer_leaves_out_are_cut_off(tmp_path: Path) -> None:
    with serving(feed) as server, reading(server, transcript=tmp_path) as consumer:
        position = [next(consumer).cut.token() for _ in range(9)][3]
    with (
        serving(feed) as server,
        reading(server, resume=position, skip=2, transcript=tmp_path) as consumer,
    ):
        next(consumer)
    assert read_run(tmp_path)["train[0]"].steps.tolist() == [*range(4), 6]


def test_a_server_writes_none_and_says_who_does(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"give transcript= to feeder\.connect"),
        serving(lambda: feed(tmp_path)),
    ):
        pass
