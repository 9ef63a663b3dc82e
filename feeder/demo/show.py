"""The demo itself: two runs under one progress bar, the comparison, and the picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from feeder.demo.picture import draw
from feeder.demo.runs import Run, differences
from feeder.demo.supervisor import TrainingFailed, draw_kill_steps, run_training
from feeder.demo.training import num_steps


def run_demo(*, num_kills: int, seed: int, output: Path, quick: bool) -> int:
    """Train undisturbed and disturbed, compare, print and draw; the command's exit code."""
    console = Console(highlight=False)
    epochs, steps_per_checkpoint = (4, 6) if quick else (16, 25)
    arguments = [
        f"--epochs={epochs}",
        f"--steps-per-checkpoint={steps_per_checkpoint}",
        f"--seed={seed}",
    ]
    kill_steps = draw_kill_steps(num_kills, num_steps(epochs), seed)
    try:
        undisturbed, disturbed = run_both(arguments, kill_steps, num_steps(epochs), console)
    except TrainingFailed as failure:
        console.print(f"feeder demo: {failure}", style="bold red", markup=False)
        return 1
    found = differences(undisturbed, disturbed)
    print_comparison(undisturbed, disturbed, console)
    draw(undisturbed, disturbed, equal=not found, output=output)
    console.print(f"picture: {output}", markup=False)
    return print_verdict(found, console)


def run_both(
    arguments: list[str], kill_steps: list[int], steps: int, console: Console
) -> tuple[Run, Run]:
    """The undisturbed and the disturbed run, under one progress bar."""
    columns = (
        TextColumn("{task.description:<42}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("undisturbed run", total=2 * steps)

        def watch_undisturbed(life: int, step: int) -> None:
            progress.update(task, completed=step)

        def watch_disturbed(life: int, step: int) -> None:
            name = f"disturbed run, life {life + 1} of {len(kill_steps) + 1}"
            if life < len(kill_steps):
                name += f", SIGKILL at step {kill_steps[life]}"
            progress.update(task, completed=steps + step, description=name)

        undisturbed = run_training(arguments, [], watch_undisturbed)
        return undisturbed, run_training(arguments, kill_steps, watch_disturbed)


def print_comparison(undisturbed: Run, disturbed: Run, console: Console) -> None:
    """The two runs side by side; digests one above the other, whole on 80 columns."""
    runs = {"undisturbed": undisturbed, "disturbed": disturbed}
    table = Table("", "kills", "steps", "done again", "accuracy on unseen digits", box=None)
    for name, run in runs.items():
        counts = (run.num_kills, len(run.first_reports()), run.num_repeated)
        table.add_row(name, *map(str, counts), f"{run.result.accuracy:.1%}")
    console.print(table)
    for name, what in (("batches", "all batches, in order"), ("weights", "the final weights")):
        console.print(f"\nxxh3 (128 bits) of {what}")
        for run_name, run in runs.items():
            console.print(f"  {run_name:<12} {getattr(run.result, name)}")
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
