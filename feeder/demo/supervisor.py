"""Runs the training in child processes, kills them, and starts them again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from feeder.demo.runs import Life, Result, Run, Step

LIFE_LIMIT_S = 120.0
"""A child that takes longer is stuck: a life takes about a second."""

# One thread per product: nothing but the code decides the order of a child's sums.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class TrainingFailed(Exception):
    """A training process ended in another way than the one it was meant to."""


def draw_kill_steps(num_kills: int, num_steps: int, seed: int) -> list[int]:
    """A random step out of each of `num_kills` equal stretches of the run, never the last step."""
    edges = np.linspace(1, num_steps, num_kills + 1).astype(int)
    rng = np.random.default_rng(seed)
    return [int(rng.integers(low, high)) for low, high in pairwise(edges)]


def run_training(
    arguments: Sequence[str], kill_steps: Sequence[int], watch: Callable[[int, int], None]
) -> Run:
    """One whole run: killed at each of `kill_steps`, started again from its newest checkpoint.

    `arguments` go to the training process; `watch(life, step)` is called at every reported step.
    Raises TrainingFailed where a process ends in any other way.
    """
    lives: list[Life] = []
    with tempfile.TemporaryDirectory(prefix="feeder-demo-") as folder:
        checkpoint = Path(folder) / "checkpoint.npz"
        for number, kill_step in enumerate([*kill_steps, None]):
            command = training_command(checkpoint, arguments)
            lives.append(run_life(command, Path(folder), number, kill_step, watch))
    result = lives[-1].result
    assert result is not None  # run_life lets no other end of a life without a kill pass
    return Run(lives=tuple(lives), result=result)


def training_command(checkpoint: Path, arguments: Sequence[str]) -> list[str]:
    """The command that goes on from `checkpoint`."""
    return [sys.executable, "-m", "feeder.demo.training", str(checkpoint), *arguments]


def run_life(
    command: Sequence[str],
    folder: Path,
    number: int,
    kill_step: int | None,
    watch: Callable[[int, int], None],
) -> Life:
    """Start one training process and follow it until its `kill_step` or its end."""
    errors_path = folder / f"stderr-{number}.txt"
    with (
        errors_path.open("wb") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | ONE_THREAD,
        ) as child,
    ):
        watchdog = threading.Timer(LIFE_LIMIT_S, child.kill)
        watchdog.start()
        try:
            life = follow(child, kill_step, lambda step: watch(number, step))
        finally:
            watchdog.cancel()
            watchdog.join()
            child.kill()
    check_end(life, kill_step, child.returncode, errors_path)
    return life


def check_end(life: Life, kill_step: int | None, returncode: int, errors: Path) -> None:
    """Raise TrainingFailed unless the process was killed as planned or ended well by itself."""
    if kill_step is None:
        as_planned = returncode == 0 and life.result is not None
    else:
        as_planned = returncode == -signal.SIGKILL and life.end == kill_step
    if not as_planned:
        plan = "run to its end" if kill_step is None else f"be killed at step {kill_step}"
        limit = f" (it may take {LIFE_LIMIT_S} s)" if returncode == -signal.SIGKILL else ""
        raise TrainingFailed(
            f"the training process, meant to {plan}, ended after step {life.end} "
            f"with code {returncode}{limit}\n{errors.read_text(errors='replace')}".rstrip()
        )


def follow(
    child: subprocess.Popen[bytes], kill_step: int | None, watch: Callable[[int], None]
) -> Life:
    """Read the child's reports; kill it at the very report of its `kill_step`."""
    assert child.stdin is not None
    assert child.stdout is not None
    start, steps, result = 0, [], None
    for line in child.stdout:
        report = json.loads(line)
        match report.pop("event"):
            case "start":
                start = report["step"]
            case "step":
                steps.append(Step(number=report.pop("step"), **report))
                watch(steps[-1].number)
                if steps[-1].number == kill_step:
                    child.kill()
                    break
            case "end":
                result = Result(**report)
        with contextlib.suppress(BrokenPipeError):  # it has ended: the next read says how
            os.write(child.stdin.fileno(), b".")
    child.wait()
    return Life(start=start, steps=tuple(steps), result=result)
