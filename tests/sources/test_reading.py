"""Rows of bytes become one array, wherever they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from workers.sources import reading
from workers.sources.reading import EvenRows, stack_bytes

SIZE = 6
MEMORY = np.random.default_rng(5).integers(0, 256, 400, np.uint8).tobytes()


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "JOIN_BYTES", SIZE - 1)
    monkeypatch.setattr(reading, "STRETCH_BYTES", SIZE)


@given(st.lists(st.sampled_from(range(0, 392, 8)) | st.integers(0, 394), min_size=1, max_size=12))
def test_rows_from_anywhere(starts: list[int]) -> None:
    rows = [memoryview(MEMORY)[start : start + SIZE] for start in starts]
    stacked = stack_bytes(rows, (2, 3))
    assert stacked.shape == (len(rows), 2, 3)
    assert stacked.tobytes() == b"".join(rows)


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        ([0, 20, 40, 60], [4]),
        ([60, 40, 20], [3]),
        ([7, 7, 7], [3]),
        ([0, 20, 40, 100, 121, 142, 162], [3, 3, 1]),
        ([0, 21, 41, 61, 81], []),
        ([0, 20], [2]),
        ([5], []),
    ],
)
def test_rows_at_even_distances_are_copied_together(
    starts: list[int], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(first: Any, shape: tuple[int, int], strides: tuple[int, int]) -> Any:
        copied.append(shape[0])
        return as_strided(first, shape, strides)

    copied: list[int] = []
    monkeypatch.setattr(reading, "as_strided", noted)
    rows = [memoryview(MEMORY)[start : start + SIZE] for start in starts]
    assert stack_bytes(rows, (SIZE,)).tobytes() == b"".join(rows)
    assert copied == lengths


def test_the_largest_rows_are_copied_without_the_gil_wherever_they_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "DROP_GIL_BYTES", SIZE)
    for starts, lengths in (([0, 21, 41, 61, 81], [2, 3]), ([5], [1])):
        test_rows_at_even_distances_are_copied_together(starts, lengths, monkeypatch)
        monkeypatch.setattr(reading, "as_strided", as_strided)


@given(st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_rows_inside_records_of_equally_many_bytes(num: int, before: int, after: int) -> None:
    record = before + SIZE + after
    rows = EvenRows(MEMORY[: num * record], record, before, before + SIZE)
    assert stack_bytes(rows, (SIZE,)).tobytes() == b"".join(rows) == rows.tobytes()
