"""The verdict on a feed: what holds it up, and what to change. Pure rules over figures.

The trainer's waits say whether anything is wrong; the enqueuer's two waits say on which side of it
the cause lies. Where it waits for chunks the fetch function is slow, where it waits for room the
trainer is, or the way to it; where it does neither, it copies. This is how bounded queues are read
in SPDL's optimisation guide too: find the first stage whose output is waited for and whose input
is not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from feeder.observe.figures import FeedFigures
from feeder.observe.humanize import duration, size, some
from feeder.observe.interval import Interval, QueuePart, WorkerPart

KINDS = (
    "starting", "waiting", "ended", "stopped", "failed", "stalled-queue", "slow-queue",
    "trainer-bound", "tiny-batches", "checksum-bound", "network-bound", "failing-fetch",
    "source-bound", "small-buffer", "storage-bound", "slow-worker", "fetch-bound", "copy-bound",
)  # fmt: skip
"""All that a verdict may be."""

STARVING = 0.05
"""A trainer that waits for less of its time does not wait for data."""
# A first batch within this time is no start worth a verdict.
_STARTING_S = 1.0
# Below this size, above this rate, and where fetching is as cheap as this, handing a batch over
# costs more than making it; larger batches are then the only cure.
_TINY_BYTES = 64 * 1024
_TINY_PER_S = 2000.0
_TINY_FETCH_S = 0.0002
# A worker is the slow one where its calls take so many times the others' median: less is noise.
_SLOWER = 3.0
# The share of the trainer's wait during which batches were ready: half of it makes the way the
# cause.
_ON_THE_WAY = 0.5
# Checksums that take a quarter of the time are worth turning down.
_CHECKING = 0.25
# Calls that compute in Python have one processor together, however many are under way. Where they
# have this much of one, and this many times more are under way, they wait for the interpreter.
_INTERPRETER = (0.7, 1.15)
_QUEUED = 1.5
# Calls that wait for stores half of their time are held up by these.
_STORAGE = 0.5
# More retries among requests are no hiccup.
_RETRYING = 0.1
# A store that sends so many times the bytes of batches sends most of them for nothing.
_WASTING = 2.0
# One call in ten that raises is a fault, and not a hiccup of storage.
_FAILING = 0.1


class Verdict(NamedTuple):
    """The verdict on a feed: what holds it up."""

    kind: str
    """One of `KINDS`."""
    why: str
    """The figures that it was seen by."""
    advice: str = ""
    """The change to make; empty where nothing needs one."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})" + (f": {self.advice}" if self.advice else "")


def judge(before: FeedFigures | None, after: FeedFigures, seconds: float) -> Verdict:
    """The verdict on a stream between two readings of its figures, `seconds` apart; since its start
    where `before` is None. The first rule that has something to say wins."""
    interval = Interval(before, after, seconds)
    return next(verdict for rule in _RULES if (verdict := rule(interval)) is not None)


# ---- nothing to be fed


def _over(interval: Interval) -> Verdict | None:
    feed = interval.after
    match feed.state:
        case "failed":
            return Verdict(
                kind="failed",
                why=feed.failure,
                advice="cure the fetch function, and resume from the last snapshot",
            )
        case "ended":
            return Verdict(kind="ended", why=f"all {feed.batches} batches are made")
        case "stopped":
            return Verdict(kind="stopped", why=f"after {feed.batches} batches")
        case _:
            return None


def _waiting(interval: Interval) -> Verdict | None:
    """It has not begun, or has made batches for consumers that are gone."""
    feed = interval.after
    missing = [feed.queues[place] for place in feed.missing]
    if feed.state != "waiting":
        missing = [queue for queue in missing if queue.waiting]
        if not missing:
            return None
    if missing:
        named = some((queue.name for queue in missing), ", ")
        return Verdict(
            kind="waiting",
            why=f"for a consumer on queue {named}",
            advice="start the trainers of these queues",
        )
    return Verdict(kind="waiting", why="it is not started")


def _starting(interval: Interval) -> Verdict | None:
    feed = interval.after
    if any(queue.batches for queue in feed.queues) or feed.age_s >= _STARTING_S:
        return None
    return Verdict(kind="starting", why="no batch has been taken yet")


# ---- the trainer's side


def _stalled(interval: Interval) -> Verdict | None:
    """One trainer takes nothing, and another waits behind it."""
    idle = [q for q in interval.queues if not q.batches and q.wait < STARVING and q.after.waiting]
    hungry = [q for q in interval.queues if q.wait >= 0.5]
    if not (idle and hungry):
        return None
    return Verdict(
        kind="stalled-queue",
        why=f"{_list(idle)} has batches that nobody takes, {_list(hungry)} waits behind it",
        advice="look at the trainer of that queue: the queues of a feed go round together",
    )


def _slow_queue(interval: Interval) -> Verdict | None:
    """One trainer is slower than another, and the feed is held back by it."""
    if interval.room < max(interval.chunks, interval.busy):
        return None
    full = [
        q for q in interval.queues if q.wait < STARVING and 2 * q.after.waiting >= q.after.capacity
    ]
    hungry = [q for q in interval.queues if q.wait >= STARVING]
    if not (full and hungry):
        return None
    return Verdict(
        kind="slow-queue",
        why=f"{_list(full)} is full, and {_list(hungry)} waits behind it "
        f"{interval.starving:.0%} of the time",
        advice="make the trainers equally fast: the queues of a feed go round together",
    )


def _trainer(interval: Interval) -> Verdict | None:
    if interval.starving >= STARVING:
        return None
    if not interval.taken_per_s:
        long = duration(interval.seconds)
        return Verdict(kind="trainer-bound", why=f"it took no batch in {long}, and waits for none")
    return Verdict(
        kind="trainer-bound",
        why=f"it waits for data {interval.starving:.0%} of the time: the feed keeps up",
    )


# ---- between the two


def _tiny(interval: Interval) -> Verdict | None:
    rate, each = interval.taken_per_s, interval.batch_bytes
    cheap = interval.fetch_s_per_batch <= _TINY_FETCH_S
    if each > _TINY_BYTES or rate < _TINY_PER_S or not cheap:
        return None
    return Verdict(
        kind="tiny-batches",
        why=f"{size(each)} each, {rate:.0f} /s: to hand them over costs more than to make them",
        advice="raise batch_size",
    )


def _transport(interval: Interval) -> Verdict | None:
    """Batches are ready, and do not reach the trainer in time."""
    queue = _hungriest(interval)
    if queue is None or queue.on_the_way < _ON_THE_WAY * queue.wait:
        return None
    if queue.checked >= _CHECKING:
        return Verdict(
            kind="checksum-bound",
            why=f"checksums take {queue.checked:.0%} of the time on queue {queue.after.name}",
            advice='connect with checksum="sampled", or "off"',
        )
    consumer = queue.after.consumer
    if consumer is None or consumer.plane != "frames":
        return None
    speed = queue.batches / interval.seconds * interval.batch_bytes
    return Verdict(
        kind="network-bound",
        why=f"queue {queue.after.name} gets {size(speed)}/s while batches wait at the server",
        advice="run the server on the trainer's host, raise credit=, or send less per row",
    )


def _buffer(interval: Interval) -> Verdict | None:
    if interval.room < max(interval.chunks, interval.busy):
        return None
    served = interval.after.service is not None
    return Verdict(
        kind="small-buffer",
        why=f"the trainer waits {interval.starving:.0%} of the time, and the feed waits for room "
        f"{interval.room:.0%}",
        advice="raise " + ("credit= of the consumer" if served else "max_buffered_batches")
        + ": the trainer takes batches in bursts",
    )  # fmt: skip


# ---- the fetch function's side


def _failing(interval: Interval) -> Verdict | None:
    errors, all_calls = interval.errors, interval.calls + interval.errors
    if not errors or errors < _FAILING * all_calls or interval.chunks < interval.busy:
        return None
    return Verdict(
        kind="failing-fetch",
        why=f"{errors} of {all_calls} calls raised, the last {interval.after.last_error}",
        advice="cure the fetch function: each call that raises is put off and made again",
    )


def _source(interval: Interval) -> Verdict | None:
    if interval.nothings <= interval.calls or interval.fetching >= 0.5:
        return None
    return Verdict(
        kind="source-bound",
        why=f"the fetch function had nothing {interval.nothings} times, and something "
        f"{interval.calls} times",
        advice="look at what it reads from",
    )


def _storage(interval: Interval) -> Verdict | None:
    if interval.chunks < interval.busy or interval.storage < _STORAGE:
        return None
    requests, num_bytes = interval.of_store("requests"), interval.of_store("bytes")
    per_s = num_bytes / interval.seconds
    why = (
        f"calls wait for blocks {interval.storage:.0%} of their time, {size(per_s)}/s come in "
        f"{requests / interval.seconds:.3g} requests/s"
    )
    made = per_s / max(interval.bytes_per_s, 1.0)
    if (again := interval.of_store("retries")) > _RETRYING * requests:
        why += f", {again:.0f} of {requests:.0f} were made again"
        advice = "look at the store: it refuses requests, or breaks them off"
    elif made >= _WASTING:
        why += f", {made:.1f} times what batches hold"
        advice = "use shuffle(window=), or a cache with room for all"
    else:
        advice = "the link is the bound: a cache with room for all asks for nothing a second time"
    return Verdict(kind="storage-bound", why=why, advice=advice)


def _fetch(interval: Interval) -> Verdict | None:
    if interval.chunks < interval.busy:
        return None
    slowest = max(interval.workers, key=lambda worker: worker.call_s)
    others = [worker.call_s for worker in interval.workers if worker is not slowest]
    usual = float(np.median(others)) if others else 0.0
    if others and slowest.call_s >= _SLOWER * usual and _is_waited_for(interval, slowest):
        return Verdict(
            kind="slow-worker",
            why=f"worker {slowest.worker}, {duration(slowest.call_s)} a call, the others "
            f"{duration(usual)}",
            advice='give it less or faster data, or order="arrival" where the order may vary',
        )
    return Verdict(
        kind="fetch-bound",
        why=f"worker {slowest.worker} slowest, {duration(slowest.call_s)} a call",
        advice=_more_of(interval),
    )


def _is_waited_for(interval: Interval, worker: WorkerPart) -> bool:
    """Whether most waits for single workers were for this one; so too where none was for one."""
    return 2 * worker.wait_s >= sum(other.wait_s for other in interval.workers)


def _more_of(interval: Interval) -> str:
    feed = interval.after
    if feed.executor is not None:
        one = feed.executor
        return f"make the fetch function faster, or raise the {one.processes} {one.kind}"
    if _holds_interpreter(interval):
        return (
            "the fetch function holds the interpreter: run it in processes, "
            f"executor=feeder.Processes({_enough(interval)})"
        )
    if interval.fetching < 0.5:
        return "its threads are idle half of the time: look for what they share, or read ahead"
    if feed.threads < len(feed.workers):
        return f"raise num_threads from {feed.threads} to {len(feed.workers)}"
    # More worker ids would be another stream, in which no position of this one can be resumed.
    return (
        f"make the fetch function faster, or as fetch(call) raise num_threads from {feed.threads}"
    )


def _holds_interpreter(interval: Interval) -> bool:
    least, most = _INTERPRETER
    computing = interval.computing
    return least <= computing <= most and interval.calling >= _QUEUED * computing


def _enough(interval: Interval) -> int:
    """So many processes as the trainer would use, or as there are processors."""
    cores = len(os.sched_getaffinity(0))
    used = interval.computing / max(1e-9, 1.0 - interval.starving)
    return max(2, min(cores, math.ceil(used)))


def _copy(interval: Interval) -> Verdict:
    chunks = f"chunks of {interval.chunk_rows:.3g} rows into batches of {interval.after.batch_size}"
    return Verdict(
        kind="copy-bound",
        why=f"the enqueuer copies {interval.busy:.0%} of the time, {chunks}, "
        f"{size(interval.bytes_per_s)}/s",
        advice="return batch_size rows a call, in arrays that the fetch function keeps no hold of",
    )


# The order matters: what makes the others' numbers meaningless comes first (ended, waiting,
# starting), then one trainer that holds up the rest, then the trainer, the way, and the fetch
# function; copying is what is left.
_RULES: tuple[Callable[[Interval], Verdict | None], ...] = (
    _over, _waiting, _starting, _stalled, _slow_queue, _trainer, _tiny, _transport, _failing,
    _source, _buffer, _storage, _fetch, _copy,
)  # fmt: skip


def _hungriest(interval: Interval) -> QueuePart | None:
    return max(interval.queues, key=lambda queue: queue.wait, default=None)


def _list(queues: list[QueuePart]) -> str:
    return "queue " + ", ".join(queue.after.name for queue in queues)
