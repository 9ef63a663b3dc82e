"""The example reads the same batches however often it is stopped, and on whatever it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from project import ROOT

pytestmark = pytest.mark.process

LIMIT_S = 60


def run(cluster: Any, *arguments: str) -> list[str]:
    """Run the example; the steps that it says."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/ray_fetch/train.py"), *arguments], env=env,
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


def test_the_example_goes_on_where_it_was_stopped(cluster: Any, tmp_path: Path) -> None:
    position = str(tmp_path / "position")
    whole = run(cluster, str(tmp_path / "none"))
    assert len(whole) == 200
    first = run(cluster, position, "--stop-at", "40")
    rest = run(cluster, position, "--actors", "1-3")
    assert first + rest == whole
