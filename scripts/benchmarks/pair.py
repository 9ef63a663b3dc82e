"""This checkout against another commit, process by process in turns, row by row.

Of each row a pair is three processes in turn: the other commit, this checkout, the other commit
once more. The two runs of the same commit tell the row's own spread: half of all pairs differ by no
more from 1 than its figure. A row fails where the median pair loses more than the tolerance beyond
that spread, in wall time or in CPU. On a busy machine the spread of wall time is large, and CPU is
what tells. The processes of both commits run the measuring code of this checkout, which uses
nothing but the public names of the package.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness import Cost, Row, Settings
from benchmarks.report import machine, positive, seconds, table

ROOT = Path(__file__).parents[2]
LOADS = ("core", "service", "fetch", "sources", "checkpoints")
PAIRS = 10
TOLERANCE_PERCENT = 3.0
PROCESS_LIMIT_S = 120.0
MEASURED = Settings(timed_s=0.8, warm_s=0.3)
CLOCKS = {"wall": "wall_s", "CPU": "cpu_s"}
RUNS = ("base", "change", "again")

Costs = Mapping[str, Sequence[Cost]]
"""Of a row: the costs in the other commit, in this checkout, and in the other commit again."""


@cache
def rows(names: Sequence[str] = LOADS) -> dict[str, Row]:
    """What can be compared, by the names of load and row."""
    loads = [import_module(f"benchmarks.{name}").LOAD for name in names]
    return {
        f"{load.name} {row.name}": row
        for load in loads
        for row in load.rows
        if row.ours and row.is_possible
    }


@contextmanager
def exported(revision: str) -> Iterator[Path]:
    """The project as it was at a commit, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="feeder-pair-") as folder:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def run(row: str, package: Path) -> Cost:
    """What one process finds that measures a row over the package in a folder."""
    # The package comes first on the path: an installed one is this checkout.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "pair", "--measure", row, "--of", str(package), "-"],
        cwd=ROOT / "scripts", env={**os.environ, "PYTHONPATH": str(package)},
        stdout=subprocess.PIPE, text=True, check=True, timeout=PROCESS_LIMIT_S,
    )  # fmt: skip
    return Cost(**json.loads(done.stdout))


def _measure(row: str, package: Path) -> None:
    import feeder

    if Path(feeder.__file__).parents[1] != package.resolve():
        raise SystemExit(f"measured {feeder.__file__}, wanted the package in {package}")
    # An old commit may lack what other loads name.
    found = rows((row.partition(" ")[0],))
    print(json.dumps(asdict(found[row].measure(MEASURED))))


def _pairs(row: str, base: Path, count: int) -> dict[str, list[Cost]]:
    costs: dict[str, list[Cost]] = {name: [] for name in RUNS}
    places = {"base": base, "change": ROOT, "again": base}
    for pair in range(count + 1):
        # Where the first of three has a harder start, it is another one in each pair.
        for name in (*RUNS[pair % 3 :], *RUNS[: pair % 3]):
            cost = run(row, places[name])
            # The first pair warms files and bytecode up.
            if pair:
                costs[name].append(cost)
    return costs


def gain_and_spread(costs: Costs, clock: str) -> tuple[float, float]:
    """The median gain of this checkout by a clock and the row's own spread, both in percent."""
    triples = [
        tuple(getattr(cost, clock) for cost in triple)
        for triple in zip(*(costs[name] for name in RUNS), strict=True)
    ]
    gain = statistics.median((a + b) / 2 / change - 1 for a, change, b in triples)
    own = statistics.median(abs(b / a - 1) for a, _, b in triples)
    return 100 * gain, 100 * own


def lost_by(costs: Costs, clocks: Sequence[str]) -> list[str]:
    """The clocks by which a row lost more than may be."""
    lost = []
    for name in clocks:
        gain, own = gain_and_spread(costs, CLOCKS[name])
        if gain < -(TOLERANCE_PERCENT + own):
            lost.append(name)
    return lost


def main(arguments: Sequence[str]) -> int:
    """Compare; 1 where a row lost."""
    parser = argparse.ArgumentParser(prog="bench pair", description=__doc__)
    parser.add_argument("base", metavar="BASE_REV", help="the commit to compare this checkout with")
    parser.add_argument("--rows", action="append", metavar="TEXT", help="only rows that hold TEXT")
    parser.add_argument(
        "--pairs", type=positive, default=PAIRS, metavar="N", help=f"pairs of each row ({PAIRS})"
    )
    parser.add_argument(
        "--by", choices=tuple(CLOCKS), action="append",
        help="judge by this clock alone (both)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        _measure(options.measure, options.of)
        return 0
    wanted = [row for row in rows() if not options.rows or any(t in row for t in options.rows)]
    if not wanted:
        parser.error(f"nothing to measure; the rows are: {'; '.join(rows())}")
    return _compare(options.base, wanted, options)


def _compare(revision: str, wanted: Sequence[str], options: Any) -> int:
    print("; ".join(f"{name} {value}" for name, value in machine().items()))
    found, lines, num_lost = {}, [], 0
    with exported(revision) as base:
        for row in wanted:
            try:
                costs = found[row] = _pairs(row, base, options.pairs)
            except subprocess.CalledProcessError as error:
                if str(base) not in error.cmd:
                    raise
                print(f"{row}: left out, for it does not run at {revision}", flush=True)
                continue
            lost = lost_by(costs, options.by or tuple(CLOCKS))
            num_lost += bool(lost)
            verdict = f"LOST by {' and '.join(lost)}" if lost else "ok"
            lines.append((row, *_cells(costs), verdict))
            print("; ".join(cell for cell in (row, *_told(costs), verdict)), flush=True)
    head = ["row"]
    for clock in CLOCKS:
        head += [f"{clock}: {revision}", "this checkout", "median pair", "own spread"]
    print(f"\n{table((*head, 'load', ''), lines)}")
    print(f"{options.pairs} pairs; {num_lost} of {len(lines)} rows lost")
    if options.json:
        document = {
            row: {name: [asdict(cost) for cost in costs[name]] for name in RUNS}
            for row, costs in found.items()
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if num_lost else 0


def _told(costs: Costs) -> Iterator[str]:
    for name, clock in CLOCKS.items():
        gain, own = gain_and_spread(costs, clock)
        yield f"{name} {gain:+.1f} % (own spread {own:.1f} %)"


def _cells(costs: Costs) -> Iterator[str]:
    for clock in CLOCKS.values():
        for name in ("base", "change"):
            yield seconds(statistics.median(getattr(cost, clock) for cost in costs[name]))
        gain, own = gain_and_spread(costs, clock)
        yield f"{gain:+.1f} %"
        yield f"{own:.1f} %"
    yield f"{statistics.median(cost.load for cost in costs['change']):.1f}"
