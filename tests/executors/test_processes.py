"""Real processes behind a feed: what `test_streams.py` shows with threads holds for them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import feeder
import remote
from conformance.served import TRANSPORTS, served
from executors.test_streams import DiesHalfWay
from executors.writing import plain
from feeder import Processes, Threads
from feeds import CARRIERS, Record, assert_same, drain, expected, make, note, running
from fetches import FORMS, make_fetch

pytestmark = pytest.mark.process

KINDS = (Processes(2), Threads(2), Processes(3), "processes", None, Processes(5))
"""What a feed is run on, one after the other; None says nothing."""


@pytest.mark.parametrize("form", FORMS)
def test_a_feed_goes_on_on_something_else(form: str) -> None:
    what: dict[str, Any] = {"epochs": 2, "last_batch": "carry"}
    stream: list[Record] = []
    position = None
    for executor, carrier in zip(KINDS, [*CARRIERS.values()] * 2, strict=False):
        fetch = make_fetch(form, "ragged")
        with running(fetch, resume=position, executor=executor, **what) as (coordinator, feed):
            batches = list(islice(feed, 1 if executor is not KINDS[-1] else None))
            stream += map(note, batches)
            position = carrier(coordinator, batches[-1])
    assert_same(stream, expected(make_fetch(form, "ragged"), pure=form == "pure", **what))


def test_a_function_is_named_by_its_place() -> None:
    whole = drain(remote.plain, epochs=2)
    assert_same(drain("remote:plain", epochs=2, executor=Processes(2)), whole)


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
