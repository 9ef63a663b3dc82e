"""Processes that save are killed, or fill a disk: what they said they had saved is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from project import ROOT

pytestmark = pytest.mark.process


def run(*words: str) -> str:
    """What a module says that runs in a process of its own, which has no threads."""
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_some_kills_lose_nothing() -> None:
    said = run("crashes.command", "--states", "0", "--kills", "20")
    assert said.endswith("0 states and 20 kills, 0 failures\n"), said


def test_on_a_full_disk_what_was_saved_loads_and_feeding_goes_on(tmp_path: Path) -> None:
    found = json.loads(run("crashes.full", str(tmp_path)))
    what = {"full": "no space left on device; free some space", "limited": "file too large"}
    assert what[found["disk"]] in found["error"].lower()
    assert 3 <= found["saved"] < 100
    assert found["loaded"] == found["loaded_after"] == found["saved"]
    assert (found["partials"], found["partials_of_large"]) == ([], [])
    assert found["equal"]
    assert (found["saves"], found["failed_saves"] > 0) == (0, True)
