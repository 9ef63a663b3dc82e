"""The metrics of OpenTelemetry are those of Prometheus, value by value."""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum

import feeder
from feeder.observe.figures import (
    CheckpointFigures,
    ExecutorFigures,
    Figures,
    ProgressFigures,
    SourceFigures,
)
from feeder.observe.metrics import METRICS, names
from feeder.observe.prometheus import expose
from feeder.observe.status.board import Board
from figures import consumer, feed, figures, queue, service, store, worker
from samples import parse
from small import Pure, make

NUMBERS = st.integers(0, 2**40)
TEXTS = st.text(max_size=3)


class Told:
    """Gives one reading after the other."""

    def __init__(self, *readings: Figures | Exception) -> None:
        self.readings = deque(readings)

    def figures(self) -> Figures:
        found = self.readings.popleft()
        if isinstance(found, Exception):
            raise found
        return found


def collected(reader: InMemoryMetricReader) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every value of a collection under the name that it has in Prometheus."""
    data = reader.get_metrics_data()
    return {
        (
            metric.name + "_total" * isinstance(metric.data, Sum),
            frozenset(point.attributes.items()),
        ): point.value
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def registered(feeds: Any) -> InMemoryMetricReader:
    reader = InMemoryMetricReader()
    # Its own end at the exit would belong to no test.
    provider = MeterProvider([reader], shutdown_on_exit=False)
    feeder.register_metrics(feeds, provider)
    return reader


def exposed(read: Figures) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return parse(expose(read, Board(lambda: read).kinds(read))[1])


@st.composite
def feeds(draw: st.DrawFn, number: int) -> Any:
    """A stream with any of the parts that a metric may be of."""
    some = {name: draw(NUMBERS) for name in ("batches", "rows", "skipped", "buffered_bytes")}
    queues = tuple(
        queue(i, batches=draw(NUMBERS), consumer=draw(st.none() | st.just(consumer(in_flight=i))))
        for i in range(draw(st.integers(1, 3)))
    )
    source = SourceFigures(
        name=draw(TEXTS), rows=draw(NUMBERS), tokens=draw(st.none() | NUMBERS), skipped=1
    )
    progress = ProgressFigures(epoch=0, epochs=1, batches=0, length=None, sources=(source,))
    executor = ExecutorFigures(
        processes=draw(NUMBERS), busy=0, restarts=0, bytes=1, nodes=((draw(TEXTS), 3),)
    )
    checkpoint = CheckpointFigures(age_s=float(number), saves=draw(NUMBERS), failures=1)
    return feed(
        name=draw(st.sampled_from(["train", "eval", "", "ä\n"])),
        number=number,
        state=draw(st.sampled_from(["waiting", "running", "failed"])),
        queues=queues,
        workers=tuple(worker(i, retries=draw(NUMBERS)) for i in range(draw(st.integers(1, 3)))),
        progress=draw(st.none() | st.just(progress)),
        service=draw(st.none() | st.just(service(expired=draw(NUMBERS)))),
        store=draw(st.none() | st.just(store(requests=draw(NUMBERS), wait_s=0.5))),
        executor=draw(st.none() | st.just(executor)),
        checkpoint=draw(st.none() | st.just(checkpoint)),
        **some,
    )


@given(st.data(), st.integers(0, 3))
def test_every_value_is_that_of_prometheus(data: st.DataObject, num_streams: int) -> None:
    read = figures(*(data.draw(feeds(number)) for number in range(num_streams)))
    assert collected(registered(told := Told(read))) == exposed(read)
    assert not told.readings, "read once"


def test_every_metric_is_there_with_its_words() -> None:
    all_parts = feed(
        queues=(queue(0, consumer=consumer()),),
        progress=ProgressFigures(
            epoch=0, epochs=1, batches=0, length=9,
            sources=(SourceFigures(name="web", rows=1, tokens=2, skipped=3),),
        ),
        service=service(),
        store=store(),
        executor=ExecutorFigures(processes=1, busy=1, restarts=0, bytes=1, nodes=(("a", 1),)),
        checkpoint=CheckpointFigures(age_s=1.0, saves=1, failures=0),
    )  # fmt: skip
    told = Told(figures(all_parts), figures(all_parts))
    reader = registered(told)
    assert {name for name, _ in collected(reader)} == names()
    data = reader.get_metrics_data()
    found = {each.name: each for each in data.resource_metrics[0].scope_metrics[0].metrics}
    assert all(found[each.name.removesuffix("_total")].description == each.help for each in METRICS)
    units = {name: each.unit for name, each in found.items() if each.unit}
    assert set(units.values()) == {"s", "By"}
    assert units["feeder_fetch_seconds"] == "s" and units["feeder_arena_bytes"] == "By"


def test_each_collection_reads_anew() -> None:
    """The verdict is on the time since the last one."""
    waits = feed(queues=(queue(0, batches=90, wait_s=50.0),))
    # All that the trainer waited was before the first collection.
    later = feed(queues=(queue(0, batches=990, wait_s=50.0),), age_s=200.0, batches=990)
    reader = registered(told := Told(figures(waits), figures(later, at_s=100.0)))
    for batches in (90, 990):
        found = collected(reader)
        batch = "feeder_batches_total", frozenset({("feed", "train"), ("queue", "0")})
        assert found[batch] == batches
    bound = "feeder_verdict", frozenset({("feed", "train"), ("kind", "trainer-bound")})
    assert found[bound] == 1.0
    assert not told.readings


def test_a_feed_of_this_process_is_observed_until_it_is_forgotten() -> None:
    coordinator = make(Pure(7, 4))
    reader = registered(coordinator)
    with coordinator:
        list(coordinator["train"])
    rows = "feeder_rows_total", frozenset({("feed", "train"), ("queue", "0")})
    assert collected(reader)[rows] == 28
    del coordinator
    gc.collect()
    assert collected(reader) == {}


def test_feeds_that_cannot_answer_have_no_values_once(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(feeder.ClosedError("the server is closed"), figures(feed()))
    reader = registered(told)
    assert collected(reader) == {}
    assert len(told.readings) == 1, "asked once in a collection"
    assert collected(reader)
    assert not caplog.records


@pytest.mark.process
def test_a_forked_child_tells_nothing_of_its_parent() -> None:
    told = Told(figures(feed()), figures(feed()))
    reader = registered(told)
    if (child := os.fork()) == 0:
        os._exit(len(collected(reader)))
    assert os.waitpid(child, 0)[1] == 0
    assert collected(reader)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(feeder.ConfigError, match=r"pip install 'feedworks\[opentelemetry\]'"):
        feeder.register_metrics(Told())
