"""The numbers of a process's feeds at one moment: the nouns, and their two forms as text.

Counts only grow, for as long as the process lives; what may fall says so. Seconds of waits include
the wait under way. Nothing in here is a row of data.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

State = Literal["waiting", "running", "ended", "failed", "stopped"]
"""A feed waits for its start or for consumers, runs, has ended, has failed, or was stopped."""

AS_GREATEST = {"age_s", "position_age_s", "starved_share"}
"""Of the flat numbers, those that are not added up over the streams of a feed."""

STATES: tuple[State, ...] = ("waiting", "running", "ended", "failed", "stopped")


class Noun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that are read together."""


class WorkerFigures(Noun, frozen=True, kw_only=True):
    """One worker id; for `fetch(call)` one of the sequences of calls, of which there are as many
    as threads."""

    worker: int
    calls: int
    """Calls that returned a chunk."""
    rows: int
    bytes: int
    fetch_s: float
    """Seconds in the fetch function, without waiting for room."""
    running_s: float
    """For how long the calls under way have lasted (may fall); 0 while there is none."""
    wait_s: float
    """Seconds for which the enqueuer waited for just this worker."""
    errors: int
    """Calls that raised, retried or not."""
    retries: int
    nothings: int
    """Calls that returned None."""


class ConsumerFigures(Noun, frozen=True, kw_only=True):
    """Who reads a queue of a served feed now."""

    who: str
    plane: str
    """How batches reach it: "shared", "frames", or "" while that is not settled."""
    state: str
    """Of its session, as in `feeder.service.protocol.session`."""
    credit: int
    """Batches that it may be sent beyond those that it has used; 0 while that is not known."""
    in_flight: int
    """Batches that it has been sent and has not used (may fall)."""
    silent_s: float
    """Seconds since it was last heard of (may fall)."""


class QueueFigures(Noun, frozen=True, kw_only=True):
    """One device queue: what was handed to its trainer, and what waits there."""

    queue: int
    """Its number among those of the feed."""
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
    """Those of them in which the feed had none for it; the rest were on their way."""
    checked_s: float
    """Seconds that checksums took, the longer of the two sides."""
    corrupt: int
    """Batches that came with bytes that were not sent."""
    consumer: ConsumerFigures | None
    """None in process, and where nobody holds the queue."""


class ServiceFigures(Noun, frozen=True, kw_only=True):
    """What a server did for a feed."""

    opened: int
    """Times that a consumer was given a queue."""
    reopened: int
    """Those of them for a consumer that came back."""
    fenced: int
    """Leases that ended because another consumer took the queue."""
    expired: int
    """Leases that ran out unheard."""
    rewinds: int
    """Times that the feed was begun again at another place."""
    arena_bytes: int
    """Shared memory in slots (may fall)."""


class FeedFigures(Noun, frozen=True, kw_only=True):
    """One stream of a feed, from the fetch function to the trainer."""

    name: str
    number: int
    """Number of the stream among those of that name."""
    state: State
    failure: str
    """Why it failed, in one line; else empty."""
    last_error: str
    """What a call raised last, in one line; empty where none has."""
    missing: tuple[int, ...]
    """Queues that nobody holds and the feed waits for."""
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

    @property
    def title(self) -> str:
        """Its name; with the number where it is not the first of that name."""
        return self.name if not self.number else f"{self.name}#{self.number}"


class Figures(Noun, frozen=True, kw_only=True):
    """All feeds of a process."""

    version: str
    """Of feeder."""
    who: str
    """The process, for people."""
    at_s: float
    """When they were read, on the process's own monotonic clock."""
    feeds: tuple[FeedFigures, ...]


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
        "starved_share": max([queue.wait_s for queue in feed.queues]) / max(feed.age_s, 1e-9),
    }
    for worker in feed.workers:
        for name in ("calls", "rows", "bytes", "fetch_s", "wait_s", "errors", "retries"):
            flat[f"worker/{worker.worker}/{name}"] = getattr(worker, name)
    for queue in feed.queues:
        for name in ("batches", "rows", "bytes", "waiting", "wait_s"):
            flat[f"queue/{queue.queue}/{name}"] = getattr(queue, name)
    return flat
