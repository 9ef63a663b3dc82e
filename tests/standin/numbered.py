"""Feeds of numbered rows, whose batches are known without a feed."""

from __future__ import annotations

from typing import Any

import numpy as np

from feeder import Batch, Call
from feeder.devices.cuda.packed import pack
from feeder.devices.layout import layout
from feeder.workers.stream.chunks import Column
from feeds import Record, note_columns

ROWS = 4


def rows_of(first: int, num: int) -> list[np.ndarray]:
    """Return rows that are like no others, in columns of several widths."""
    ids = np.arange(first, first + num, dtype=np.int64)
    return [ids, (ids[:, None] * np.arange(1, 8)).astype(np.float32), (ids % 251).astype(np.uint8)]


class Rows:
    """`fetch(call)`: chunks of 1 to 9 rows, `num_rows` in all, numbered from 0."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __call__(self, call: Call) -> Any:
        # Five chunks go round: 1, 3, 5, 7 and 9 rows.
        first = call.index // 5 * 25 + (0, 1, 4, 9, 16)[call.index % 5]
        if first >= self.num_rows:
            raise StopIteration
        return rows_of(first, min(1 + call.index % 5 * 2, self.num_rows - first))


def wanted(num_batches: int) -> list[Record]:
    """Return the batches of such a feed."""
    return [
        (0, step, step, ROWS, note_columns(rows_of(step * ROWS, ROWS)))
        for step in range(num_batches)
    ]


def settings(num_batches: int, **more: Any) -> dict[str, Any]:
    """Return what makes such a feed, for `feeds.make` and `feeds.running`."""
    names = ["id", "vector", "label"]
    return {"fetch": Rows(num_batches * ROWS), "input_blob_names": names, "batch_size": ROWS} | more


def registered_batch(driver: Any) -> Batch:
    """Return a batch that lies in memory which is registered for as long as the batch lives."""
    memory = np.arange(64, dtype=np.uint8)
    column = Column(name="x", axis=0, dtype=memory.dtype, shape=())
    packed = pack(
        (memory,), region=driver.register(memory.data), address=memory.ctypes.data,
        layout=layout((column,), 64), rows=64, length=64, give_back=lambda: None,
    )  # fmt: skip
    place: Any = None
    return Batch(("x",), packed, place, 0, 0, 0, 64)
