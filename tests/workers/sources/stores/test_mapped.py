"""Large records by where they lie in memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeder.workers.sources.stores import mapped
from feeder.workers.sources.stores.mapped import MappedRows, RowMap
from feeder.workers.sources.stores.reading import stack_bytes

MEMORY = np.random.default_rng(5).integers(0, 256, 400, np.uint8)
ADDRESS = MEMORY.__array_interface__["data"][0]

starts_and_sizes = st.lists(
    st.tuples(st.sampled_from(range(0, 380, 20)) | st.integers(0, 380), st.integers(6, 20)),
    min_size=1, max_size=12,
)  # fmt: skip


def rows_at(starts: list[int], sizes: list[int]) -> MappedRows:
    return MappedRows(ADDRESS + np.array(starts), np.array(sizes))


def values_at(starts: list[int], sizes: list[int]) -> list[memoryview]:
    return [MEMORY.data[a : a + size] for a, size in zip(starts, sizes, strict=True)]


@given(starts_and_sizes)
def test_rows_from_anywhere(drawn: list[tuple[int, int]]) -> None:
    starts, sizes = map(list, zip(*drawn, strict=True))
    rows, values = rows_at(starts, sizes), values_at(starts, sizes)
    assert list(rows) == values
    assert all(row.readonly for row in rows)
    cut = rows.cut(2, 6)
    wanted = [value[2:6] for value in values]
    assert list(cut) == wanted and cut.octets().tobytes() == b"".join(wanted)
    assert stack_bytes(cut, (2, 2)).tobytes() == b"".join(wanted)
    assert list(rows.take(np.arange(len(rows))[::2])) == values[::2]


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        ([0, 20, 40, 60], [4]),
        ([60, 40, 20], [3]),
        ([7, 7, 7], [3]),
        ([0, 20, 40, 100, 121, 142, 162], [3, 3, 1]),
        ([0, 21, 41, 61, 81], [2, 3]),
        ([0, 20], [2]),
        ([5], [1]),
    ],
)
def test_rows_at_even_distances_are_copied_together(starts: list[int], lengths: list[int]) -> None:
    rows = rows_at(starts, [6] * len(starts)).cut(0, 6)
    assert [len(array) for array in rows.arrays()] == lengths


def test_where_large_records_lie_is_known_once_they_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mapped, "LARGE_BYTES", 8)
    known, indices = RowMap(15), np.arange(2, 12)
    starts, sizes = list(range(0, 200, 20)), [8, 9] * 5
    values = values_at(starts, sizes)
    assert known.find(indices) is None
    found = known.note(indices, values)
    assert found is not None and list(found) == values
    again = known.find(np.array([11, *range(2, 11)]))
    assert again is not None and list(again) == [values[9], *values[:9]]
    assert known.find(np.arange(2, 13)) is None
    assert known.find(np.array([0])) is None


@pytest.mark.parametrize(
    ("starts", "sizes"),
    [([0, 20, 40, 60], [8, 8, 7, 8]), ([0, 20, 45, 60], [8, 8, 8, 8]), ([0, 20], [8, 8])],
    ids=["a small one", "uneven", "few"],
)
def test_records_that_are_read_as_they_come(
    starts: list[int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "LARGE_BYTES", 8)
    known, indices = RowMap(len(starts)), np.arange(len(starts))
    assert known.note(indices, values_at(starts, sizes)) is None
    assert known.find(indices) is None


def test_two_threads_that_note_the_first_records_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_zeros(*arguments: Any) -> Any:
        other.start()
        noted.wait(0.2)
        return zeros(*arguments)

    def note() -> None:
        monkeypatch.setattr(np, "zeros", zeros)
        known.note(np.arange(4, 8), values[4:])
        noted.set()

    monkeypatch.setattr(mapped, "LARGE_BYTES", 8)
    zeros, noted, other = np.zeros, threading.Event(), threading.Thread(target=note)
    known, values = RowMap(8), values_at(list(range(0, 160, 20)), [8] * 8)
    monkeypatch.setattr(np, "zeros", slow_zeros)
    known.note(np.arange(4), values[:4])
    other.join()
    found = known.find(np.arange(8))
    assert found is not None and list(found) == values
