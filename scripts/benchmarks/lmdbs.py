"""Batches of Caffe's LMDBs, delivered by the feeder and by DALI's reader."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import feeder
from contenders import FEED, copyto, timed
from fetches import Array, Load
from folders import write_lmdb
from harness import Settings, interleave
from report import Goal, Report, rate_cells

ASKED = 1.5
CHECKED_BATCHES = 8
DALI_THREADS = 2

Batch = tuple[Array, Array]
Batches = Callable[[], AbstractContextManager[Callable[[], Batch]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Datums:
    """An LMDB to be read, and how."""

    case: str
    shape: tuple[int, int, int]
    """Height, width and channels."""
    num_records: int
    batch_size: int
    bound: int
    """Batches buffered by the feeder."""
    num_fetchers: int
    """One where reading is a little Python and a small copy, so that another would wait for the
    GIL; two where it is a large copy."""

    @property
    def load(self) -> Load:
        """The batch, for a plain copy of it."""
        return Load(
            name=self.case, batch_size=self.batch_size, row_shape=self.shape, dtype="uint8",
            chunk_rows=self.batch_size, bound=self.bound,
        )  # fmt: skip


DATUMS = (
    Datums(
        case="lmdb-1kb", shape=(32, 32, 1), num_records=20_000, batch_size=256, bound=16,
        num_fetchers=1,
    ),
    Datums(
        case="lmdb-100kb", shape=(183, 187, 3), num_records=1_000, batch_size=32, bound=4,
        num_fetchers=2,
    ),
)  # fmt: skip
DALI_PREFETCHES = (2, 4)


@cache
def _path(datums: Datums) -> Path:
    return write_lmdb(datums.shape, datums.num_records)


def of_feeder(datums: Datums) -> Batches:
    """A feed over the LMDB, without end."""

    @contextmanager
    def running() -> Iterator[Callable[[], Batch]]:
        source = feeder.sources.caffe_lmdb(_path(datums))
        coordinator = feeder.init_data_input_workers(
            ["image", "label"], source, datums.batch_size, datums.num_fetchers, FEED, datums.bound,
            epochs=None, last_batch="carry", coordinator=feeder.Coordinator(),
        )  # fmt: skip
        with coordinator:
            feed = coordinator[FEED]

            def take() -> Batch:
                batch = next(feed)
                return batch["image"], batch["label"]

            yield take

    return running


def of_dali(datums: Datums, prefetch: int) -> Batches:
    """DALI's reader on the CPU. A batch is taken as arrays over DALI's own memory, not copied."""

    @contextmanager
    def running() -> Iterator[Callable[[], Batch]]:
        from nvidia.dali import Pipeline, fn

        pipeline: Any = Pipeline(
            batch_size=datums.batch_size, num_threads=DALI_THREADS, device_id=None,
            prefetch_queue_depth=prefetch,
        )  # fmt: skip
        with pipeline:
            pipeline.set_outputs(*fn.readers.caffe(path=str(_path(datums))))
        pipeline.build()

        def take() -> Batch:
            image, label = (np.asarray(output.as_tensor()) for output in pipeline.run())
            return image, label[:, 0]

        yield take

    return running


def _without_labels(batches: Batches) -> Any:
    """The batches as a contender whose one column is the image."""

    @contextmanager
    def running() -> Iterator[Callable[[], Array]]:
        with batches() as take:
            yield lambda: take()[0]

    return running


def _check(datums: Datums, contenders: dict[str, Batches]) -> None:
    """Raise RuntimeError unless all deliver the same batches, in the order of the records."""
    taken: dict[str, list[Batch]] = {}
    for name, batches in contenders.items():
        with batches() as take:
            taken[name] = [(image.copy(), label.copy()) for image, label in _several(take)]
    first = next(iter(taken.values()))
    labels = np.concatenate([label for _, label in first])
    if not np.array_equal(labels, np.arange(len(labels)) % datums.num_records):
        raise RuntimeError(f"{datums.case}: the labels are not those that were written")
    for name, batches_of in taken.items():
        for got, wanted in zip(batches_of, first, strict=True):
            if not all(map(np.array_equal, got, wanted)):
                raise RuntimeError(f"{datums.case}: {name} delivers other batches")


def _several(take: Callable[[], Batch]) -> Iterator[Batch]:
    for _ in range(CHECKED_BATCHES):
        yield take()


def reading(datums: Datums, settings: Settings) -> Report:
    """The feeder and, where it is installed, DALI: batches per second."""
    contenders = {"feeder": of_feeder(datums)}
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
        for prefetch in DALI_PREFETCHES:
            contenders[f"DALI, prefetch {prefetch}"] = of_dali(datums, prefetch)
    _check(datums, contenders)
    rates = interleave(
        [
            *(timed(name, _without_labels(made), settings) for name, made in contenders.items()),
            timed("copyto", copyto(datums.load), settings),
        ],
        settings.repetitions,
    )
    rivals = [rate for name, rate in rates.items() if name.startswith("DALI")]
    goals: tuple[Goal, ...] = ()
    if rivals:
        best = max(rivals, key=lambda rate: rate.median)
        goals = (
            Goal(
                what=f"{datums.case}: batches of {datums.batch_size}, against DALI's reader",
                asked=ASKED,
                measured=rates["feeder"].per(best),
                unit="×",
            ),
        )
    size = datums.load.batch_bytes
    return Report(
        case=datums.case,
        title=f"batches of {datums.batch_size} datums of {np.prod(datums.shape):,} bytes",
        head=("contender", "batches/s", "GB/s", "of copyto"),
        rows=tuple(
            (name, *rate_cells(rate, rates["copyto"], size)) for name, rate in rates.items()
        ),
        measures=rates,
        goals=goals,
        notes=() if rivals else ("DALI is not installed: pip install nvidia-dali-cuda120",),
    )
