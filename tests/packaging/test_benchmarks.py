"""The harness of the benchmarks counts and compares rightly, and each load runs."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(SCRIPTS)
    yield importlib.import_module("benchmarks.harness")
    logging.getLogger("feeder").setLevel(logging.NOTSET)  # A load makes it say less.


def module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


ROWS = {
    "core": ["vectors-17", "stop", "token"],
    "fetch": ["waits 2 ms, 8"],
    "sources": ["cheap-numbers", "start, mixed"],
    "checkpoints": ["vectors, 10 saves", "put 1 MB"],
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
