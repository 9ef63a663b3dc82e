"""Fetch functions in processes, beside threads, plain loops and the loaders of others."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import feeder
import jpegs
import process_loads as loads
from contenders import COLUMN, FEED, Contender, Take, copyto, timed
from fetches import IMAGES, SMALL
from harness import Measures, Settings, interleave
from report import Goal, Report, spread

PROCESSES = 2
LOOP, THREADS, OURS = "plain loop", "feed, 2 threads", "feed, 2 processes"
LOADER, GRAIN = "DataLoader, 2 workers", "Grain, 2 workers"


def of_feed(fetch: Callable[..., Any], batch_size: int, names: tuple[str, ...] = (COLUMN,),
            bound: int = 16, **settings: Any) -> Contender:  # fmt: skip
    """A feed without end over a function or a source."""

    @contextmanager
    def running() -> Iterator[Take]:
        coordinator = feeder.init_data_input_workers(
            names, fetch, batch_size, 2, FEED, bound, epochs=None,
            coordinator=feeder.Coordinator(), **settings,
        )  # fmt: skip
        with coordinator:
            feed = coordinator[FEED]
            yield lambda: next(feed)[names[0]]

    return running


def in_processes(fetch: Callable[..., Any], batch_size: int, **settings: Any) -> Contender:
    """The same in processes."""
    return of_feed(fetch, batch_size, executor=feeder.Processes(PROCESSES), **settings)


def in_threads(fetch: Callable[..., Any], batch_size: int, **settings: Any) -> Contender:
    """The same on as many threads."""
    return of_feed(fetch, batch_size, executor=feeder.Threads(PROCESSES), **settings)


def plain(fetch: Callable[[Any], Any], batch_size: int) -> Contender:
    """One thread that calls the function."""
    numbers = count()
    return lambda: nullcontext(lambda: fetch(feeder.Call(next(numbers), 0, 0, batch_size, 0))[0])


def data_loader(dataset: Callable[[], Any], batch_size: int) -> Contender:
    """PyTorch's DataLoader over a dataset of single rows, with as many worker processes."""

    @contextmanager
    def running() -> Iterator[Take]:
        data = importlib.import_module("torch.utils.data")
        batches = iter(
            data.DataLoader(dataset(), batch_size, num_workers=PROCESSES, prefetch_factor=8)
        )
        try:
            yield lambda: next(batches)
        finally:
            batches._shutdown_workers()

    return running


def grain(dataset: Callable[[], Any], batch_size: int) -> Contender:
    """Grain over the same, with as many worker processes."""

    @contextmanager
    def running() -> Iterator[Take]:
        module: Any = importlib.import_module("grain")
        made = module.MapDataset.source(dataset()).batch(batch_size).to_iter_dataset()
        options = module.MultiprocessingOptions(num_workers=PROCESSES)
        batches = iter(made.mp_prefetch(options))
        try:
            yield lambda: next(batches)
        finally:
            batches.close()

    return running


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _race(
    case: str, title: str, contenders: dict[str, Contender], settings: Settings,
    asked: dict[str, float], ours: str = OURS, batch: float = 1.0,
) -> Report:  # fmt: skip
    """Contenders in turns; `asked` is what ours is to reach of each."""
    rates = interleave(
        [timed(name, contender, settings) for name, contender in contenders.items()],
        settings.repetitions,
    )
    ratios = {name: rates[ours].per(rate) for name, rate in rates.items()}
    missing = [name for name in asked if name not in rates]
    return Report(
        case=case,
        title=title,
        head=("contender", "batches/s", f"{ours}, of it"),
        rows=tuple((name, spread(rates[name]), spread(ratios[name], "×")) for name in rates),
        measures=rates,
        goals=tuple(
            Goal(what=f"{case}: {ours}, of {name}", asked=times, measured=ratios[name], unit="×")
            for name, times in asked.items()
            if name in rates
        ),
        notes=tuple(f"not installed: {name}" for name in missing),
    )


def text(settings: Settings) -> Report:
    """Lines of words made numbers, by Python alone."""
    size = loads.TEXT_ROWS
    contenders = {
        LOOP: plain(loads.text, size),
        THREADS: in_threads(loads.text, size),
        OURS: in_processes(loads.text, size),
        **({LOADER: data_loader(loads.Text, size)} if _has("torch") else {}),
        **({GRAIN: grain(loads.Text, size)} if _has("grain") else {}),
    }
    return _race(
        "text", f"{size} lines of {loads.TEXT_WORDS} words, tokenised in Python", contenders,
        settings, {LOOP: 1.8, THREADS: 2.0, LOADER: 1.7, GRAIN: 2.8},
    )  # fmt: skip


def pictures(settings: Settings) -> Report:
    """JPEGs decoded by Pillow."""
    source = feeder.sources.image_folder(jpegs.photographs(), decoder="pillow")
    size, names = jpegs.BATCH_SIZE, ("image", "label")
    contenders = {
        LOOP: plain(_cycled(source), size),
        THREADS: in_threads(source, size, names=names, bound=8),
        OURS: in_processes(source, size, names=names, bound=8),
        **({LOADER: data_loader(Pictures, size)} if _has("torch") else {}),
    }
    return _race(
        "pictures", f"{size} JPEGs of 480 × 480 pixels, decoded by Pillow", contenders, settings,
        {THREADS: 0.95, LOADER: 1.4},
    )  # fmt: skip


def _cycled(source: Any) -> Callable[[Any], Any]:
    most = jpegs.NUM_FILES // jpegs.BATCH_SIZE
    return lambda call: source(call._replace(index=call.index % most))


class Pictures:
    """The same files as a dataset, again and again."""

    def __init__(self) -> None:
        self._files = sorted(jpegs.photographs().glob("*/*.jpg"))

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, number: int) -> Any:
        import numpy as np
        from PIL import Image

        return np.asarray(Image.open(self._files[number % len(self._files)]).convert("RGB"))


def large(settings: Settings) -> Report:
    """20 MB chunks that are written to where they are sent from."""
    contenders = {
        "memcpy": copyto(IMAGES),
        THREADS: in_threads(loads.images, IMAGES.batch_size),
        OURS: in_processes(loads.images, IMAGES.batch_size),
    }
    return _race(
        "large", "20 MB chunks, written by call.empty", contenders, settings, {"memcpy": 0.85}
    )


def small(settings: Settings) -> Report:
    """8 KB batches from chunks of a batch."""
    fetch, size = loads.small, SMALL.batch_size
    contenders = {
        THREADS: in_threads(fetch, size, bound=100),
        OURS: in_processes(fetch, size, bound=100),
    }
    rates = interleave(
        [timed(name, contender, settings) for name, contender in contenders.items()],
        settings.repetitions,
    )
    return Report(
        case="small", title="8 KB batches from chunks of 64 rows", head=("contender", "batches/s"),
        rows=tuple((name, spread(rate)) for name, rate in rates.items()), measures=rates,
        goals=(Goal(what="small: batches/s", asked=30_000, measured=rates[OURS], unit="/s"),),
    )  # fmt: skip


def starting(settings: Settings) -> Report:
    """From the call of the front door to the first batch; and how long a killed process is gone."""

    def start() -> Measures:
        begin = time.perf_counter()
        with in_processes(loads.small, SMALL.batch_size)() as take:
            take()
            return {"first batch, ms": (time.perf_counter() - begin) * 1e3}

    def kill() -> Measures:
        return {"after a kill, ms": statistics.median(_kills(settings.tries)) * 1e3}

    found = interleave([start, kill], settings.repetitions)
    return Report(
        case="starting", title="2 processes whose function imports NumPy",
        head=("from", "milliseconds"),
        rows=tuple((name, spread(times)) for name, times in found.items()), measures=found,
        goals=(
            Goal(what="start: first batch", asked=300, measured=found["first batch, ms"],
                 unit="ms", at_most=True),
            Goal(what="a killed process: its call is made again", asked=150,
                 measured=found["after a kill, ms"], unit="ms", at_most=True),
        ),
    )  # fmt: skip


def _kills(times: int) -> Iterator[float]:
    """How long it takes until the next batch, where the one process is killed and nothing is
    buffered."""
    coordinator = feeder.init_data_input_workers(
        [COLUMN], loads.images, IMAGES.batch_size, 1, FEED, 1, epochs=None,
        executor=feeder.Processes(1), coordinator=feeder.Coordinator(),
    )  # fmt: skip
    with coordinator:
        feed: Any = coordinator[FEED]
        pool = feed.streams[0].pipeline._execution._pool
        next(feed)
        for _ in range(times):
            (pid,) = pool.pids()
            begin = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            # Some are there already: with the one that is under way, four at most.
            for _ in range(4):
                next(feed)
            yield time.perf_counter() - begin
