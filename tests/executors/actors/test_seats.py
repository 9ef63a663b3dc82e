"""Actors that hold several processes: these come and go by themselves, and change not one byte."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any
from unittest.mock import MagicMock

import pytest

import remote
from executors.actors.test_kills import TIMEOUT_S, actors_of, pool_of
from executors.actors.test_pool import Fake
from feeder import RayActors
from feeder.executors.actors import _MOST_UNMADE
from feeder.executors.lines import Line
from feeds import assert_same, drain, note, running
from lineage import ends_of


@pytest.mark.process
def test_a_process_is_replaced_where_it_was(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"epochs": 4, "timeout": TIMEOUT_S, "input_blob_names": ["x"]}
    got: list[Any] = []
    with running(remote.many, executor=RayActors(1, per_actor=3), **settings) as (_, feed):
        pool = pool_of(feed)
        batches = iter(feed)

        def wait_for(num: int) -> list[int]:
            while len(pool.pids()) != num:
                got.append(note(next(batches)))
            return pool.pids()

        first = wait_for(3)
        launcher = actors_of(pool)
        (actor,) = launcher.actors
        os.kill(first[0], signal.SIGKILL)
        while first[0] in pool.pids():
            got.append(note(next(batches)))
        second = wait_for(3)
        # The others have gone on, and so has their actor.
        assert set(first[1:]) < set(second) and launcher.actors == [actor]
        with contextlib.ExitStack() as stack:
            ends = stack.enter_context(ends_of(second))
            launcher.cluster.kill(actor.handle)
            # Whatever ends the actor: it leaves none of them.
            ends.wait()
        third = wait_for(3)
        assert not set(third) & set(second) and launcher.actors != [actor]
        stack = contextlib.ExitStack()
        ends = stack.enter_context(ends_of(third))
    with stack:
        ends.wait()
    assert f"(process {first[0]} on " in caplog.text and "was killed by SIGKILL" in caplog.text
    assert_same(got, drain(remote.many, most=len(got), **settings))


# ---- Without a cluster


@pytest.mark.process  # of an environment that has Ray
def test_an_actor_that_ends_takes_its_processes_along() -> None:
    with contextlib.closing(Fake(2, per_actor=3)) as made:
        actors = made.launcher.actors
        for generation in range(1, 7):
            made.join(generation, Line())
        first, second = actors
        assert [len(actor.members) for actor in actors] == [3, 3]
        # One process: its actor gets another one.
        made.bury(2, how="was killed")
        assert actors == [first, second] and len(first.members) == 3
        assert made.ended == [(first.handle, 2)] and not made.killed
        # The actor: each of its processes is told to have ended.
        made.launcher.ports = MagicMock()
        for member in list(first.members):
            made.launcher._on_end(member.generation, RuntimeError("has ended"))
        assert first not in actors and second in actors
        assert [len(actor.members) for actor in actors] == [3, 3]
        assert set(made.killed) == {first.handle}


@pytest.mark.process  # of an environment that has Ray
def test_an_actor_that_was_never_made_counts_once() -> None:
    error = RuntimeError("no such package")
    with contextlib.closing(Fake(1, per_actor=2 * _MOST_UNMADE)) as made:
        launcher = made.launcher
        launcher.ports = MagicMock()
        for _ in range(_MOST_UNMADE):
            assert made.pool.failure == ""
            for member in list(launcher.actors[0].members):
                launcher._on_hello(member.generation, None, error)
        assert "no actor could be started: the last one has ended: no such" in made.pool.failure
