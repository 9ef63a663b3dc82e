"""The page of figures on GPUs says what was run and nothing else, and the benchmark runs."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
PAGE = ROOT / "docs" / "gpu.md"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("benchmarks.gpu_page")


JUNIT = """<testsuites><testsuite tests="4" failures="1" errors="0" skipped="1">
<testcase name="test_ten_thousand_batches_come_back_as_they_were_fetched[1-0]"/>
<testcase name="test_ten_thousand_batches_come_back_as_they_were_fetched[2-1]"><failure/></testcase>
<testcase name="test_resumed_at_a_hundred_random_batches_the_rest_is_the_same"/>
<testcase name="test_what_torch_copies_from_a_consumer_on_the_host_is_what_was_sent">
<skipped/></testcase></testsuite></testsuites>"""


def run_of(page: ModuleType, tmp_path: Path) -> Any:
    tests, bench = tmp_path / "tests.xml", tmp_path / "bench.json"
    tests.write_text(JUNIT)
    found = {
        "20 MB, marked by 8 fetchers": {"times as fast": 0.97},
        "20 MB, filled by 8 fetchers": {"times as fast": 0.5},
        "step, fed": {"times as fast": 0.5, "samples": [{"more": {"stalls": 0.0}}]},
        "8 KB, copied": {"samples": [{"wall_s": 1 / 31_234.5}]},
    }
    bench.write_text(json.dumps({"rows": found}))
    return page.read_run(tests, bench, "NVIDIA H200, 141 GiB; driver for CUDA 12.8", "2026-01-02")


def rows(text: str) -> dict[str, str]:
    """Return what the table of figures says was measured."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[2].strip(" |") if len(line) > 2 else "" for line in lines[1:]}


def figures(text: str) -> str:
    return text.partition("<!-- figures")[2].partition("<!-- end")[0]


def test_figures_of_a_run_are_written_and_others_left_blank(
    page: ModuleType, tmp_path: Path
) -> None:
    text = page.fill(PAGE.read_text(), run_of(page, tmp_path))
    assert "Never run" not in text
    assert "Run on 2026-01-02: NVIDIA H200, 141 GiB; driver for CUDA 12.8. 2 tests passed" in text
    assert "1 failed, 1 left out" in text
    values = list(rows(figures(text)).values())
    # What the run has of rows of the benchmark, and of tests.
    assert values[:7] == ["0.97 / **0.5**", "", "", "", "**100**", "0", "31,234"]
    assert values[7:] == ["", "", "**some**", "0", "", "", ""]
    assert page.fill(text, None) == page.fill(PAGE.read_text(), None)


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


@pytest.mark.process
def test_without_a_gpu_the_benchmark_says_why_and_measures_nothing() -> None:
    done = run("-m", "benchmarks", "gpu", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("bench gpu: nothing is measured, device 'cuda:0' ")


def test_every_case_of_the_benchmark_runs_over_a_stand_in(page: ModuleType) -> None:
    done = run("-W", "error", "-c", "from standin import bench; bench.main()")
    assert done.returncode == 0, done.stderr
