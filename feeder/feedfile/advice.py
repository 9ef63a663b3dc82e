"""What a configuration could do better here: said, never done."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from feeder.coordinator import Coordinator
from workers.spec import RunSpec

GOOD_SHARE = 0.5
"""Of the memory, for what is buffered; the rest is the trainer's and the system's."""
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may use: the machine's memory, or its group's where that is less."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            most = min(most, int((cgroup / name).read_text()))
    return most


def advise(coordinator: Coordinator, *, memory: int, cpus: int) -> Iterator[str]:
    """A line for each thing that could be better, with what to do; `memory` in bytes."""
    runs = {name: stream.config.run for name in coordinator for stream in coordinator[name].streams}
    yield from _advise_memory(runs, memory)
    threads = sum(run.num_threads for run in runs.values())
    if threads > 4 * cpus:
        yield (
            f"{threads} fetcher threads share {cpus} CPUs: that pays where they wait for storage; "
            "where they compute, set num_threads nearer to the number of CPUs"
        )


def _advise_memory(runs: dict[str, RunSpec], memory: int) -> Iterator[str]:
    good = int(memory * GOOD_SHARE)
    for name, run in runs.items():
        if run.max_bytes is None:
            yield (
                f"feed {name!r} is bounded by rows alone, {run.max_rows} of them: set "
                f"max_buffered_bytes too, {good // len(runs)} at most for half of the memory"
            )
    bound = sum(run.max_bytes or 0 for run in runs.values())
    if bound > good:
        yield (
            f"max_buffered_bytes comes to {bound} bytes, and there are {memory}: lower it to "
            f"{good // len(runs)} a feed, half of the memory"
        )
