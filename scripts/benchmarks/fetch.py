"""Fetch functions that compute and decode, on threads and in processes.

They run beside the plain loop. Functions that fill their batch where it lies (`rows_per_call`) run
beside a loop over one buffer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import feeder
from benchmarks import fetches
from benchmarks.contenders import (
    COLUMN,
    FEED,
    calling_loop,
    copyto,
    feed,
    filling_loop,
    first_batch,
    make_coordinator,
)  # fmt: skip
from benchmarks.data import NUM_PICTURES, photographs
from benchmarks.fetches import IMAGES, SMALL, Fetch, Size
from benchmarks.harness import Row, Watch, batches, once
from benchmarks.report import Load

NUM = 2
"""Threads, and processes."""
TEXT = Size(batch_size=fetches.TEXT_ROWS, row_shape=(fetches.TEXT_WORDS,), dtype="int64",
            chunk_rows=fetches.TEXT_ROWS, bound=16)  # fmt: skip
PICTURES = Size(batch_size=16, row_shape=(480, 480, 3), dtype="uint8", chunk_rows=16, bound=8)
IMAGE_COLUMNS = ("image", "label")


def pillow() -> feeder.sources.Source:
    """The photographs, decoded by Pillow."""
    return feeder.sources.image_folder(photographs(), decoder="pillow")


def _both(
    what: str, make_fetch: Callable[[], Fetch], size: Size, of: str | None, **settings: Any
) -> list[Row]:
    """Rows of two threads and of two processes."""
    executors = {"threads": feeder.Threads(NUM), "processes": feeder.Processes(NUM)}
    return [
        batches(f"{what}, {NUM} {kind}",
                partial(feed, make_fetch, size, executor=executor, **settings), of=of)
        for kind, executor in executors.items()
    ]  # fmt: skip


def _start(watch: Watch) -> int:
    """From the call of the front door to the first batch of two processes."""
    make = partial(make_coordinator, fetches.small, SMALL, executor=feeder.Processes(NUM))
    return first_batch(make)(watch)


def _killed(watch: Watch) -> int:
    """From the kill of the one process to a batch of the next one; as little as possible is
    buffered."""
    with make_coordinator(
        fetches.images, IMAGES, 1, executor=feeder.Processes(1), epochs=None,
        max_buffered_bytes=1,
    ) as coordinator:  # fmt: skip
        stream = coordinator[FEED]
        pid = int(next(stream)[COLUMN].flat[0])
        with watch:
            os.kill(pid, signal.SIGKILL)
            while int(next(stream)[COLUMN].flat[0]) == pid:
                pass
    return 1


FILL = partial(feed, partial(fetches.filling, IMAGES), IMAGES, 1, num_threads=NUM)
LOAD = Load(
    name="fetch",
    about=__doc__,
    rows=(
        batches("text, loop", partial(calling_loop, lambda: fetches.text, TEXT.batch_size),
                ours=False),
        *_both("text", lambda: fetches.text, TEXT, of="text, loop"),
        batches("pictures, loop",
                partial(calling_loop, pillow, PICTURES.batch_size,
                        NUM_PICTURES // PICTURES.batch_size), ours=False),
        *_both("pictures", pillow, PICTURES, of="pictures, loop", columns=IMAGE_COLUMNS),
        batches("copy 20 MB", partial(copyto, IMAGES), ours=False),
        *_both("large", lambda: fetches.images, IMAGES, of="copy 20 MB"),
        *_both("small", lambda: fetches.small, SMALL, of=None),
        batches("loop that fills one buffer", partial(filling_loop, IMAGES), ours=False),
        batches("filled in place", partial(FILL, rows_per_call=IMAGES.batch_size),
                of="loop that fills one buffer"),
        once("first batch of 2 processes", _start),
        once("killed process", _killed),
    ),
)  # fmt: skip
main = LOAD.main
