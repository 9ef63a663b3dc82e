"""When the power goes, or a process that saves is killed, all that was acknowledged is there; the
model would see if it were not."""

from __future__ import annotations

import random

import pytest

from crashes.disk import ROOT, Disk
from crashes.power import lose_power
from feeder import durable
from project import printed

pytestmark = pytest.mark.served

FEW_STATES = 1_000


def test_after_a_few_losses_of_power_all_that_was_acknowledged_is_there() -> None:
    tally = lose_power(FEW_STATES, seed=2)
    assert tally.num_states >= FEW_STATES
    assert tally.num_failed == 0
    # States in which something was written and not yet acknowledged are among them.
    assert FEW_STATES / 20 < tally.num_recovered < FEW_STATES


@pytest.mark.parametrize("missing", ["syncs_files", "syncs_folders"])
def test_the_model_sees_what_an_fsync_is_for(missing: str) -> None:
    tally = lose_power(FEW_STATES, seed=3, **{missing: False})
    assert tally.num_unloadable > FEW_STATES / 20
    assert tally.num_old > FEW_STATES / 100


def test_a_file_that_is_replaced_is_the_old_or_the_new_one_whole() -> None:
    dice = random.Random(5)
    for syncs in (True, False):
        disk, found = Disk(syncs_files=syncs, syncs_folders=syncs), set()
        folder = disk.open_folder(ROOT)
        for number in range(1, 9):
            durable.write(disk, folder, "file", [bytes([number]) * 50], replace=True)
            disk.note("acknowledged", number)
        for _ in range(300):
            end = dice.randrange(len(disk.log) + 1)
            told = [value for word, _, value in disk.log[:end] if word == "acknowledged"]
            names = disk.after_power_loss(end, dice).top.names
            data = names["file"].data if "file" in names else bytes(50)
            is_whole = len(data) == 50 and data == data[:1] * 50
            found.add(is_whole and data[0] >= max(told, default=0))
        assert found == ({True} if syncs else {True, False})


@pytest.mark.process
def test_some_kills_lose_nothing() -> None:
    """In a process of its own, which has no threads."""
    told = printed("-m", "crashes.command", "--states", "0", "--kills", "20", limit_s=50.0)
    assert told.endswith("0 states and 20 kills, 0 failures\n"), told
