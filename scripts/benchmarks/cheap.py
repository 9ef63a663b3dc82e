"""Cheap records, where the machinery could cost more than the data: feeds against plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import feeder
from contenders import COLUMN, FEED, Contender, Take, timed
from fetches import Array
from folders import make_folder
from harness import Settings, interleave
from report import Goal, Report, spread

SEQ_LEN = 2048
NUM_SEQUENCES = 4096
NUM_ROWS = 65_536
ROW_NUMBERS = 8
BUFFERED_BATCHES = 100
PLAIN = "plain loop"


@cache
def _token_file() -> Path:
    """A file of 16 MiB of tokens of 2 bytes."""
    path = make_folder() / "tokens.bin"
    tokens = np.random.default_rng(0).integers(0, 50_000, SEQ_LEN * NUM_SEQUENCES, np.uint16)
    tokens.tofile(path)
    return path


class Sequences:
    """A dataset of sequences of tokens, each made int64."""

    def __init__(self) -> None:
        # A slice of a `memmap` runs Python code of NumPy's, one of a plain array over it does not.
        self._tokens = np.memmap(_token_file(), np.uint16, mode="r").view(np.ndarray)

    def __len__(self) -> int:
        return NUM_SEQUENCES

    def __getitem__(self, index: int) -> Array:
        tokens: Array = self._tokens[index * SEQ_LEN : (index + 1) * SEQ_LEN].astype(np.int64)
        return tokens


class Numbers:
    """A dataset of rows of a few numbers."""

    def __init__(self) -> None:
        self._rows = np.random.default_rng(0).random((NUM_ROWS, ROW_NUMBERS), dtype=np.float32)

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Array:
        row: Array = self._rows[index]
        return row


def _tokens() -> feeder.sources.Source:
    return feeder.sources.tokens(_token_file(), SEQ_LEN, np.uint16, as_type="int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheapRecords:
    """Records of little work, as a source and as a dataset for the loop beside it."""

    case: str
    title: str
    batch_size: int
    dataset: Callable[[], Any]
    source: Callable[[], feeder.sources.Source]
    asked: Mapping[int, float]
    """What a feed is to reach of the plain loop, by its number of threads."""


CHEAP = (
    CheapRecords(
        case="cheap-sequences", title="records of 2,048 tokens made int64", batch_size=16,
        dataset=Sequences, source=lambda: feeder.sources.records(Sequences()),
        asked={1: 0.8, 2: 0.8, 4: 0.7},
    ),
    CheapRecords(
        case="cheap-numbers", title="records of 8 numbers", batch_size=32,
        dataset=Numbers, source=lambda: feeder.sources.records(Numbers()),
        asked={1: 0.8, 2: 0.8, 4: 0.7},
    ),
    CheapRecords(
        case="cheap-tokens", title="2,048 tokens of a file made int64", batch_size=16,
        dataset=Sequences, source=_tokens, asked={1: 0.9},
    ),
)  # fmt: skip


def of_feeder(cheap: CheapRecords, num_threads: int) -> Contender:
    """A feed over the records, without end."""

    @contextmanager
    def running() -> Iterator[Take]:
        coordinator = feeder.init_data_input_workers(
            [COLUMN], cheap.source(), cheap.batch_size, 2, FEED, BUFFERED_BATCHES,
            epochs=None, num_threads=num_threads, coordinator=feeder.Coordinator(),
        )  # fmt: skip
        with coordinator:
            feed = coordinator[FEED]
            yield lambda: next(feed)[COLUMN]

    return running


def plain_loop(cheap: CheapRecords) -> Contender:
    """One thread that takes the records of a batch and stacks them."""
    dataset, size, numbers = cheap.dataset(), cheap.batch_size, count()
    num_batches = len(dataset) // size

    def take() -> Array:
        start = next(numbers) % num_batches * size
        return np.stack([dataset[i] for i in range(start, start + size)])

    return lambda: nullcontext(take)


def _stacking(cheap: CheapRecords, settings: Settings) -> Report:
    """A feed on each number of threads, in turns with the loop."""
    names = {number: f"feed, threads: {number}" for number in cheap.asked}
    rates = interleave(
        [
            timed(PLAIN, plain_loop(cheap), settings),
            *(timed(name, of_feeder(cheap, number), settings) for number, name in names.items()),
        ],
        settings.repetitions,
    )
    ratios = {name: rate.per(rates[PLAIN]) for name, rate in rates.items()}
    return Report(
        case=cheap.case,
        title=f"batches of {cheap.batch_size} {cheap.title}",
        head=("contender", "batches/s", "of the loop"),
        rows=tuple((name, spread(rates[name]), spread(ratios[name], "×")) for name in rates),
        measures=rates,
        goals=tuple(
            Goal(
                what=f"{cheap.case}: threads: {number}, against the plain loop",
                asked=asked, measured=ratios[names[number]], unit="×",
            )
            for number, asked in cheap.asked.items()
        ),
    )  # fmt: skip


CASES = {cheap.case: partial(_stacking, cheap) for cheap in CHEAP}
