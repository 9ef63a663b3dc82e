"""Plants bugs that the service once had, and prints how many runs it takes to find each."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from planted.bug import Bug
from planted.plant import ROOT, planted_text
from simulation.catalogue import BUGS, EPOCHS
from simulation.simulate import Outcome, campaign


class Found(NamedTuple):
    """What became of a search."""

    bug: Bug
    runs: int
    """How many runs it took, or were made."""
    outcome: Outcome | None
    """The run that failed; None where none did."""


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The bug is in this process: its function has the code that it has in the planted text."""
    path = ROOT / bug.file
    module = importlib.import_module(bug.file.removesuffix(".py").replace("/", "."))
    function = _function(attrgetter(bug.symbol)(module))
    code = _code_in(compile(planted_text(bug, ROOT), str(path), "exec"), bug.symbol)
    before = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before


def _function(found: Any) -> FunctionType:
    function = found.fget if isinstance(found, property) else found
    assert isinstance(function, FunctionType)
    return function


def _code_in(code: CodeType, symbol: str) -> CodeType:
    for name in symbol.split("."):
        inner = [one for one in code.co_consts if isinstance(one, CodeType)]
        (code,) = (one for one in inner if one.co_name == name)
    return code


def search(bug: Bug, most: int) -> Found:
    """Run seeds with the bug until an invariant fails."""
    num, rounds = 0, "epoch" if bug in EPOCHS else "stream"
    with planted(bug):
        for outcome in campaign(range(most), rounds):
            num += 1
            if outcome.violation:
                return Found(bug, num, outcome)
    return Found(bug, num, None)


def main() -> int:
    """Return 1 where a bug was not found."""
    parser = argparse.ArgumentParser(prog="scripts/simulate planted", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="of that name")
    parser.add_argument("--most", type=int, default=10_000, help="runs for each bug (10000)")
    wish = parser.parse_args()
    bugs = [bug for bug in BUGS if wish.only is None or bug.name in wish.only]
    num_found = 0
    for bug in bugs:
        began = time.process_time()
        found = search(bug, wish.most)
        num_found += found.outcome is not None
        told = "NOT FOUND" if found.outcome is None else found.outcome.violation
        took = time.process_time() - began
        print(f"{found.runs:6} runs {took:6.1f} s  {bug.name:38} {told[:110]}", flush=True)
    print(f"{num_found} of {len(bugs)} planted bugs found within {wish.most} runs")
    return 0 if num_found == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
