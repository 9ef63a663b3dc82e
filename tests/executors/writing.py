"""Fetch functions that write rows where there is a place for them, in every way that there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from feeder import Call
from feeds import drain
from fetches import make_rows

AXES = {"id": 0, "vector": 1, "label": 0}
"""Of each column the axis that is rows: one has rows that do not lie together."""
BAD = 7
"""What is written before the rows are."""

Columns = dict[str, np.ndarray]
Way = Callable[[Call, Columns], Any]


def into_out(call: Call, columns: Columns) -> Any:
    """Write to what there is of `call.out`, and return it."""
    out = call.out
    if out is None:
        return columns
    rows = len(columns["id"])
    shown = {name: np.moveaxis(out[name], AXES[name], 0)[:rows] for name in columns}
    for name, array in columns.items():
        shown[name][...] = BAD
        shown[name][...] = np.moveaxis(array, AXES[name], 0)
    if rows == len(out["id"]):
        return out
    return {name: np.moveaxis(shown[name], 0, AXES[name]) for name in columns}


def into_empty(call: Call, columns: Columns) -> Any:
    arrays = {name: call.empty(a.shape, a.dtype) for name, a in columns.items()}
    for name, array in columns.items():
        arrays[name][...] = array
    return tuple(arrays.values())


def elsewhere(call: Call, columns: Columns) -> Any:
    return list(columns.values())


def some_columns(call: Call, columns: Columns) -> Any:
    """Write one column to its place, and leave nonsense in those of others."""
    if call.out is not None:
        for array in call.out.values():
            array[...] = BAD
    label = call.empty(columns["label"].shape, np.uint16)
    label[:] = columns["label"]
    return {**columns, "label": label}


def now_and_then(call: Call, columns: Columns) -> Any:
    return (into_out, elsewhere, into_empty, some_columns)[call.index % 4](call, columns)


WAYS: dict[str, Way] = {
    "out": into_out, "empty": into_empty, "elsewhere": elsewhere, "some": some_columns,
    "mixed": now_and_then,
}  # fmt: skip


class Even:
    """Gives `rows` rows in each call, and perhaps fewer in the last call of an epoch."""

    def __init__(self, way: Way, rows: int) -> None:
        self.way, self.rows = way, rows

    def __call__(self, call: Call) -> Any:
        num = 41 + 4 * call.epoch
        rows = min(self.rows, num - call.index * self.rows)
        if rows <= 0:
            # Who looks beyond the end may have written there already.
            for array in (call.out or {}).values():
                array[...] = BAD
            raise StopIteration
        columns = make_rows(0, call.epoch, call.index, rows)
        columns["vector"] += call.rng.random((rows, 3), dtype=np.float32)
        columns["vector"] = np.ascontiguousarray(columns["vector"].T)
        return self.way(call, columns)


def plain(rows: int, **settings: Any) -> Any:
    """The stream of a function that writes nowhere, without the setting."""
    return drain(Even(elsewhere, rows), batch_columns=[0, 1, 0], **settings)
