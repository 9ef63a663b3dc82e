"""The loaders that users of PyTorch have, beside feeder's, on the same data sets and files.

Each figure is measured in a process of its own. Notes tell whether all loaders gave the same
samples, and how soon their first batch came. A loader that is not installed is left out, and named.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import data, peer_files
from benchmarks.children import Process
from benchmarks.harness import LIMIT_S, Cost, Row, Settings, bounded
from benchmarks.peer_loaders import PEERS, Peer
from benchmarks.report import Load, Samples, seconds

WORKERS = (1, 2)
BATCHES = 12
"""Of the epoch whose samples are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How a data set is read."""

    batch_size: int
    samples: int
    """Of an epoch that is timed in full."""
    workers: Sequence[int] = WORKERS

    def epoch(self, settings: Settings) -> int:
        """Samples of an epoch, the same for all loaders."""
        part = self.samples * settings.timed_s / Settings().timed_s
        return max(24, round(part) // self.batch_size) * self.batch_size


WORKS: Mapping[str, Work] = {
    "jpeg": Work(batch_size=32, samples=768),
    "text": Work(batch_size=64, samples=19_200),
    "tokens": Work(batch_size=16, samples=24_000),
    "tiny": Work(batch_size=64, samples=96_000),
    "photos 480x480": Work(batch_size=32, samples=1536, workers=(2,)),
    "photos 500x375": Work(batch_size=32, samples=1536, workers=(2,)),
    "photos 2000x1500": Work(batch_size=8, samples=384, workers=(2,)),
    "rows": Work(batch_size=256, samples=data.PARQUET_ROWS, workers=(1,)),
    "tars": Work(batch_size=32, samples=1536, workers=(2,)),
}


def peers(work: str) -> Mapping[str, Peer]:
    """Who reads it; all others are compared with the first."""
    return peer_files.READERS.get(work, PEERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A data set, a loader that reads it, and its workers."""

    work: str
    loader: str
    workers: int

    @property
    def name(self) -> str:
        kind = "thread" if self.loader.endswith("threads") else "worker"
        return f"{self.work}: {self.loader}, {self.workers} {kind}{'s' * (self.workers > 1)}"

    def measure(self, settings: Settings) -> Cost:
        """What a sample costs, in a process of its own."""
        return Cost(**self.ask("timed", WORKS[self.work].epoch(settings)))

    def ask(self, task: str, samples: int) -> Any:
        """What one process finds; those that it has started end with it."""
        numbers = (self.workers, WORKS[self.work].batch_size, samples)
        made = folder(self.work, samples)
        words = (task, self.work, self.loader, *map(str, numbers), str(made))
        # Not `-m`: data sets of `__main__` could not be sent to workers.
        command = ("-c", "from benchmarks.peer_child import main; main()", *words)
        with bounded(LIMIT_S), Process(command) as process:
            try:
                return json.loads(process.read_line())
            finally:
                process.kill_all()


READINGS = {
    reading.name: reading
    for work in WORKS
    for loader in peers(work)
    for workers in WORKS[work].workers
    for reading in (Reading(work=work, loader=loader, workers=workers),)
}


@cache
def folder(work: str, samples: int) -> Path:
    """The folder of what is read, which ends with this process."""
    return peer_files.make(work, samples) if work in peer_files.READERS else _shared()


@cache
def _shared() -> Path:
    made = data.photographs()
    tokens = np.random.default_rng(0).integers(0, 50_000, 8_000_000, dtype=np.uint16)
    tokens.tofile(made / "tokens.bin")
    return made


def notes(rows: Sequence[Row], samples: Samples) -> Iterator[str]:
    """Whether all gave the same samples, and how soon the first batch came."""
    for work in WORKS:
        those = [READINGS[row.name] for row in rows if READINGS[row.name].work == work]
        checks = {one.ask("checked", BATCHES * WORKS[work].batch_size) for one in those}
        if those:
            yield f"{work}: {'all' if len(checks) == 1 else 'NOT ALL'} gave the same samples"
    for row in rows:
        first_s = statistics.median(cost.more["first_s"] for cost in samples[row.name])
        yield f"{row.name}: first batch after {seconds(first_s)}"


def _row(reading: Reading) -> Row:
    first = next(iter(peers(reading.work)))
    than = Reading(work=reading.work, loader=first, workers=reading.workers)
    return Row(
        name=reading.name,
        measure=partial(Reading.measure, reading),
        of=None if reading == than else than.name,
        ours=reading.loader.startswith("feeder"),
        needs=peers(reading.work)[reading.loader].module.partition(".")[0],
    )


LOAD = Load(
    name="peers", about=__doc__, rows=[_row(reading) for reading in READINGS.values()], notes=notes
)
main = LOAD.main
