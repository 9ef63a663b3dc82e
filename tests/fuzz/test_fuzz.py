"""Whatever bytes come in, they are read or refused; nothing ends the process."""

from __future__ import annotations

import subprocess
import sys
from random import Random
from typing import Any

import msgpack
import pytest

import feeder
from feeder.state import codec
from feeder.state.snapshot import Snapshot
from fuzz import entries
from fuzz.entries import ENTRIES
from project import ROOT

COMMANDS = ("inspect", "command")


def run_fuzz(*arguments: str) -> tuple[int, str]:
    """Run a campaign in a process of its own; returns exit status and output."""
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.campaign", *arguments],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=50.0,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.process
def test_hostile_bytes_are_read_or_refused() -> None:
    status, output = run_fuzz("--inputs", "60", "--codec-inputs", "3000", "--seed", "3")
    assert status == 0, output
    assert f"{3000 + 60 * (len(ENTRIES) - 1):,} inputs, 0 findings" in output


@pytest.mark.parametrize("entry", [name for name in ENTRIES if name not in COMMANDS])
def test_some_inputs_are_let_in(entry: str) -> None:
    """Else what is behind the first check would not be looked at; a command tells by its status."""
    made, chance, let_in, refused = ENTRIES[entry], Random(5), 0, 0
    for _ in range(5_000):
        try:
            made.take(made.make(chance))
            let_in += 1
        except made.refusals:
            refused += 1
        if let_in and refused:
            return
    pytest.fail(f"{let_in} let in, {refused} refused")


# ---- what ended the process, or came out as another error


def tuples(levels: int) -> bytes:
    """Tuples in tuples, as the codec writes them."""
    heads, size = [b"\x90"], 1
    for _ in range(levels):
        head = b"\xc9" + (size + 1).to_bytes(4, "big") + b"\x01\x91"
        heads.append(head)
        size += len(head)
    return b"".join(reversed(heads))


@pytest.mark.parametrize("levels", [33, 200, 100_000])
def test_values_that_are_nested_too_deeply_are_not_read(levels: int) -> None:
    assert codec.unpack(tuples(32))
    with pytest.raises(ValueError, match="more than 32 tuples"):
        codec.unpack(tuples(levels))


@pytest.mark.parametrize("levels", [33, 200, 5_000])
def test_values_that_could_not_be_read_again_are_not_written(levels: int) -> None:
    value: Any = []
    for level in range(levels):
        if level == 32:
            assert codec.unpack(codec.pack(value)) == value
        value = (value,)
    with pytest.raises(ValueError, match="more than 32 tuples"):
        codec.pack(value)


@pytest.mark.parametrize("summary", [[], [0, 0, 0], [0, 0, 0, "x"], [0, 0, 0, -1], [0.0, 0, 0, 0]])
def test_a_snapshot_with_another_summary_is_none(summary: list[Any]) -> None:
    header = msgpack.unpackb(entries._HEADER)
    header[0][6] = summary
    with pytest.raises(feeder.SnapshotFormatError):
        Snapshot.from_bytes(entries._sealed_snapshot(msgpack.packb(header)))
