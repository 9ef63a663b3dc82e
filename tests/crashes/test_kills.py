"""Processes that save are killed: what they said they had saved is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from project import ROOT

pytestmark = pytest.mark.process


def test_some_kills_lose_nothing() -> None:
    """In a process of its own, which has no threads."""
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "crashes.command", "--states", "0", "--kills", "20"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 states and 20 kills, 0 failures\n"), done.stdout
