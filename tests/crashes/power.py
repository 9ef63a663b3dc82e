"""Takes the power away from a store at random moments, and sees that what it said it had is there.

Each life begins on what the power left of the one before: some saves into a store that keeps two,
then the power goes. Of every life many ends are tried, at any of its changes to the disk; one of
them is where the next life begins.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from crashes.disk import ROOT, Disk
from crashes.positions import snapshot_at, step_of
from feeder.checkpoint.store import CheckpointStore
from feeder.errors import CheckpointError

_SAVES_PER_LIFE = 5
_ENDS_PER_LIFE = 25
_LIVES_PER_DISK = 8


class Acknowledged(NamedTuple):
    """What a store has said that it has."""

    step: int
    """The newest snapshot."""
    part: str
    """The name of what was put beside it."""


@dataclass(slots=True)
class Tally:
    """What was found."""

    num_states: int = 0
    """States of the disk that were looked at."""
    num_unloadable: int = 0
    """Those in which nothing could be loaded, or not what was put beside it, though it had been
    acknowledged."""
    num_old: int = 0
    """Those in which what was loaded is older than what had been acknowledged."""
    num_recovered: int = 0
    """Those in which it was newer: written, but not acknowledged yet."""

    @property
    def num_failed(self) -> int:
        return self.num_unloadable + self.num_old

    def __str__(self) -> str:
        return (
            f"{self.num_states} states after a loss of power: {self.num_unloadable} with nothing "
            f"to load, {self.num_old} older than acknowledged, {self.num_recovered} newer"
        )


def lose_power(
    num_states: int, seed: int, *, syncs_files: bool = True, syncs_folders: bool = True
) -> Tally:
    """Look at so many states of a disk after a loss of power."""
    dice, tally = random.Random(seed), Tally()
    logger = logging.getLogger("feeder")
    logger.disabled = True  # damaged files are named, thousands of them
    try:
        while tally.num_states < num_states:
            disk = Disk(syncs_files=syncs_files, syncs_folders=syncs_folders)
            told = Acknowledged(0, "")
            for _ in range(_LIVES_PER_DISK):
                disk, told = _live(disk, told, dice, tally)
    finally:
        logger.disabled = False
    return tally


def _live(
    disk: Disk, acknowledged: Acknowledged, dice: random.Random, tally: Tally
) -> tuple[Disk, Acknowledged]:
    """Save some snapshots, lose the power many ways; returns what is left by the last of them and
    what had been acknowledged by then."""
    # The next number is larger than any that was ever used: what is found tells when it was saved.
    first = max(acknowledged.step, _newest(disk) or 0) + 1
    disk.note("acknowledged", acknowledged)
    begun = len(disk.log)
    _save(disk, range(first, first + _SAVES_PER_LIFE), dice)
    left, told = disk, acknowledged
    for _ in range(_ENDS_PER_LIFE):
        end = dice.randint(begun, len(disk.log))
        told = [value for word, _, value in disk.log[:end] if word == "acknowledged"][-1]
        left = disk.after_power_loss(end, dice)
        _look(left, told, tally)
    return left, told


def _save(disk: Disk, steps: range, dice: random.Random) -> None:
    """Save snapshots, and put something beside each, into one of three folders."""
    with CheckpointStore(ROOT, keep=2, fs=disk) as store:
        for step in steps:
            store.save(snapshot_at(step, dice.choice((0, 40, 3000))))
            part = f"parts/{step % 3}/node.{dice.getrandbits(60)}"
            store.put(part, {"row": np.full(9, step)})
            disk.note("acknowledged", Acknowledged(step, part))


def _look(disk: Disk, acknowledged: Acknowledged, tally: Tally) -> None:
    tally.num_states += 1
    found = _newest(disk)
    if found is None or not _has_part(disk, acknowledged):
        tally.num_unloadable += acknowledged.step > 0
    else:
        tally.num_old += found < acknowledged.step
        tally.num_recovered += found > acknowledged.step


def _has_part(disk: Disk, acknowledged: Acknowledged) -> bool:
    try:
        loaded = CheckpointStore(ROOT, fs=disk).get(acknowledged.part)
    except CheckpointError:
        return False
    return bool((loaded.entries["row"] == acknowledged.step).all())


def _newest(disk: Disk) -> int | None:
    try:
        return step_of(CheckpointStore(ROOT, fs=disk).load())
    except CheckpointError:
        return None
