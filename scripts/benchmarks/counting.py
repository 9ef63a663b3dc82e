"""What statistics cost: 8 KB batches with them, and in a build without.

The build without is made here: the lines that count are cut out of the functions on the way of a
batch, and the clocks of waits do nothing.
"""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from contenders import Contender, Take, product
from feeder.feeds.device_feed import DeviceFeed
from feeder.workers.fetch.channel import Channel
from feeder.workers.fetch.fetcher import Fetcher
from feeder.workers.stats import Crowd, Stopwatch, StreamStats
from feeder.workers.stream.batcher import RoundRobinRouter
from fetches import SMALL, constant, fresh
from harness import Measures, Settings, interleave, rate_of
from report import Goal, Report, rate_cells, spread

COUNTING: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (DeviceFeed, "_refill", ("self._handed.after(", "self._handed.taken =")),
    (RoundRobinRouter, "_count", ("self._made.count(",)),
    (Fetcher, "fill", ("stats.begin_list(", "stats.end_list(")),
    (Channel, "acquire", ("self._stats.idle.change(1", "self._stats.idle.change(-1")),
    (Channel, "queue", ("self._stats.queued[",)),
)
"""Where batches are counted: class, method, and what each line that counts holds."""
ASKED = 0.95
CPU = ", by CPU"


class NoStopwatch(Stopwatch):
    def start(self, now: float) -> None:
        pass

    def stop(self, now: float) -> None:
        pass


class NoCrowd(Crowd):
    def change(self, num: int, now: float) -> None:
        pass


class NoStats(StreamStats):
    """Its clocks stand still."""

    def __init__(self, num_partitions: int, num_devices: int) -> None:
        super().__init__(num_partitions, num_devices)
        self.idle, self.chunks, self.room = NoCrowd(), NoStopwatch(), NoStopwatch()
        self.partitions = [NoStopwatch() for _ in range(num_partitions)]


def cut(function: Callable[..., Any], needles: tuple[str, ...]) -> Any:
    """The function without the lines that hold each of the needles; each must be in one line."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    for needle in needles:
        (found,) = [line for line in lines if needle in line]
        lines.remove(found)
    names: dict[str, Any] = {}
    exec("\n".join(lines), function.__globals__, names)
    return names[function.__name__]


def without(contender: Contender) -> Contender:
    """The same contender, made of a build that counts nothing."""

    @contextmanager
    def running() -> Iterator[Take]:
        with ExitStack() as stack:
            for kind, name, needles in COUNTING:
                changed = cut(inspect.getattr_static(kind, name), needles)
                stack.enter_context(mock.patch.object(kind, name, changed))
            stack.enter_context(mock.patch("feeder.feeds.stream.StreamStats", NoStats))
            yield stack.enter_context(contender())

    return running


def statistics(settings: Settings) -> Report:
    """Fresh arrays, which are passed on, and a constant one, which is copied; on and off."""
    contenders = {
        "passed": product(SMALL, lambda: fresh(SMALL)),
        "copied": product(SMALL, lambda: constant(SMALL)),
    }
    measures = []
    for name, contender in contenders.items():
        measures.append(_timed(f"{name}, on", contender, settings))
        measures.append(_timed(f"{name}, off", without(contender), settings))
    found = interleave(measures, settings.repetitions)
    rates = {name: rate for name, rate in found.items() if not name.endswith(CPU)}
    ratios = {name: rates[f"{name}, on"].per(rates[f"{name}, off"]) for name in contenders}
    by_cpu = {
        name: found[f"{name}, on{CPU}"].per(found[f"{name}, off{CPU}"]) for name in contenders
    }
    return Report(
        case="statistics",
        title=f"batches of {SMALL.name} (8 KB), counted and not",
        head=("contender", "batches/s", "GB/s", "of passed, off"),
        rows=tuple(
            (name, *rate_cells(rate, rates["passed, off"], SMALL.batch_bytes))
            for name, rate in rates.items()
        ),
        measures=found,
        goals=tuple(
            Goal(what=f"statistics: {name}, on against off", asked=ASKED, measured=ratio, unit="×")
            for name, ratio in ratios.items()
        ),
        notes=tuple(
            f"{name}, on / off: {spread(ratios[name], '×')}; by the CPU's time, which other load "
            f"disturbs less: {spread(by_cpu[name], '×')}"
            for name in contenders
        ),
    )


def _timed(name: str, contender: Contender, settings: Settings) -> Callable[[], Measures]:
    """Measures batches per second, and per second that the process had a CPU."""

    def measure() -> Measures:
        with contender() as take:
            rate = rate_of(take, settings)
            began, batches = time.process_time(), max(100, int(rate * settings.timed_s))
            for _ in range(batches):
                take()
            return {name: rate, name + CPU: batches / (time.process_time() - began)}

    return measure
