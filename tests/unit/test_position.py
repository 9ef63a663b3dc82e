"""Positions: written in indices outside the kernel, laid out over partitions within it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from feeder.workers.stream.digests import digest_chunk
from feeder.workers.stream.position import (
    LazyPosition,
    Leftover,
    PartialChunk,
    Partitions,
    Position,
    Span,
    next_live,
)


def pure(num_partitions: int, *, arrival: bool = False) -> Partitions:
    return Partitions(num_partitions=num_partitions, pure=True, arrival=arrival)


def at_index(index: int, done: tuple[int, ...] = ()) -> Position:
    return Position(2, 0, (True,), (index,), (0,), (None,), done)


def indices(partitions: Partitions, position: Position, most: int) -> list[int]:
    """Return the indices below `most` that are called from a position on."""
    called = [partitions.number(partition, call)
              for partition, first in enumerate(position.calls)
              for call in range(first, most)]  # fmt: skip
    return sorted(i for i in called if i < most and i not in position.done)


@pytest.mark.parametrize("num_partitions", [1, 2, 3, 8])
@pytest.mark.parametrize("index", range(20))
def test_an_index_is_laid_out_over_any_number_of_partitions_and_back(
    index: int, num_partitions: int
) -> None:
    partitions = pure(num_partitions)
    spread = partitions.spread(at_index(index))
    assert indices(partitions, spread, 40) == list(range(index, 40))
    assert partitions.number(spread.turn, spread.calls[spread.turn]) == index
    assert partitions.gather(spread) == at_index(index)


@pytest.mark.parametrize("num_partitions", [1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_in_arrival_order_what_is_done_stays_done(seed: int, num_partitions: int) -> None:
    chance = random.Random(seed)
    partitions = pure(num_partitions, arrival=True)
    calls = tuple(chance.randint(0, 9) for _ in range(num_partitions))
    position = Position(
        0, 0, (True,) * num_partitions, calls, (0,) * num_partitions, (None,) * num_partitions
    )
    gathered = partitions.gather(position)
    assert indices(partitions, partitions.spread(gathered), 60) == indices(partitions, position, 60)
    assert gathered.calls[0] not in gathered.done
    assert all(index > gathered.calls[0] for index in gathered.done)
    assert list(gathered.done) == sorted(set(gathered.done))
    for other in (1, 2, 3, 7):
        others = pure(other, arrival=True)
        spread = others.spread(gathered)
        assert indices(others, spread, 60) == indices(partitions, position, 60)
        assert others.gather(spread) == gathered


@pytest.mark.parametrize("num_partitions", [1, 2, 3])
@pytest.mark.parametrize("call", range(8))
def test_a_pure_position_is_put_back_to_before_a_call(call: int, num_partitions: int) -> None:
    partitions = pure(num_partitions)
    back = partitions.rewind(at_index(8), leftover(0, call))
    wanted = sorted({call, *range(8, 20)})
    assert indices(partitions, partitions.spread(back), 20) == wanted


def leftover(partition: int, call: int, rows: int = 7) -> Leftover:
    return Leftover(partition=partition, call=call, taken=2, rows=rows, digest=1, mark=b"before")


def test_a_ring_position_is_put_back_to_before_a_call() -> None:
    partitions = Partitions(num_partitions=3, pure=False, arrival=False)
    position = Position(1, 2, (True, True, True), (4, 9, 3), (40, 90, 30), (b"a", b"b", b"c"))
    back = partitions.rewind(position, leftover(1, 8))
    assert back == Position(
        1, 1, (True, True, True), (4, 8, 3), (40, 83, 30), (b"a", b"before", b"c")
    )


@pytest.mark.parametrize(
    "partitions", [pure(4), Partitions(num_partitions=4, pure=False, arrival=False)]
)
def test_the_origin_is_the_start_of_every_partition(partitions: Partitions) -> None:
    spread = partitions.spread(partitions.origin())
    assert (spread.epoch, spread.turn, spread.live) == (0, 0, (True,) * 4)
    assert spread.calls == spread.rows == (0,) * 4
    assert partitions.gather(spread) == partitions.origin()


def test_the_next_epoch_begins_at_worker_0_with_all_live() -> None:
    ring = Partitions(num_partitions=3, pure=False, arrival=False)
    position = Position(4, 2, (False, False, True), (5, 6, 7), (1, 2, 3), (b"a", b"b", b"c"), (9,))
    assert ring.next_epoch(position) == Position(
        5, 0, (True,) * 3, (5, 6, 7), (1, 2, 3), (b"a", b"b", b"c"), ()
    )
    after = pure(3).next_epoch(position)
    assert (after.epoch, after.turn, after.calls, after.done) == (5, 0, (0, 0, 0), ())


@pytest.mark.parametrize(
    ("live", "partition", "then"),
    [
        ([True, True, True], 0, 1), ([True, True, True], 2, 0), ([True, False, True], 0, 2),
        ([True, False, False], 0, 0), ([False, True, False], 0, 1), ([True], 0, 0),
        ([False, False], 1, 1),
    ],
)  # fmt: skip
def test_an_ended_worker_is_passed_over(live: list[bool], partition: int, then: int) -> None:
    assert next_live(live, partition) == then


def test_a_span_tells_the_position_after_any_of_its_chunks() -> None:
    start = Position(0, 2, (True, False, True), (5, 9, 3), (50, 90, 30), (b"x", b"y", b"z"))
    span = Span(start, [2, 0], [3, 5], [1, 2, 3, 4, 5], [[b"c3", b"c4", b"c5"], [b"a5", b"a6"]])
    told = [span.position(num) for num in range(6)]
    assert [position.turn for position in told] == [2, 0, 2, 0, 2, 0]
    assert [position.calls for position in told] == [
        (5, 9, 3), (5, 9, 4), (6, 9, 4), (6, 9, 5), (7, 9, 5), (7, 9, 6),
    ]  # fmt: skip
    assert [position.rows for position in told] == [
        (50, 90, 30), (50, 90, 31), (52, 90, 31), (52, 90, 34), (56, 90, 34), (56, 90, 39),
    ]  # fmt: skip
    assert [position.marks for position in told[1:3]] == [
        (b"x", b"y", b"c3"), (b"a5", b"y", b"c3"),
    ]  # fmt: skip
    assert {position.live for position in told} == {(True, False, True)}


def test_a_chunk_kept_for_snapshots_gives_its_rest_and_its_digest() -> None:
    arrays = (np.arange(6), np.arange(12).reshape(2, 6))
    partial = PartialChunk(arrays, (0, 1), 6)
    ids, images = partial.rest(4)
    assert (ids.tolist(), images.tolist()) == ([4, 5], [[4, 5], [10, 11]])
    assert np.shares_memory(ids, arrays[0])
    assert partial.digest == digest_chunk(arrays)


def test_a_chunk_that_was_resumed_knows_what_is_missing() -> None:
    partial = PartialChunk((np.arange(4, 6),), (0,), 6, skip=4, digest=77)
    assert partial.rest(5)[0].tolist() == [5]
    assert (partial.rows, partial.digest) == (6, 77)


def test_a_place_becomes_the_start_of_the_next_epoch_once_that_is_known() -> None:
    def place(epoch: int, step: int) -> Any:
        made = LazyPosition((pure(1), lambda cut: b"", 3), Span(at_index(0), (), (), [], ()),
                     0, 0, None, epoch)  # type: ignore[arg-type]  # fmt: skip
        made.step = step
        return made

    last, start, later = place(0, 7), place(1, 7), place(2, 7)
    assert (last.cut().epoch, last.cut().finished) == (0, False)
    last.after = start
    assert last.settled() is start
    start.after = later  # an epoch without a batch
    assert last.settled() is later
    assert last.cut().epoch == 2
    later.after = place(3, 7)
    assert last.cut().finished
