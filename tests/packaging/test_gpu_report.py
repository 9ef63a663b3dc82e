"""The page of figures on GPUs says what was run and nothing else, and the benchmark runs."""

from __future__ import annotations

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
BENCHMARKS = ROOT / "scripts" / "benchmarks"
PAGE = ROOT / "docs" / "gpu.md"
NAMES = re.compile(r'^    "(gpu-[a-z0-9]+)": ', re.MULTILINE)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_page

    return gpu_page


JUNIT = """<testsuites><testsuite tests="4" failures="{bad}" errors="0" skipped="1">
<testcase name="test_ten_thousand_batches_come_back_as_they_were_fetched[1-0]"/>
<testcase name="test_ten_thousand_batches_come_back_as_they_were_fetched[2-1]">{failure}</testcase>
<testcase name="test_resumed_at_a_hundred_random_batches_the_rest_is_the_same"/>
<testcase name="test_what_torch_copies_from_a_consumer_on_the_host_is_what_was_sent">
<skipped/></testcase></testsuite></testsuites>"""


def goal(what: str, median: float, reached: bool) -> dict[str, Any]:
    return {"what": what, "measured": {"median": median}, "reached": reached}


def run_of(page: ModuleType, tmp_path: Path, *, fails: bool) -> Any:
    tests, bench = tmp_path / "tests.xml", tmp_path / "bench.json"
    tests.write_text(JUNIT.format(bad=int(fails), failure="<failure/>" if fails else ""))
    (first, second), (small,) = page.ROWS[0][2], page.ROWS[6][2]
    goals = [goal(first, 0.97, True), goal(second, 0.5, False), goal(small, 31_234.5, True)]
    bench.write_text(json.dumps({"cases": [{"goals": goals}]}))
    return page.read_run(tests, bench, "NVIDIA H200, 141 GiB; driver for CUDA 12.8", "2026-01-02")


def rows(text: str) -> dict[str, str]:
    """Return what the table of figures says was measured."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[2].strip(" |") if len(line) > 2 else "" for line in lines[1:]}


def figures(text: str) -> str:
    return text.partition("<!-- figures")[2].partition("<!-- end")[0]


def test_the_page_is_as_it_is_written_where_nothing_was_run(page: ModuleType) -> None:
    text = PAGE.read_text()
    if "Never run on a GPU" in text:
        assert page.fill(text, None) == text
        assert set(rows(figures(text)).values()) == {""}


def test_figures_of_a_run_are_written_and_others_left_blank(
    page: ModuleType, tmp_path: Path
) -> None:
    text = page.fill(PAGE.read_text(), run_of(page, tmp_path, fails=False))
    assert "Never run" not in text
    assert "Run on 2026-01-02: NVIDIA H200, 141 GiB; driver for CUDA 12.8. 3 tests passed" in text
    values = list(rows(figures(text)).values())
    # Row 0, row 6 of a benchmark, and the tests that the run has.
    assert values == ["0.97 / **0.5**", *[""] * 5, "31,234", "", "", "0", "0", "", "", ""]
    assert page.fill(text, None) == page.fill(PAGE.read_text(), None)


def test_a_test_that_fails_is_no_zero(page: ModuleType, tmp_path: Path) -> None:
    text = page.fill(PAGE.read_text(), run_of(page, tmp_path, fails=True))
    assert "2 tests passed, 1 failed, 1 left out" in text
    assert list(rows(figures(text)).values())[9] == "**some**"


def test_every_row_is_told_by_a_goal_or_a_test_that_there_is(page: ModuleType) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    tests = set(re.findall(r"def (test_\w+)", sources))
    cases = set(NAMES.findall((BENCHMARKS / "gpu.py").read_text()))
    for _, _, names in page.ROWS:
        for name in names:
            assert name in tests or name.partition(":")[0] in cases, name


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = [str(BENCHMARKS), str(ROOT), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | env
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_a_gpu_the_benchmark_says_why_and_measures_nothing() -> None:
    done = run(str(BENCHMARKS / "gpu.py"), CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("bench gpu: nothing is measured, device 'cuda:0' ")


def test_without_a_gpu_there_is_nothing_to_report_on() -> None:
    before = PAGE.read_text()
    code = "import sys, gpu_page; sys.exit(gpu_page.main())"
    done = run("-c", code, "--look", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "cupy" in done.stdout
    assert PAGE.read_text() == before


def test_every_case_of_the_benchmark_runs_over_a_stand_in(page: ModuleType) -> None:
    done = run("-W", "error", "-c", "from standin import bench; bench.main()")
    assert done.returncode == 0, done.stderr
    told = [name for _, _, names in page.ROWS for name in names if name.startswith("gpu-")]
    # A DataLoader stands beside it only where PyTorch is installed.
    missing = {name.partition(":")[0] for name in told if name not in done.stdout}
    assert missing <= {"gpu-154mb", "gpu-loader", "gpu-samples"}
