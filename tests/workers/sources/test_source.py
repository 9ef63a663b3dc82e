"""A source as a pure fetch function: calls in any order and thread, the epoch's end, cursors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from calls import call, epoch_of
from feeder.workers.errors import ResumeError
from feeder.workers.sources import RecordError, Source, arrays
from feeder.workers.stream.batch import Call

SHUFFLES: dict[str, dict[str, Any]] = {
    "none": {},
    "feeder": {"random_shuffle": True},
    "dali": {"random_shuffle": True, "order": "dali", "initial_fill": 50},
    "dali after epoch": {"shuffle_after_epoch": True, "order": "dali"},
    "dali compound": {"shuffle_after_epoch": "compound", "order": "dali"},
}
each_shuffle = pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES.keys())


def rows(source: Source, batch_size: int, epoch: int) -> list[list[int]]:
    return [labels.tolist() for (labels,) in epoch_of(source, batch_size, epoch)]


def test_seek_refuses_what_is_no_cursor() -> None:
    source = arrays(np.arange(100), random_shuffle=True, order="dali")
    with pytest.raises(ResumeError, match="cursor has 3 bytes"):
        source.seek(call(0, 10), b"abc")


def test_the_feeds_seed_is_taken_where_the_options_name_none() -> None:
    source = arrays(np.arange(100), random_shuffle=True)
    with_seed = arrays(np.arange(100), random_shuffle=True, seed=7)
    first = source(call(0, 50, seed=7))[0].tolist()
    assert first == with_seed(call(0, 50, seed=1))[0].tolist()
    assert first != source(call(0, 50, seed=1))[0].tolist()


class Fragile:
    """Records of which some cannot be read, and are left out."""

    kind = "fragile"
    skipped = 3

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 10

    def name(self, index: int) -> str:
        return f"record {index}"

    def read(self, indices: NDArray[np.int64], call: Call) -> Mapping[str, NDArray[Any]] | None:
        good = [index for index in indices.tolist() if index not in self.bad]
        return {"x": np.array(good, np.int16).reshape(-1, 1)} if good else None

    def describe(self) -> dict[str, Any]:
        return {}


def test_a_call_without_a_sound_record_has_no_rows() -> None:
    source = Source(Fragile({4, 5, 6, 7}))
    chunks = [chunk["x"] for chunk in epoch_of(source, 4)]  # type: ignore[call-overload]
    assert [chunk.shape for chunk in chunks] == [(4, 1), (0, 1), (2, 1)]
    assert {chunk.dtype for chunk in chunks} == {np.dtype(np.int16)}
    assert source.skipped == 3


def test_a_first_call_without_a_sound_record_has_no_rows_either() -> None:
    for index in (0, 1):
        chunk = Source(Fragile({0, 1, 2, 3, 4, 5}))(call(index, 3))
        assert chunk["x"].shape == (0, 1) and chunk["x"].dtype == np.int16  # type: ignore[call-overload]


def test_a_source_without_a_sound_record_is_an_error() -> None:
    with pytest.raises(RecordError, match=r"record 4: defective, and so is every other record$"):
        Source(Fragile(set(range(10))))(call(1, 4))


@each_shuffle
@pytest.mark.parametrize("shards", [{}, {"num_shards": 3}, {"num_shards": 3, "shard_id": 2}])
@pytest.mark.parametrize("stick", [False, True])
def test_a_source_that_carries_keeps_its_calls_in_step_with_batches(
    shuffle: dict[str, Any], shards: dict[str, int], stick: bool
) -> None:
    stick = stick and "shuffle_after_epoch" not in shuffle  # They exclude each other.
    source = arrays(np.arange(1000), stick_to_shard=stick, **shards, **shuffle)
    carrying, taken = source.carrying(), 0
    for epoch in range(7):
        chunks = rows(carrying, 32, epoch)
        assert list(chain(*chunks)) == list(chain(*rows(source, 32, epoch)))
        for chunk in chunks[:-1]:
            taken += len(chunk)
            assert taken % 32 == 0
        taken += len(chunks[-1])
        with pytest.raises(StopIteration):
            carrying(call(len(chunks), 32, epoch))


def test_a_source_that_carries_knows_how_far_it_is_without_counting() -> None:
    carrying = arrays(np.arange(1000), num_shards=3).carrying()
    epoch = 3 * 10**12 + 1
    before = 10**12 * 1000 + 333
    assert len(rows(carrying, 32, epoch)[0]) == 32 - before % 32
