"""A consumer that reconnects again and again leaves nothing behind, here and in the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(90)
def test_nothing_grows_over_fifty_reconnects() -> None:
    command = [sys.executable, "-m", "chaos.campaign", "--soak", "5000"]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=80)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "nothing grew" in done.stdout
