"""What the house asks for that no linter can say: scripts and the CI run can be started and say
what is wrong, and no array of objects is ever unpickled."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from project import ROOT

pytestmark = pytest.mark.process

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


ROOMS = ("examples", "feeder", "workers")
LIBRARY = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def unpickling(source: str) -> Iterator[int]:
    """Yield the lines that let NumPy unpickle."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
                yield node.lineno


def test_no_array_of_objects_is_unpickled() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in LIBRARY} >= {"feeder", "workers"}
    assert [path for path in LIBRARY if list(unpickling(path.read_text()))] == []
    assert list(unpickling("a = 1\nnp.load(path, allow_pickle=True)")) == [2]
    assert list(unpickling("np.load(path, allow_pickle=False)  # never pickle")) == []
