"""The metrics: names, labels, and where each value comes from. A table.

Names follow Prometheus' conventions: base units, counters end in `_total`. They stay as they are
within a major version, since alert rules and dashboards are made of them. `prometheus.py` and
`opentelemetry.py` show the table, each in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from feeder.observe.figures import STATES, ExecutorFigures, FeedFigures, Figures
from feeder.observe.verdict import KINDS


class Parts(NamedTuple):
    """The parts of a feed that a metric has a value for."""

    label: str | None
    """What tells a part from the others; None if there is one."""
    read: Callable[[FeedFigures], Iterable[tuple[str, Any]]]
    """The label's value of each, and its figures; None instead of figures is left out."""


class Metric(NamedTuple):
    """One metric."""

    name: str
    parts: Parts
    field: str | None
    """The name of its value among the figures of a part; None if the part is the value itself."""
    help: str

    @property
    def kind(self) -> str:
        """Prometheus' word for what the values do."""
        return _kind(self.name)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        return ("feed",) if self.parts.label is None else ("feed", self.parts.label)

    def values(self, feed: FeedFigures) -> Iterator[tuple[tuple[str, ...], float]]:
        """The values of a feed beside those of the labels."""
        for label, part in self.parts.read(feed):
            value = part if self.field is None or part is None else getattr(part, self.field)
            if value is not None:
                is_one = self.parts.label is None
                yield (feed.name,) if is_one else (feed.name, label), float(value)


_NO_PROCESSES = ExecutorFigures(processes=0, busy=0, restarts=0, bytes=0)

_FEED = Parts(None, lambda feed: [("", feed)])
_STATES = Parts("state", lambda feed: [(state, feed.state == state) for state in STATES])
_SERVICE = Parts(None, lambda feed: [("", feed.service)])
_EXECUTOR = Parts(None, lambda feed: [("", feed.executor or _NO_PROCESSES)])
_NODES = Parts("node", lambda feed: (feed.executor or _NO_PROCESSES).nodes)
_STORE = Parts(None, lambda feed: [("", feed.store)])
_CHECKPOINT = Parts(None, lambda feed: [("", feed.checkpoint)])
_WORKERS = Parts("worker", lambda feed: [(str(each.worker), each) for each in feed.workers])
_SOURCES = Parts(
    "source",
    lambda feed: [(each.name, each) for each in (feed.progress.sources if feed.progress else ())],
)
_QUEUES = Parts("queue", lambda feed: [(each.name, each) for each in feed.queues])
_NUM_QUEUES = Parts(None, lambda feed: [("", len(feed.queues))])
_CONSUMERS = Parts("queue", lambda feed: [(each.name, each.consumer) for each in feed.queues])
_NUM_CONSUMERS = Parts(
    None,
    lambda feed: [("", feed.service and sum(each.consumer is not None for each in feed.queues))],
)

METRICS: tuple[Metric, ...] = (
    Metric("feeder_feed_state", _STATES, None, "1 for the state that the feed is in."),
    Metric("feeder_batches_total", _QUEUES, "batches", "Batches handed to the trainer."),
    Metric("feeder_rows_total", _QUEUES, "rows", "Rows in them."),
    Metric("feeder_bytes_total", _QUEUES, "bytes", "Bytes in them."),
    Metric("feeder_queue_batches", _QUEUES, "waiting",
           "Batches made and not handed to the trainer."),
    Metric("feeder_queue_capacity_batches", _QUEUES, "capacity",
           "The most of them; 0 while that is not known."),
    Metric("feeder_consumer_wait_seconds_total", _QUEUES, "wait_s",
           "Time that the trainer waited for batches."),
    Metric("feeder_buffer_wait_seconds_total", _FEED, "room_wait_s",
           "Time that the enqueuer waited for room."),
    Metric("feeder_chunk_wait_seconds_total", _FEED, "chunks_wait_s",
           "Time that the enqueuer waited for chunks."),
    Metric("feeder_fetcher_wait_seconds_total", _FEED, "idle_s",
           "Time that fetchers waited, added up over them."),
    Metric("feeder_fetcher_threads", _FEED, "threads", "Fetcher threads."),
    Metric("feeder_source_rows", _SOURCES, "rows",
           "Rows that were read of a source of a mixture in the epoch of the position."),
    Metric("feeder_source_tokens", _SOURCES, "tokens",
           "Their tokens, where a mixture counts them."),
    Metric("feeder_source_skipped_total", _SOURCES, "skipped",
           "Reads of defective records of a source of a mixture that were left out."),
    Metric("feeder_processes", _EXECUTOR, "processes",
           "Processes that the fetch function runs in."),
    Metric("feeder_busy_processes", _EXECUTOR, "busy", "Those that have something to do."),
    Metric("feeder_process_restarts_total", _EXECUTOR, "restarts",
           "Processes that ended by themselves, and were replaced."),
    Metric("feeder_process_bytes", _EXECUTOR, "bytes", "Memory in which their chunks come."),
    Metric("feeder_node_actors", _NODES, None,
           "Actors of the fetch function on a node of the cluster."),
    Metric("feeder_buffered_rows", _FEED, "buffered_rows",
           "Rows between a call's return and the trainer."),
    Metric("feeder_buffered_bytes", _FEED, "buffered_bytes", "Their bytes."),
    Metric("feeder_buffer_limit_rows", _FEED, "limit_rows", "The most rows that may be buffered."),
    Metric("feeder_fetch_calls_total", _WORKERS, "calls", "Calls that returned a chunk."),
    Metric("feeder_fetch_rows_total", _WORKERS, "rows", "Rows in the chunks."),
    Metric("feeder_fetch_bytes_total", _WORKERS, "bytes", "Bytes in the chunks."),
    Metric("feeder_fetch_seconds_total", _WORKERS, "fetch_s",
           "Time in the fetch function, without waiting for room."),
    Metric("feeder_fetch_running_seconds", _WORKERS, "running_s",
           "For how long the calls under way have lasted."),
    Metric("feeder_fetch_errors_total", _WORKERS, "errors", "Calls that raised."),
    Metric("feeder_fetch_retries_total", _WORKERS, "retries",
           "Calls made again after they raised."),
    Metric("feeder_fetch_nothing_total", _WORKERS, "nothings", "Calls that returned None."),
    Metric("feeder_skipped_records_total", _FEED, "skipped",
           "Defective records that the source has left out."),
    Metric("feeder_store_wait_seconds_total", _STORE, "wait_s",
           "Time that calls waited for blocks of object stores, added up over them."),
    Metric("feeder_store_requests_total", _STORE, "requests",
           "Requests that the process has made of object stores."),
    Metric("feeder_store_bytes_total", _STORE, "bytes", "Bytes that came."),
    Metric("feeder_store_retries_total", _STORE, "retries", "Requests that were made again."),
    Metric("feeder_cache_hits_total", _STORE, "hits",
           "Reads of the process's caches that found their block."),
    Metric("feeder_cache_waits_total", _STORE, "waits", "Those that had to wait for it."),
    Metric("feeder_cache_wanted_blocks", _STORE, "wanted",
           "Blocks that are wanted and not asked for yet."),
    Metric("feeder_cache_coming_blocks", _STORE, "coming", "Blocks that are on their way."),
    Metric("feeder_cache_ahead_bytes", _STORE, "ahead",
           "Bytes that were asked for in advance and are not used yet."),
    Metric("feeder_worker_wait_seconds_total", _WORKERS, "wait_s",
           "Time that the enqueuer waited for just this worker."),
    Metric("feeder_snapshot_age_seconds", _FEED, "position_age_s",
           "Time since the position was last asked for, of the queue where that is longest ago."),
    Metric("feeder_checkpoint_age_seconds", _CHECKPOINT, "age_s",
           "Time since the process stored a checkpoint last, or since its start."),
    Metric("feeder_checkpoints_total", _CHECKPOINT, "saves", "Checkpoints that it has stored."),
    Metric("feeder_checkpoint_failures_total", _CHECKPOINT, "failures",
           "Checkpoints that could not be stored."),
    Metric("feeder_queues", _NUM_QUEUES, None, "Queues of the feed."),
    Metric("feeder_consumers", _NUM_CONSUMERS, None, "Queues that a consumer holds."),
    Metric("feeder_in_flight_batches", _CONSUMERS, "in_flight",
           "Batches sent to the consumer and not used."),
    Metric("feeder_consumer_silence_seconds", _CONSUMERS, "silent_s",
           "Time since the consumer was last heard of."),
    Metric("feeder_sessions_opened_total", _SERVICE, "opened",
           "Times that a consumer was given a queue."),
    Metric("feeder_sessions_reopened_total", _SERVICE, "reopened",
           "Those for a consumer that came back."),
    Metric("feeder_leases_fenced_total", _SERVICE, "fenced",
           "Leases that ended because another consumer took the queue."),
    Metric("feeder_leases_expired_total", _SERVICE, "expired", "Leases that ran out unheard."),
    Metric("feeder_checksum_failures_total", _QUEUES, "corrupt",
           "Batches that arrived with bytes that were not sent."),
    Metric("feeder_checksum_seconds_total", _QUEUES, "checked_s",
           "Time that checksums took, on the slower of the two sides."),
    Metric("feeder_rewinds_total", _SERVICE, "rewinds",
           "Times that the feed was begun again at another place."),
    Metric("feeder_arena_bytes", _SERVICE, "arena_bytes", "Shared memory in slots."),
)  # fmt: skip
"""All that are read from the figures of a feed."""

BUILD = "feeder_build_info"
"""1, with the version as its label."""
VERDICT = "feeder_verdict"
"""1 for the kind of the feed's verdict."""

# States are 0 or 1, and two streams that run at the same time run for the longer time: not sums.
_LARGEST = {"feeder_feed_state", "feeder_fetch_running_seconds", "feeder_snapshot_age_seconds"}
# Those of the process are the same for each stream of a feed.
_LARGEST |= {metric.name for metric in METRICS if metric.parts in (_STORE, _CHECKPOINT)}


def names() -> frozenset[str]:
    """Every name that is exported."""
    return frozenset({BUILD, VERDICT, *(metric.name for metric in METRICS)})


class Series(NamedTuple):
    """One metric and its values at one moment."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: Mapping[tuple[str, ...], float]
    """Each value by those of the labels."""

    @property
    def kind(self) -> str:
        """Prometheus' word for what the values do."""
        return _kind(self.name)


def all_series(figures: Figures, kinds: Mapping[str, str]) -> list[Series]:
    """Every metric, in the order of the table; `kinds` is the kind of each feed's verdict by its
    title."""
    verdicts: dict[tuple[str, ...], float] = {
        (title, kind): float(found == kind) for title, found in kinds.items() for kind in KINDS
    }
    return [
        Series(BUILD, "The version of feeder.", ("version",), {(figures.version,): 1.0}),
        Series(VERDICT, "1 for what holds the feed up.", ("feed", "kind"), verdicts),
        *(Series(each.name, each.help, each.labels, samples(each, figures)) for each in METRICS),
    ]


def samples(metric: Metric, figures: Figures) -> dict[tuple[str, ...], float]:
    """A metric's values by their labels. Streams of one feed have the labels in common: their
    values are added up, or the largest stands for them."""
    found: dict[tuple[str, ...], float] = {}
    for feed in figures.feeds:
        for labels, value in metric.values(feed):
            old = found.get(labels, 0.0)
            found[labels] = max(old, value) if metric.name in _LARGEST else old + value
    return found


def _kind(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"
