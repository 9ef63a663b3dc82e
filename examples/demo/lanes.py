"""The lowest panel of the picture: who lived when, a lane for the server and for each trainer."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from demo.panels import BAND, GREY, INK, KILL, PAPER, RESUME, kills, life_colour
from demo.runs import EVERYBODY, Life, Run, Training

LANES = (0.0, 1.3, 3.4)
"""Where the lanes begin, from above."""
ROWS, PITCH = 3, 0.6
"""Of a trainer's lane: its processes take turns, since they overlap, and so do their labels."""
MOST_LABELLED_LIVES = 5
BAR: dict[str, Any] = {"height": 0.3}


def draw_lanes(axes: Axes, disturbed: Run) -> None:
    """A bar for each process, from the step that it began with to its kill."""
    draw_server(axes, disturbed)
    for queue, training in enumerate(disturbed.trainings):
        draw_trainer(axes, queue, training)
    axes.set_ylim(LANES[-1] + (ROWS - 1) * PITCH + 0.4, -0.6)
    axes.set_yticks([LANES[0], *(lane + (ROWS - 1) * PITCH / 2 for lane in LANES[1:])], EVERYBODY)
    axes.tick_params(axis="y", length=0, labelsize=9, pad=6)
    axes.spines["left"].set_visible(False)
    axes.set_title("processes", loc="left", size=10.5, color=GREY, pad=4)
    axes.set_xlabel("step")


def draw_server(axes: Axes, disturbed: Run) -> None:
    """The server's processes; each begins where the one before was killed."""
    ends = disturbed.server_kills
    last = max(training.lives[-1].end for training in disturbed.trainings)
    for begin, end in zip((0, *ends), (*ends, last), strict=True):
        axes.barh(LANES[0], end - begin, left=begin, color=INK, **BAR)
    for end in ends:
        axes.plot(end, LANES[0], color=INK, **KILL)
        if len(ends) <= MOST_LABELLED_LIVES:
            label(axes, (end, LANES[0]), f"killed at {end}", INK, (0, 8), ha="center")


def draw_trainer(axes: Axes, queue: int, training: Training) -> None:
    """A trainer's processes, and what was done again."""
    top = LANES[1 + queue]
    for _, killed, resumed in kills(training):
        height, centre = ROWS * PITCH, top + (ROWS - 1) * PITCH / 2
        width = killed.end - resumed.start
        axes.barh(centre, width, left=resumed.start, height=height, color=BAND, zorder=0)
    for number, life in enumerate(training.lives):
        row, colour = top + PITCH * (number % ROWS), life_colour(queue, number)
        axes.barh(row, life.end - life.start, left=life.start, color=colour, **BAR)
        if life.result is None:
            axes.plot(life.end, row, color=colour, **KILL)
        if number > 0:
            axes.plot(life.start, row, color=colour, **RESUME)
        if len(training.lives) <= MOST_LABELLED_LIVES:
            label_life(axes, row, number, life, colour)


def label_life(axes: Axes, row: float, number: int, life: Life, colour: str) -> None:
    """Where the process began, at its left, and where it was killed, at its right."""
    if number > 0:
        label(axes, (life.start, row), f"from {life.start}", colour, (-9, -0.5), ha="right")
    if life.result is None:
        label(axes, (life.end, row), f"killed at {life.end}", colour, (9, -0.5), ha="left")


def label(
    axes: Axes, at: tuple[float, float], text: str, colour: str, away: tuple[float, float], ha: str
) -> None:
    """Text near a point."""
    va = "center" if ha != "center" else "bottom"
    box: dict[str, Any] = {"facecolor": PAPER, "linewidth": 0, "pad": 1.5}
    axes.annotate(
        text,
        at,
        away,
        textcoords="offset points",
        ha=ha,
        va=va,
        size=9,
        color=colour,
        bbox=box if ha == "center" else None,
    )
