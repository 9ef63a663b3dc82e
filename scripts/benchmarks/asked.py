"""How long a question of a run takes: `scripts/bench asked`.

The run is a shuffled mixture of a trillion records at step 10**9; the position alone is asked. The
packed run is asked for the next step, whose window of 1,024 documents is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import feeder
from feeder import sources
from feeder.feeds.records import asked_of, records_of, when

TRILLION, STEP = 10**12, 10**9
_TIMES = 5


def coordinator_of(names: list[str], source: Any, **settings: Any) -> feeder.Coordinator:
    """A feed of a source, not started."""
    mine = feeder.Coordinator()
    return feeder.init_data_input_workers(names, source, 256, coordinator=mine, **settings)


def number(info: Any) -> int:
    """A record that is its number."""
    return int(info.idx_in_epoch)


def document(record: Any) -> Any:
    """A document of 1 to 2,000 tokens."""
    return np.full(int(record) * 7919 % 2000 + 1, record)


def tell(what: str, most_ms: float, ask: Callable[[], Any]) -> None:
    """Print the longest of some answers, in time and in CPU time, and what is asked for."""
    took = []
    for _ in range(_TIMES):
        began, busy = time.perf_counter(), time.process_time()
        ask()
        took.append((time.perf_counter() - began, time.process_time() - busy))
    wall, cpu = max(took)
    print(
        f"{what}: {wall * 1e3:.1f} ms, {cpu * 1e3:.1f} ms CPU, at most {most_ms:.0f} ms asked for"
    )


def main(arguments: list[str]) -> int:
    """The command."""
    del arguments
    web = sources.samples(number, TRILLION * 3 // 4).shuffle()
    code = sources.samples(number, TRILLION // 4).shuffle()
    mixture = sources.mix({"web": (web, 0.75), "code": (code, 0.25)}).shuffle()
    position = coordinator_of(["x"], mixture, epochs=None).snapshot()

    def which() -> Any:
        return records_of(asked_of(position.states[0])[0], STEP)

    (one,) = which()[100]

    def find() -> Any:
        seen = next(when(asked_of(position.states[0])[0], one.source, one.number))
        assert (seen.step, seen.row) == (STEP, 100)

    tell("which, step 10**9 of 10**12 shuffled and mixed records", 50, which)
    tell("when, the same", 50, find)
    packed = sources.pack(sources.arrays(np.arange(10**6)).shuffle().map(document), 2048)
    names = ["tokens", "segment_ids", "positions", "loss_mask"]
    with coordinator_of(names, packed) as coordinator:
        feed = coordinator["train"]
        for _ in range(40):
            batch = next(feed)
        tell("records of a packed batch, window 1,024", 300, batch.records)
        tell("the next step of a packed run", 300, lambda: feed.records(40, read=True))
    return 0
