"""The feeds of the kill campaign, one of each form of fetch function, and what they should give.

Chunks are ragged, so that most cuts leave rows over (a source's are not), and "carry" takes rows
over the ends of epochs. The reference comes from the naive feeder: no line of the product makes
its batches.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np

import feeds
from feeder import Call, Coordinator, sources
from fetches import Pure, Replay, Seek

NUM_QUEUES = 3
EPOCHS = 4
SEED = 11

_CALLS = 78
"""Calls of each worker in an epoch."""
_MAX_ROWS = 32


@cache
def sizes(worker: int, epoch: int) -> Sequence[int]:
    """Return the rows of each call: none, few, about a batch, or several batches."""
    dice = random.Random(100 * worker + epoch)
    return [dice.choice((0, 1, 3, 5, 8, 11, 17, 24, _MAX_ROWS)) for _ in range(_CALLS + worker)]


def make_rows(worker: int, epoch: int, call: int, rows: int) -> dict[str, np.ndarray]:
    """Return so many rows that no other call returns, none of them zero."""
    ids = 1 + _MAX_ROWS * (call + 1024 * (epoch + EPOCHS * worker)) + np.arange(rows)
    vectors = ids[:, None] % np.array([997, 1009, 1013]) + 1
    labels = (ids * 40503 % 65521 + 1).astype(np.uint16)
    return {"id": ids, "vector": vectors.astype(np.float32), "label": labels}


class ReplayRows(Replay):
    """`fetch(worker_id, batch_size)` that can only be put back by being called again."""

    def make(self, worker: int, epoch: int, call: int, rows: int) -> Any:
        return tuple(make_rows(worker, epoch, call, rows).values())


class SeekRows(Seek):
    """`fetch(worker_id, batch_size)` with cursors."""

    def make(self, worker: int, epoch: int, call: int, rows: int) -> Any:
        return make_rows(worker, epoch, call, rows)


class PureRows(Pure):
    """`fetch(call)`, with random numbers in a column."""

    plan = cache(Pure.plan)

    def make(self, call: Call, rows: int) -> Any:
        columns = make_rows(0, call.epoch, call.index, rows)
        columns["vector"] += call.rng.random((rows, 3), dtype=np.float32)
        return columns


def make_source() -> Any:
    """Return a source that shuffles; its epochs end within a batch."""
    columns = make_rows(0, 0, 0, 3001)
    return sources.arrays(*columns.values(), random_shuffle=True, seed=SEED)


FORMS: dict[str, Callable[[], Any]] = {
    "seek": lambda: SeekRows(sizes),
    "replay": lambda: ReplayRows(sizes),
    "pure": lambda: PureRows(sizes),
    "source": make_source,
}
"""The forms of fetch function, each made anew."""

_PURE = ("pure", "source")


def make(form: str) -> Coordinator:
    """Return a coordinator, not started, with one feed: what a server is given as its factory."""
    return feeds.make(
        FORMS[form](), epochs=EPOCHS, last_batch="carry", seed=SEED, max_buffered_batches=24,
        timeout=300.0,
    )  # fmt: skip


def digest(record: feeds.Record) -> bytes:
    """What tells a batch from all others, by its numbers and by types, shapes and bytes of its
    columns."""
    return hashlib.blake2b(repr(record).encode(), digest_size=16).digest()


@cache
def reference(form: str) -> tuple[list[bytes], ...]:
    """Return the digests of each queue's batches, from the naive feeder."""
    stream = feeds.expected(
        FORMS[form](), pure=form in _PURE, epochs=EPOCHS, last_batch="carry", seed=SEED
    )
    digests = [digest(record) for record in stream]
    return tuple(digests[queue::NUM_QUEUES] for queue in range(NUM_QUEUES))


def chained(chain: bytes, one: bytes) -> bytes:
    """Return the hash of a digest and of all before it."""
    return hashlib.blake2b(chain + one, digest_size=16).digest()


def chain_of(digests: Sequence[bytes]) -> bytes:
    """Return the hash chain over digests."""
    return reduce(chained, digests, bytes(16))
