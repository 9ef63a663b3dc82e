"""Fetch functions in Ray actors, beside processes: every way of chunks, and a thousand workers.

The cluster has two nodes on this host: the driver's, and one that stands for another host, whose
actors come by TCP and CURVE, or by Ray's object store, from one node's store to the other's.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import feeder
import process_loads as loads
import sleepers
from contenders import COLUMN, FEED, Contender, Take, timed
from feeder.executors import actors
from feeder.executors import cluster as cluster_module
from harness import Measures, Settings, interleave
from report import Goal, Report, spread

NUM = 2
STORE_BYTES = 200 * 1024 * 1024
PROCESSES = "2 processes"
WAYS = {
    "2 actors, memory of the host": ("mapped", "near"),
    "2 actors, store of the host": ("store", "near"),
    "2 actors on the other node, CURVE": ("frames", "far"),
    "2 actors on the other node, store": ("store", "far"),
}
OURS = "2 actors, memory of the host"
MOST_CONTROL_S = 8.0
"""How long a thousand workers are watched."""


@contextmanager
def cluster() -> Iterator[Any]:
    """Two nodes, of which no process is left."""
    import ray
    from ray.cluster_utils import Cluster

    variables = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        os.environ.update(variables, RAY_TMPDIR=folder)
        made = Cluster()
        try:
            for name in ("near", "far"):
                made.add_node(num_cpus=NUM, resources={name: NUM}, include_dashboard=False,
                              object_store_memory=STORE_BYTES)  # fmt: skip
            ray.init(address=made.address, log_to_driver=False, configure_logging=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()  # type: ignore[no-untyped-call]
            os.environ.clear()
            os.environ.update(before)


def on(executor: Any, fetch: Callable[..., Any], batch_size: int, way: str = "mapped") -> Contender:
    """A feed on an executor, measured from when all of its processes or actors have come."""

    @contextmanager
    def running() -> Iterator[Take]:
        os.environ[actors.DATA] = way
        coordinator = feeder.init_data_input_workers(
            (COLUMN,), fetch, batch_size, 2, FEED, 16, epochs=None, executor=executor,
            coordinator=feeder.Coordinator(),
        )  # fmt: skip
        with coordinator:
            feed: Any = coordinator[FEED]
            pool = feed.streams[0].pipeline._execution._pool
            while len(pool.pids()) < NUM:
                next(feed)
            yield lambda: next(feed)[COLUMN]

    return running


def _race(
    case: str, title: str, fetch: Callable[..., Any], batch_size: int, asked: float,
    settings: Settings,
) -> Report:  # fmt: skip
    contenders = {PROCESSES: on(feeder.Processes(NUM), fetch, batch_size)}
    for name, (way, node) in WAYS.items():
        executor = feeder.RayActors(NUM, resources={node: 1})
        contenders[name] = on(executor, fetch, batch_size, way)
    with cluster():
        rates = interleave(
            [timed(name, contender, settings) for name, contender in contenders.items()],
            settings.repetitions,
        )
    ratios = {name: rate.per(rates[PROCESSES]) for name, rate in rates.items()}
    return Report(
        case=case, title=title, head=("contender", "batches/s", "of 2 processes"),
        rows=tuple((name, spread(rates[name]), spread(ratios[name], "×")) for name in rates),
        measures=rates,
        goals=(
            Goal(what=f"{case}: {OURS}, of {PROCESSES}", asked=asked, measured=ratios[OURS],
                 unit="×"),
        ),
    )  # fmt: skip


def chunks(settings: Settings) -> Report:
    """Chunks of 1 MB, written by `call.empty`."""
    return _race("chunks", "1 MB chunks, written by call.empty", loads.megabyte,
                 loads.MEGABYTE_ROWS, 0.7, settings)  # fmt: skip


def lines(settings: Settings) -> Report:
    """Lines of words made numbers, by Python alone."""
    return _race("lines", f"{loads.TEXT_ROWS} lines of {loads.TEXT_WORDS} words, in Python",
                 loads.text, loads.TEXT_ROWS, 0.9, settings)  # fmt: skip


def first(settings: Settings) -> Report:
    """From the return of `ray.init` to the first batch, in a script of its own."""
    with cluster() as made:

        def start() -> Measures:
            output = subprocess.run(
                [sys.executable, "-c", "import actors; actors.time_first_batch()"],
                cwd=Path(__file__).parent, env={**os.environ, "RAY_ADDRESS": made.address},
                check=True, stdout=subprocess.PIPE, text=True,
            ).stdout  # fmt: skip
            return {"first batch, s": float(output.split()[-1])}

        found = interleave([start], settings.repetitions)
    times = found["first batch, s"]
    return Report(
        case="first", title="from ray.init to the first batch of 2 actors", head=("", "seconds"),
        rows=(("first batch", spread(times)),), measures=found,
        goals=(Goal(what="first batch", asked=2.0, measured=times, unit="s", at_most=True),),
    )  # fmt: skip


def time_first_batch() -> None:
    """Print the seconds from `ray.init` to the first batch."""
    import ray

    ray.init(address="auto", log_to_driver=False)
    begin = time.perf_counter()
    with in_first_batch() as take:
        take()
        print(time.perf_counter() - begin)
    ray.shutdown()


@contextmanager
def in_first_batch() -> Iterator[Take]:
    """A feed on actors."""
    coordinator = feeder.init_data_input_workers(
        (COLUMN,), loads.small, 64, 2, FEED, executor=feeder.RayActors(NUM), epochs=None,
        coordinator=feeder.Coordinator(),
    )  # fmt: skip
    with coordinator:
        feed = coordinator[FEED]
        yield lambda: next(feed)[COLUMN]


def limits(settings: Settings) -> Report:
    """What a gigabyte costs the driver, and an actor its host: the inputs of docs/scale.md."""
    with cluster():
        found = interleave(
            [lambda name=name: cost_of(name) for name in WAYS],  # type: ignore[misc]
            settings.repetitions,
        )
    return Report(
        case="limits", title="1 MB chunks, what they cost", head=("", ""),
        rows=tuple((name, spread(value)) for name, value in found.items()), measures=found,
        goals=(),
    )  # fmt: skip


def cost_of(name: str) -> Measures:
    """The driver's seconds of CPU for a gigabyte that comes by a way, and an actor's own memory."""
    way, node = WAYS[name]
    executor, num = feeder.RayActors(NUM, resources={node: 1}), 300
    with on(executor, loads.megabyte, loads.MEGABYTE_ROWS, way)() as take:
        for _ in range(50):
            take()
        begin = time.process_time()
        for _ in range(num):
            take()
        seconds = (time.process_time() - begin) / (num / 1024)
        return {f"{name}: s/GB": seconds, "memory of an actor, MiB": memory_of_an_actor()}


def memory_of_an_actor() -> float:
    """Of what it shares with others its part."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"FeederActor" in (folder / "cmdline").read_bytes():
                _, _, rest = (folder / "smaps_rollup").read_text().partition("\nPss:")
                found.append(int(rest.split()[0]) / 1024)
    return max(found)


def control(settings: Settings) -> Report:
    """A thousand workers that sleep, in four processes: tickets, answers, the driver's memory."""

    def sleep() -> Measures:
        # In a process of its own: what an earlier feed had is used again, and would be counted
        # out.
        output = subprocess.run(
            [sys.executable, "-c", "import actors; actors.tell_control()"],
            cwd=Path(__file__).parent, check=True, stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip
        rate, kib = map(float, output.split()[-2:])
        return {"calls/s": rate, "KiB each": kib}

    found = interleave([sleep], settings.repetitions)
    return Report(
        case="control", title=f"1,000 workers that sleep {sleepers.SLEEP_S} s for a ticket",
        head=("", ""), rows=tuple((name, spread(value)) for name, value in found.items()),
        measures=found,
        goals=(
            Goal(what="calls/s", asked=20_000, measured=found["calls/s"], unit="/s"),
            Goal(what="memory of the driver for each worker", asked=64,
                 measured=found["KiB each"], unit="KiB", at_most=True),
        ),
    )  # fmt: skip


def tell_control() -> None:
    """Print calls per second, and the KiB of the driver for each worker."""
    # What is imported when the first feed starts is no worker's.
    sleep_through(8, 0.1)
    found = sleep_through(1000, MOST_CONTROL_S)
    print(found["calls/s"], found["KiB each"])


def sleep_through(num: int, seconds: float) -> Measures:
    """Run a feed over so many workers."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ[actors.DATA] = "frames"
    with ExitStack() as stack:
        stand_in = stack.enter_context(sleepers.hosts(num, num_hosts=4))
        stack.callback(setattr, actors, "Cluster", cluster_module.Cluster)
        setattr(actors, "Cluster", stand_in)  # noqa: B010
        coordinator = feeder.init_data_input_workers(
            (COLUMN,), loads.small, 64, 2, FEED, 500, epochs=None,
            executor=feeder.RayActors(num), coordinator=feeder.Coordinator(), timeout=60.0,
        )  # fmt: skip
        before = sleepers.resident_kib()
        with coordinator:
            feed: Any = coordinator[FEED]
            pool = feed.streams[0].pipeline._execution._pool
            while len(pool.pids()) < num:
                next(feed)
            begin, rows = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - begin) < seconds:
                rows += len(next(feed)[COLUMN])
            kib = (sleepers.resident_kib() - before) / num
    return {"calls/s": rows / elapsed, "KiB each": kib}
