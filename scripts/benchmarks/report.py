"""How a load is run from the command line, and what it found is told: a table, and JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import QUICK, Cost, Row, Settings, chosen, interleave

Samples = Mapping[str, Sequence[Cost]]
HEAD = ("", "median (lowest – highest)", "CPU", "CPU here", "load", "times as fast as", "by CPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rows that are measured in turns."""

    name: str
    about: str | None
    """What it is, for the help: the docstring of its module."""
    rows: Sequence[Row]
    notes: Callable[[Sequence[Row], Samples], Iterable[str]] = lambda rows, samples: ()
    """What else there is to say of rows that were measured."""

    def main(self, arguments: Sequence[str]) -> int:
        """Measure what the command line asks for, and tell what was found."""
        parser = _parser(self)
        options = parser.parse_args(arguments)
        wanted = chosen(self.rows, options.rows or ())
        rows = [row for row in wanted if row.is_possible]
        names = {row.name for row in rows}
        rows = [row if row.of in names else replace(row, of=None) for row in rows]
        if not rows:
            parser.error(
                f"nothing to measure; the rows are: {'; '.join(r.name for r in self.rows)}"
            )
        settings = QUICK if options.quick else Settings()
        settings = replace(settings, repetitions=options.reps or settings.repetitions)
        # Consumers whose server is killed say so, and so do servers that come and go.
        logging.getLogger("feeder").setLevel(logging.ERROR)
        found = machine()
        print("; ".join(f"{name} {value}" for name, value in found.items()), flush=True)
        begin = time.monotonic()
        samples = interleave(rows, settings)
        print(f"\n{table(HEAD, [cells(row, samples) for row in rows])}")
        for note in (*self.notes(rows, samples), *_missing(wanted)):
            print(note, flush=True)
        print(f"{settings.repetitions} repetitions, {time.monotonic() - begin:.0f} s")
        if options.json:
            document = document_of(self.name, rows, samples, found, settings)
            options.json.write_text(json.dumps(document, indent=1) + "\n")
        return 0


def _parser(load: Load) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"bench {load.name}", description=load.about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    parser.add_argument(
        "--reps", type=positive, metavar="N",
        help=f"repetitions of every measurement ({Settings().repetitions}, or {QUICK.repetitions} "
        "if quick)",
    )  # fmt: skip
    parser.add_argument(
        "--rows", action="append", metavar="TEXT",
        help="only rows whose name holds TEXT, and what they are compared with; may be given again",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="short repetitions, rougher figures")
    return parser


def positive(text: str) -> int:
    """A whole number from 1 on, of a command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def _missing(rows: Iterable[Row]) -> list[str]:
    packages = sorted({row.needs for row in rows if row.needs and not row.is_possible})
    return (
        [f"not installed, or broken, so rows are left out: {', '.join(packages)}"]
        if packages
        else []
    )


# ---- tables


def cells(row: Row, samples: Samples) -> tuple[str, ...]:
    """A row of the table."""
    costs = samples[row.name]
    told = _rate if row.counts_batches else seconds
    walls = sorted(cost.wall_s for cost in costs)
    ends = (walls[-1], walls[0]) if row.counts_batches else (walls[0], walls[-1])
    found = f"{told(statistics.median(walls))} ({told(ends[0])} – {told(ends[1])})"
    middle = [statistics.median(getattr(c, what) for c in costs) for what in ("cpu_s", "here_s")]
    load = f"{statistics.median(cost.load for cost in costs):.1f}"
    if row.of is None:
        compared = ("", "")
    else:
        wall, cpu = (figure(times_as_fast(row, samples, what)) for what in ("wall_s", "cpu_s"))
        compared = (f"{row.of}: {wall}", cpu)
    return (row.name, found, *map(seconds, middle), load, *compared)


def times_as_fast(row: Row, samples: Samples, what: str = "wall_s") -> float:
    """How many times as fast as what it is compared with, as the median over the repetitions."""
    assert row.of is not None
    pairs = zip(samples[row.of], samples[row.name], strict=True)
    ratios = [getattr(other, what) / max(getattr(ours, what), 1e-9) for other, ours in pairs]
    return float(statistics.median(ratios))


def figure(value: float) -> str:
    """A number with three significant digits, or with its thousands set apart."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"


def seconds(value: float) -> str:
    """A time in the unit that fits it."""
    for unit, per_s in (("s", 1), ("ms", 1e3)):
        if abs(value) * per_s >= 1:
            return f"{figure(value * per_s)} {unit}"
    return f"{figure(value * 1e6)} µs"


def _rate(wall_s: float) -> str:
    return f"{figure(1 / wall_s)} /s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# ---- documents


def machine() -> dict[str, Any]:
    """What is measured on, and how busy it is already."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)$", cpus.read_text() if cpus.exists() else "", re.M)
    return named[1] if named else platform.machine()


def document_of(
    name: str, rows: Sequence[Row], samples: Samples, found: Mapping[str, Any], settings: Settings
) -> dict[str, Any]:
    """The day, the machine, the settings, and every sample of every row."""
    return {
        "load": name,
        "date": datetime.date.today().isoformat(),
        "machine": dict(found),
        "settings": asdict(settings),
        "rows": {
            row.name: {
                "of": row.of,
                "times as fast": None if row.of is None else times_as_fast(row, samples),
                "samples": [asdict(cost) for cost in samples[row.name]],
            }
            for row in rows
        },
    }
