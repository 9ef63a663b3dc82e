"""How long a question of a run takes.

The run is a shuffled mixture of a trillion records at step 10**9; the position alone is asked. The
packed run is asked for a batch at hand, and for the next step, whose window of 1,024 documents is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks.contenders import FEED, make_coordinator
from benchmarks.harness import Watch, once
from benchmarks.report import Load
from benchmarks.sources import number, size_of
from feeder import sources
from feeder.feeds.records import asked_of, records_of, when

TRILLION, STEP, PACKED_STEP = 10**12, 10**9, 40


@cache
def _position() -> Any:
    """Where the mixture stands at its start."""
    web = sources.samples(number, TRILLION * 3 // 4).shuffle()
    code = sources.samples(number, TRILLION // 4).shuffle()
    mixture = sources.mix({"web": (web, 0.75), "code": (code, 0.25)}).shuffle()
    made = make_coordinator(mixture, size_of(256, (), "int64", 9), columns=("x",), epochs=None)
    return made.snapshot().states[0]


def _document(record: Any) -> Any:
    """A document of 1 to 2,000 tokens."""
    return np.full(int(record) * 7919 % 2000 + 1, record)


@contextmanager
def _packed() -> Iterator[tuple[Any, Any]]:
    """The packed feed, and its last batch."""
    source = sources.pack(sources.arrays(np.arange(10**6)).shuffle().map(_document), 2048)
    names = ("tokens", "segment_ids", "positions", "loss_mask")
    size = size_of(256, (2048,), "int64", 9)
    with make_coordinator(source, size, columns=names) as coordinator:
        feed = coordinator[FEED]
        yield feed, [next(feed) for _ in range(PACKED_STEP)][-1]


def _which(watch: Watch) -> int:
    asked = asked_of(_position())[0]
    with watch:
        records_of(asked, STEP)
    return 1


def _when(watch: Watch) -> int:
    asked = asked_of(_position())[0]
    (one,) = records_of(asked, STEP)[100]
    with watch:
        seen = next(when(asked, one.source, one.number))
    assert (seen.step, seen.row) == (STEP, 100)
    return 1


def _of_packed(ask: Callable[[Any, Any], Any], watch: Watch) -> int:
    with _packed() as (feed, batch), watch:
        ask(feed, batch)
    return 1


LOAD = Load(
    name="asked",
    about=__doc__,
    rows=(
        once("which", _which),
        once("when", _when),
        once("packed, a batch at hand", partial(_of_packed, lambda feed, batch: batch.records())),
        once("packed, the next step",
             partial(_of_packed, lambda feed, batch: feed.records(PACKED_STEP, read=True))),
    ),
)  # fmt: skip
main = LOAD.main
