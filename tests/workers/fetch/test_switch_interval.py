"""The interpreter's switch interval: shorter while threads of the feeder run, then as it was."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.workers.fetch.threads import SWITCH_INTERVAL_S, ThreadGroup
from project import printed
from small import make

PYTHONS_S = 0.005
SWITCH_S = SWITCH_INTERVAL_S
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _as_python_has_it() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(PYTHONS_S)
    yield
    sys.setswitchinterval(before)


def interval_s() -> float:
    return round(sys.getswitchinterval(), 6)


def run_on(feeds: ExitStack, name: str = "train") -> None:
    """Start a feed that runs on, and wait for its threads."""
    coordinator = make(lambda call: (np.arange(4),), input_source_name=name, epochs=None)
    next(feeds.enter_context(coordinator)[name])


def test_the_last_of_several_feeds_puts_it_back() -> None:
    with ExitStack() as longer:
        with ExitStack() as shorter:
            run_on(longer, "longer")
            run_on(shorter, "shorter")
        assert interval_s() == SWITCH_S
    assert interval_s() == PYTHONS_S


@pytest.mark.parametrize(
    ("meanwhile", "mine"),
    [
        *product([False], [0.0005, SWITCH_S, 0.002, 0.005001, 0.1]),
        *product([True], [0.0005, PYTHONS_S, 0.1]),
    ],
)
def test_one_that_the_user_has_set_stays(mine: float, meanwhile: bool) -> None:
    with ExitStack() as feeds:
        if meanwhile:
            run_on(feeds)
        sys.setswitchinterval(mine)
        run_on(feeds, "another")
        assert interval_s() == mine
    assert interval_s() == mine


def test_it_is_put_back_after_a_thread_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)

    def fail() -> None:
        seen.append(interval_s())
        raise RuntimeError

    scope = ThreadGroup()
    scope.start("fails", fail)
    scope.close(WAIT_S)
    assert len(seen) == 2 and seen[0] == SWITCH_S
    assert interval_s() == PYTHONS_S


TELL = """
import os, sys
import numpy as np
import feeder

def tell():
    os.write(1, b"%.6f " % sys.getswitchinterval())
"""


def told_by(script: str, *words: str) -> list[float]:
    """What a script tells in an interpreter of its own."""
    warns = "ignore:.*fork:DeprecationWarning"
    told = printed("-W", warns, "-c", TELL + script, *words, limit_s=WAIT_S)
    return [float(word) for word in told.split()]


@pytest.mark.process
def test_it_is_short_in_a_trainer_that_is_served(tmp_path: Path) -> None:
    coordinator = make(lambda call: (np.arange(4),), epochs=None)
    trainer = """
tell()
with feeder.connect(sys.argv[1]) as consumer:
    next(consumer)
    tell()
tell()
"""
    with coordinator, feeder.serve(coordinator, f"ipc://{tmp_path}/feed") as server:
        assert told_by(trainer, server.addresses[0]) == [PYTHONS_S, SWITCH_S, PYTHONS_S]


@pytest.mark.process
@pytest.mark.parametrize("mine", [PYTHONS_S, 0.002])
def test_a_forked_child_begins_with_the_users(mine: float) -> None:
    script = f"""
def make():
    return feeder.init_data_input_workers(
        ["id"], lambda call: (np.arange(4),), 4, epochs=None, coordinator=feeder.Coordinator()
    )

def use():
    with make() as coordinator:
        next(coordinator["train"])
        tell()

sys.setswitchinterval({mine})
with make() as coordinator:
    next(coordinator["train"])
    if not os.fork():
        tell()
        use()
        tell()
        os._exit(0)
    assert not os.wait()[1]
    tell()
tell()
"""
    within = SWITCH_S if mine == PYTHONS_S else mine
    assert told_by(script) == [mine, within, mine, within, mine]


@pytest.mark.process
def test_a_fork_just_after_it_was_set_begins_with_the_users() -> None:
    script = """
from feeder.workers.fetch.threads import TURNS

set_interval = sys.setswitchinterval

def set_and_fork(seconds):
    set_interval(seconds)
    sys.setswitchinterval = set_interval
    if not os.fork():
        tell()
        os._exit(0)
    assert not os.wait()[1]

sys.setswitchinterval = set_and_fork
TURNS.thread_begins()
tell()
"""
    assert told_by(script) == [PYTHONS_S, SWITCH_S]
