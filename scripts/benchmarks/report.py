"""How results are told: goals, tables with aligned columns, JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness import Settings, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure that is asked for, beside what was measured."""

    what: str
    asked: float
    measured: Spread
    unit: str = ""
    at_most: bool = False
    ambitious: float | None = None

    @property
    def reached(self) -> bool:
        value = self.measured.median
        return value <= self.asked if self.at_most else value >= self.asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one case found: a table to read, goals to judge, and every sample for the JSON."""

    case: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    measures: Mapping[str, Spread]
    goals: tuple[Goal, ...] = ()
    notes: tuple[str, ...] = field(default=())


def figure(value: float) -> str:
    """A number with three significant digits, or with its thousands set apart."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"


def spread(measured: Spread, unit: str = "") -> str:
    """The median with its unit, then the lowest and the highest sample."""
    middle = f"{figure(measured.median)} {unit}".rstrip()
    if measured.low == measured.high:
        return middle
    return f"{middle} ({figure(measured.low)} – {figure(measured.high)})"


def rate_cells(rate: Spread, copyto: Spread, batch_bytes: int) -> tuple[str, str, str]:
    """Batches per second, gigabytes per second, and their part of what copyto does."""
    gigabytes = rate.median * batch_bytes / 1e9
    return spread(rate), figure(gigabytes), figure(rate.per(copyto).median)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def show(report: Report) -> None:
    """Print what one case found."""
    print(f"\n{report.case}: {report.title}")
    print(table(report.head, report.rows))
    for note in report.notes:
        print(f"  {note}")


def show_goals(reports: Sequence[Report]) -> None:
    """Print every asked figure beside the measured one, and whether it was reached."""
    goals = [goal for report in reports for goal in report.goals]
    reached = sum(goal.reached for goal in goals)
    print("\nasked (and the ambitious figure) beside measured: median (lowest – highest)")
    print(table(("goal", "asked", "measured", "verdict"), [_goal_row(goal) for goal in goals]))
    print(f"{reached} of {len(goals)} goals reached")


def _goal_row(goal: Goal) -> list[str]:
    asked = f"{'<=' if goal.at_most else '>='} {figure(goal.asked)} {goal.unit}".rstrip()
    if goal.ambitious is not None:
        asked += f" ({figure(goal.ambitious)})"
    verdict = "pass" if goal.reached else "FAIL"
    return [goal.what, asked, spread(goal.measured, goal.unit), verdict]


def machine() -> dict[str, Any]:
    """What the figures are measured on, and how busy it is already."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_json(
    path: Path, found: Mapping[str, Any], settings: Settings, reports: Sequence[Report]
) -> None:
    """Write the day, the machine, the settings, every sample and every verdict."""
    document = {
        "date": datetime.date.today().isoformat(),
        "machine": dict(found),
        "settings": asdict(settings),
        "cases": [_case_document(report) for report in reports],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def _case_document(report: Report) -> dict[str, Any]:
    return {
        "case": report.case,
        "title": report.title,
        "measures": {name: _document(measured) for name, measured in report.measures.items()},
        "goals": [_goal_document(goal) for goal in report.goals],
        "notes": list(report.notes),
    }


def _goal_document(goal: Goal) -> dict[str, Any]:
    return asdict(goal) | {"measured": _document(goal.measured), "reached": goal.reached}


def _document(measured: Spread) -> dict[str, Any]:
    return {"median": measured.median, "samples": list(measured.samples)}
