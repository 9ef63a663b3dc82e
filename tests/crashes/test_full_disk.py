"""A disk that is really full: what was saved loads, nothing is left over, and feeding goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]


def test_on_a_full_disk_what_was_saved_loads_and_feeding_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "crashes.full", str(tmp_path)]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    what = {"full": "no space left on device; free some space", "limited": "file too large"}
    assert what[found["disk"]] in found["error"].lower()
    assert 3 <= found["saved"] < 100
    assert found["loaded"] == found["loaded_after"] == found["saved"]
    assert (found["partials"], found["partials_of_large"]) == ([], [])
    assert found["equal"]
    assert (found["saves"], found["failed_saves"] > 0) == (0, True)
