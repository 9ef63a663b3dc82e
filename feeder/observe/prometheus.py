"""The metrics of Prometheus: names, labels and where each value comes from. A table.

Names follow Prometheus' conventions: base units, counters end in `_total`. They stay as they are
within a major version, since alert rules and dashboards are made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from feeder.errors import ConfigError
from feeder.observe.figures import STATES, FeedFigures, Figures
from feeder.observe.verdict import KINDS

Values = Iterator[tuple[tuple[str, ...], float]]


class Metric(NamedTuple):
    """One metric: the values of its labels beside each of its own."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    values: Callable[[FeedFigures], Values]
    help: str


def _feed(read: Callable[[FeedFigures], float]) -> Callable[[FeedFigures], Values]:
    def values(feed: FeedFigures) -> Values:
        yield (feed.name,), read(feed)

    return values


def _field(name: str) -> Callable[[FeedFigures], Values]:
    return _feed(lambda feed: getattr(feed, name))


def _service(name: str) -> Callable[[FeedFigures], Values]:
    def values(feed: FeedFigures) -> Values:
        if feed.service is not None:
            yield (feed.name,), getattr(feed.service, name)

    return values


def _workers(name: str) -> Callable[[FeedFigures], Values]:
    def values(feed: FeedFigures) -> Values:
        for worker in feed.workers:
            yield (feed.name, str(worker.worker)), getattr(worker, name)

    return values


def _queues(name: str) -> Callable[[FeedFigures], Values]:
    def values(feed: FeedFigures) -> Values:
        for queue in feed.queues:
            yield (feed.name, queue.name), getattr(queue, name)

    return values


def _consumers(name: str) -> Callable[[FeedFigures], Values]:
    def values(feed: FeedFigures) -> Values:
        for queue in feed.queues:
            if queue.consumer is not None:
                yield (feed.name, queue.name), getattr(queue.consumer, name)

    return values


def _sources(name: str) -> Callable[[FeedFigures], Values]:
    def values(feed: FeedFigures) -> Values:
        for source in () if feed.progress is None else feed.progress.sources:
            if (value := getattr(source, name)) is not None:
                yield (feed.name, source.name), value

    return values


def _executor(name: str) -> Callable[[FeedFigures], Values]:
    def values(feed: FeedFigures) -> Values:
        yield (feed.name,), 0 if feed.executor is None else getattr(feed.executor, name)

    return values


def _nodes(feed: FeedFigures) -> Values:
    for name, num in () if feed.executor is None else feed.executor.nodes:
        yield (feed.name, name), num


def _states(feed: FeedFigures) -> Values:
    for state in STATES:
        yield (feed.name, state), float(feed.state == state)


def _held(feed: FeedFigures) -> Values:
    if feed.service is not None:
        yield (feed.name,), sum(queue.consumer is not None for queue in feed.queues)


_F, _W, _Q = ("feed",), ("feed", "worker"), ("feed", "queue")

METRICS: tuple[Metric, ...] = (
    Metric("feeder_feed_state", "gauge", ("feed", "state"), _states,
           "1 for the state that the feed is in."),
    Metric("feeder_batches_total", "counter", _Q, _queues("batches"),
           "Batches handed to the trainer."),
    Metric("feeder_rows_total", "counter", _Q, _queues("rows"), "Rows in them."),
    Metric("feeder_bytes_total", "counter", _Q, _queues("bytes"), "Bytes in them."),
    Metric("feeder_queue_batches", "gauge", _Q, _queues("waiting"),
           "Batches made and not handed to the trainer."),
    Metric("feeder_queue_capacity_batches", "gauge", _Q, _queues("capacity"),
           "The most of them; 0 while that is not known."),
    Metric("feeder_consumer_wait_seconds_total", "counter", _Q, _queues("wait_s"),
           "Time that the trainer waited for batches."),
    Metric("feeder_buffer_wait_seconds_total", "counter", _F, _field("room_wait_s"),
           "Time that the enqueuer waited for room."),
    Metric("feeder_chunk_wait_seconds_total", "counter", _F, _field("chunks_wait_s"),
           "Time that the enqueuer waited for chunks."),
    Metric("feeder_fetcher_wait_seconds_total", "counter", _F, _field("idle_s"),
           "Time that fetchers waited, added up over them."),
    Metric("feeder_fetcher_threads", "gauge", _F, _field("threads"), "Fetcher threads."),
    Metric("feeder_source_rows", "gauge", ("feed", "source"), _sources("rows"),
           "Rows that were read of a source of a mixture in the epoch of the position."),
    Metric("feeder_source_tokens", "gauge", ("feed", "source"), _sources("tokens"),
           "Their tokens, where a mixture counts them."),
    Metric("feeder_source_skipped_total", "counter", ("feed", "source"), _sources("skipped"),
           "Reads of defective records of a source of a mixture that were left out."),
    Metric("feeder_processes", "gauge", _F, _executor("processes"),
           "Processes that the fetch function runs in."),
    Metric("feeder_busy_processes", "gauge", _F, _executor("busy"),
           "Those that have something to do."),
    Metric("feeder_process_restarts_total", "counter", _F, _executor("restarts"),
           "Processes that ended by themselves, and were replaced."),
    Metric("feeder_process_bytes", "gauge", _F, _executor("bytes"),
           "Memory in which their chunks come."),
    Metric("feeder_node_actors", "gauge", ("feed", "node"), _nodes,
           "Actors of the fetch function on a node of the cluster."),
    Metric("feeder_buffered_rows", "gauge", _F, _field("buffered_rows"),
           "Rows between a call's return and the trainer."),
    Metric("feeder_buffered_bytes", "gauge", _F, _field("buffered_bytes"), "Their bytes."),
    Metric("feeder_buffer_limit_rows", "gauge", _F, _field("limit_rows"),
           "The most rows that may be buffered."),
    Metric("feeder_fetch_calls_total", "counter", _W, _workers("calls"),
           "Calls that returned a chunk."),
    Metric("feeder_fetch_rows_total", "counter", _W, _workers("rows"), "Rows in the chunks."),
    Metric("feeder_fetch_bytes_total", "counter", _W, _workers("bytes"), "Bytes in the chunks."),
    Metric("feeder_fetch_seconds_total", "counter", _W, _workers("fetch_s"),
           "Time in the fetch function, without waiting for room."),
    Metric("feeder_fetch_running_seconds", "gauge", _W, _workers("running_s"),
           "For how long the calls under way have lasted."),
    Metric("feeder_fetch_errors_total", "counter", _W, _workers("errors"), "Calls that raised."),
    Metric("feeder_fetch_retries_total", "counter", _W, _workers("retries"),
           "Calls made again after they raised."),
    Metric("feeder_fetch_nothing_total", "counter", _W, _workers("nothings"),
           "Calls that returned None."),
    Metric("feeder_skipped_records_total", "counter", _F, _field("skipped"),
           "Defective records that the source has left out."),
    Metric("feeder_worker_wait_seconds_total", "counter", _W, _workers("wait_s"),
           "Time that the enqueuer waited for just this worker."),
    Metric("feeder_snapshot_age_seconds", "gauge", _F, _field("position_age_s"),
           "Time since the position was last asked for, of the queue where that is longest ago."),
    Metric("feeder_queues", "gauge", _F, _feed(lambda feed: len(feed.queues)),
           "Queues of the feed."),
    Metric("feeder_consumers", "gauge", _F, _held, "Queues that a consumer holds."),
    Metric("feeder_in_flight_batches", "gauge", _Q, _consumers("in_flight"),
           "Batches sent to the consumer and not used."),
    Metric("feeder_consumer_silence_seconds", "gauge", _Q, _consumers("silent_s"),
           "Time since the consumer was last heard of."),
    Metric("feeder_sessions_opened_total", "counter", _F, _service("opened"),
           "Times that a consumer was given a queue."),
    Metric("feeder_sessions_reopened_total", "counter", _F, _service("reopened"),
           "Those for a consumer that came back."),
    Metric("feeder_leases_fenced_total", "counter", _F, _service("fenced"),
           "Leases that ended because another consumer took the queue."),
    Metric("feeder_leases_expired_total", "counter", _F, _service("expired"),
           "Leases that ran out unheard."),
    Metric("feeder_checksum_failures_total", "counter", _Q, _queues("corrupt"),
           "Batches that arrived with bytes that were not sent."),
    Metric("feeder_checksum_seconds_total", "counter", _Q, _queues("checked_s"),
           "Time that checksums took, on the slower of the two sides."),
    Metric("feeder_rewinds_total", "counter", _F, _service("rewinds"),
           "Times that the feed was begun again at another place."),
    Metric("feeder_arena_bytes", "gauge", _F, _service("arena_bytes"),
           "Shared memory in slots."),
)  # fmt: skip
"""All that are read from the figures of a feed."""

BUILD = "feeder_build_info"
"""1, with the version as its label."""
VERDICT = "feeder_verdict"
"""1 for the kind of the feed's verdict."""

# States are 0 or 1, and two streams that run at the same time run for the longer time: not sums.
_LARGEST = {"feeder_feed_state", "feeder_fetch_running_seconds", "feeder_snapshot_age_seconds"}


def names() -> frozenset[str]:
    """Every name that is exported."""
    return frozenset({BUILD, VERDICT, *(metric.name for metric in METRICS)})


def samples(metric: Metric, figures: Figures) -> dict[tuple[str, ...], float]:
    """A metric's values by their labels. Streams of one feed have the labels in common: their
    values are added up, or the largest stands for them."""
    found: dict[tuple[str, ...], float] = {}
    for feed in figures.feeds:
        for labels, value in metric.values(feed):
            old: Any = found.get(labels)
            if old is None:
                found[labels] = float(value)
            else:
                found[labels] = max(old, value) if metric.name in _LARGEST else old + value
    return found


def verdict_samples(kinds: dict[str, str]) -> dict[tuple[str, ...], float]:
    """For each feed and each kind of verdict whether it is that."""
    return {(title, kind): float(found == kind) for title, found in kinds.items() for kind in KINDS}


# ---- Figures as Prometheus reads them; needs the extra `metrics`
#
# A registry of our own for each time, so that nothing is left in the global one of the process,
# which belongs to the user.


try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError(
        "metrics for Prometheus need prometheus-client: pip install 'feedworks[metrics]'"
    ) from error


class _Figures(Collector):
    """The figures of one moment, for the one thread that exposes them."""

    def __init__(self, figures: Figures, kinds: dict[str, str]) -> None:
        self._figures = figures
        self._kinds = kinds

    def collect(self) -> Iterator[Family]:
        """Every metric, in the order of the table."""
        build = GaugeMetricFamily(BUILD, "The version of feeder.", labels=("version",))
        build.add_metric((self._figures.version,), 1.0)
        yield build
        verdict = GaugeMetricFamily(
            VERDICT, "1 for what holds the feed up.", labels=("feed", "kind")
        )
        for labels, value in verdict_samples(self._kinds).items():
            verdict.add_metric(labels, value)
        yield verdict
        for metric in METRICS:
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
            for labels, value in samples(metric, self._figures).items():
                family.add_metric(labels, value)
            yield family


def expose(figures: Figures, kinds: dict[str, str]) -> tuple[str, bytes]:
    """Content type and text; `kinds` is the kind of each feed's verdict by its title."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(figures, kinds))
    return CONTENT_TYPE_LATEST, generate_latest(registry)
