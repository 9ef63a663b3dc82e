"""The metrics of Prometheus: names, values and text."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from prometheus_client import REGISTRY

from feeder.observe.figures import ExecutorFigures
from feeder.observe.metrics import BUILD, METRICS, VERDICT, names
from feeder.observe.prometheus import expose
from feeder.observe.status.board import Board
from feeder.observe.status.routes import answer
from feeder.observe.verdict import KINDS
from figures import consumer, feed, figures, queue, service, store, worker
from samples import parse
from small import Pure, make


def shown(*feeds: Any, kinds: dict[str, str] | None = None) -> Any:
    """Return what looks a sample up."""
    found = parse(expose(figures(*feeds), kinds or {})[1])
    return lambda name, **labels: found[name, frozenset(labels.items())]


def test_a_running_feed_shows_every_metric_that_needs_no_server() -> None:
    with make(Pure(7, 4)) as coordinator:
        list(coordinator["train"])
        _, text = expose(coordinator.figures(), {"train": "ended"})
    found = {name for name, _ in parse(text)}
    served = {
        "feeder_consumers", "feeder_in_flight_batches", "feeder_consumer_silence_seconds",
        "feeder_sessions_opened_total", "feeder_sessions_reopened_total",
        "feeder_leases_fenced_total", "feeder_leases_expired_total", "feeder_rewinds_total",
        "feeder_arena_bytes",
    }  # fmt: skip
    mixed = {"feeder_source_rows", "feeder_source_tokens", "feeder_source_skipped_total"}
    others = ("feeder_store_", "feeder_cache_", "feeder_checkpoint")
    other = {name for name in names() if name.startswith(others)}
    assert found == names() - served - mixed - other - {"feeder_node_actors"}
    rows = "feeder_rows_total", frozenset({("feed", "train"), ("queue", "0")})
    assert parse(text)[rows] == 28.0


def test_values_are_those_of_the_figures() -> None:
    made = feed(
        queues=(queue(0, batches=7, wait_s=1.5, consumer=consumer(in_flight=3)), queue(1)),
        workers=(worker(0, calls=5), worker(1, calls=6, fetch_s=2.5)),
        service=service(rewinds=4),
        executor=ExecutorFigures(
            processes=4, busy=3, restarts=2, bytes=1024, kind="actors", nodes=(("host/1", 4),)
        ),
        state="failed",
        store=store(requests=9, wait_s=2.5),
    )
    # The streams of a feed are of one process.
    value = shown(made, feed(number=1, store=store(requests=9)), kinds={"train": "failed"})
    assert value("feeder_store_requests_total", feed="train") == 9.0
    assert value("feeder_store_wait_seconds_total", feed="train") == 2.5
    value = shown(made, kinds={"train": "failed"})
    assert value("feeder_batches_total", feed="train", queue="0") == 7.0
    assert value("feeder_consumer_wait_seconds_total", feed="train", queue="0") == 1.5
    assert value("feeder_in_flight_batches", feed="train", queue="0") == 3.0
    assert value("feeder_fetch_seconds_total", feed="train", worker="1") == 2.5
    assert value("feeder_consumers", feed="train") == 1.0
    assert value("feeder_rewinds_total", feed="train") == 4.0
    assert value("feeder_processes", feed="train") == 4.0
    assert value("feeder_busy_processes", feed="train") == 3.0
    assert value("feeder_process_restarts_total", feed="train") == 2.0
    assert value("feeder_process_bytes", feed="train") == 1024.0
    assert value("feeder_node_actors", feed="train", node="host/1") == 4.0
    assert value("feeder_feed_state", feed="train", state="failed") == 1.0
    assert value("feeder_feed_state", feed="train", state="running") == 0.0
    assert value(VERDICT, feed="train", kind="failed") == 1.0
    assert sum(value(VERDICT, feed="train", kind=kind) for kind in KINDS) == 1.0
    assert value(BUILD, version="1.2.3") == 1.0


def test_streams_of_one_feed_are_added_up() -> None:
    """The same labels twice would be no valid text."""
    value = shown(
        feed(chunks_wait_s=1.0, position_age_s=3.0),
        feed(number=1, chunks_wait_s=2.0, position_age_s=9.0, queues=(queue(1),)),
    )
    assert value("feeder_chunk_wait_seconds_total", feed="train") == 3.0
    assert value("feeder_snapshot_age_seconds", feed="train") == 9.0, "the oldest"
    assert value("feeder_feed_state", feed="train", state="running") == 1.0
    assert value("feeder_queues", feed="train") == 2.0


def test_any_name_of_a_feed_can_be_shown() -> None:
    for name in ('a"b', "back\\slash", "two\nlines", "é", "", "{}"):
        assert shown(feed(name=name))("feeder_queues", feed=name) == 1.0


def test_names_are_as_prometheus_wants_them() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"feeder_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert "_second_" not in metric.name and "_ms" not in metric.name
        assert metric.help.endswith(".")
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_nothing_is_left_in_the_registry_of_the_process() -> None:
    before = set(REGISTRY._names_to_collectors)
    expose(figures(feed()), {})
    assert set(REGISTRY._names_to_collectors) == before


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page and the figures need no extra."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "feeder.observe.prometheus")
    board = Board(lambda: figures(feed()))
    got = {
        path: answer(board, path, peer="127.0.0.1", host=None)
        for path in ("/metrics", "/stats.json", "/")
    }
    assert [each.status for each in got.values()] == [501, 200, 200]
    assert b"pip install 'feedworks[metrics]'" in got["/metrics"].body
