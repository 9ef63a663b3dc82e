"""Processes are killed at every point of what they do: the same bits, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import deadly
import feeder
import remote
import zygote
from conformance.served import TRANSPORTS, served
from executors.test_streams import DiesHalfWay
from executors.writing import plain
from feeder import Processes
from feeds import assert_same, deal, drain, expected, make, note, running
from fetches import FORMS, make_fetch
from lineage import descendants
from remote import DeadlyDrawing

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("point", "form"), [*zip(deadly.POINTS, cycle(FORMS), strict=False)])
def test_killed_at_a_point(form: str, point: str, tmp_path: Path) -> None:
    stream = expected(make_fetch(form, "ragged"), pure=form == "pure", epochs=3)
    count = 1 if "function" in point else 3
    env = {deadly.POINT: point, deadly.MARK: str(tmp_path / "mark"), deadly.COUNT: str(count)}
    executor = Processes(2, preload=["deadly"], env=env)
    with running(make_fetch(form, "ragged"), epochs=3, executor=executor) as (_, feed):
        assert_same([note(batch) for batch in deal(feed)], stream, point)
    assert (tmp_path / "mark").exists(), "nobody has come by"


@pytest.mark.parametrize(
    ("whom", "form", "num"),
    (
        ("one", "replay", 3), ("all", "seek", 3), ("the zygote", "pure", 3),
        ("the zygote and all", "seek", 3), ("all", "pure", 64),
    ),
)  # fmt: skip
def test_killed_between_batches(form: str, whom: str, num: int) -> None:
    stream = expected(make_fetch(form, "single"), pure=form == "pure", epochs=3)
    dice, got = random.Random(whom), []
    # Of so many that end at once a call may be made by several that end.
    retries = {"retries": 9} if num == 64 else {}
    with running(
        make_fetch(form, "single"), epochs=3, executor=Processes(num), max_buffered_batches=1,
        **retries,
    ) as (_, feed):  # fmt: skip
        for i, batch in enumerate(deal(feed)):
            got.append(note(batch))
            if i % 4 == 1:
                strike(whom, dice)
    assert_same(got, stream)


def strike(whom: str, dice: random.Random) -> None:
    """Kill some of the processes of this one's feed."""
    zygotes, processes = [], []
    others = descendants(os.getpid())
    others.pop(zygote.pid(), None)  # That of the tests.
    for pid, parent in others.items():
        (zygotes if parent == os.getpid() else processes).append(pid)
    struck = {
        "one": dice.sample(processes, min(1, len(processes))),
        "all": processes,
        "the zygote": zygotes,
        "the zygote and all": [*processes, *zygotes],
    }[whom]
    for pid in struck:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_killed_where_its_own_children_live_on(tmp_path: Path) -> None:
    stream = expected(remote.plain, pure=True, epochs=1)
    try:
        # The whole timeout would pass if they held the connection.
        got = drain(remote.At(4, remote.fork_and_die, tmp_path), executor=Processes(2), timeout=60)
    finally:
        for path in tmp_path.iterdir():
            os.kill(int(path.name), signal.SIGKILL)
    assert_same(got, stream)


def test_what_was_drawn_is_drawn_again_after_a_kill(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"input_blob_names": ["x"], "epochs": 2, "batch_size": 1}
    streams = []
    for folder in (None, tmp_path):
        with running(DeadlyDrawing(folder), executor=Processes(2), **settings) as (_, feed):
            streams.append([note(batch) for batch in feed])
    assert_same(streams[1], streams[0])
    assert len(list(tmp_path.iterdir())) >= 3


# ---- served


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_served_feed_runs_on_processes_that_die_half_way(transport: str, tmp_path: Path) -> None:
    coordinator = make(
        DiesHalfWay(8, tmp_path, remote.die), rows_per_call=8, executor=Processes(2), epochs=3,
        batch_columns=[0, 1, 0],
    )  # fmt: skip
    with served(transport, coordinator) as seen:
        assert_same(list(map(note, seen)), plain(8, epochs=3), transport)
    assert len(list(tmp_path.iterdir())) >= 3, "nobody has died"


def test_a_server_runs_what_it_serves_on_processes(tmp_path: Path) -> None:
    stream = expected(make_fetch("pure", "ragged"), pure=True, epochs=2)
    coordinator = make(make_fetch("pure", "ragged"), epochs=2)
    address = f"ipc://{tmp_path}/feed.sock"
    with (
        feeder.serve(coordinator, address, executor=Processes(2)) as server,
        feeder.connect(server.addresses[0]) as consumer,
    ):
        assert_same([note(batch) for batch in consumer], stream)
