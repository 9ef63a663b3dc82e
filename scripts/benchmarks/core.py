"""Batches in process, by size, chunk and workers; stopping, resuming, positions.

Fetch functions return chunks that were prepared once ("the same array") or are copied from a
template ("fresh"). Beside the feed runs a copy of the same bytes by one thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from benchmarks.contenders import (
    FEED,
    beside_busy,
    copyto,
    feed,
    first_batch,
    make_coordinator,
)  # fmt: skip
from benchmarks.fetches import (
    IMAGES,
    SMALL,
    TINY,
    VECTORS,
    Fetch,
    SeekableFetch,
    Size,
    constant,
    fresh,
    fresh_by_index,
    fresh_holding,
)  # fmt: skip
from benchmarks.harness import Watch, batches, once
from benchmarks.report import Load

RESUME_AT = 1_000_000  # Rows before the place of the resume.
RESUMED = SMALL.in_chunks_of(100)
COPY = {IMAGES: "copy 20 MB", VECTORS: "copy 1 MB", SMALL: "copy 8 KB"}

CHUNKS = (
    ("images-32", IMAGES, 32, fresh),
    ("images-7", IMAGES, 7, constant),
    ("images-7-fresh", IMAGES, 7, fresh),
    ("images-100", IMAGES, 100, constant),
    ("vectors-1", VECTORS, 1, constant),
    ("vectors-1-fresh", VECTORS, 1, fresh),
    ("vectors-17", VECTORS, 17, constant),
    ("vectors-17-fresh", VECTORS, 17, fresh),
    ("vectors-256", VECTORS, 256, fresh),
)
"""Name, batches, rows of a chunk, and what returns them."""

MANY: tuple[tuple[str, Callable[[Size], Fetch], int, dict[str, Any]], ...] = (
    ("small, copied", constant, 2, {}),
    ("small, 1,000 workers", fresh, 1000, {}),
    ("small, by index, 8 threads", fresh_by_index, 2, {"num_threads": 8}),
    ("small, sleeping, 8 threads", partial(fresh_by_index, sleep_s=0.001), 2, {"num_threads": 8}),
)
"""Other ways to the same batches."""


def _stop(watch: Watch) -> int:
    """While fetchers are blocked on the bound, or are about to be."""
    coordinator = make_coordinator(constant(SMALL), SMALL, 8)
    coordinator.start()
    for _ in range(2 * SMALL.bound):
        next(coordinator[FEED])
    with watch:
        coordinator.stop()
    return 1


def _token(watch: Watch) -> int:
    with make_coordinator(SeekableFetch(TINY), TINY, 8) as coordinator:
        cuts = [next(coordinator[FEED]).cut for _ in range(500)]
        with watch:
            for cut in cuts:
                cut.token()
    return len(cuts)


@cache
def _far_token() -> bytes:
    with make_coordinator(SeekableFetch(RESUMED), RESUMED) as coordinator:
        feed_ = coordinator[FEED]
        for _ in range(RESUME_AT // RESUMED.batch_size):
            batch = next(feed_)
        token: bytes = batch.cut.token()
        return token


def _resume(watch: Watch) -> int:
    token = _far_token()
    return first_batch(lambda: make_coordinator(SeekableFetch(RESUMED), RESUMED, resume=token))(
        watch
    )


def _import(program: str, watch: Watch) -> int:
    # Modules are compiled once, as where they are installed, also in a shell that forbids it.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    with watch:
        subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    return 1


NEEDED = "import numpy, zmq, msgpack, msgspec, xxhash"
EVERY_NAME = f"{NEEDED}; import feeder; [getattr(feeder, name) for name in feeder.__all__]"

LOAD = Load(
    name="core",
    about=__doc__,
    rows=(
        *(batches(name, partial(copyto, size), ours=False) for size, name in COPY.items()),
        *(
            batches(name, partial(feed, partial(make, size.in_chunks_of(rows)), size),
                    of=COPY[size])
            for name, size, rows, make in CHUNKS
        ),
        batches("small, passed", partial(feed, partial(fresh, SMALL), SMALL), of=COPY[SMALL]),
        *(
            batches(name, partial(feed, partial(make, SMALL), SMALL, num, **settings),
                    of="small, passed")
            for name, make, num, settings in MANY
        ),
        batches("vectors-17 beside a busy thread",
                partial(beside_busy, partial(
                    feed, partial(fresh_holding, VECTORS.in_chunks_of(17)), VECTORS)),
                of="vectors-17-fresh"),
        once("stop", _stop),
        once("token", _token),
        once("start", first_batch(lambda: make_coordinator(SeekableFetch(RESUMED), RESUMED))),
        once("resume", _resume, of="start"),
        once("import", partial(_import, EVERY_NAME), of="import of what it needs"),
        once("import of what it needs", partial(_import, NEEDED), ours=False),
    ),
)  # fmt: skip
main = LOAD.main
