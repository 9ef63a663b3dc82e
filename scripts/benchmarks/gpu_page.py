"""The figures on the page docs/gpu.md: written from one run of the tests and the benchmark.

None of them is entered by hand. Without a run they are left blank.
"""

from __future__ import annotations

import argparse
import datetime
import json
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feeder.cli.gpus import check_cupy, check_path, find_gpus
from report import figure, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- figures: written by scripts/gpu-report -->", "<!-- end of figures -->"
"""What the figures stand between."""

NEVER = """\
**Never run on a GPU.** No GPU could be had when this was written: what follows from the code and
from the stand-in is tested, and nothing on this page was measured. Every figure is blank, and stays
so until somebody runs `scripts/gpu-report`, which fills it in."""

ROWS = (
    ("19.8 MB batches that fetch functions write themselves (`rows_per_call`), without work / "
     "filled by 8 threads, of a plain `memcpyAsync` loop", "0.95",
     ("gpu-20mb: feeder, in process, marked by them against loop of memcpyAsync",
      "gpu-20mb: feeder, in process, filled by 8 fetchers against loop of memcpyAsync")),
    ("154 MB batches, written likewise", "0.95",
     ("gpu-154mb: feeder, in process, marked by them against loop of memcpyAsync",
      "gpu-154mb: feeder, in process, filled by 8 fetchers against loop of memcpyAsync")),
    ("19.8 MB batches that are copied, in process / from a server's memory, of what one thread "
     "copies on the host", "0.95",
     ("gpu-20mb: feeder, in process against copyto by one thread, on the host",
      "gpu-20mb: feeder, from a server's memory against copyto by one thread, on the host")),
    ("154 MB batches, copied likewise", "0.95",
     ("gpu-154mb: feeder, in process against copyto by one thread, on the host",
      "gpu-154mb: feeder, from a server's memory against copyto by one thread, on the host")),
    ("a step of 20 ms fed with 19.8 MB batches: beyond compute alone, in %", "at most 1",
     ("gpu-step: step time beyond compute alone",)),
    ("stalls of these steps after the warm-up", "0", ("gpu-step: stalls after the warm-up",)),
    ("8 KB batches on the device, in process, per second", "30,000",
     ("gpu-small: feeder, in process",)),
    ("against PyTorch's DataLoader (2 workers, pinned, non-blocking), 19.8 MB", "5",
     ("gpu-loader: feeder, in process against DataLoader, 2 workers, pinned",)),
    ("FeedLoader against DataLoader, the same 0.6 MB samples, 2 worker processes each", "1.3",
     ("gpu-samples: FeedLoader, 2 workers against DataLoader, 2 workers, pinned",)),
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
"""What is asked for, how much, and which goals of the benchmark or which tests tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of the tests and the benchmark found."""

    figures: dict[str, str]
    """Of each goal and each test what was measured, as it is written."""
    tests: str
    """How the tests went, in words."""
    where: str
    """The GPU and what drives it."""
    day: str


def read_run(tests: Path, bench: Path, where: str, day: str) -> Run:
    """Read what a run has written."""
    figures = {}
    for case in xml.parse(tests).getroot().iter("testcase"):
        name = case.attrib["name"].partition("[")[0]
        bad = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        if bad or name not in figures:
            figures[name] = {"skipped": ""}.get(bad[0], "**some**") if bad else "0"
    cases: list[dict[str, Any]] = []
    if bench.exists():
        cases = json.loads(bench.read_text())["cases"]
    for goal in (goal for case in cases for goal in case["goals"]):
        value = figure(goal["measured"]["median"])
        figures[goal["what"]] = value if goal["reached"] else f"**{value}**"
    return Run(figures=figures, tests=_outcome(tests), where=where, day=day)


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
        head = f"Run on {run.day}: {run.where}. {run.tests}. Bold figures are short of their goal."
    measured = {} if run is None else run.figures
    rows = [
        [what, asked, " / ".join(value for name in names if (value := measured.get(name, "")))]
        for what, asked, names in ROWS
    ]
    lines = ["| | at least | measured |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return before + "\n".join([BEGIN, "", head, "", *lines, "", END]) + after


def main() -> int:
    """Write the page; with --look, say whether there is a GPU to run on."""
    parser = argparse.ArgumentParser(prog="gpu_page", description=__doc__)
    parser.add_argument("--look", action="store_true", help="1 where there is no GPU")
    parser.add_argument(
        "--tests", type=Path, metavar="FILE", help="what pytest wrote (JUnit's XML)"
    )
    parser.add_argument("--bench", type=Path, metavar="FILE", help="what `bench gpu --json` wrote")
    options = parser.parse_args()
    drivers = find_gpus()
    if options.look:
        print(check_cupy())
        return 0 if drivers else 1
    run = None
    if options.tests is not None:
        name, num_bytes = drivers[0].name_and_bytes()
        where = f"{name}, {num_bytes / 2**30:.0f} GiB; {check_cupy().text}; {check_path().text}"
        run = read_run(options.tests, options.bench, where, datetime.date.today().isoformat())
        print(table(("figure", "measured"), sorted(run.figures.items())))
    PAGE.write_text(fill(PAGE.read_text(), run))
    return 0
