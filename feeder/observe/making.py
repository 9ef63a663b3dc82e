"""Figures of a stream from what was counted of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import feeder
from feeder.observe.figures import (
    FeedFigures,
    Figures,
    QueueFigures,
    ServiceFigures,
    State,
    WorkerFigures,
)
from feeder.workers.errors import in_words
from feeder.workers.fetch.ledger import Ledger
from feeder.workers.stats import StreamStats

if TYPE_CHECKING:
    from feeder.config import FeedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """How a stream is, beside its counts."""

    state: State
    failure: BaseException | None = None
    """Why it failed."""
    missing: Sequence[int] = ()
    """Queues that it waits for."""
    started_at: float | None
    """When it was started; None where it was not."""
    asked_at: float | None
    """When its position was last asked for; None where it never was."""


def make_feed(
    config: FeedConfig,
    number: int,
    condition: Condition,
    stats: StreamStats,
    ledger: Ledger | None,
    queues: Sequence[QueueFigures],
    now: float,
    *,
    blocked_s: float,
    service: ServiceFigures | None = None,
) -> FeedFigures:
    """The figures of one stream. `blocked_s`: the enqueuer's waits for slots and queues; `ledger`
    is None where nothing is buffered."""
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
        idle_s=stats.idle.read(now),
        chunks_wait_s=stats.chunks.read(now),
        room_wait_s=stats.room.read(now) + blocked_s,
        buffered_rows=0 if ledger is None else ledger.rows,
        buffered_bytes=0 if ledger is None else ledger.bytes,
        limit_rows=config.run.max_rows,
        workers=_make_workers(stats, config.stream.first_worker_id, now),
        queues=tuple(queues),
        service=service,
    )


def _make_workers(stats: StreamStats, first: int, now: float) -> tuple[WorkerFigures, ...]:
    fetch, workers = stats.fetch, []
    for lane, clock in enumerate(stats.lanes):
        done, running_s = fetch.read(lane, now)
        workers.append(
            WorkerFigures(
                worker=first + lane,
                calls=done.calls,
                rows=done.rows,
                bytes=done.bytes,
                fetch_s=done.seconds,
                running_s=running_s,
                wait_s=clock.read(now),
                errors=fetch.errors[lane],
                retries=fetch.retries[lane],
                nothings=fetch.nothings[lane],
            )
        )
    return tuple(workers)


def make_figures(feeds: Sequence[FeedFigures], now: float) -> Figures:
    """The figures of this process."""
    who = f"pid {os.getpid()} on {os.uname().nodename}"
    return Figures(version=feeder.__version__, who=who, at_s=now, feeds=tuple(feeds))


def one_line(text: str) -> str:
    """A text in one line of at most 500 characters that can be sent and shown anywhere."""
    line = " ".join(text.split())
    return line.encode(errors="backslashreplace").decode()[:500]
