"""The merge: one order of all chunks, whatever chunk lists they came in and whenever these came."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

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


def chunk_lists_of(
    partition: int, epochs: list[range], cut: random.Random, ends: list[bool] | None = None
) -> list[ChunkList]:
    """Return a partition's calls of each epoch in chunk lists of random sizes; where `ends` says
    so the partition tells that the epoch has ended."""
    chunk_lists: list[ChunkList] = []
    for epoch, calls in enumerate(epochs):
        at = calls.start
        while at < calls.stop:
            stop = cut.randint(at + 1, calls.stop)
            arrays = [array_of((epoch, partition, call)) for call in range(at, stop)]
            chunk_lists.append(ChunkList(partition, epoch, at, arrays, None, None))
            at = stop
        if ends is None or ends[epoch]:
            if calls and cut.random() < 0.5:
                chunk_lists[-1].ending = End(None)
            else:
                chunk_lists.append(ChunkList(partition, epoch, at, [], None, End(None)))
    return chunk_lists


def ring_calls(counts: list[int]) -> list[range]:
    """Return the calls of a worker that gives so many chunks in each epoch."""
    stops = list(accumulate(counts))
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def naive(counts: list[list[int]]) -> Iterator[Chunk]:
    """Yield the chunks of a ring in their order: one of each live worker in turn."""
    firsts = [0] * len(counts)
    for epoch in range(len(counts[0])):
        left = [of_partition[epoch] for of_partition in counts]
        while any(left):
            for partition, num in enumerate(left):
                if num:
                    yield epoch, partition, firsts[partition]
                    firsts[partition] += 1
                    left[partition] -= 1


def collected(
    chunk_lists: list[list[ChunkList]], chance: random.Random
) -> Iterator[list[ChunkList]]:
    """Yield chunk lists as the channel hands them over: no partition is called for an epoch before
    all have ended the one before it, and what has come meanwhile is collected partition by
    partition."""
    waiting = [list(of_partition) for of_partition in chunk_lists]
    group: list[ChunkList] = []
    while some := [of_partition for of_partition in waiting if of_partition]:
        epoch = min(of_partition[0].epoch for of_partition in some)
        group.append(chance.choice([b for b in some if b[0].epoch == epoch]).pop(0))
        if chance.random() < 0.4:
            yield sorted(group, key=lambda chunk_list: chunk_list.partition)
            group = []
    yield sorted(group, key=lambda chunk_list: chunk_list.partition)


def run_merge(merge: Merge, chunk_lists: list[list[ChunkList]], chance: random.Random) -> list[Any]:
    """Return all that comes out of the merge, chunk lists being pushed when it has nothing more."""
    out: list[Any] = []
    groups = collected(chunk_lists, chance)
    while not merge.finished:
        merged = merge.next()
        if merged is not None:
            out.append(merged)
            continue
        group = next(groups, None)
        assert group is not None, (
            f"the merge waits for partition {merge.wanted}, all has been pushed"
        )
        merge.push(group)
    return out


def chunks_of(run: MergedChunks) -> list[Chunk | None]:
    """Return what the chunks of a run are; None for one without rows."""
    return [
        tuple(map(int, array[0])) if len(array) else None  # type: ignore[misc]
        for array in run.columns[0]
    ]


def assert_merged(out: list[Any], wanted: list[Chunk]) -> None:
    runs = [merged for merged in out if isinstance(merged, MergedChunks)]
    got = [chunk for run in runs for chunk in chunks_of(run)]
    assert got == [chunk if rows_of(chunk) else None for chunk in wanted]
    assert [n for run in runs for n in run.rows] == [rows_of(chunk) for chunk in wanted]


@pytest.mark.parametrize("num_partitions", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(12))
def test_a_ring_takes_one_chunk_of_each_live_worker_in_turn(num_partitions: int, seed: int) -> None:
    chance = random.Random(seed)
    counts = [[chance.randint(0, 9) for _ in range(3)] for _ in range(num_partitions)]
    partitions = Partitions(num_partitions=num_partitions, pure=False, arrival=False)
    chunk_lists = [
        chunk_lists_of(partition, ring_calls(counts[partition]), chance)
        for partition in range(num_partitions)
    ]
    out = run_merge(make_merge(partitions, 3), chunk_lists, chance)
    assert_merged(out, list(naive(counts)))
    assert [end.position.epoch for end in out if isinstance(end, EpochEnd)] == [1, 2, 3]


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


def test_nothing_is_left_behind_that_refers_to_a_chunk() -> None:
    """The assembler passes an array on only where nobody else holds it."""
    merge = make_merge(Partitions(num_partitions=2, pure=False, arrival=False), 1)
    refs = []
    for partition in range(2):
        arrays = [(np.full((2, 3), i, np.int64),) for i in range(3)]
        refs += [weakref.ref(chunk[0]) for chunk in arrays]
        merge.push([ChunkList(partition, 0, 0, arrays, None, None)])
        del arrays
    num_alive = []
    while (run := merge.next()) is not None:
        assert isinstance(run, MergedChunks)
        for column in run.columns:
            column.clear()
        gc.collect()
        num_alive.append(sum(ref() is not None for ref in refs))
    assert num_alive[-1] == 0
