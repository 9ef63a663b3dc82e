"""Batches on a GPU, beside what its bus can do.

That is a plain loop of asynchronous copies of the same bytes from pinned memory. Fetch functions
return chunks that were prepared once, or write the pinned memory themselves. Where there is no GPU
nothing is measured. `scripts/gpu-report` writes what came out of it into docs/gpu.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial

import beside_torch
from benchmarks.contenders import copyto, feed
from benchmarks.fetches import HUGE, IMAGES, KINDS, SMALL, Size, constant
from benchmarks.harness import Contender, Cost, Row, Settings, Take, Watch, batches
from benchmarks.report import Load
from benchmarks.service import served
from feeder.devices.cuda.driver import open_driver
from feeder.errors import ConfigError

DEVICE = "cuda:0"
WRITERS = 8
"""Threads that fill batches at once."""
IN_FLIGHT = 4
"""Copies that the loop has under way: one would wait for the host in between."""
STEP_S = 0.020
STALL_S = 0.001
"""A batch that is waited for longer was not there."""
MATRIX = 4096


@contextmanager
def memcpy_loop(size: Size) -> Iterator[Take]:
    """Asynchronous copies of a batch's bytes, from pinned memory into memory of the device."""
    num_bytes = size.rows(1).nbytes * size.batch_size
    driver = open_driver(DEVICE)
    driver.bind()
    stream = driver.make_stream()
    turn = deque(
        (driver.alloc_pinned(num_bytes), driver.alloc_device(num_bytes), driver.make_event())
        for _ in range(IN_FLIGHT)
    )

    def take() -> None:
        source, target, done = turn[0]
        turn.rotate(-1)
        driver.synchronize(done)
        driver.copy_in(target.address, source.address, num_bytes, stream)
        driver.record(done, stream)

    yield take
    driver.drain(stream)


def on_gpu(size: Size, device: str = DEVICE) -> Contender:
    """A feed on the GPU whose rows are copied."""
    return partial(feed, partial(constant, size), size, devices=(device,))


def written_on_gpu(kind: str, size: Size) -> Contender:
    """A feed whose fetch functions write where the batch lies (`rows_per_call`)."""
    return partial(
        feed, partial(KINDS[kind], size), size, 1, num_threads=WRITERS,
        rows_per_call=size.batch_size, depth=WRITERS + 4, devices=(DEVICE,),
    )  # fmt: skip


# ---- steps of a trainer

Work = Callable[[], None]
"""Gives the GPU the work of one step; returns before it is done."""


@cache
def step_work() -> tuple[Work, Work]:
    """Work of a step's length, and what waits for it: products of matrices, by PyTorch where that
    is installed, else by CuPy, which needs cuBLAS."""
    module = importlib.import_module("torch" if importlib.util.find_spec("torch") else "cupy")
    if module.__name__ == "torch":
        matrix = module.ones((MATRIX, MATRIX), device=DEVICE)
        wait = module.cuda.synchronize
    else:
        matrix = module.ones((MATRIX, MATRIX), dtype="float32")
        wait = module.cuda.Device(0).synchronize
    target = module.empty_like(matrix)

    def work(num: int) -> None:
        for _ in range(num):
            module.matmul(matrix, matrix, out=target)

    watch = Watch()
    work(1)
    wait()
    with watch:
        work(20)
        wait()
    num = max(1, round(STEP_S / watch.cost(20).wall_s))
    return partial(work, num), wait


def step(settings: Settings, fed: Contender = lambda: nullcontext(lambda: None)) -> Cost:
    """Steps as a trainer makes them, with a batch each or without; how many batches were late. It
    waits for the step before last, so that the host does not run away from the GPU."""
    (work, wait), watch = step_work(), Watch()
    num = max(20, int(4 * settings.timed_s / STEP_S))
    driver = open_driver(DEVICE)
    driver.bind()
    done = [driver.make_event(), driver.make_event()]
    with fed() as take:

        def steps() -> int:
            late = 0
            for number in range(num):
                asked_at = time.perf_counter()
                held = take()
                late += time.perf_counter() - asked_at > STALL_S
                work()
                driver.synchronize(done[number % 2])
                driver.record(done[number % 2], driver.current_stream())
            wait()
            del held
            return late

        steps()
        with watch:
            stalls = steps()
    return watch.cost(num, stalls=float(stalls))


# ---- rows

LARGE = (("20 MB", "images", IMAGES), ("154 MB", "images-250", HUGE))


def _bus_rows(title: str, name: str, size: Size) -> Iterator[Row]:
    bus, host = f"{title}, loop of memcpyAsync", f"{title}, copy on the host"
    to_gpu = partial(served, name, device=DEVICE, plane="shared")
    yield batches(bus, partial(memcpy_loop, size), ours=False)
    yield batches(host, partial(copyto, size), ours=False)
    yield batches(f"{title}, marked by 8 fetchers", written_on_gpu("marking", size), of=bus)
    yield batches(f"{title}, filled by 8 fetchers", written_on_gpu("filling", size), of=bus)
    yield batches(f"{title}, copied", on_gpu(size), of=host)
    yield batches(f"{title}, from a server's memory", to_gpu, of=host)


LOAD = Load(
    name="gpu",
    about=__doc__,
    rows=(
        *(row for large in LARGE for row in _bus_rows(*large)),
        batches("8 KB, copied", on_gpu(SMALL), of="8 KB, loop of memcpyAsync"),
        batches("8 KB, loop of memcpyAsync", partial(memcpy_loop, SMALL), ours=False),
        Row(name="step, fed", measure=partial(step, fed=on_gpu(IMAGES)), of="step, alone",
            counts_batches=False),
        Row(name="step, made ready", measure=partial(step, fed=beside_torch.made_on_gpu),
            of="step, alone", counts_batches=False, needs="torch"),
        Row(name="step, alone", measure=step, ours=False, counts_batches=False),
        *beside_torch.rows(on_gpu),
    ),
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Measure; 1 where there is no GPU."""
    try:
        open_driver(DEVICE)
    except ConfigError as error:
        # A command line that only asks for help is answered all the same.
        if not {"-h", "--help"} & set(arguments):
            print(f"bench gpu: nothing is measured, {error}", file=sys.stderr)
            return 1
    return LOAD.main(arguments)
