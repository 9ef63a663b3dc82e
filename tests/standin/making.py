"""A function for `on_device=`, the same for arrays of the host and of the stand-in; and what a feed
of numbered rows gives with it, known without a feed."""

from __future__ import annotations

from typing import Any

import numpy as np

from feeds import Record, note_columns
from standin.arrays import mapped
from standin.numbered import ROWS, rows_of


def _turned(vectors: np.ndarray, factors: np.ndarray) -> np.ndarray:
    # With gaps between its elements: the axes are swapped.
    return np.transpose(vectors * factors[:, None] - 1)


def make(batch: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Draws a factor for each row; one column as it is, one of another shape, and one more."""
    factors = rng.random(ROWS, np.float32)
    scaled = mapped(lambda turned: turned.T, mapped(_turned, batch["vector"], factors))
    return {
        "id": batch["id"],
        "scaled": mapped(lambda one: (one + 1).astype(np.float64), scaled),
        "picked": scaled[:, 1:3],
    }


def factors_of(seed: int, epoch: int, index: int) -> np.ndarray:
    """The factors of a batch, by Philox as it is documented: the key is (seed, 3), the counter (0,
    0, epoch, index)."""
    philox = np.random.Philox(
        key=np.array([seed, 3], np.uint64), counter=np.array([0, 0, epoch, index], np.uint64)
    )
    return np.random.Generator(philox).random(ROWS, np.float32)


def made(num_batches: int, seed: int = 0) -> list[Record]:
    """The batches of a feed of one epoch of numbered rows with that function."""
    records: list[Record] = []
    for step in range(num_batches):
        ids, vectors, _ = rows_of(step * ROWS, ROWS)
        scaled = vectors * factors_of(seed, 0, step)[:, None] - 1
        columns = [ids, (scaled + 1).astype(np.float64), scaled[:, 1:3].copy()]
        records.append((0, step, step, ROWS, note_columns(columns)))
    return records
