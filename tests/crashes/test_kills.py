"""A process that is killed while it saves has saved what it said it had."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
TALLY = re.compile(
    r"(\d+) kills during (\d+) saves: (\d+) times older than acknowledged, (\d+) times newer; "
    r"(\d+) temporary files, (\d+) of them left"
)


def kill(num: int) -> list[int]:
    """Kill so many, in a process that has no threads, and return the numbers that it tells."""
    command = [sys.executable, "-m", "crashes.command", "--states", "0", "--kills", str(num)]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    found = TALLY.search(done.stdout)
    assert found is not None
    return [int(number) for number in found.groups()]


def test_two_hundred_kills_lose_nothing() -> None:
    num_kills, num_saves, num_old, num_newer, num_partials, num_left = kill(200)
    assert (num_kills, num_old, num_left) == (200, 0, 0)
    # The kills came in the middle of saves.
    assert num_saves > 20
    assert num_newer + num_partials > 10


def test_some_kills_lose_nothing() -> None:
    num_kills, _, num_old, *_, num_left = kill(20)
    assert (num_kills, num_old, num_left) == (20, 0, 0)
