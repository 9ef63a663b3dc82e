"""The page of figures on GPUs says what was run and nothing else, and the benchmark runs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("benchmarks.gpu_page")


def rows(text: str) -> dict[str, str]:
    """Return what the table of figures says was measured."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[2].strip(" |") if len(line) > 2 else "" for line in lines[1:]}


def figures(text: str) -> str:
    return text.partition("<!-- figures")[2].partition("<!-- end")[0]


def test_every_row_is_told_by_a_goal_or_a_test_that_there_is(page: ModuleType) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    tests = set(re.findall(r"def (test_\w+)", sources))
    rows = {row.name for row in importlib.import_module("benchmarks.gpu").LOAD.rows}
    for _, _, names in page.ROWS:
        for name in names:
            assert name in tests or getattr(name, "row", None) in rows, name


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = [str(SCRIPTS), str(ROOT), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | env
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_case_of_the_benchmark_runs_over_a_stand_in(page: ModuleType) -> None:
    done = run("-W", "error", "-c", "from standin import bench; bench.main()")
    assert done.returncode == 0, done.stderr
