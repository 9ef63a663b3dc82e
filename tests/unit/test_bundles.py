"""How far fetchers run ahead of a user who has stopped taking batches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import feeder
from unit.small import WAIT_S

BOUND, STOPPED_AT = 20, 40


class Counted:
    """Counts its calls; slow enough that the merge takes chunks from under it."""

    def __init__(self, num_expected: int) -> None:
        self.calls = 0
        self.all_made = threading.Event()
        self._num_expected = num_expected
        self._disk = threading.Event()

    def __call__(self, call: feeder.Call) -> Any:
        self._disk.wait(0.001)
        self.calls += 1
        if self.calls >= self._num_expected:
            self.all_made.set()
        return (np.zeros((32, 100)),)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_bound_holds_where_chunks_are_taken_from_open_bundles(workers: int) -> None:
    taken = STOPPED_AT + 1
    fetch = Counted(taken + BOUND)
    coordinator = feeder.init_data_input_workers(
        ["x"], fetch, 32, workers, max_buffered_batches=BOUND, epochs=None,
        coordinator=feeder.Coordinator(),
    )  # fmt: skip
    with coordinator:
        for batch in coordinator["train"]:
            if batch.step == STOPPED_AT:
                break
        assert fetch.all_made.wait(WAIT_S)
    assert fetch.calls <= taken + BOUND + BOUND // 4 + workers
