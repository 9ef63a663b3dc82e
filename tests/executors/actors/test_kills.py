"""Actors, their node and their driver are killed: the same bits, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import remote
from chaos.actors import ActorLegs
from chaos.executors import run_legs
from executors.actors.test_streams import FORMS_AND_WAYS
from feeder import FetchError, RayActors
from feeder.executors import ledger
from feeder.executors.actors import DATA, Actors
from feeder.executors.pool import Pool
from feeds import assert_same, deal, drain, expected, note, running
from fetches import make_fetch
from lineage import ends_of, shared_memory
from watching import CallsOf

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.process]

TIMEOUT_S = 60.0


def pool_of(feed: Any) -> Pool:
    """The actors of a feed."""
    pool = feed.streams[0].pipeline._execution._pool
    assert isinstance(pool, Pool)
    return pool


def actors_of(pool: Pool) -> Actors:
    """What starts them."""
    assert isinstance(pool.launcher, Actors)
    return pool.launcher


def strike(pool: Pool, dice: random.Random, whom: str) -> None:
    """Kill some actors of a feed, by a signal or as Ray does it."""
    if whom == "ray":
        launcher = actors_of(pool)
        with pool.lock:
            handles = [actor.handle for actor in launcher.actors]
        for handle in dice.sample(handles, min(1, len(handles))):
            launcher.cluster.kill(handle)
        return
    pids = pool.pids()
    for pid in pids if whom == "all" else dice.sample(pids, min(1, len(pids))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("form", "way", "per_actor"),
    [*((*both, 1) for both in FORMS_AND_WAYS), ("seek", "mapped", 2), ("pure", "frames", 2)],
)
def test_killed_again_and_again(
    form: str, way: str, per_actor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left when the feed stops."""
    monkeypatch.setenv(DATA, way)
    before = shared_memory()
    stream = expected(make_fetch(form, "ragged"), pure=form == "pure", epochs=3)
    dice, got, kills = random.Random(form + way), [], 0
    retries = {} if form == "replay" else {"retries": 1000}
    with running(
        make_fetch(form, "ragged"), epochs=3, executor=RayActors(2, per_actor=per_actor),
        timeout=TIMEOUT_S, max_buffered_batches=1, **retries,
    ) as (coordinator, feed):  # fmt: skip
        pool = pool_of(feed)
        for i, batch in enumerate(deal(feed)):
            got.append(note(batch))
            if i % 6 == 2:
                # First all: one alone may be one that has nothing to do, each time.
                strike(pool, dice, dice.choice(("one", "ray", "all")) if kills else "all")
                kills += 1
        (figures,) = coordinator.figures().feeds
        stack = contextlib.ExitStack()
        ends = stack.enter_context(ends_of(pool.pids()))
    with stack:
        ends.wait()
    assert not shared_memory() - before
    assert_same(got, stream)
    assert kills >= 3
    assert figures.executor is not None and figures.executor.restarts >= 1


def test_a_node_dies_with_its_actors(cluster: Any) -> None:
    settings: dict[str, Any] = {"epochs": 40, "num_workers": 6}
    stream = expected(make_fetch("seek", "ragged"), pure=False, **settings)
    node = cluster.add_node(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    name, got, is_struck = node.node_id[:6], [], False
    try:
        with running(
            make_fetch("seek", "ragged", pause), epochs=40, num_worker_threads=6,
            executor=RayActors(6), timeout=TIMEOUT_S, max_buffered_batches=1, retries=100,
        ) as (coordinator, feed):  # fmt: skip
            for batch in deal(feed):
                got.append(note(batch))
                (figures,) = coordinator.figures().feeds
                assert figures.executor is not None and figures.executor.kind == "actors"
                places = [place for place, _ in figures.executor.nodes]
                # "Spread" has some of them on each node, once these have come.
                if not is_struck and any(place.endswith(name) for place in places):
                    is_struck = True
                    cluster.remove_node(node, allow_graceful=False)
        assert is_struck
        assert_same(got, stream)
    finally:
        if not is_struck:
            cluster.remove_node(node, allow_graceful=False)


def test_the_campaign_kills_actors_and_drivers_and_finds_nothing(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A few of its kills on the cluster that is here, which keeps its nodes."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    legs = ActorLegs(2, cluster, nodes_a_leg=0)
    status = run_legs(legs, 3)
    assert (status, legs.num_trainers > 0, legs.num_processes > 0) == (0, True, True), (
        capfd.readouterr().out
    )


def pause() -> None:
    """Have a call last a little: actors come while others work."""
    threading.Event().wait(0.01)


def test_a_call_that_hangs_is_made_by_another_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"timeout": TIMEOUT_S}
    fetch, got = remote.HangsOnce(tmp_path / "mark", 100), list[Any]()
    with running(fetch, epochs=None, executor=RayActors(2), **settings) as (_, feed):
        pool = pool_of(feed)
        for batch in feed:
            got.append(note(batch))
            # It would hang for ever, with all that is sent to it. A new actor takes seconds to
            # come, and none is ended earlier.
            if pool.counts().restarts:
                break
            if pool.ledger.num_again:
                threading.Event().wait(0.03)
        assert pool.ledger.num_again >= 1
    assert (tmp_path / "mark").exists()
    assert_same(got, drain(remote.plain, epochs=got[-1][0] + 1, **settings)[: len(got)])


def test_two_that_differ_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDER_DEBUG", "1")
    # Not each lie is found: another actor may have given up before it, or have had no time.
    fetch = remote.LiesNowAndThen(tmp_path)
    with pytest.raises(FetchError, match=r"gave other rows (in actor|when the same call)"):
        drain(fetch, epochs=None, executor=RayActors(2), timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("executor", "told"),
    ((RayActors(2), "the last time"), (RayActors(1, per_actor=2), ".*by SIGKILL")),
)
def test_one_that_ends_each_process_is_named(
    executor: RayActors, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA, "frames")
    with pytest.raises(FetchError, match=f"call 4: its process ended 3 times, {told}"):
        drain(remote.At(4, remote.die), executor=executor, timeout=TIMEOUT_S)


def test_a_feed_takes_as_many_as_its_trainer_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_EVERY_S", 0.3)
    monkeypatch.setattr(ledger, "_PATIENCE", 2)
    calls = CallsOf(monkeypatch, (Pool, "retire"), (Pool, "_remove"))
    settings: dict[str, Any] = {
        "epochs": 1, "timeout": TIMEOUT_S, "input_blob_names": ["x"], "max_buffered_batches": 16
    }  # fmt: skip
    got = []
    with running(remote.many, executor=RayActors((1, 3), num_cpus=0), **settings) as (_, feed):
        pool = pool_of(feed)
        for batch in feed:
            got.append(note(batch))
            if len(pool.pids()) > 1:
                # The trainer takes no more, for which one actor is enough.
                calls.wait_until(lambda: len(pool.pids()) == 1)
                break
    assert len(got) < 4000, "a trainer that does nothing else needs more than one"
    assert_same(got, drain(remote.many, most=len(got), **settings))
