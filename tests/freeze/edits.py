"""Runs that have been edited: their positions as bytes, and what goes on from these."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from feeder import Coordinator, init_data_input_workers, sources
from freeze.runs import digest

COLUMNS = ["tokens", "segment_ids", "positions", "loss_mask"]


def _document(number: Any) -> Any:
    return int(number) * 16 + np.arange(int(number) * 7919 % 13 + 1)


def _mixture(**weights: int) -> sources.Source:
    return sources.mix({
        name: (sources.arrays(np.arange(30) + 100 * i).map(_document).shuffle(i), weight)
        for i, (name, weight) in enumerate(weights.items())
    })  # fmt: skip


def _edited(kind: str, number: int) -> Any:
    """The source of a run after so many edits."""
    of = _mixture(web=2 + number, code=1)
    if kind == "records":
        return sources.mix({
            name: (sources.arrays(np.arange(30) + 100 * i).shuffle(i), weight)
            for i, (name, weight) in enumerate({"web": 2 + number, "code": 1}.items())
        })  # fmt: skip
    if kind == "batch_by_tokens":
        return of.batch_by_tokens(40 + number, window=6)
    more = {"window_tokens": 30} if kind == "pack in pieces" else {}
    return sources.pack(of, 8 + number, 6 + number, bos=1, **more)  # type: ignore[arg-type]


def _run(kind: str) -> dict[str, str]:
    names = COLUMNS if kind.startswith("pack") else ["x"]
    state, told = None, {}
    for number in range(3):
        edit = f"edit {number}" if number else None
        with init_data_input_workers(
            names, _edited(kind, number), 3, num_worker_threads=1, coordinator=Coordinator(),
            resume=state, edit=edit, dont_rebatch=kind == "batch_by_tokens",
        ) as coordinator:  # fmt: skip
            batches = [
                [batch[name].tolist() for name in names]
                for batch in islice(coordinator["train"], 4)
            ]
            state = coordinator.snapshot()
        told[f"{number} edits"] = bytes(state).hex()
        told[f"batches after {number} edits"] = digest(repr(batches).encode())
    return told


def make(folder: Path) -> dict[str, Any]:
    kinds = ("records", "pack", "pack in pieces", "batch_by_tokens")
    return {kind: _run(kind) for kind in kinds}
