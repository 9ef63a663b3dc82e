"""pytest plugin: stops the run where the packages under test are not those of the folder that
the run is in, and says which they are."""

from __future__ import annotations

from pathlib import Path

import pytest

import feeder
import feeder.workers

TESTED = "tested: "


def pytest_configure(config: pytest.Config) -> None:
    for package in (feeder, feeder.workers):
        # The engine is a link in `feeder`: both packages lie at the top of the project.
        folder = Path(str(package.__file__)).resolve().parents[1]
        if folder != config.rootpath:
            raise pytest.UsageError(f"{package.__name__} is of {folder}, not {config.rootpath}")


def pytest_report_header() -> str:
    return f"{TESTED}{feeder.__file__}, {feeder.workers.__file__}"
