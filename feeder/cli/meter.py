"""Counts, rates and the running digest of what `feeder consume` has read, shown as it reads."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from feeder.observe.humanize import size
from feeder.workers.stream.batch import Batch

if TYPE_CHECKING:
    from feeder.service.client.consumer import Consumer

# As quick as an eye follows; drawing takes the interpreter from the reading thread.
REDRAW_S = 0.2
RATE_SAMPLES = 10
"""Redraws over which the rates of the progress line are taken."""


class Meter:
    """Counts batches. The reading thread writes it; others read it, a batch late at most."""

    def __init__(self) -> None:
        """The clock starts now."""
        self.batches = 0
        """Batches read."""
        self.rows = 0
        """Real rows in them."""
        self.bytes = 0
        """Bytes of all their columns."""
        self._digest = xxhash.xxh3_128()
        self._began = time.monotonic()
        self._ended: float | None = None

    def add(self, batch: Batch) -> None:
        """Count a batch, and take all its bytes, column after column, into the digest."""
        for array in batch.columns:
            # Byte by byte: equal values of another layout or byte order are other bytes.
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._digest.update(data)
            self.bytes += data.nbytes
        self.rows += batch.rows
        self.batches += 1

    def stop(self) -> None:
        """The clock stops."""
        self._ended = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, up to the stop."""
        return (self._ended or time.monotonic()) - self._began

    def hexdigest(self) -> str:
        """xxh3 (128 bits) of every byte so far."""
        return self._digest.hexdigest()

    def summary(self, consumer: Consumer) -> list[str]:
        """Lines to print: counts, rates, and the digest."""
        # From zero: the summary's rates are those of the whole run, the progress line's of the last
        # seconds.
        end = Sample.of(self, consumer)
        return [
            f"{self.batches} batches, {self.rows} rows, {size(self.bytes)} in "
            f"{self.elapsed_s:.3f} s over {consumer.plane}: {Sample(0.0, 0, 0, 0.0).rates(end)}",
            f"xxh3 {self.hexdigest()}",
        ]


class Sample(NamedTuple):
    """A meter at one moment."""

    at_s: float
    """Seconds since the start."""
    batches: int
    """Batches by then."""
    bytes: int
    """Bytes by then."""
    waited_s: float
    """Seconds waited for batches by then."""

    @classmethod
    def of(cls, meter: Meter, consumer: Consumer) -> Sample:
        """The meter now."""
        waited_s = float(consumer.stats()["starved_s"])
        return cls(meter.elapsed_s, meter.batches, meter.bytes, waited_s)

    def rates(self, later: Sample) -> str:
        """Batches and bytes a second between two moments, and the share of time waited."""
        passed_s = max(later.at_s - self.at_s, 1e-9)
        waited = min(1.0, (later.waited_s - self.waited_s) / passed_s)
        return (
            f"{(later.batches - self.batches) / passed_s:.0f} batches/s, "
            f"{size((later.bytes - self.bytes) / passed_s)}/s, waited {waited:.0%}"
        )


def show_progress(meter: Meter, consumer: Consumer, total: int | None, over: int) -> None:
    """Show how the reading goes until the eventfd `over` is readable: on stderr where that is a
    terminal, else not at all."""
    if not sys.stderr.isatty():
        os.read(over, 8)
        return
    with progress_line(total) as draw:
        samples = deque([Sample.of(meter, consumer)], maxlen=RATE_SAMPLES)
        is_over = False
        while not is_over:
            is_over = bool(select.select([over], [], [], REDRAW_S)[0])
            samples.append(Sample.of(meter, consumer))
            draw(meter.batches, samples[0].rates(samples[-1]))


def progress_line(
    total: int | None,
) -> contextlib.AbstractContextManager[Callable[[int, str], None]]:
    """A function that draws counts and rates: with rich where it is installed, else plain text."""
    return plain_line(total) if importlib.util.find_spec("rich") is None else rich_line(total)


@contextlib.contextmanager
def rich_line(total: int | None) -> Iterator[Callable[[int, str], None]]:
    """A bar, and the rates after it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=total)

        def draw(batches: int, rates: str) -> None:
            progress.update(task, completed=batches, description=rates, refresh=True)

        yield draw


@contextlib.contextmanager
def plain_line(total: int | None) -> Iterator[Callable[[int, str], None]]:
    """One line that is written over itself."""
    of = "" if total is None else f"/{total}"

    def draw(batches: int, rates: str) -> None:
        sys.stderr.write(f"\r{batches}{of} batches  {rates}\x1b[K")
        sys.stderr.flush()

    try:
        yield draw
    finally:
        sys.stderr.write("\n")
