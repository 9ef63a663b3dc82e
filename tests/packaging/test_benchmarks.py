"""The harness of the benchmarks counts and compares rightly, and each load runs. The page of
figures on GPUs says what was run and nothing else."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from project import PATHS, ROOT, TESTS, printed

SCRIPTS = ROOT / "scripts"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(SCRIPTS)
    yield importlib.import_module("benchmarks.harness")
    logging.getLogger("feeder").setLevel(logging.NOTSET)  # A load makes it say less.


def module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


ROWS = {
    "core": ["vectors-17", "stop", "token"],
    "fetch": ["small, 2 threads"],
    "sources": ["cheap-tokens", "start, mixed"],
    "checkpoints": ["vectors, 10 saves", "save"],
}
"""Of each load the rows that show the ways in which it measures, in this process."""


@pytest.mark.served
@pytest.mark.parametrize("name", ROWS)
def test_a_load_runs(harness: ModuleType, name: str) -> None:
    settings = harness.Settings(
        repetitions=1, timed_s=0.0, warm_s=0.0, warm_batches=1, tries=1
    )  # fmt: skip
    rows = harness.chosen(module(name).LOAD.rows, ROWS[name])
    samples = harness.interleave(rows, settings)
    assert all(cost.wall_s > 0 for costs in samples.values() for cost in costs)
    assert len(samples) >= len(ROWS[name])


@pytest.mark.process
def test_served_rows_run_and_are_written(
    harness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "service.json"
    arguments = ["--quick", "--reps", "1", "--rows", "small, credit 64", "--json", str(out)]
    assert module("service").main(arguments) == 0
    told = json.loads(out.read_text())["rows"]
    assert told.keys() == {"copy 8 KB", "small, credit 64"}
    assert all(row["samples"][0]["cpu_s"] > 0 for row in told.values())
    assert "copy 8 KB: " in capsys.readouterr().out


@pytest.mark.process
def test_a_row_stays_whose_comparison_is_not_installed(
    harness: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    found = harness.Watch().cost()

    def measure(settings: object) -> object:
        return found

    theirs = harness.Row(name="theirs", measure=measure, ours=False, needs="no_such_package")
    ours = harness.Row(name="ours", measure=measure, of="theirs", counts_batches=False)
    load = module("report").Load(name="two", about="", rows=[theirs, ours])
    assert load.main(["--reps", "1"]) == 0
    told = capsys.readouterr().out
    assert "\nours " in told and "\ntheirs" not in told
    assert "rows are left out: no_such_package" in told


# ---- figures on GPUs


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("benchmarks.gpu_page")


@pytest.mark.process
def test_every_row_is_told_by_a_goal_or_a_test_that_there_is(page: ModuleType) -> None:
    sources = "".join(path.read_text() for path in (TESTS / "gpu").glob("test_*.py"))
    tests = set(re.findall(r"def (test_\w+)", sources))
    rows = {row.name for row in importlib.import_module("benchmarks.gpu").LOAD.rows}
    for _, _, names in page.ROWS:
        for name in names:
            assert name in tests or getattr(name, "row", None) in rows, name


@pytest.mark.process
def test_every_case_of_the_benchmark_runs_over_a_stand_in(page: ModuleType) -> None:
    path = os.pathsep.join([str(SCRIPTS), PATHS])
    printed("-W", "error", "-c", "from standin import bench; bench.main()", PYTHONPATH=path)
