"""The figures of a process's feeds at one moment, as structures, as JSON, and as a flat dictionary.

Counts only grow, for as long as the process lives; what may fall says so. Seconds of waits include
the wait under way. Nothing in here is a row of data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

import feeder
from feeder.workers.errors import in_words
from feeder.workers.fetch.bound import Bound
from feeder.workers.stats import ExecutorCounts, StreamStats

if TYPE_CHECKING:
    from feeder.config import FeedConfig


State = Literal["waiting", "running", "ended", "failed", "stopped"]
"""A feed waits for its start or for consumers, runs, has ended, has failed, or was stopped."""

# Two streams that wait at the same time wait once, so these are not sums.
AS_GREATEST = {"age_s", "position_age_s", "starved_share"}
"""Flat numbers of which the greatest stands for all streams of a feed, and not their sum."""

STATES: tuple[State, ...] = ("waiting", "running", "ended", "failed", "stopped")


class FiguresStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that are read together and never change: any thread may hold them.

    Their field names are those of /stats.json and of what a server sends to `feeder top`.
    """


class WorkerFigures(FiguresStruct, frozen=True, kw_only=True):
    """One worker id; for `fetch(call)` one of the threads, any of which may make any call."""

    worker: int
    calls: int
    """Calls that returned a chunk."""
    rows: int
    bytes: int
    fetch_s: float
    """Seconds in the fetch function, without waiting for room."""
    running_s: float
    """For how long the calls under way have lasted (may fall); 0 while there is none."""
    computed_s: float = 0.0
    """Seconds of `fetch_s` in which its thread had a processor."""
    wait_s: float
    """Seconds for which the enqueuer waited for just this worker; 0 for a thread."""
    errors: int
    """Calls that raised, retried or not."""
    retries: int
    nothings: int
    """Calls that returned None."""


class ConsumerFigures(FiguresStruct, frozen=True, kw_only=True):
    """The consumer that reads a queue of a served feed now."""

    who: str
    plane: str
    """How batches reach it: "shared", "frames", or "" while that is not settled."""
    state: str
    """The state of its session, as in `feeder.service.protocol.session`."""
    credit: int
    """Batches that it may be sent beyond those that it has used; 0 while that is not known."""
    in_flight: int
    """Batches that it has been sent and has not used (may fall)."""
    silent_s: float
    """Seconds since it was last heard of (may fall)."""


class QueueFigures(FiguresStruct, frozen=True, kw_only=True, omit_defaults=True):
    """One device queue: what was handed to its trainer, and what waits there. A queue that trainers
    share is there once for each of them."""

    queue: int
    """Its number among those of the feed."""
    replica: int | None = None
    """Which of the trainers that share it; None, and left out, where there is one."""
    device: str
    batches: int
    """Batches handed to the trainer."""
    rows: int
    bytes: int
    waiting: int
    """Batches that are made and not handed to the trainer (may fall)."""
    capacity: int
    """The most that may wait; 0 while that is not known (may fall)."""
    wait_s: float
    """Seconds for which the trainer waited for batches."""
    starved_s: float
    """Seconds of `wait_s` in which the feed had no batch for it; else batches were on their way."""
    wait_p99_s: float = 0.0
    """Seconds that 99 of 100 of these waits took at most (may fall)."""
    checked_s: float
    """Seconds that checksums took, the longer of the two sides."""
    corrupt: int
    """Batches that came with bytes that were not sent."""
    consumer: ConsumerFigures | None
    """None in process, and where nobody holds the queue."""

    @property
    def name(self) -> str:
        """Its number, and the replica's after a point where it is shared."""
        return str(self.queue) if self.replica is None else f"{self.queue}.{self.replica}"


class ServiceFigures(FiguresStruct, frozen=True, kw_only=True):
    """The counts of a server for a feed."""

    opened: int
    """Times that a consumer was given a queue."""
    reopened: int
    """Times of `opened` for a consumer that came back."""
    fenced: int
    """Leases that ended because another consumer took the queue."""
    expired: int
    """Leases that ran out unheard."""
    rewinds: int
    """Times that the feed was begun again at another place."""
    arena_bytes: int
    """Shared memory in slots (may fall)."""


class ExecutorFigures(FiguresStruct, frozen=True, kw_only=True, omit_defaults=True):
    """The processes that a fetch function runs in, or the actors."""

    processes: int
    """Those that live (may fall)."""
    busy: int
    """Those that have something to do (may fall)."""
    restarts: int
    """Those that ended by themselves, and were replaced."""
    bytes: int
    """Bytes of the memory in which their chunks come (may fall)."""
    kind: str = "processes"
    """What they are: "processes" of this host, or "actors" of a cluster."""
    nodes: tuple[tuple[str, int], ...] = ()
    """The nodes of a cluster, and how many of them are there (may fall)."""


class CheckpointFigures(FiguresStruct, frozen=True, kw_only=True):
    """What became of the positions that a process stores by itself: of all its feeds together."""

    age_s: float
    """Seconds since one was stored last, or since the start (may fall)."""
    saves: int
    """Those that were stored."""
    failures: int
    """Those that could not be stored."""


class StoreFigures(FiguresStruct, frozen=True, kw_only=True):
    """How a stream reads objects of stores. All but `wait_s` are those of the process, of which
    feeds share caches; with those of the stream's own calls in other processes, but for what may
    fall."""

    wait_s: float
    """Seconds for which calls waited for blocks, added up over them."""
    requests: int
    """Ranges that were asked for, each time that they were."""
    bytes: int
    """Bytes that came."""
    retries: int
    """Requests that were made again."""
    slower: int
    """Answers by which a store asked for fewer requests."""
    stalls: int
    """Requests that were given up since no byte came."""
    damaged: int
    """Answers that were cut, or of another range."""
    hits: int
    """Reads of blocks that were there."""
    waits: int
    """Reads that had to wait for their block."""
    wanted: int
    """Blocks that are wanted and not asked for yet (may fall)."""
    coming: int
    """Blocks that are on their way (may fall)."""
    ahead: int
    """Bytes that were asked for in advance and are not used yet (may fall)."""


class SourceFigures(FiguresStruct, frozen=True, kw_only=True):
    """What a stream has read of one source of its mixture in the epoch of its position."""

    name: str
    rows: int
    """Records, or rows of packed sources (may fall)."""
    tokens: int | None
    """Tokens of these (may fall); None where they are not counted."""
    skipped: int
    """Reads of defective records that were left out, in all epochs."""


class ProgressFigures(FiguresStruct, frozen=True, kw_only=True):
    """How far a stream is in its epoch: by the batches that all devices have been handed."""

    epoch: int
    """The epoch, from 0 (may fall where a feed goes back)."""
    epochs: int | None
    """How many there are; None is without end."""
    batches: int
    """Batches of the epoch that were handed out (may fall)."""
    length: int | None
    """Batches that the epoch has; None where nobody knows."""
    sources: tuple[SourceFigures, ...] = ()
    """Those of a mixture, where its position tells what has been read of them."""


class FeedFigures(FiguresStruct, frozen=True, kw_only=True):
    """One stream of a feed, from the fetch function to the trainer."""

    name: str
    number: int
    """Number of the stream among those of that name."""
    state: State
    failure: str
    """Why it failed, in one line; else empty."""
    last_error: str
    """The last error of a call, in one line; empty where none has raised."""
    missing: tuple[int, ...]
    """Those of `queues` that nobody holds and the feed waits for, by their place there."""
    age_s: float
    """Seconds since it was started."""
    position_age_s: float
    """Seconds since its position was last asked for, or since the start (may fall)."""
    batch_size: int
    threads: int
    """Fetcher threads."""
    batches: int
    """Batches made."""
    rows: int
    bytes: int
    idle_s: float
    """Seconds for which fetchers waited, added up over them."""
    chunks_wait_s: float
    """Seconds for which the enqueuer waited for chunks."""
    room_wait_s: float
    """Seconds for which the enqueuer waited for room."""
    buffered_rows: int
    """Rows between a call's return and the trainer (may fall)."""
    buffered_bytes: int
    """Their bytes (may fall)."""
    limit_rows: int
    """The most rows that may be buffered."""
    workers: tuple[WorkerFigures, ...]
    queues: tuple[QueueFigures, ...]
    service: ServiceFigures | None
    """None in process."""
    executor: ExecutorFigures | None = None
    """None where fetcher threads call the function themselves."""
    progress: ProgressFigures | None = None
    """None where nobody can tell."""
    skipped: int = 0
    """Defective records that the source has left out."""
    store: StoreFigures | None = None
    """None where nothing is read from object stores."""
    checkpoint: CheckpointFigures | None = None
    """None where the process stores no positions by itself."""

    @property
    def title(self) -> str:
        """Its name; with the number where it is not the first of that name."""
        return self.name if not self.number else f"{self.name}#{self.number}"


class Figures(FiguresStruct, frozen=True, kw_only=True):
    """All feeds of a process."""

    version: str
    """The version of feeder."""
    who: str
    """The process, for people."""
    at_s: float
    """When they were read, on the process's own monotonic clock."""
    feeds: tuple[FeedFigures, ...]


def with_checkpoints(figures: Figures, age_s: float, stats: Mapping[str, Any]) -> Figures:
    """The same, which say what became of checkpoints, too: `stats` are the counts of the `Saver`,
    and so old is the last."""
    told = CheckpointFigures(age_s=age_s, saves=stats["saves"], failures=stats["failed_saves"])
    feeds = [replace(feed, checkpoint=told) for feed in figures.feeds]
    return replace(figures, feeds=tuple(feeds))


def to_json(figures: Figures) -> bytes:
    """The figures as JSON."""
    return msgspec.json.encode(figures)


def from_json(data: bytes) -> Figures:
    """The figures that another process wrote. Raises `msgspec.MsgspecError`."""
    return msgspec.json.decode(data, type=Figures)


def flatten(feed: FeedFigures) -> dict[str, Any]:
    """The numbers of one stream as a flat dictionary, for any logger."""
    flat: dict[str, Any] = {
        "age_s": feed.age_s,
        "position_age_s": feed.position_age_s,
        "fetchers_wait_s": feed.idle_s,
        "chunks_wait_s": feed.chunks_wait_s,
        "room_wait_s": feed.room_wait_s,
        "skipped": feed.skipped,
        "starved_share": max([queue.wait_s for queue in feed.queues]) / max(feed.age_s, 1e-9),
    }
    for worker in feed.workers:
        for name in ("calls", "rows", "bytes", "fetch_s", "wait_s", "errors", "retries"):
            flat[f"worker/{worker.worker}/{name}"] = getattr(worker, name)
    for source in () if feed.progress is None else feed.progress.sources:
        for name in ("rows", "tokens", "skipped"):
            if (value := getattr(source, name)) is not None:
                flat[f"source/{source.name}/{name}"] = value
    if feed.store is not None:
        flat |= {
            f"store/{name}": value for name, value in msgspec.structs.asdict(feed.store).items()
        }
    for queue in feed.queues:
        for name in ("batches", "rows", "bytes", "waiting", "wait_s"):
            flat[f"queue/{queue.name}/{name}"] = getattr(queue, name)
    return flat


# ---- From the counts of the engine to the figures of a stream


class Condition(NamedTuple):
    """How a stream is, beside its counts."""

    state: State
    started_at: float | None
    """When it was started; None where it was not."""
    asked_at: float | None
    """When its position was last asked for; None where it never was."""
    failure: BaseException | None = None
    """Why it failed."""
    missing: Sequence[int] = ()
    """The places of the queues that it waits for."""


def build_feed_figures(
    config: FeedConfig,
    number: int,
    condition: Condition,
    stats: StreamStats,
    bound: Bound | None,
    queues: Sequence[QueueFigures],
    now: float,
    *,
    blocked_s: float,
    service: ServiceFigures | None = None,
    executor: ExecutorCounts | None = None,
    progress: ProgressFigures | None = None,
) -> FeedFigures:
    """The figures of one stream. `blocked_s`: the enqueuer's waits for slots and queues; `bound` is
    None where nothing is buffered."""
    # A stream that was not started is as old as now: every rate over its age is 0.
    started_at = now if condition.started_at is None else condition.started_at
    asked_at = started_at if condition.asked_at is None else condition.asked_at
    failure = condition.failure
    return FeedFigures(
        name=config.name,
        number=number,
        state=condition.state,
        failure="" if failure is None else one_line(in_words(failure)),
        last_error=one_line(stats.fetch.last_error),
        missing=tuple(condition.missing),
        age_s=now - started_at,
        position_age_s=now - max(asked_at, started_at),
        batch_size=config.stream.batch_size,
        threads=config.run.num_threads,
        batches=stats.made.batches,
        rows=stats.made.rows,
        bytes=stats.made.bytes,
        idle_s=stats.idle.seconds(now),
        chunks_wait_s=stats.chunks.seconds(now),
        room_wait_s=stats.room.seconds(now) + blocked_s,
        buffered_rows=0 if bound is None else bound.rows,
        buffered_bytes=0 if bound is None else bound.bytes,
        limit_rows=config.run.max_rows if bound is None else bound.max_rows,
        workers=_make_workers(stats, config.stream.first_worker_id, now),
        queues=tuple(queues),
        service=service,
        executor=None if executor is None else ExecutorFigures(**executor._asdict()),
        progress=progress,
        skipped=stats.skipped,
        store=None if (store := stats.store) is None else msgspec.convert(store, StoreFigures),
    )


def _make_workers(stats: StreamStats, first: int, now: float) -> tuple[WorkerFigures, ...]:
    fetch, workers = stats.fetch, []
    for partition, clock in enumerate(stats.partitions):
        done, running_s = fetch.counts_of(partition, now)
        workers.append(
            WorkerFigures(
                worker=first + partition,
                calls=done.calls,
                rows=done.rows,
                bytes=done.bytes,
                fetch_s=done.seconds,
                running_s=running_s,
                computed_s=done.computed_s,
                wait_s=clock.seconds(now),
                errors=fetch.errors[partition],
                retries=fetch.retries[partition],
                nothings=fetch.nothings[partition],
            )
        )
    return tuple(workers)


def build_figures(feeds: Sequence[FeedFigures], now: float) -> Figures:
    """The figures of this process."""
    who = f"pid {os.getpid()} on {os.uname().nodename}"
    return Figures(version=feeder.__version__, who=who, at_s=now, feeds=tuple(feeds))


def one_line(text: str) -> str:
    """A text in one line of at most 500 characters that can be sent and shown anywhere."""
    # An error's text may hold the user's data, escape sequences of a terminal, or surrogates.
    line = " ".join(text.split())
    return line.encode(errors="backslashreplace").decode()[:500]
