"""Positions that are stored: what that costs a running feed, and how long it takes.

Positions are stored by the feed's own thread, and made durable. None has more than 1 MB of rows
left over.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import feeder
from benchmarks.contenders import FEED, feed, make_coordinator
from benchmarks.fetches import SMALL, VECTORS, SeekableFetch, Size
from benchmarks.harness import Take, Watch, batches, once
from benchmarks.report import Load

EVERY_S = 0.1
SIZES = {"small": SMALL.in_chunks_of(50), "vectors": VECTORS.in_chunks_of(240)}


@contextmanager
def saving(size: Size) -> Iterator[Take]:
    """A feed whose position is stored ten times a second."""
    with tempfile.TemporaryDirectory(prefix="feeder-bench-") as folder:
        store = feeder.CheckpointStore(Path(folder) / "run", keep=3)
        coordinator = feeder.Coordinator(feeder.Checkpointing(store, every_s=EVERY_S))
        with feed(partial(SeekableFetch, size), size, coordinator=coordinator) as take:
            yield take
        if coordinator.checkpoint_stats()["failed_saves"]:
            raise RuntimeError("a save has failed")


def _save(watch: Watch) -> int:
    """From the call until it is durable, of a running feed."""
    size = SIZES["vectors"]
    with (
        tempfile.TemporaryDirectory(prefix="feeder-bench-") as folder,
        feeder.CheckpointStore(Path(folder) / "run", keep=3) as store,
        make_coordinator(SeekableFetch(size), size, epochs=None) as coordinator,
    ):
        next(coordinator[FEED])
        with watch:
            coordinator.checkpoint(store)
    return 1


LOAD = Load(
    name="checkpoints",
    about=__doc__,
    rows=(
        *(
            batches(f"{name}, alone", partial(feed, partial(SeekableFetch, size), size))
            for name, size in SIZES.items()
        ),
        *(
            batches(f"{name}, 10 saves a second", partial(saving, size), of=f"{name}, alone")
            for name, size in SIZES.items()
        ),
        once("save", _save),
    ),
)
main = LOAD.main
