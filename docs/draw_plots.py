"""Draws what the benchmarks measured: run by scripts/docs plots.

Each docs/figures/NAME.json was written by `scripts/bench NAME --json FILE`. Two pictures are drawn
from it, and each answers one question. NAME-goals.svg: is every goal reached? It shows each figure
as a part of its goal. NAME-rates.svg: how many batches per second come, beside those of others?
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FIGURES = Path(__file__).with_name("figures")
INK, GREY, LINE, PAPER = "#22252b", "#6d727c", "#d5d7dc", "#ffffff"
MET, SHORT = "#1f5fa8", "#d1602b"
COLOURS = {"product": MET, "original": "#7b4ab5", "copyto": "#9aa0ab"}
NAMES = {"product": "feeder", "original": "Caffe2's algorithm", "copyto": "a copy by one thread"}
SERVED = {
    "images-shared": "20 MB",
    "images-frames": "20 MB",
    "vectors-shared": "1 MB",
    "small-shared": "8 KB",
}
"""The cases of served batches that compare rates, and the size of their batches."""
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "feeder",
    "text.color": INK, "axes.edgecolor": LINE, "axes.labelcolor": GREY, "figure.facecolor": PAPER,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "xtick.color": LINE, "xtick.labelcolor": GREY, "ytick.color": LINE, "ytick.labelcolor": INK,
}  # fmt: skip
PEERS = ("DataLoader", "StatefulDataLoader", "Grain", "SPDL", "feeder")
"""Whose samples per second are compared, where a run has DataLoader's."""
LEFT, RIGHT, ROW_INCHES = 0.44, 0.84, 0.27


def main() -> None:
    """Draw everything anew."""
    for path in sorted(FIGURES.glob("*.json")):
        for picture in draw(path, FIGURES):
            print(f"wrote {picture}")


def draw(path: Path, folder: Path) -> Iterator[Path]:
    """Draw the pictures of one run into a folder."""
    document = json.loads(path.read_text(encoding="utf-8"))
    goals = [goal for case in document["cases"] for goal in case["goals"] if goal["asked"]]
    with mpl.rc_context(STYLE):
        yield _save(draw_goals(goals, said(document)), folder / f"{path.stem}-goals.svg")
        cases = document["cases"]
        races = [case for case in cases if set(COLOURS) <= set(case["measures"])]
        served = [case for case in cases if case["case"] in SERVED]
        if is_of_peers(document):
            yield _save(draw_peers(cases, said(document)), folder / f"{path.stem}-rates.svg")
        elif races:
            yield _save(draw_rates(races, said(document)), folder / f"{path.stem}-rates.svg")
        elif served:
            yield _save(draw_served(served, said(document)), folder / f"{path.stem}-rates.svg")


def said(document: dict[str, Any]) -> str:
    """When and on what a run was."""
    machine, settings = document["machine"], document["settings"]
    each = "in processes of their own" if is_of_peers(document) else f"each {settings['timed_s']} s"
    return (
        f"{document['date']}, {machine['cores']} cores of {machine['processor']}, Python "
        f"{machine['python']}, NumPy {machine['numpy']}, load {machine['load']} before; medians "
        f"of {settings['repetitions']}, {each}; lines from the lowest to the "
        "highest"
    )


def is_of_peers(document: dict[str, Any]) -> bool:
    """Whether a run is of `scripts/bench peers`."""
    return any(": samples/s" in name for name in document["cases"][0]["measures"])


def part(goal: dict[str, Any], value: float) -> float:
    """A measured figure as its part of the goal: 1 is what was asked, more is better."""
    if goal["at_most"]:
        return goal["asked"] / max(value, goal["asked"] / 100)
    return value / goal["asked"]


def draw_goals(goals: list[dict[str, Any]], when: str) -> Figure:
    """A row for each goal: a dot at its part of the goal, its numbers at the right."""
    figure, axes = _frame(len(goals), when)
    axes.axvline(1, color=GREY, linewidth=1)
    for row, goal in enumerate(goals):
        samples = [part(goal, sample) for sample in goal["measured"]["samples"]]
        middle = part(goal, goal["measured"]["median"])
        colour = MET if goal["reached"] else SHORT
        axes.plot([min(samples), max(samples)], [row, row], color=colour, linewidth=1.4)
        axes.plot(middle, row, "o", color=colour, markersize=5)
        sign = "≤" if goal["at_most"] else "≥"
        told = f"{number(goal['measured']['median'])} {goal['unit']}".rstrip()
        _beside(axes, row, f"{told} ({sign} {number(goal['asked'])})", colour)
    _label(axes, [goal["what"] for goal in goals])
    axes.set_xlabel("part of the goal, logarithmic: right of the line it is met", labelpad=6)
    return figure


def draw_rates(races: list[dict[str, Any]], when: str) -> Figure:
    """A row for each load: batches per second of everybody."""
    figure, axes = _frame(len(races), when)
    for row, race in enumerate(races):
        for name, colour in COLOURS.items():
            measured = race["measures"][name]
            samples = measured["samples"]
            label = NAMES[name] if row == 0 else None
            axes.plot([min(samples), max(samples)], [row, row], color=colour, linewidth=1.4)
            axes.plot(measured["median"], row, "o", color=colour, markersize=5, label=label)
        pairs = zip(
            *(race["measures"][name]["samples"] for name in ("product", "original")), strict=True
        )
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        _beside(axes, row, f"{number(ratio)}× the original", INK)
    # The axis says what the titles begin with, and the longest do not fit beside it.
    _label(axes, [race["title"].removeprefix("batches of ") for race in races])
    axes.set_xlabel("batches per second, logarithmic", labelpad=6)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, frameon=False)
    return figure


def draw_served(cases: list[dict[str, Any]], when: str) -> Figure:
    """A row for each way in which batches of one size come: their number per second."""
    rates: list[tuple[str, str, Any]] = []
    for case in cases:
        for way, measured in case["measures"].items():
            ours = "product" if way.startswith(("feeder", "credit")) else "original"
            colour = COLOURS["copyto" if way == "copyto" else ours]
            name = NAMES.get(way, f"feeder, {way}" if way.startswith("credit") else way)
            rates.append((f"{SERVED[case['case']]}: {name}", colour, measured))
    figure, axes = _frame(len(rates), when)
    for row, (_, colour, measured) in enumerate(rates):
        samples = measured["samples"]
        axes.plot([min(samples), max(samples)], [row, row], color=colour, linewidth=1.4)
        axes.plot(measured["median"], row, "o", color=colour, markersize=5)
        _beside(axes, row, f"{number(measured['median'])} /s", INK)
    _label(axes, [name for name, _, _ in rates])
    axes.set_xlabel("batches per second, logarithmic", labelpad=6)
    return figure


def draw_peers(cases: list[dict[str, Any]], when: str) -> Figure:
    """A row for each loader with two workers or threads, over each data set: samples per second."""
    rates = [
        (f"{case['case']}: {name.partition(':')[0]}", measured)
        for case in cases
        for name, measured in case["measures"].items()
        if name.startswith(PEERS) and name.endswith(": samples/s") and ", 2 " in name
    ]
    figure, axes = _frame(len(rates), when)
    for row, (name, measured) in enumerate(rates):
        samples = measured["samples"]
        colour = COLOURS["product" if ": feeder" in name else "copyto"]
        axes.plot([min(samples), max(samples)], [row, row], color=colour, linewidth=1.4)
        axes.plot(measured["median"], row, "o", color=colour, markersize=5)
        _beside(axes, row, f"{number(measured['median'])} /s", INK)
        if row and name.partition(":")[0] != rates[row - 1][0].partition(":")[0]:
            axes.axhline(row - 0.5, color=LINE, linewidth=0.8)
    _label(axes, [name for name, _ in rates])
    axes.set_xlabel("samples per second, logarithmic", labelpad=6)
    return figure


def number(value: float) -> str:
    """Three digits, or thousands set apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _frame(num_rows: int, when: str) -> tuple[Figure, Axes]:
    height = ROW_INCHES * num_rows + 1.15
    figure = Figure(figsize=(11.5, height))
    axes = figure.add_axes((LEFT, 0.62 / height, RIGHT - LEFT, ROW_INCHES * num_rows / height))
    axes.set_xscale("log")
    axes.grid(axis="x", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_ylim(num_rows - 0.5, -0.5)
    figure.text(0.01, 1 - 0.2 / height, when, color=GREY, size=8.5)
    return figure, axes


def _label(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="both", length=0)


def _beside(axes: Axes, row: int, text: str, colour: str) -> None:
    axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), color=colour, va="center")


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, format="svg", metadata={"Date": None})
    return path


if __name__ == "__main__":
    main()
