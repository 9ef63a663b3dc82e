"""Batches that fetch functions write where they belong (`rows_per_call`), beside copied ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

import feeder
from children import Child, address_for, bounded
from contenders import COLUMN, FEED, Contender, Take, timed
from fetches import IMAGES, VECTORS, Array, Load
from harness import Measures, Settings, Spread, interleave
from report import Goal, Report, rate_cells
from served import connect

if TYPE_CHECKING:
    from feeder import Call

LOADS = {"images": IMAGES, "vectors": VECTORS}
LOOP = "a loop that fills one buffer"
NUM_SLOTS = 12
"""Batches of 20 MB that a feed holds: a loop over as many shows what the caches are worth."""
BOUND = 100
"""Batches that a feed may buffer; its bound on bytes is what counts for the large ones."""
RECORDS = 5
"""Batches of records that are read in turn: more than the caches hold."""
NUM_THREADS = 2
CREDIT = 32
"""Batches that the consumer may be sent ahead: what only marks them waits for nothing else."""
FILLED_ASKED = {"in process": 0.97, "served": 0.95}
MARKED_ASKED_PER_S = 15_000


def filling(load: Load) -> Callable[[Call], Any]:
    """A function that reads records and writes them to the memory that it is given."""
    shape, records = (load.batch_size, *load.row_shape), _records(load)

    def fetch(call: Call) -> Any:
        array = call.empty(shape, load.dtype)
        np.copyto(array, records[call.index % RECORDS])
        return (array,)

    return fetch


def marking(load: Load) -> Callable[[Call], Any]:
    """A function that writes the number of its call, and nothing else: no work at all."""
    shape = (load.batch_size, *load.row_shape)

    def fetch(call: Call) -> Any:
        array = call.empty(shape, load.dtype)
        array.flat[0] = call.index % 1024
        return (array,)

    return fetch


def _records(load: Load) -> Array:
    return np.stack([load.rows(load.batch_size) for _ in range(RECORDS)])


KINDS = {"filling": filling, "marking": marking}


def make(kind: str, name: str, *, places: bool) -> feeder.Coordinator:
    """A feed without end over this load."""
    load = LOADS[name]
    settings: dict[str, Any] = {"rows_per_call": load.batch_size} if places else {}
    return feeder.init_data_input_workers(
        [COLUMN], KINDS[kind](load), load.batch_size, 1, FEED, BOUND,
        epochs=None, num_threads=NUM_THREADS, coordinator=feeder.Coordinator(), **settings,
    )  # fmt: skip


def loop(load: Load, num_buffers: int = 1) -> Contender:
    """One thread that reads the same records into so many buffers in turn, again and again."""
    records = _records(load)
    buffers = itertools.cycle([np.zeros_like(records[0]) for _ in range(num_buffers)])
    numbers = itertools.count()

    def take() -> None:
        np.copyto(next(buffers), records[next(numbers) % RECORDS])

    return lambda: nullcontext(take)


def in_process(kind: str, name: str, *, places: bool) -> Contender:
    """The feed, read in its own process."""

    @contextmanager
    def running() -> Iterator[Take]:
        with make(kind, name, places=places) as coordinator:
            feed = coordinator[FEED]

            def take() -> None:
                next(feed)[COLUMN].item(0)

            yield take

    return running


def served(kind: str, name: str, *, places: bool, **options: Any) -> Contender:
    """The feed, made in a process of its own and read here through shared memory."""

    @contextmanager
    def running() -> Iterator[Take]:
        with (
            address_for("ipc") as address,
            Child("serve_places", kind, name, address, str(int(places))) as server,
            connect(server.address, plane="shared", **options) as consumer,
        ):

            def take() -> None:
                next(consumer)[COLUMN].item(0)

            yield take

    return running


def filled(settings: Settings) -> Report:
    """20 MB batches, filled where they lie and copied there, beside a loop over one buffer."""
    ways = {"in process": in_process, "served": served}
    contenders: dict[str, Contender] = {
        LOOP: loop(IMAGES), f"a loop that fills {NUM_SLOTS} buffers": loop(IMAGES, NUM_SLOTS),
    }  # fmt: skip
    for title, way in ways.items():
        contenders[title] = way("filling", "images", places=True)
        contenders[f"{title}, without rows_per_call"] = way("filling", "images", places=False)
    rates = _race(contenders, settings)
    goals = tuple(
        Goal(what=f"places: {title} against {LOOP}", asked=asked, unit="×",
             measured=rates[title].per(rates[LOOP]))
        for title, asked in FILLED_ASKED.items()
    )  # fmt: skip
    rows = tuple(
        (title, *rate_cells(rate, rates[LOOP], IMAGES.batch_bytes)) for title, rate in rates.items()
    )
    return Report(
        case="places", title=f"batches of {IMAGES.name}, written by the fetch function",
        head=("contender", "batches/s", "GB/s", "of the loop"), rows=rows, measures=rates,
        goals=goals,
    )  # fmt: skip


def marked(settings: Settings) -> Report:
    """Served batches of 1 MB and 20 MB, of which the function writes one element: what a batch
    costs, whatever its size. Without a checksum, since a sample reads a 64th of each batch."""
    contenders: dict[str, Contender] = {}
    for name, size in (("vectors", "1 MB"), ("images", "20 MB")):
        contenders[size] = served("marking", name, places=True, credit=CREDIT, checksum="off")
        contenders[f"{size}, checksum sampled"] = served(
            "marking", name, places=True, credit=CREDIT
        )
        contenders[f"{size}, without rows_per_call"] = served(
            "marking", name, places=False, credit=CREDIT, checksum="off"
        )
    rates = _race(contenders, settings)
    goals = tuple(
        Goal(what=f"marks: {size}", asked=MARKED_ASKED_PER_S, measured=rates[size],
             unit="/s")
        for size in ("1 MB", "20 MB")
    )  # fmt: skip
    rows = tuple((title, *rate_cells(rate, rate, 0)[:1]) for title, rate in rates.items())
    return Report(
        case="marks", title="served batches that the fetch function only marks",
        head=("contender", "batches/s"), rows=rows, measures=rates, goals=goals,
    )  # fmt: skip


def _race(contenders: Mapping[str, Contender], settings: Settings) -> dict[str, Spread]:
    measures: list[Callable[[], Measures]] = [
        bounded()(timed(title, contender, settings)) for title, contender in contenders.items()
    ]
    return interleave(measures, settings.repetitions)
