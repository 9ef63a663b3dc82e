"""Positions: written in indices outside the kernel, laid out over partitions within it."""

from __future__ import annotations

import numpy as np
import pytest

from feeder.workers.stream.position import (
    PartialChunk,
    Partitions,
    Position,
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


def test_a_chunk_that_was_resumed_knows_what_is_missing() -> None:
    partial = PartialChunk((np.arange(4, 6),), (0,), 6, skip=4, digest=77)
    assert partial.rest(5)[0].tolist() == [5]
    assert (partial.rows, partial.digest) == (6, 77)
