"""The picture: the loss of the disturbed run, one colour per process, over the undisturbed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from demo.digits import load_digits
from demo.lanes import draw_lanes
from demo.panels import (
    GREY,
    HAIRLINE,
    INK,
    PAPER,
    draw_detail,
    draw_legend,
    draw_losses,
    draw_server_kills,
)
from demo.runs import Run, trainer_name

GOOD, ALARM = "#1d7a46", "#c1121f"
SIZE_INCHES = (12.8, 9.6)
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
    """Write the picture to `output`, a PNG of 1,920 x 1,440 pixels."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH)
        draw_heading(figure, undisturbed, disturbed, equal)
        draw_sample(figure)
        first = figure.add_axes((LEFT, 0.51, WIDTH, 0.275))
        second = figure.add_axes((LEFT, 0.297, WIDTH, 0.17), sharex=first)
        lanes = figure.add_axes((LEFT, 0.068, WIDTH, 0.192), sharex=first)
        for queue, axes in enumerate((first, second)):
            trainings = undisturbed.trainings[queue], disturbed.trainings[queue]
            draw_losses(axes, queue, *trainings)
            draw_server_kills(axes, disturbed.server_kills)
        draw_legend(first)
        draw_lanes(lanes, disturbed)
        draw_server_kills(lanes, disturbed.server_kills)
        queue, training = max(
            enumerate(disturbed.trainings), key=lambda found: found[1].num_repeated
        )
        draw_detail(first, queue, undisturbed.trainings[queue], training)
        figure.savefig(output, format="png")


def draw_heading(figure: Figure, undisturbed: Run, disturbed: Run, equal: bool) -> None:
    """What was done, and what came of it."""
    color = INK if equal else ALARM
    figure.text(LEFT, 0.952, title(disturbed, equal), size=21, weight="bold", color=color)
    num_trainer_kills = sum(training.num_kills for training in disturbed.trainings)
    shares = [f"{training.result.accuracy:.1%}" for training in disturbed.trainings]
    summary = (
        f"SIGKILL to the server {len(disturbed.server_kills)}\N{MULTIPLICATION SIGN}, to its "
        f"{len(shares)} trainers {num_trainer_kills}\N{MULTIPLICATION SIGN}; "
        f"{len(undisturbed.trainings[0].first_reports())} steps each on handwritten digits; "
        f"{' and '.join(shares)} of unseen digits recognised"
    )
    figure.text(LEFT, 0.925, summary, size=10.5, color=GREY)
    draw_digests(figure, undisturbed, disturbed)


def title(disturbed: Run, equal: bool) -> str:
    """How many processes were killed, and what came of it."""
    killed = "1 process" if disturbed.num_killed == 1 else f"{disturbed.num_killed} processes"
    outcome = "not one bit is different" if equal else "the two runs DIFFER"
    return f"{killed} killed and resumed: {outcome}"


def draw_digests(figure: Figure, undisturbed: Run, disturbed: Run) -> None:
    """The digests of both runs side by side."""
    line = "{:<24}  {:<32} {} {:<32}"
    style: dict[str, Any] = {"size": 8.5, "family": "DejaVu Sans Mono"}
    heading = line.format("xxh3, 128 bits", "undisturbed", " ", "killed and resumed")
    figure.text(LEFT, 0.901, heading, color=GREY, **style)
    y = 0.901
    for queue, (before, after) in enumerate(
        zip(undisturbed.trainings, disturbed.trainings, strict=True)
    ):
        for name, what in (("batches", "all batches"), ("weights", "final weights")):
            y -= 0.0165
            digests = getattr(before.result, name), getattr(after.result, name)
            equal = digests[0] == digests[1]
            sign, colour = ("=", GOOD) if equal else ("\N{NOT EQUAL TO}", ALARM)
            text = line.format(f"{trainer_name(queue)} {what}", digests[0], sign, digests[1])
            figure.text(LEFT, y, text, color=colour, **style)


def draw_sample(figure: Figure) -> None:
    """One image of each digit, at the right of the heading."""
    images, labels = load_digits()
    side, pitch = 0.026, 0.0305
    for digit in range(10):
        x = LEFT + WIDTH - (10 - digit) * pitch + pitch - side
        axes = figure.add_axes((x, 0.845, side, side * SIZE_INCHES[0] / SIZE_INCHES[1]))
        image = images[np.flatnonzero(labels == digit)[0]]
        axes.imshow(image, cmap="gray_r", vmin=0, vmax=16)
        axes.set_axis_off()
