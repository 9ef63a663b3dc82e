"""Where the project lies, and what a Python of its own prints there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PATHS = os.pathsep.join(map(str, (ROOT, TESTS, ROOT / "examples")))


def printed(*command: Any, folder: Path | None = None, limit_s: float = 60.0, **env: str) -> str:
    """What a Python of its own prints; it ends with 0."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": PATHS, **env}, timeout=limit_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
