"""What the files in `checkpoints/` hold: one folder for each version of the format and of its
tokens, for ever.

`python -m conformance.golden FOLDER` writes those of the current version, once, when it is new.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import feeder
import jobs
from feeder.job import MultiNodeCheckpointManager
from small import Pure, make

FILES = Path(__file__).parent / "checkpoints"
META = {"epoch": 3, "step": 2**70, "where": ("node", 1), "rates": [0.5, None, True], "text": "ä"}
FEED_STEP = 3
"""How many batches the feed had handed out."""


def entries() -> dict[str, Any]:
    """Entries of every kind."""
    gaps = np.zeros(2, np.dtype([("a", "i1"), ("b", "<f8", (2,))], align=True))
    gaps["b"] = [[1.0, 2.0], [3.0, 4.0]]
    return {
        "int64": np.arange(-3, 3, dtype="<i8").reshape(2, 3),
        "big-endian": np.arange(4, dtype=">u2"),
        "float16": np.array([0.0, -0.0, np.nan, np.inf], "<f2"),
        "bool": np.array([True, False]),
        "complex": np.array([1 + 2j], "<c16"),
        "text": np.array(["a", "äö"], "<U3"),
        "bytes": np.array([b"ab", b"c"], "S2"),
        "time": np.array(["2026-11-21T08:00:00"], "M8[ms]"),
        "fields": gaps,
        "scalar": np.array(7, "<u4"),
        "no rows": np.empty((0, 5), "<f4"),
        "plain bytes": bytes(range(256)),
        "ünicode/name": b"",
    }


def make_feed(**settings: Any) -> feeder.Coordinator:
    """A feed whose batches straddle chunks: one row is left over after the first."""
    return make(Pure(), epochs=2, seed=5, **settings)


def train(folder: Path, db_type: str) -> tuple[int, int]:
    """Run the job of Caffe2's test, of one node with LMDBs and of three with files; returns its
    last epoch and a node's total."""
    job = jobs.make_single() if db_type == "lmdb" else jobs.make_three()
    return jobs.train(MultiNodeCheckpointManager(folder, db_type), job)[:2]


def write_jobs(folder: Path, *db_types: str) -> None:
    """Write the epochs 0 to 2 of jobs, in folders that are called by their `db_type`."""
    for db_type in db_types:
        train(folder / db_type, db_type)
        for made in sorted((folder / db_type).rglob("*")):
            if made.suffix in (".3", ".4", ".lock"):
                made.unlink()


def write(folder: Path) -> None:
    """Write the files of the current version."""
    with make_feed() as coordinator, feeder.CheckpointStore(folder) as store:
        for _ in range(FEED_STEP):
            next(coordinator["train"])
        coordinator.checkpoint(folder / "feed.snap")
        store.put("arrays", entries(), meta=META)
        store.save(coordinator.snapshot(), step=10)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    write_jobs(Path(sys.argv[1]), "file", "lmdb")
