"""How the tests here run `scripts/nightly chaos`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_chaos(*arguments: str, limit_s: float) -> tuple[int, str]:
    """Run a campaign in a process of its own, whose children are its own; returns exit status and
    output. What a failed leg keeps to be looked at is told, and removed."""
    command = [sys.executable, "-m", "chaos.campaign", *arguments]
    with tempfile.TemporaryDirectory(prefix="c-") as folder:
        env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TMPDIR": folder}
        with subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                output, _ = process.communicate()
                raise AssertionError(f"not done within {limit_s} s:\n{output}") from None
    return process.returncode, output
