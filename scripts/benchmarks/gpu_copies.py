"""How fast batches get to a GPU: in process, from a server, by a plain loop, by a DataLoader."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import feeder
from children import Child, address_for, bounded
from contenders import COLUMN, FEED, Contender, Take, copyto, timed
from factories import LOADS
from feeder.devices.cuda.driver import open_driver
from fetches import NUM_WORKERS, Load, constant
from harness import Measures, Settings, Spread, interleave
from places import KINDS
from report import Goal, Report, figure, spread
from served import Batches, Samples, connect, has_torch

DEVICE = "cuda:0"
BUS = "loop of memcpyAsync"
IN_PROCESS = "feeder, in process"
SERVED = "feeder, from a server's memory"
COPYTO = "copyto by one thread, on the host"
WRITTEN = "feeder, in process, filled by 8 fetchers"
MARKED = "feeder, in process, marked by them"
AS_TORCH = "feeder, in process, as tensors of PyTorch"
TORCH = "DataLoader, 2 workers, pinned"
FEED_LOADER = "FeedLoader, 2 workers"
WRITERS = 8
"""Threads that fill batches at once."""
IN_FLIGHT = 4
"""Copies that the loop has under way: one would wait for the host in between."""
BUS_ASKED, SMALL_ASKED_PER_S, TORCH_ASKED, SAMPLES_ASKED = 0.95, 30_000, 5.0, 1.3


def memcpy_loop(load: Load) -> Contender:
    """Asynchronous copies of a batch's bytes, from pinned memory into memory of the device."""

    @contextmanager
    def running() -> Iterator[Take]:
        driver = open_driver(DEVICE)
        driver.bind()
        stream = driver.make_stream()
        slots = [
            (driver.alloc_pinned(load.batch_bytes), driver.alloc_device(load.batch_bytes),
             driver.make_event())
            for _ in range(IN_FLIGHT)
        ]  # fmt: skip
        turn = deque(slots)

        def take() -> None:
            source, target, done = turn[0]
            turn.rotate(-1)
            driver.synchronize(done)
            driver.copy_in(target.address, source.address, load.batch_bytes, stream)
            driver.record(done, stream)

        yield take
        driver.drain(stream)

    return running


def on_gpu(load: Load, device: str = DEVICE) -> Contender:
    """The feeder as users have it."""

    @contextmanager
    def running() -> Iterator[Take]:
        with make_coordinator(load, device) as coordinator:
            feed = coordinator[FEED]
            yield lambda: next(feed)[COLUMN]

    return running


def written_on_gpu(kind: str, load: Load) -> Contender:
    """The feeder, whose fetch functions write where the batch lies (`rows_per_call`)."""

    @contextmanager
    def running() -> Iterator[Take]:
        with feeder.init_data_input_workers(
            [COLUMN], KINDS[kind](load), load.batch_size, 1, FEED, load.bound, epochs=None,
            num_threads=WRITERS, rows_per_call=load.batch_size, depth=WRITERS + 4,
            devices=(DEVICE,), coordinator=feeder.Coordinator(),
        ) as coordinator:  # fmt: skip
            feed = coordinator[FEED]
            yield lambda: next(feed)[COLUMN]

    return running


def make_coordinator(load: Load, device: str = DEVICE) -> feeder.Coordinator:
    """A feed on the GPU over this load."""
    return feeder.init_data_input_workers(
        [COLUMN], constant(load), load.batch_size, NUM_WORKERS, FEED, load.bound,
        devices=(device,), coordinator=feeder.Coordinator(),
    )  # fmt: skip


def served_to_gpu(name: str, paths: set[str]) -> Contender:
    """A server in a process of its own, read here; on what way is noted in `paths`."""

    @contextmanager
    def running() -> Iterator[Take]:
        with (
            address_for("ipc") as address,
            Child("serve", name, address) as server,
            connect(server.address, device=DEVICE, plane="shared") as consumer,
        ):
            next(consumer)
            paths.add(consumer.path)
            yield lambda: next(consumer)[COLUMN]

    return running


def data_loader(dataset: Any, batch_size: int | None = None) -> Contender:
    """PyTorch's DataLoader over a data set, and copies that do not wait."""

    @contextmanager
    def running() -> Iterator[Take]:
        torch = importlib.import_module("torch")
        data = importlib.import_module("torch.utils.data")
        loader = data.DataLoader(dataset, batch_size, num_workers=NUM_WORKERS, pin_memory=True)
        batches = iter(loader)

        def take() -> Any:
            return next(batches).to(DEVICE, non_blocking=True)

        take()
        yield take
        torch.cuda.synchronize()

    return running


def feed_loader(load: Load) -> Contender:
    """The same data set of samples as DataLoader has."""

    @contextmanager
    def running() -> Iterator[Take]:
        adapter = importlib.import_module("feeder.adapters.torch")
        loader = adapter.FeedLoader(
            Samples(load), load.batch_size, num_workers=NUM_WORKERS, device=DEVICE
        )
        with loader:
            batches = iter(loader)
            next(batches)
            yield partial(next, batches)
            importlib.import_module("torch").cuda.synchronize()

    return running


# ---- cases


def bus(case: str, name: str, settings: Settings) -> Report:
    """Large batches against the bus."""
    load, paths = LOADS[name], set[str]()
    rates = _race(
        {IN_PROCESS: on_gpu(load), SERVED: served_to_gpu(name, paths),
         WRITTEN: written_on_gpu("filling", load), MARKED: written_on_gpu("marking", load),
         BUS: memcpy_loop(load), COPYTO: copyto(load)},
        settings,
    )  # fmt: skip
    goals = [
        *(_against(case, rates, name, BUS, BUS_ASKED) for name in (MARKED, WRITTEN)),
        *(_against(case, rates, name, COPYTO, BUS_ASKED) for name in (IN_PROCESS, SERVED)),
    ]
    notes = (
        f"from a server's memory by way of: {', '.join(sorted(paths))}",
        "batches that are copied are written by one thread, and go no faster than it copies",
    )
    return _report(case, load, rates, goals, notes)


def small(settings: Settings) -> Report:
    """Batches so small that the calls count, and not their bytes."""
    load = LOADS["small"]
    rates = _race(
        {IN_PROCESS: on_gpu(load), BUS: memcpy_loop(load), COPYTO: copyto(load)}, settings
    )
    goal = Goal(
        what=f"gpu-small: {IN_PROCESS}", asked=SMALL_ASKED_PER_S, measured=rates[IN_PROCESS],
        unit="/s",
    )  # fmt: skip
    return _report("gpu-small", load, rates, [goal], ())


def loader(settings: Settings) -> Report:
    """19.8 MB batches against PyTorch's DataLoader."""
    load = LOADS["images"]
    contenders = {IN_PROCESS: on_gpu(load), BUS: memcpy_loop(load), COPYTO: copyto(load)}
    if not has_torch():
        rates = _race(contenders, settings)
        note = "PyTorch is not installed: no DataLoader beside it"
        return _report("gpu-loader", load, rates, [], (note,))
    rates = _race({**contenders, TORCH: data_loader(Batches(load))}, settings)
    goal = _against("gpu-loader", rates, IN_PROCESS, TORCH, TORCH_ASKED)
    return _report("gpu-loader", load, rates, [goal], ())


def samples(settings: Settings) -> Report:
    """Samples of a data set, stacked by workers: FeedLoader and DataLoader with the same."""
    load = LOADS["images"]
    if not has_torch():
        rates = _race({BUS: memcpy_loop(load), COPYTO: copyto(load)}, settings)
        return _report("gpu-samples", load, rates, [], ("PyTorch is not installed",))
    contenders = {
        FEED_LOADER: feed_loader(load), TORCH: data_loader(Samples(load), load.batch_size),
        AS_TORCH: on_gpu(load, "torch:0"), BUS: memcpy_loop(load), COPYTO: copyto(load),
    }  # fmt: skip
    rates = _race(contenders, settings)
    goal = _against("gpu-samples", rates, FEED_LOADER, TORCH, SAMPLES_ASKED)
    return _report("gpu-samples", load, rates, [goal], ())


def _race(contenders: Mapping[str, Contender], settings: Settings) -> dict[str, Spread]:
    measures: list[Callable[[], Measures]] = [
        bounded()(timed(title, contender, settings)) for title, contender in contenders.items()
    ]
    return interleave(measures, settings.repetitions)


def _against(case: str, rates: Mapping[str, Spread], name: str, other: str, asked: float) -> Goal:
    measured = rates[name].per(rates[other])
    return Goal(what=f"{case}: {name} against {other}", asked=asked, measured=measured, unit="×")


def _report(
    case: str, load: Load, rates: dict[str, Spread], goals: list[Goal], notes: tuple[str, ...]
) -> Report:
    return Report(
        case=case,
        title=f"batches of {load.name} ({load.batch_bytes / 1e6:.3g} MB) on {DEVICE}",
        head=("contender", "batches/s", "GB/s", "of the bus"),
        rows=tuple(
            (name, spread(rate), figure(rate.median * load.batch_bytes / 1e9),
             figure(rate.per(rates[BUS]).median))
            for name, rate in rates.items()
        ),
        measures=rates,
        goals=tuple(goals),
        notes=notes,
    )  # fmt: skip
