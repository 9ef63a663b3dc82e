"""Whether a training step notices that it is fed: steps of some 20 ms, alone and with batches."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from children import bounded
from contenders import FEED
from factories import LOADS
from feeder.devices.cuda.driver import open_driver
from gpu_copies import DEVICE, make_coordinator
from harness import Measures, Settings, interleave
from report import Goal, Report, spread

STEP_S = 0.020
STALL_S = 0.001
"""A batch that is waited for longer was not there."""
ALONE, FED, STALLS = "compute alone", "fed", "stalls"
SLOWER_ASKED = 1.0
_SIZE = 4096

Work = Callable[[], None]
"""Gives the GPU the work of one step; returns before it is done."""


def make_work() -> tuple[Work, Work]:
    """Work of a step's length, and what waits for it: products of matrices, by PyTorch where that
    is installed, else by CuPy, which needs cuBLAS."""
    module = importlib.import_module("torch" if importlib.util.find_spec("torch") else "cupy")
    if module.__name__ == "torch":
        matrix = module.ones((_SIZE, _SIZE), device=DEVICE)
        wait = module.cuda.synchronize
    else:
        matrix = module.ones((_SIZE, _SIZE), dtype="float32")
        wait = module.cuda.Device(0).synchronize
    target = module.empty_like(matrix)

    def product() -> None:
        module.matmul(matrix, matrix, out=target)

    num = max(1, round(STEP_S / _time_of(product, wait)))

    def work() -> None:
        for _ in range(num):
            product()

    return work, wait


def _time_of(work: Work, wait: Work, num: int = 20) -> float:
    """Seconds that a piece of work takes, the first one aside."""
    work()
    wait()
    start = time.perf_counter()
    for _ in range(num):
        work()
    wait()
    return (time.perf_counter() - start) / num


def steps(settings: Settings) -> Report:
    """Steps alone, and fed with 19.8 MB batches: their time, and how often a batch was late."""
    work, wait = make_work()
    num = max(20, int(4 * settings.timed_s / STEP_S))
    measured = interleave(
        [bounded()(lambda: _alone(work, wait, num)), bounded()(lambda: _fed(work, wait, num))],
        settings.repetitions,
    )
    slower = measured[FED].per(measured[ALONE]).minus(measured[ALONE].per(measured[ALONE]))
    goals = (
        Goal(what="gpu-step: step time beyond compute alone", asked=SLOWER_ASKED, unit="%",
             measured=slower.times(100), at_most=True),
        Goal(what="gpu-step: stalls after the warm-up", asked=0, measured=measured[STALLS],
             at_most=True),
    )  # fmt: skip
    load = LOADS["images"]
    return Report(
        case="gpu-step",
        title=f"steps of {STEP_S * 1e3:.0f} ms, fed with batches of {load.name}",
        head=("contender", "ms a step"),
        rows=tuple((name, spread(measured[name].times(1e3))) for name in (ALONE, FED)),
        measures=measured,
        goals=goals,
        notes=(f"stalls of more than {STALL_S * 1e3:.0f} ms: {spread(measured[STALLS])}",),
    )


def _alone(work: Work, wait: Work, num: int) -> Measures:
    return {ALONE: _time_of(work, wait, num)}


def _fed(work: Work, wait: Work, num: int) -> Measures:
    """Steps as a trainer makes them: it waits for the step before last, so that the host does not
    run away from the GPU."""
    with _feed() as (feed, driver):
        late = 0
        held: Any = None
        done = [driver.make_event(), driver.make_event()]
        for step in range(2 * num):
            if step == num:
                wait()
                start, late = time.perf_counter(), 0
            asked_at = time.perf_counter()
            held = next(feed)
            late += time.perf_counter() - asked_at > STALL_S
            work()
            driver.synchronize(done[step % 2])
            driver.record(done[step % 2], driver.current_stream())
        wait()
        del held
        return {FED: (time.perf_counter() - start) / num, STALLS: float(late)}


@contextmanager
def _feed() -> Iterator[tuple[Any, Any]]:
    driver = open_driver(DEVICE)
    driver.bind()
    with make_coordinator(LOADS["images"]) as coordinator:
        yield coordinator[FEED], driver
