"""What fetch functions run on, and where they write their rows, against what it must reach.

All contenders take turns within each repetition, so that a ratio is one of figures measured at the
same time; medians are printed with the lowest and the highest sample. Everything stays on this
host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import actors
from command import run_cases
from harness import Settings
from places import filled, marked
from processes import large, pictures, small, starting, text
from report import Report

CASES: Mapping[str, Callable[[Settings], Report]] = {
    "text": text,
    "pictures": pictures,
    "large": large,
    "small": small,
    "starting": starting,
    "places": filled,
    "marks": marked,
    "chunks": actors.chunks,
    "lines": actors.lines,
    "first": actors.first,
    "limits": actors.limits,
    "control": actors.control,
}


if __name__ == "__main__":
    logging.getLogger("feeder").setLevel(logging.ERROR)
    run_cases("executors", __doc__, CASES)
