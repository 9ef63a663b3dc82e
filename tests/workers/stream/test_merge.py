"""The merge: one order of all chunks, whatever chunk lists they came in and whenever these came."""

from __future__ import annotations

from typing import Any

import numpy as np

from feeder.workers.fetch.scheduler import ChunkList, End
from feeder.workers.spec import StreamSpec
from feeder.workers.stream.chunks import Schema
from feeder.workers.stream.merge import EpochEnd, Merge, MergedChunks
from feeder.workers.stream.position import Partitions, Position

Chunk = tuple[int, int, int]
"""Epoch, partition and call: what a chunk in these tests is known by."""


def rows_of(chunk: Chunk) -> int:
    return (5 * chunk[1] + 3 * chunk[2]) % 4


def array_of(chunk: Chunk) -> Any:
    return (np.full((rows_of(chunk), 3), chunk, np.int64),)


def make_merge(partitions: Partitions, epochs: int, start: Position | None = None) -> Merge:
    spec = StreamSpec(
        fetch=print, pure=partitions.pure, cursor=abs, seek=None, names=("id",), axes=(0,),
        batch_size=1, num_workers=partitions.num_partitions, first_worker_id=10, seed=0,
        epochs=epochs, last_batch="keep", last_round="uneven", order="ticket", dont_rebatch=False,
        repeatable=True,
    )  # fmt: skip
    start = start or partitions.spread(partitions.origin())
    schema = Schema(spec.names, spec.axes)
    return Merge(partitions, schema, start, spec, prints=None, first_partition=None)


def test_rows_beyond_the_end_are_counted_out() -> None:
    merge = make_merge(Partitions(num_partitions=2, pure=True, arrival=False), 2)
    chunks = [array_of((0, 1, call)) for call in range(4)]
    merge.push(
        [ChunkList(0, 0, 0, [], None, End(None)), ChunkList(1, 0, 0, chunks[:2], None, None)]
    )
    assert isinstance(merge.next(), EpochEnd)
    merge.push([ChunkList(1, 0, 2, chunks[2:], None, None)])
    merge.push([ChunkList(0, 1, 0, [array_of((1, 0, 1))], None, None)])
    merge.push([ChunkList(1, 1, 0, [], None, End(None))])
    run, end = merge.next(), merge.next()
    assert isinstance(run, MergedChunks)
    assert isinstance(end, EpochEnd)
    assert merge.discarded_rows == sum(rows_of((0, 1, call)) for call in range(4))
