"""The picture: the loss of the disturbed run, one colour per process, over the undisturbed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from feeder.demo.digits import load_digits
from feeder.demo.panels import (
    GREY,
    HAIRLINE,
    INK,
    PAPER,
    draw_detail,
    draw_legend,
    draw_lives,
    draw_losses,
)
from feeder.demo.runs import Run

GOOD, ALARM = "#1d7a46", "#c1121f"
SIZE_INCHES = (12.8, 8.0)
DOTS_PER_INCH = 150
LEFT, WIDTH = 0.058, 0.917

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": HAIRLINE,
    "axes.facecolor": PAPER,
    "axes.labelcolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": PAPER,
    "xtick.color": HAIRLINE,
    "xtick.labelcolor": GREY,
    "ytick.color": HAIRLINE,
    "ytick.labelcolor": GREY,
}


def draw(undisturbed: Run, disturbed: Run, *, equal: bool, output: Path | BinaryIO) -> None:
    """Write the picture to `output`, a PNG of 1,920 x 1,200 pixels."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH)
        draw_heading(figure, undisturbed, disturbed, equal)
        draw_sample(figure)
        losses = figure.add_axes((LEFT, 0.33, WIDTH, 0.435))
        lives = figure.add_axes((LEFT, 0.085, WIDTH, 0.205), sharex=losses)
        draw_losses(losses, undisturbed, disturbed)
        draw_legend(losses)
        draw_lives(lives, disturbed)
        draw_detail(losses, undisturbed, disturbed)
        figure.savefig(output, format="png")


def draw_heading(figure: Figure, undisturbed: Run, disturbed: Run, equal: bool) -> None:
    """What was done, and what came of it, with the digests of both runs."""
    times = {1: "once", 2: "twice"}.get(disturbed.num_kills, f"{disturbed.num_kills} times")
    outcome = "not one bit is different" if equal else "the two runs DIFFER"
    title = f"Killed {times}, resumed {times}: {outcome}"
    figure.text(LEFT, 0.942, title, size=21, weight="bold", color=INK if equal else ALARM)
    summary = (
        f"{len(undisturbed.first_reports())} training steps on handwritten digits, "
        "fed by 2 fetch workers through 2 device queues; "
        f"{disturbed.result.accuracy:.1%} of unseen digits recognised"
    )
    figure.text(LEFT, 0.91, summary, size=11, color=GREY)
    line = "{:<14}  {:<32} {} {:<32}"
    style: dict[str, Any] = {"size": 9, "family": "DejaVu Sans Mono"}
    heading = line.format("xxh3, 128 bits", "undisturbed", " ", "killed and resumed")
    figure.text(LEFT, 0.879, heading, color=GREY, **style)
    for y, name, what in ((0.858, "batches", "all batches"), (0.837, "weights", "final weights")):
        before, after = getattr(undisturbed.result, name), getattr(disturbed.result, name)
        sign, colour = ("=", GOOD) if before == after else ("\N{NOT EQUAL TO}", ALARM)
        figure.text(LEFT, y, line.format(what, before, sign, after), color=colour, **style)


def draw_sample(figure: Figure) -> None:
    """One image of each digit, at the right of the heading."""
    images, labels = load_digits()
    side, pitch = 0.031, 0.0375
    for digit in range(10):
        x = LEFT + WIDTH - (10 - digit) * pitch + pitch - side
        axes = figure.add_axes((x, 0.837, side, side * SIZE_INCHES[0] / SIZE_INCHES[1]))
        image = images[np.flatnonzero(labels == digit)[0]]
        axes.imshow(image, cmap="gray_r", vmin=0, vmax=16)
        axes.set_axis_off()
