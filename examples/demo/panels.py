"""The panels of the picture: the losses of each trainer, and one kill enlarged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

from demo.runs import Life, Step, Training, trainer_name

INK, GREY, HAIRLINE, PALE, BAND, PAPER = (
    "#22252b", "#6d727c", "#d5d7dc", "#d3d8e2", "#f6ecd9", "#ffffff",
)  # fmt: skip
LIFE_COLOURS = (
    "#1f5fa8", "#d1602b", "#2b8a4b", "#7b4ab5", "#b3203f", "#0f8b9a", "#a67c00", "#a8388f",
)  # fmt: skip
COLOURS_PER_TRAINER = 4
TOP_LOSS = (6.0, 3.0)
"""Where the loss axis of each trainer ends: above the first there is room for the enlargement."""
KILL: dict[str, Any] = {
    "marker": "X",
    "markersize": 9,
    "markeredgecolor": PAPER,
    "linestyle": "none",
    "zorder": 6,
}
RINGS: dict[str, Any] = {
    "marker": "o",
    "markersize": 10,
    "markerfacecolor": "none",
    "markeredgewidth": 1.5,
}
DOTS: dict[str, Any] = {"marker": "o", "markersize": 4.5}
SERVER_KILL: dict[str, Any] = {"color": INK, "linewidth": 0.9, "linestyle": (0, (4, 3))}
RESUME: dict[str, Any] = {
    "marker": "o", "markersize": 6.5, "markerfacecolor": PAPER, "markeredgewidth": 1.6,
    "linestyle": "none", "zorder": 5,
}  # fmt: skip


def life_colour(queue: int, number: int) -> str:
    """The colour of a trainer's process, by its number; no two trainers share one."""
    return LIFE_COLOURS[COLOURS_PER_TRAINER * queue + number % COLOURS_PER_TRAINER]


def kills(training: Training) -> Iterator[tuple[int, Life, Life]]:
    """Number of the killed life, the killed life, and the one that resumed after it."""
    for number, (killed, resumed) in enumerate(pairwise(training.lives)):
        yield number, killed, resumed


def draw_losses(axes: Axes, queue: int, undisturbed: Training, disturbed: Training) -> None:
    """Both loss curves of a trainer over its steps; the disturbed one life by life, each to its
    kill."""
    steps = undisturbed.first_reports()
    draw_bands(axes, disturbed)
    draw_curve(axes, tuple(steps.values()), PALE, 8)
    for number, killed, resumed in kills(disturbed):
        lost = tuple(step for step in killed.steps if step.number > resumed.start)
        draw_curve(axes, lost, life_colour(queue, number), 3.6, alpha=0.45)
    for number, life in enumerate(disturbed.lives):
        draw_curve(axes, life.steps, life_colour(queue, number), 1.3)
    for number, killed, resumed in kills(disturbed):
        for step in resumed.steps[:1]:
            axes.plot(step.number, step.loss, color=life_colour(queue, number + 1), **RESUME)
        for step in killed.steps[-1:]:
            axes.plot(step.number, step.loss, color=life_colour(queue, number), **KILL)
    frame_losses(axes, max(steps), TOP_LOSS[queue], f"loss of {trainer_name(queue)}")


def draw_server_kills(axes: Axes, steps: Iterable[int]) -> None:
    """A line at each step at which the server was killed."""
    for step in steps:
        axes.axvline(step, **SERVER_KILL)


def frame_losses(axes: Axes, last_step: int, top: float, title: str) -> None:
    """A logarithmic loss axis with few lines; the steps stand under the panel below."""
    axes.set_yscale("log")
    axes.set_ylim(top=top)
    axes.yaxis.set_major_locator(FixedLocator([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(axis="y", color=HAIRLINE, linewidth=0.6, alpha=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelbottom=False, length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, last_step * 1.008)
    axes.set_title(title, loc="left", size=10.5, color=GREY, pad=8)


def draw_curve(
    axes: Axes, steps: tuple[Step, ...], colour: str, width: float, alpha: float = 1.0
) -> None:
    """The losses of `steps` as one line."""
    axes.plot(
        [step.number for step in steps], [step.loss for step in steps], color=colour,
        linewidth=width, alpha=alpha, solid_capstyle="round", solid_joinstyle="round",
    )  # fmt: skip


def draw_bands(axes: Axes, disturbed: Training) -> None:
    """A band over the steps that were done again after each kill."""
    for _, killed, resumed in kills(disturbed):
        axes.axvspan(resumed.start, killed.end, color=BAND, linewidth=0, zorder=0)


def draw_legend(axes: Axes) -> None:
    """What the marks mean, in one line above the panel."""
    process = LIFE_COLOURS[0]
    axes.legend(
        handles=[
            Line2D([], [], color=PALE, linewidth=8, solid_capstyle="butt", label="undisturbed"),
            Line2D([], [], color=process, linewidth=1.3, label="disturbed, a colour per process"),
            Line2D([], [], color=process, **KILL, label="SIGKILL"),
            Line2D([], [], color=process, **RESUME, label="resumed"),
            Line2D([], [], label="server killed", **SERVER_KILL),
            Patch(color=BAND, linewidth=0, label="steps done again"),
        ],
        loc="lower right", bbox_to_anchor=(1.005, 1.0), ncols=6, frameon=False, fontsize=9.5,
        labelcolor=INK, handlelength=1.6, handletextpad=0.6, columnspacing=1.8, borderpad=0.3,
    )  # fmt: skip


def draw_detail(axes: Axes, queue: int, undisturbed: Training, disturbed: Training) -> None:
    """The kill after which most steps were done again, enlarged: each of them twice."""
    if not disturbed.num_repeated:
        return
    number, killed, resumed = max(kills(disturbed), key=lambda kill: kill[1].end - kill[2].start)
    first, last = resumed.start + 1, killed.end
    around = range(first - 3, last + 4)
    card = axes.inset_axes((0.455, 0.56, 0.545, 0.44))
    card.set(xticks=[], yticks=[])
    card.spines[:].set(visible=True, color=HAIRLINE)
    detail = card.inset_axes((0.025, 0.2, 0.95, 0.6))
    detail.axvspan(first - 0.5, last + 0.5, color=BAND, linewidth=0, zorder=0)
    draw_curve(detail, select(undisturbed.reports(), around), PALE, 11)
    for life_number, life, marks in ((number, killed, RINGS), (number + 1, resumed, DOTS)):
        steps, colour = select(life.steps, around), life_colour(queue, life_number)
        draw_curve(detail, steps, colour, 0.9)
        numbers, losses = [step.number for step in steps], [step.loss for step in steps]
        label = f"process {life_number + 1}"
        detail.plot(numbers, losses, color=colour, linestyle="none", label=label, **marks)
    told = f"{trainer_name(queue)}, steps {first} to {last} twice"
    frame_detail(detail, f"{told}: {agreement(killed, resumed)}")


def select(steps: Iterable[Step], numbers: range) -> tuple[Step, ...]:
    """Those of `steps` whose number is among `numbers`."""
    return tuple(step for step in steps if step.number in numbers)


def agreement(killed: Life, resumed: Life) -> str:
    """How the steps that both processes did compare, in words."""
    again = {step.number: step for step in resumed.steps}
    twice = [(step, again[step.number]) for step in killed.steps if step.number in again]
    num_equal = sum(before == after for before, after in twice)
    return "equal to the last bit" if num_equal == len(twice) else f"{num_equal} of them equal"


def frame_detail(detail: Axes, title: str) -> None:
    """Room around the curve, a title and a legend."""
    detail.set_title(title, loc="left", size=9.5, color=INK, pad=7)
    detail.margins(x=0.02, y=0.16)
    detail.set_yticks([])
    detail.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    detail.tick_params(axis="x", labelsize=9)
    detail.spines["left"].set_visible(False)
    detail.legend(
        loc="lower right", bbox_to_anchor=(1.01, 0.975), ncols=2, frameon=False, fontsize=9.5,
        handletextpad=0.2, columnspacing=1.2,
    )  # fmt: skip
