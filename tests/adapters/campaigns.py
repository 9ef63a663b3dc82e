"""Campaigns of the harnesses: configurations drawn by a seed, each run, killed and resumed."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn


def first_difference(got: list[Any], want: list[Any]) -> str:
    """Where two logs part."""
    at = next((i for i, (x, y) in enumerate(zip(got, want, strict=False)) if x != y), -1)
    if at == -1:
        return f"{len(got)} entries, expected {len(want)}"
    return f"entry {at} of {len(want)}: {got[at]}, expected {want[at]}"


def resume_all(
    kills: list[tuple[Path, int]], want: list[Any], resume: Callable[[Path, Path], list[Any]]
) -> list[str]:
    """How what goes on from checkpoints differs from what was logged after them."""
    found = []
    for path, at in kills:
        try:
            rest = resume(path, path.with_suffix(".resumed"))
        except Exception as error:
            found.append(f"killed after {at} entries: {error!r}")
            continue
        if rest != want[at:]:
            told = first_difference(rest, want[at:])
            found.append(f"killed after {at} of {len(want)} entries: {told}")
    return found


def count(draw: Any, differences: Any, seed: int, numbers: Iterable[int]) -> tuple[int, int]:
    """How many kills there were in these configurations, and how many of them differ."""
    kills = wrong = 0
    # The frameworks collect garbage at each run.
    gc.collect()
    gc.freeze()
    for number in numbers:
        configuration = draw(random.Random(f"{seed} {number}"))
        with tempfile.TemporaryDirectory() as folder:
            try:
                killed, found = differences(configuration, Path(folder))
            except Exception as error:
                killed, found = 0, [f"{type(error).__name__}: {str(error)[:900]}"]
        kills, wrong = kills + killed, wrong + bool(found)
        if found:
            print(f"{number}: {configuration}", *found, sep="\n    ", flush=True)
    gc.unfreeze()
    return kills, wrong


def campaign(draw: Any, differences: Any, about: str | None) -> NoReturn:
    """The command of a harness."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--configurations", type=int, default=300)
    parser.add_argument("--only", type=int, help="the number of one, to run it again")
    told, began = parser.parse_args(), time.monotonic()
    warnings.simplefilter("ignore")
    logging.disable()
    numbers = range(told.configurations) if told.only is None else [told.only]
    kills, wrong = count(draw, differences, told.seed, numbers)
    print(f"seed {told.seed}: {len(numbers)} configurations, {kills} kills, {wrong} differ, "
          f"in {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    # Loaders that runs have left have threads, and a process with hundreds of them may not end; nor
    # may TensorFlow with replicas.
    os._exit(bool(wrong))
