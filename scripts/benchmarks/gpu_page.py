"""The figures on the page docs/gpu.md: written from one run of the tests and the benchmark.

None of them is entered by hand. Without a run they are left blank.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import xml.etree.ElementTree as xml
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import figure
from feeder.cli.gpus import check_cupy, check_path, find_gpus

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- figures: written by scripts/gpu-report -->", "<!-- end of figures -->"
"""What the figures stand between."""

NEVER = """\
**Never run on a GPU.** No GPU could be had when this was written: what follows from the code and
from the stand-in is tested, and nothing on this page was measured. Every figure is blank, and stays
so until somebody runs `scripts/gpu-report`, which fills it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What a row of the benchmark tells, and the goal that is asked of it."""

    row: str
    asked: float
    at_most: bool = False
    read: Callable[[dict[str, Any]], float] = lambda found: float(found["times as fast"])

    def told(self, found: dict[str, Any]) -> str:
        """What was measured; bold where it is short of the goal."""
        value = self.read(found)
        reached = value <= self.asked if self.at_most else value >= self.asked
        return figure(value) if reached else f"**{figure(value)}**"


def _per_second(found: dict[str, Any]) -> float:
    return 1 / float(statistics.median(sample["wall_s"] for sample in found["samples"]))


def _slower_percent(found: dict[str, Any]) -> float:
    return 100 * (1 / float(found["times as fast"]) - 1)


def _stalls(found: dict[str, Any]) -> float:
    return float(statistics.median(sample["more"]["stalls"] for sample in found["samples"]))


ROWS: tuple[tuple[str, str, tuple[Figure | str, ...]], ...] = (
    ("19.8 MB batches that fetch functions write themselves (`rows_per_call`), without work / "
     "filled by 8 threads, of a plain `memcpyAsync` loop", "0.95",
     (Figure(row="20 MB, marked by 8 fetchers", asked=0.95),
      Figure(row="20 MB, filled by 8 fetchers", asked=0.95))),
    ("154 MB batches, written likewise", "0.95",
     (Figure(row="154 MB, marked by 8 fetchers", asked=0.95),
      Figure(row="154 MB, filled by 8 fetchers", asked=0.95))),
    ("19.8 MB batches that are copied, in process / from a server's memory, of what one thread "
     "copies on the host", "0.95",
     (Figure(row="20 MB, copied", asked=0.95),
      Figure(row="20 MB, from a server's memory", asked=0.95))),
    ("154 MB batches, copied likewise", "0.95",
     (Figure(row="154 MB, copied", asked=0.95),
      Figure(row="154 MB, from a server's memory", asked=0.95))),
    ("a step of 20 ms fed with 19.8 MB batches: beyond compute alone, in %", "at most 1",
     (Figure(row="step, fed", asked=1, at_most=True, read=_slower_percent),)),
    ("stalls of these steps after the warm-up", "0",
     (Figure(row="step, fed", asked=0, at_most=True, read=_stalls),)),
    ("8 KB batches on the device, in process, per second", "30,000",
     (Figure(row="8 KB, copied", asked=30_000, read=_per_second),)),
    ("against PyTorch's DataLoader (2 workers, pinned, non-blocking), 19.8 MB", "5",
     (Figure(row="20 MB, beside DataLoader", asked=5),)),
    ("FeedLoader against DataLoader, the same 0.6 MB samples, 2 worker processes each", "1.3",
     (Figure(row="samples, FeedLoader", asked=1.3),)),
    ("10,000 batches copied back, memory poisoned before it is written again: differences", "0",
     ("test_ten_thousand_batches_come_back_as_they_were_fetched",)),
    ("resumed at 100 random batches: differences", "0",
     ("test_resumed_at_a_hundred_random_batches_the_rest_is_the_same",)),
    ("PyTorch's `.to(device, non_blocking=True)` from a consumer on the host: differences", "0",
     ("test_what_torch_copies_from_a_consumer_on_the_host_is_what_was_sent",)),
    ("PyTorch's tensors without CuPy, memory poisoned before it is written again: differences", "0",
     ("test_tensors_are_what_was_fetched",)),
    ("FeedLoader's tensors on the GPU, all kept, and resumed: differences from the host's", "0",
     ("test_torch_tensors_are_those_of_the_host",)),
)  # fmt: skip
"""What is asked for, how much, and which rows of the benchmark or which tests tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of the tests and the benchmark found."""

    tests: dict[str, str]
    """Of each test what it found, as it is written."""
    rows: dict[str, dict[str, Any]]
    """What the benchmark wrote of each row."""
    outcome: str
    """How the tests went, in words."""
    where: str
    """The GPU and what drives it."""
    day: str


def read_run(tests: Path, bench: Path, where: str, day: str) -> Run:
    """Read what a run has written."""
    found: dict[str, str] = {}
    for case in xml.parse(tests).getroot().iter("testcase"):
        name = case.attrib["name"].partition("[")[0]
        bad = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        if bad or name not in found:
            found[name] = {"skipped": ""}.get(bad[0], "**some**") if bad else "0"
    rows = json.loads(bench.read_text())["rows"] if bench.exists() else {}
    return Run(tests=found, rows=rows, outcome=_outcome(tests), where=where, day=day)


def _outcome(tests: Path) -> str:
    suites = list(xml.parse(tests).getroot().iter("testsuite"))
    counts = {
        name: sum(int(suite.attrib.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    }
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return f"{passed} tests passed, {failed} failed, {counts['skipped']} left out"


def fill(text: str, run: Run | None) -> str:
    """A page with the figures of a run, or of none."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    head = NEVER
    if run is not None:
        head = (
            f"Run on {run.day}: {run.where}. {run.outcome}. Bold figures are short of their goal."
        )
    rows = [
        [what, asked, " / ".join(value for name in names if (value := _told(name, run)))]
        for what, asked, names in ROWS
    ]
    lines = ["| | at least | measured |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return before + "\n".join([BEGIN, "", head, "", *lines, "", END]) + after


def _told(name: Figure | str, run: Run | None) -> str:
    """What a run tells of a figure or a test; nothing where it was not there."""
    if run is None:
        return ""
    if isinstance(name, str):
        return run.tests.get(name, "")
    return name.told(run.rows[name.row]) if name.row in run.rows else ""


def main(arguments: Sequence[str]) -> int:
    """Write the page; with --look, say whether there is a GPU to run on."""
    parser = argparse.ArgumentParser(prog="bench gpu_page", description=__doc__)
    parser.add_argument("--look", action="store_true", help="1 where there is no GPU")
    parser.add_argument(
        "--tests", type=Path, metavar="FILE", help="what pytest wrote (JUnit's XML)"
    )
    parser.add_argument("--bench", type=Path, metavar="FILE", help="what `bench gpu --json` wrote")
    options = parser.parse_args(arguments)
    drivers = find_gpus()
    if options.look:
        print(check_cupy())
        return 0 if drivers else 1
    run = None
    if options.tests is not None:
        name, num_bytes = drivers[0].name_and_bytes()
        where = f"{name}, {num_bytes / 2**30:.0f} GiB; {check_cupy().text}; {check_path().text}"
        run = read_run(options.tests, options.bench, where, datetime.date.today().isoformat())
    PAGE.write_text(fill(PAGE.read_text(), run))
    return 0
