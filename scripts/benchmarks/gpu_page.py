"""The figures on the page docs/gpu.md: written from one run of the tests and the benchmark.

None of them is entered by hand, and none stays of an older run: what was not run is left blank.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import figure
from feeder.cli.gpus import check_cupy, check_path, find_gpus

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- figures: written by scripts/gpu-report -->", "<!-- end of figures -->"
"""What the figures stand between."""

Found = Mapping[str, Any]
"""What the benchmark wrote of a row."""


def _times_as_fast(found: Found) -> float:
    return float(found["times as fast"])


def _per_second(found: Found) -> float:
    return 1 / float(statistics.median(sample["wall_s"] for sample in found["samples"]))


def _slower_percent(found: Found) -> float:
    return 100 * (1 / _times_as_fast(found) - 1)


def _stalls(found: Found) -> float:
    return float(statistics.median(s["more"]["stalls"] for s in found["samples"]))


class Figure(NamedTuple):
    """What a row of the benchmark tells, and the goal that is asked of it."""

    row: str
    asked: float
    at_most: bool = False
    read: Callable[[Found], float] = _times_as_fast

    def told(self, rows: Mapping[str, Found]) -> str:
        """What was measured, bold if it is short of the goal."""
        if self.row not in rows:
            return ""
        value = self.read(rows[self.row])
        reached = value <= self.asked if self.at_most else value >= self.asked
        return figure(value) if reached else f"**{figure(value)}**"


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
    ("the same, with 25.2 MB of uint8 images that the device crops, flips and normalises, in %",
     "at most 1",
     (Figure(row="step, made ready", asked=1, at_most=True, read=_slower_percent),)),
    ("stalls of the first of these steps after the warm-up", "0",
     (Figure(row="step, fed", asked=0, at_most=True, read=_stalls),)),
    ("8 KB batches on the device, in process, per second", "30,000",
     (Figure(row="8 KB, copied", asked=30_000, read=_per_second),)),
    ("against PyTorch's DataLoader (2 workers, pinned, non-blocking), 19.8 MB", "5",
     (Figure(row="20 MB, beside DataLoader", asked=5),)),
    ("FeedLoader against DataLoader, the same 0.6 MB samples, 2 worker processes each", "1.3",
     (Figure(row="samples, FeedLoader", asked=1.3),)),
    ("images cropped, flipped and normalised on the device by FeedLoader, against DataLoader, 2 "
     "workers each: there by its workers / in the loop, on the device", "5 / 1.1",
     (Figure(row="pictures, FeedLoader, beside workers", asked=5),
      Figure(row="pictures, FeedLoader, beside the loop", asked=1.1))),
    ("JPEGs of 480 pixels a side decoded on the device, against 16 workers of DataLoader", "1.5",
     (Figure(row="JPEGs, FeedLoader", asked=1.5),)),
    ("10,000 batches that a function made on the device, memory poisoned: differences from the "
     "host's, of CuPy's arrays / of PyTorch's tensors", "0",
     ("test_ten_thousand_batches_are_what_the_host_makes_of_them",
      "test_ten_thousand_batches_of_tensors_are_what_the_host_makes")),
    ("resumed at 100 random batches, on the device and on the host: differences of draws", "0",
     ("test_resumed_at_a_hundred_random_batches_draws_are_the_same",)),
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


def read_tests(path: Path) -> tuple[dict[str, str], str]:
    """Of JUnit's XML: of each test what it found, as it is written; and how all went, in words."""
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for case in xml.parse(path).getroot().iter("testcase"):
        name = case.attrib["name"].partition("[")[0]
        bad = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        counts[bad[0] if bad else "passed"] += 1
        if bad or name not in found:
            found[name] = {"skipped": ""}.get(bad[0], "**some**") if bad else "0"
    failed = counts["failure"] + counts["error"]
    return found, f"{counts['passed']} tests passed, {failed} failed, {counts['skipped']} left out"


def fill(text: str, tests: Path, bench: Path, run_on: str) -> str:
    """A page with the figures of a run."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    found, outcome = read_tests(tests)
    rows = json.loads(bench.read_text())["rows"] if bench.exists() else {}
    lines = [f"Run on {run_on}. {outcome}. Bold figures are short of their goal.", ""]
    lines += ["| | at least | measured |", "|---|---|---|"]
    for what, asked, names in ROWS:
        told = [found.get(n, "") if isinstance(n, str) else n.told(rows) for n in names]
        lines.append(f"| {what} | {asked} | {' / '.join(filter(None, told))} |".replace("  ", " "))
    return before + "\n".join([BEGIN, "", *lines, "", END]) + after


def main(arguments: Sequence[str]) -> int:
    """Write the page; with --look, say whether there is a GPU to run on."""
    parser = argparse.ArgumentParser(prog="bench gpu_page", description=__doc__)
    parser.add_argument("--look", action="store_true", help="write nothing; 1 without a GPU")
    parser.add_argument("--tests", type=Path, metavar="FILE", help="JUnit's XML of pytest")
    parser.add_argument("--bench", type=Path, metavar="FILE", help="what `bench gpu --json` wrote")
    options = parser.parse_args(arguments)
    drivers = find_gpus()
    if options.look:
        print(check_cupy())
        return 0 if drivers else 1
    name, num_bytes = drivers[0].name_and_bytes()
    where = f"{name}, {num_bytes / 2**30:.0f} GiB; {check_cupy().text}; {check_path().text}"
    run_on = f"{datetime.date.today().isoformat()}: {where}"
    PAGE.write_text(fill(PAGE.read_text(), options.tests, options.bench, run_on))
    return 0
