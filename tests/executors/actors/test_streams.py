"""Actors change not one byte: not their number, nor the way of chunks, nor what was before."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

import feeder
import remote
from conformance.served import served
from executors.test_streams import (
    LAST_BATCH,
    ORDERS,
    SOURCES,
    Walk,
    rows_of,
    source_feed,
    two,
)
from feeder import Processes, RayActors, Threads
from feeder.executors.actors import DATA
from feeder.workers import sources
from feeds import CARRIERS, Record, assert_same, drain, expected, make, note, running
from fetches import FORMS, NEED_TWO_WORKERS, PATTERNS, make_fetch

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("cluster")]

WAYS = ("mapped", "frames", "store")
KINDS = (RayActors(1), Threads(2), RayActors(3), Processes(2), RayActors((1, 2)), None)
"""What a feed is run on, one after the other; None says nothing."""
WAIT_S = 60.0
"""Actors that come on a busy machine take seconds."""


def on_actors(fetch: Any, *, num: Any = 2, **settings: Any) -> list[Record]:
    """The stream of a feed on actors."""
    return drain(fetch, executor=RayActors(num), timeout=WAIT_S, **settings)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_the_stream_is_the_naive_one(form: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA, way)
    ways = two((form, way), tuple(PATTERNS), LAST_BATCH, (2, 3, 5), (1, 2), (2, 3, 1))
    for pattern, last_batch, workers, devices, num in ways:
        if form != "pure" and pattern in NEED_TWO_WORKERS:
            workers = 4
        settings: dict[str, Any] = {"epochs": 3, "last_batch": last_batch}
        stream = expected(
            make_fetch(form, pattern), pure=form == "pure", num_workers=workers,
            num_devices=devices, **settings,
        )  # fmt: skip
        got = on_actors(
            make_fetch(form, pattern), num=num, num_worker_threads=workers, devices=devices,
            **settings,
        )  # fmt: skip
        assert_same(got, stream, pattern, last_batch, workers, devices, num)


@pytest.mark.parametrize("form", FORMS)
def test_resumed_again_and_again_on_something_else(form: str) -> None:
    settings: dict[str, Any] = {"epochs": 2, "last_batch": "carry"}
    stream: list[Record] = []
    position = None
    for executor, carrier in zip(cycle(KINDS), cycle(CARRIERS.values()), strict=False):
        with running(
            make_fetch(form, "ragged"), resume=position, executor=executor, timeout=WAIT_S,
            **settings,
        ) as (coordinator, feed):  # fmt: skip
            batches = list(islice(feed, 3))
            stream += map(note, batches)
            if len(batches) < 3:
                break
            position = carrier(coordinator, batches[-1])
    assert_same(stream, expected(make_fetch(form, "ragged"), pure=form == "pure", **settings))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_place_is_the_same_token(form: str) -> None:
    tokens = []
    for executor in (None, RayActors(2)):
        with running(make_fetch(form, "ragged"), epochs=2, executor=executor, timeout=WAIT_S) as (
            _,
            feed,
        ):
            tokens.append([batch.cut.token() for batch in list(feed)])
    assert tokens[1] == tokens[0]


def test_in_order_of_arrival_no_row_is_lost() -> None:
    stream = expected(make_fetch("pure", "ragged"), pure=True, epochs=2)
    assert rows_of(on_actors(make_fetch("pure", "ragged"), epochs=2, order="arrival")) == rows_of(
        stream
    )


def test_a_function_is_named_by_its_place() -> None:
    assert_same(on_actors("remote:plain", epochs=2), drain(remote.plain, epochs=2))


def test_a_pure_function_may_have_cursors(tmp_path: Path) -> None:
    whole = drain(remote.plain, epochs=2)
    with running(remote.Cursors(tmp_path), epochs=2, executor=RayActors(2), timeout=WAIT_S) as (
        coordinator,
        feed,
    ):
        batches = [note(next(feed)) for _ in range(4)]
        position = bytes(coordinator.snapshot())
    assert_same(batches, whole[:4])
    rest = on_actors(remote.Cursors(tmp_path), resume=position, epochs=2)
    assert_same(rest, whole[4:])


@pytest.mark.parametrize("kind, way", list(zip(SOURCES, cycle(WAYS), strict=False)))
def test_sources_go_on_at_a_cut(
    tmp_path: Path, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA, way)
    order = ORDERS["dali window"]

    def source() -> Any:
        return SOURCES[kind](tmp_path, **order)

    whole, _ = source_feed(source())
    again, snapshots = source_feed(source(), executor=RayActors(2))
    assert_same(again, whole)
    i = len(whole) // 2
    rest, _ = source_feed(source(), resume=snapshots[i - 1])
    assert_same(rest, whole[i:])


def test_iterators_go_on_at_a_cut() -> None:
    whole, _ = source_feed(sources.iterable(Walk))
    again, snapshots = source_feed(sources.iterable(Walk), executor=RayActors(2))
    assert_same(again, whole)
    i = len(whole) // 2
    rest, _ = source_feed(sources.iterable(Walk), resume=snapshots[i - 1], executor=RayActors(1))
    assert_same(rest, whole[i:])


@pytest.mark.parametrize("way", WAYS)
def test_large_chunks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA, way)
    settings: dict[str, Any] = {"input_blob_names": ["x"], "batch_size": 48, "epochs": 1}
    stream = drain(remote.large, **settings)
    assert_same(on_actors(remote.large, **settings), stream)
    assert_same(on_actors(remote.large, writable=True, **settings), stream)


@pytest.mark.parametrize("form", FORMS)
def test_a_served_feed_runs_on_actors(form: str) -> None:
    stream = expected(make_fetch(form, "ragged"), pure=form == "pure", epochs=2)
    coordinator = make(make_fetch(form, "ragged"), epochs=2, executor=RayActors(2), timeout=WAIT_S)
    with served("shared", coordinator) as seen:
        assert_same(list(map(note, seen)), stream)


def test_a_server_runs_what_it_serves_on_actors(tmp_path: Path) -> None:
    stream = expected(make_fetch("pure", "ragged"), pure=True, epochs=2)
    coordinator = make(make_fetch("pure", "ragged"), epochs=2, timeout=WAIT_S)
    with (
        feeder.serve(coordinator, f"ipc://{tmp_path}/feed.sock", executor="ray:2") as server,
        feeder.connect(server.addresses[0]) as consumer,
    ):
        assert_same([note(batch) for batch in consumer], stream)


def test_what_is_printed_and_logged_comes_here(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for way in WAYS:
        monkeypatch.setenv(DATA, way)
        with caplog.at_level("INFO"):
            on_actors(remote.At(3, remote.speak), epochs=1)
        said = capsys.readouterr()
        assert "printed" in said.out and "in bytes: ü" in said.out and "to stderr" in said.err
        assert "logged here" in caplog.text
        caplog.clear()
