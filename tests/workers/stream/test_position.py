"""Positions: how they are told, and who is next."""

from __future__ import annotations

import numpy as np
import pytest

from feeder.workers.stream.position import (
    IndexSpan,
    Leftover,
    PartialChunk,
    Partitions,
    Position,
    next_live,
)


def test_indices_above_a_missing_one_are_named() -> None:
    partitions = Partitions(num_partitions=1, pure=True, arrival=True)
    start = Position(2, 0, (True,), (4,), (0,), (None,), (6,))
    span = IndexSpan(start, [5, 9, 4], [1, 1, 1])
    at = [partitions.after(span, num) for num in range(4)]
    assert [(one.calls, one.done) for one in at] == [
        ((4,), (6,)), ((4,), (5, 6)), ((4,), (5, 6, 9)), ((7,), (9,)),
    ]  # fmt: skip
    assert span.call(2) == (0, 4, None)


@pytest.mark.parametrize(
    ("call", "calls", "done"),
    [(2, (2,), (3, 7, 9)), (3, (3,), (7, 9)), (7, (4,), (9,)), (9, (4,), (7,))],
)
def test_only_the_call_of_a_chunk_that_is_left_is_made_again(
    call: int, calls: tuple[int, ...], done: tuple[int, ...]
) -> None:
    """Call 4 is the first that is not done; 7 and 9 are done."""
    partitions = Partitions(num_partitions=1, pure=True, arrival=True)
    position = Position(2, 0, (True,), (4,), (0,), (None,), (7, 9))
    leftover = Leftover(partition=0, call=call, taken=1, rows=3, digest=5, mark=None)
    rewound = partitions.rewind(position, leftover)
    assert (rewound.epoch, rewound.calls, rewound.done) == (2, calls, done)


def test_in_the_next_epoch_no_call_is_done() -> None:
    partitions = Partitions(num_partitions=1, pure=True, arrival=True)
    position = Position(2, 0, (False,), (4,), (0,), (None,), (7,))
    assert partitions.next_epoch(position) == Position(3, 0, (True,), (0,), (0,), (None,))


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
