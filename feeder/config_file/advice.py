"""What a configuration could do better here: said, never done."""

from __future__ import annotations

from collections.abc import Iterator

from feeder.feeds.coordinator import Coordinator
from feeder.workers.spec import RunSpec

GOOD_SHARE = 0.5
"""Of the memory, for what is buffered; the rest is the trainer's and the system's."""


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
    bound = sum(run.max_bytes for run in runs.values())
    if bound > good:
        yield (
            f"max_buffered_bytes comes to {bound} bytes, and there are {memory}: lower it to "
            f"{good // len(runs)} a feed, half of the memory"
        )
