"""JPEGs decoded by a feed on one thread and on two."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

import feeder
from contenders import FEED, Contender, Take, timed
from fetches import Array
from folders import make_folder
from harness import Measures, Settings, interleave
from report import Goal, Report, figure, spread

ASKED = 1.7
BATCH_SIZE = 16
NUM_FILES = 64
TILES = 3
PICTURES = Path(__file__).parents[2] / "docs/pictures"


@cache
def photographs() -> Path:
    """A folder of photographs of 480 × 480 pixels, each put together from nine small ones."""
    from PIL import Image

    tiles = [np.asarray(Image.open(file)) for file in sorted(PICTURES.glob("*/*.jpg"))]
    rng = np.random.default_rng(0)
    folder = make_folder()
    (folder / "class").mkdir()
    for i in range(NUM_FILES):
        drawn = [tiles[number] for number in rng.integers(len(tiles), size=TILES * TILES)]
        rows = [np.concatenate(drawn[j::TILES], axis=1) for j in range(TILES)]
        Image.fromarray(np.concatenate(rows)).save(folder / f"class/{i:02}.jpg", quality=90)
    return folder


def of_feeder(num_threads: int) -> Contender:
    """A feed over the folder, without end."""

    @contextmanager
    def running() -> Iterator[Take]:
        coordinator = feeder.init_data_input_workers(
            ["image", "label"], feeder.sources.image_folder(photographs()), BATCH_SIZE, 2, FEED, 8,
            epochs=None, num_threads=num_threads, coordinator=feeder.Coordinator(),
        )  # fmt: skip
        with coordinator:
            feed = coordinator[FEED]
            yield lambda: next(feed)["image"]

    return running


def plain_loop() -> Contender:
    """One thread that calls the source, without a feed."""
    source = feeder.sources.image_folder(photographs())
    indices = cycle(range(NUM_FILES // BATCH_SIZE))

    def take() -> Array:
        columns: Any = source(feeder.Call(next(indices), 0, 0, BATCH_SIZE, 0))
        image: Array = columns[0]
        return image

    return lambda: nullcontext(take)


PROCESS = """
import sys, time
from pathlib import Path
from feeder.workers.sources.pictures import Decoder

decode, files = Decoder("auto"), [path.read_bytes() for path in Path(sys.argv[1]).glob("*/*.jpg")]
count, start = 0, time.perf_counter()
while (elapsed := time.perf_counter() - start) < float(sys.argv[2]):
    decode(files[count % len(files)])
    count += 1
print(count / elapsed)
"""


def _processes(number: int, settings: Settings) -> Callable[[], Measures]:
    """Processes that decode and share nothing: what the machine has to give at that moment."""
    command = [sys.executable, "-c", PROCESS, str(photographs()), str(2 * settings.timed_s)]

    def measure() -> Measures:
        running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(number)]
        rates = [float(process.communicate()[0]) / BATCH_SIZE for process in running]
        return {f"processes: {number}": sum(rates)}

    return measure


def decoding(settings: Settings) -> Report:
    """Images per second on one thread and on two, and in a plain loop."""
    names = {1: "feed, 1 thread", 2: "feed, 2 threads"}
    rates = interleave(
        [
            *(timed(name, of_feeder(number), settings) for number, name in names.items()),
            timed("plain loop", plain_loop(), settings),
            *(_processes(number, settings) for number in names),
        ],
        settings.repetitions,
    )
    ratio = rates[names[2]].per(rates[names[1]])
    size = sum(file.stat().st_size for file in photographs().glob("*/*")) / NUM_FILES
    return Report(
        case="jpeg",
        title=f"JPEGs of 480 × 480 pixels and {figure(size)} bytes in batches of {BATCH_SIZE}",
        head=("contender", "images/s"),
        rows=tuple((name, spread(rate.times(BATCH_SIZE))) for name, rate in rates.items()),
        measures=rates,
        goals=(Goal(what="jpeg: 2 threads, against one", asked=ASKED, measured=ratio, unit="×"),),
        notes=tuple(
            f"{a} / {b}: {spread(rates[a].per(rates[b]), '×')}"
            for a, b in ((names[2], "plain loop"), ("processes: 2", "processes: 1"))
        ),
    )
