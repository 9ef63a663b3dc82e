"""The demo itself: two runs under progress bars, the comparison, and the picture."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo.picture import draw
from demo.runs import NUM_TRAINERS, SERVER, Kill, Run, differences, trainer_name
from demo.serving import num_steps
from demo.supervisor import TrainingFailed, draw_kills, free_port, run_training

PAGE_S = 10.0
"""For how long the server's page stays after the last batch where nobody presses a key."""


def run_demo(*, num_kills: int, seed: int, output: Path, quick: bool) -> int:
    """Train undisturbed and disturbed, compare, print and draw; the command's exit code."""
    console = Console(highlight=False)
    epochs, steps_per_checkpoint = (4, 6) if quick else (16, 25)
    kills = draw_kills(num_kills, num_steps(epochs), seed)

    port = free_port()
    run = partial(
        run_training, epochs=epochs, steps_per_checkpoint=steps_per_checkpoint, seed=seed,
        status=port,
    )  # fmt: skip
    console.print(f"while it runs, the server's own page: http://127.0.0.1:{port}/", markup=False)

    try:
        undisturbed, disturbed = run_both(run, kills, num_steps(epochs), console)
    except TrainingFailed as failure:
        console.print(f"feeder demo: {failure}", style="bold red", markup=False)
        return 1
    found = differences(undisturbed, disturbed)
    print_comparison(undisturbed, disturbed, console)
    draw(undisturbed, disturbed, equal=not found, output=output)
    console.print(f"picture: {output}", markup=False)
    return print_verdict(found, console)


def run_both(
    run: Callable[..., Run], kills: list[Kill], steps: int, console: Console
) -> tuple[Run, Run]:
    """The undisturbed and the disturbed run, with a bar for each trainer. After the second one
    there is time to look at the server's page."""
    columns = (
        TextColumn("{task.description:<42}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        undisturbed = run([], Bars(progress, "undisturbed run", [], steps))
        watch = Bars(progress, "disturbed run", kills, steps)
        return undisturbed, run(kills, watch, before_end=partial(keep_page, console))


def keep_page(console: Console, keyboard: TextIO = sys.stdin) -> None:
    """Wait until a key is pressed, for `PAGE_S` at most; not at all where nobody sits there."""
    if not (console.is_terminal and keyboard.isatty()):
        return
    console.print(f"the page stays for {PAGE_S:g} s: press any key to go on")
    with single_keys(keyboard.fileno()) as descriptor:
        if select.select([descriptor], [], [], PAGE_S)[0]:
            os.read(descriptor, 64)  # an arrow is several bytes; the shell shall not see them


@contextmanager
def single_keys(terminal: int) -> Iterator[int]:
    """Have a terminal tell each key at once, and not only whole lines."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


class Bars:
    """A bar for each trainer of a run: that of one that is killed goes back to its checkpoint."""

    def __init__(self, progress: Progress, name: str, kills: list[Kill], steps: int) -> None:
        self._progress = progress
        self._kills = kills
        self._told = progress.add_task(name, total=len(kills), visible=bool(kills))
        self._tasks = [
            progress.add_task(f"{name}, {trainer_name(queue)}", total=steps)
            for queue in range(NUM_TRAINERS)
        ]

    def __call__(self, num_kills: int, steps: tuple[int, ...]) -> None:
        """Show how many kills there were, and the step of each trainer."""
        if self._kills:
            name = "all kills are done"
            if num_kills < len(self._kills):
                name = f"SIGKILL to {self._kills[num_kills]}"
            self._progress.update(self._told, completed=num_kills, description=name)
        for task, step in zip(self._tasks, steps, strict=True):
            self._progress.update(task, completed=step)


def print_comparison(undisturbed: Run, disturbed: Run, console: Console) -> None:
    """The two runs side by side; digests one above the other, whole on 80 columns."""
    runs = {"undisturbed": undisturbed, "disturbed": disturbed}
    table = Table("", "", "kills", "steps", "done again", "accuracy on unseen digits", box=None)
    for name, run in runs.items():
        table.add_row(name, SERVER, str(len(run.server_kills)))
        for queue, training in enumerate(run.trainings):
            counts = (training.num_kills, len(training.first_reports()), training.num_repeated)
            accuracy = f"{training.result.accuracy:.1%}"
            table.add_row("", trainer_name(queue), *map(str, counts), accuracy)
    console.print(table)
    for part, what in (("batches", "all batches, in order"), ("weights", "the final weights")):
        console.print(f"\nxxh3 (128 bits) of {what}")
        for queue in range(NUM_TRAINERS):
            for name, run in runs.items():
                digest = getattr(run.trainings[queue].result, part)
                console.print(f"  {trainer_name(queue)}  {name:<12} {digest}")
    console.print()


def print_verdict(found: list[str], console: Console) -> int:
    """Say whether the runs are equal; the exit code."""
    if not found:
        console.print(
            "EQUAL bit for bit: all batches, every loss, the final weights", style="bold green"
        )
        return 0
    console.print("NOT EQUAL: the disturbed run differs", style="bold red")
    for difference in found:
        console.print(f"  {difference}", style="red", markup=False)
    return 1
