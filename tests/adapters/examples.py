"""Examples that are run several times in one process of their own: to import a framework costs more
than to run them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_BETWEEN = "---- the next run"
_RUNS = f"""
import runpy, sys
script, *runs = sys.argv[1:]
for run in runs:
    sys.argv = [script, *run.split("\\n")]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, end
    print({_BETWEEN!r}, flush=True)
"""


def said(example: str, runs: Sequence[Sequence[Any]], folder: Path, **env: str) -> list[str]:
    """What an example prints in each of its runs, each with arguments of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _RUNS, str(ROOT / "examples" / example),
         *("\n".join(map(str, run)) for run in runs)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}, cwd=folder,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split(f"{_BETWEEN}\n")[:-1]
