"""Kills a process that saves, at random moments, and sees that what it said it had saved is there.

The process tells each save through a pipe once it has returned. It is forked, not started anew: a
kill takes milliseconds so. Run in a process of its own, which has no threads that a fork would
lose.
"""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from crashes.positions import snapshot_at, step_of
from feeder.checkpoint.store import CheckpointStore

_STEP = struct.Struct("<Q")
_LONGEST_S = 0.03
_BYTES = (0, 40, 300_000)


@dataclass(slots=True)
class Tally:
    """What was found."""

    num_kills: int = 0
    num_old: int = 0
    """After so many of them the newest that loads was older than what had been acknowledged."""
    num_newer: int = 0
    """After so many it was newer: written, but not acknowledged yet."""
    num_saves: int = 0
    """Saves that were acknowledged."""
    num_partials: int = 0
    """Temporary files that were left, and were gone after the next save."""
    num_kept: int = 0
    """Temporary files that were not."""

    @property
    def num_failed(self) -> int:
        return self.num_old + self.num_kept

    def __str__(self) -> str:
        return (
            f"{self.num_kills} kills during {self.num_saves} saves: {self.num_old} times older "
            f"than acknowledged, {self.num_newer} times newer; {self.num_partials} temporary "
            f"files, {self.num_kept} of them left"
        )


def kill_savers(folder: Path, num_kills: int, seed: int) -> Tally:
    """Kill so many processes that save into one folder, one after another."""
    dice, tally = random.Random(seed), Tally()
    acknowledged = 0
    for _ in range(num_kills):
        told = _kill(folder, acknowledged + 1, dice.uniform(0.0, _LONGEST_S))
        acknowledged = max([acknowledged, *told])
        tally.num_saves += len(told)
        tally.num_kills += 1
        partials = list(folder.glob(".*.partial"))
        tally.num_partials += len(partials)
        acknowledged = _look(folder, acknowledged, tally)
        tally.num_kept += sum(partial.exists() for partial in partials)
    return tally


def _look(folder: Path, acknowledged: int, tally: Tally) -> int:
    """See what is there, as the next process would, and save once; returns what is newest then."""
    with CheckpointStore(folder, keep=2) as store:
        found = 0 if store.is_empty() else step_of(store.load())
        tally.num_old += found < acknowledged
        tally.num_newer += found > acknowledged
        store.save(snapshot_at(found + 1))
    return found + 1


def _kill(folder: Path, first: int, after_s: float) -> list[int]:
    """Start a process that saves, kill it so long after its first save began, and return what it
    acknowledged."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.close(reading)
        _run_saver(folder, first, writing)
    os.close(writing)
    with open(reading, "rb") as told:
        # Nothing is said during the wait: what is read is read afterwards.
        select.select([], [], [], after_s)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        data = told.read()
    return [step for (step,) in _STEP.iter_unpack(data[: len(data) // _STEP.size * _STEP.size])]


def _run_saver(folder: Path, step: int, telling: int) -> NoReturn:
    """Save until killed."""
    try:
        store = CheckpointStore(folder, keep=2)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            store.save(snapshot_at(step, _BYTES[step % len(_BYTES)]))
            os.write(telling, _STEP.pack(step))
            step += 1
    finally:
        os._exit(1)
