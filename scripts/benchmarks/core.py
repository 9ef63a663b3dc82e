"""The core of the feeder, measured in one process against what it must reach.

Beside it run the algorithm of Caffe2's data_workers, a copy by one thread, a loop that fetches and
copies in one thread, and a queue between two threads. All contenders take turns within each
repetition, so that a ratio is one of figures measured at the same time; medians are printed with
the lowest and the highest sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from busy import beside_busy
from command import run_cases
from copies import copy_constant, copy_fresh
from counting import statistics
from harness import Settings
from importing import importing
from many import CASES as MANY
from races import RACES, run_race
from report import Report
from resuming import resuming
from small import small_batches
from snapshots import snapshots, states, tokens
from stopping import stopping
from trivial import CASES as TRIVIAL

CASES: Mapping[str, Callable[[Settings], Report]] = {
    **{race.case: partial(run_race, race) for race in RACES},
    "copy-constant": copy_constant,
    "copy-fresh": copy_fresh,
    "small-batches": small_batches,
    **MANY,
    **TRIVIAL,
    "busy": beside_busy,
    "stop": stopping,
    "snapshot": snapshots,
    "token": tokens,
    "state": states,
    "resume": resuming,
    "statistics": statistics,
    "import": importing,
}


if __name__ == "__main__":
    run_cases("core", __doc__, CASES)
