"""A feed against the loop that it replaces, where the loop has next to nothing to do.

The loop calls the fetch function, joins what it returns by column and hands it to the consumer, in
one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

import feeder
from contenders import FEED, Contender, Take, timed
from fetches import SMALL, Array, Fetch, Load, fresh
from harness import Settings, interleave, time_of
from report import Goal, Report, spread

FEEDS, LOOP = "feed", "loop"
NUM_COLUMNS = 1000
STEP_S = 0.000_05


def _no_step() -> None:
    """The consumer does nothing with a batch."""


def _count(rounds: int) -> int:
    value = 0
    for i in range(rounds):
        value = (value * 31 + i) & 0xFFFF
    return value


@cache
def _rounds_of_step() -> int:
    """Rounds of the loop above that take 50 µs where nothing else runs."""
    rounds = 10_000
    taken_s = min(time_of(lambda: _count(rounds)) for _ in range(20))
    return int(rounds * STEP_S / taken_s)


def _python_step() -> None:
    """The consumer runs Python for 50 µs."""
    _count(_rounds_of_step())


def _of_columns(load: Load) -> Fetch:
    template = load.rows(load.chunk_rows)

    def fetch(worker_id: int, batch_size: int) -> list[Array]:
        return [template.copy() for _ in range(NUM_COLUMNS)]

    return fetch


@dataclass(frozen=True, slots=True, kw_only=True)
class Trivial:
    """A load that costs little besides its hand-over."""

    case: str
    load: Load
    asked: float
    make_fetch: Callable[[Load], Fetch] = fresh
    num_columns: int = 1
    step: Callable[[], None] = _no_step

    @property
    def names(self) -> list[str]:
        return [f"c{i}" for i in range(self.num_columns)]


ONE = Load(name="1×16 int64", batch_size=1, row_shape=(16,), dtype="int64", chunk_rows=1, bound=100)
NARROW = Load(
    name="64×1 int64", batch_size=64, row_shape=(1,), dtype="int64", chunk_rows=64, bound=100
)
TRIVIAL = (
    Trivial(case="batches-of-1", load=ONE, asked=0.3),
    Trivial(
        case="columns-1000", load=NARROW, make_fetch=_of_columns, num_columns=NUM_COLUMNS,
        asked=0.6,
    ),
    Trivial(case="python-50us", load=SMALL, step=_python_step, asked=0.9),
)  # fmt: skip


def of_feed(trivial: Trivial) -> Contender:
    """The feed, with two workers."""
    load, step = trivial.load, trivial.step

    @contextmanager
    def running() -> Iterator[Take]:
        coordinator = feeder.init_data_input_workers(
            trivial.names, trivial.make_fetch(load), load.batch_size, 2, FEED, load.bound,
            epochs=None, coordinator=feeder.Coordinator(),
        )  # fmt: skip
        with coordinator:
            feed, name = coordinator[FEED], trivial.names[0]

            def take() -> Array:
                array: Array = next(feed)[name]
                step()
                return array

            yield take

    return running


def of_loop(trivial: Trivial) -> Contender:
    """The loop, in one thread."""
    load, step, names = trivial.load, trivial.step, trivial.names
    fetch = trivial.make_fetch(load)

    def take() -> Array:
        chunk = fetch(0, load.batch_size)
        batch = {name: np.concatenate([array]) for name, array in zip(names, chunk, strict=True)}
        step()
        return batch[names[0]]

    return lambda: nullcontext(take)


def _race(trivial: Trivial, settings: Settings) -> Report:
    rates = interleave(
        [
            timed(FEEDS, of_feed(trivial), settings),
            timed(LOOP, of_loop(trivial), settings),
        ],
        settings.repetitions,
    )
    ratio = rates[FEEDS].per(rates[LOOP])
    return Report(
        case=trivial.case,
        title=f"batches of {trivial.load.name}, columns: {trivial.num_columns}",
        head=("contender", "batches/s", "of the loop"),
        rows=tuple((name, spread(rate), spread(rate.per(rates[LOOP]), "×"))
                   for name, rate in rates.items()),
        measures=rates,
        goals=(
            Goal(what=f"{trivial.case}: against the loop", asked=trivial.asked, measured=ratio,
                 unit="×"),
        ),
    )  # fmt: skip


CASES: Mapping[str, Callable[[Settings], Report]] = {
    trivial.case: partial(_race, trivial) for trivial in TRIVIAL
}
