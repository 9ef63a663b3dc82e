"""Rows of bytes become one array, wherever they lie."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeder.workers.sources.stores import reading
from feeder.workers.sources.stores.mapped import MappedCut
from feeder.workers.sources.stores.reading import EvenRows, stack_bytes

SIZE = 6
MEMORY = np.random.default_rng(5).integers(0, 256, 400, np.uint8).tobytes()


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "JOIN_BYTES", SIZE - 1)


@given(st.lists(st.sampled_from(range(0, 392, 8)) | st.integers(0, 394), min_size=1, max_size=12))
def test_rows_from_anywhere(starts: list[int]) -> None:
    rows = [memoryview(MEMORY)[start : start + SIZE] for start in starts]
    stacked = stack_bytes(rows, (2, 3))
    assert stacked.shape == (len(rows), 2, 3)
    assert stacked.tobytes() == b"".join(rows)


@pytest.mark.parametrize(
    ("starts", "num_copies"), [([0, 20, 40, 60], 1), ([0, 20, 40, 65, 90], 2), ([0, 21, 41, 61], 0)]
)
def test_large_rows_that_begin_evenly_are_copied_together(
    starts: list[int], num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LARGE_BYTES", SIZE)
    rows = [memoryview(MEMORY)[start : start + SIZE] for start in starts]
    with patch.object(MappedCut, "arrays", autospec=True, side_effect=MappedCut.arrays) as made:
        assert stack_bytes(rows, (SIZE,)).tobytes() == b"".join(rows)
    assert made.call_count == bool(num_copies)
    if num_copies:
        assert len(list(made.call_args.args[0].arrays())) == num_copies


@given(st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_rows_inside_records_of_equally_many_bytes(num: int, before: int, after: int) -> None:
    record = before + SIZE + after
    rows = EvenRows(MEMORY[: num * record], record, before, before + SIZE)
    assert stack_bytes(rows, (SIZE,)).tobytes() == b"".join(rows) == rows.tobytes()
