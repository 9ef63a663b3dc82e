"""The scripts and the CI run: they can be started and say what is wrong."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "scripts/bench",
    "scripts/check",
    "scripts/check-deploy",
    "scripts/checks/containers",
    "scripts/checks/slurm-job",
    "deploy/slurm/train.sbatch",
    "scripts/demo",
    "scripts/docs",
    "scripts/gpu-report",
    "scripts/nightly",
    "scripts/test",
    ".ci/run",
]


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | env
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_commands_can_be_started_and_bash_understands_them() -> None:
    assert [name for name in COMMANDS if not os.access(ROOT / name, os.X_OK)] == []
    for name in [*COMMANDS, "scripts/lib.sh", "scripts/checks/tools.sh"]:
        done = run("bash", "-n", ROOT / name, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, ""), name


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    done = run(ROOT / "scripts/test", cwd=tmp_path, FEEDER_VENV=".")
    assert done.returncode == 1
    assert f"{tmp_path} is not a virtual environment: move it away" in done.stderr
    assert (tmp_path / "thesis.txt").exists()
