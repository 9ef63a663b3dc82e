"""A short part of the campaign of formats: files of each, whole and damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

from needs import needs_framework
from project import ROOT

needs_framework("tensorflow", "webdataset", "datasets")


def test_sources_read_what_the_libraries_read() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "adapters.formats", "--inputs", "4", "--seed", "5"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "FORMATS_DAMAGED": "4"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200.0,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    num = 4 * (12 + (find_spec("streaming") is not None))
    assert f"{num} inputs, 0 findings" in done.stdout
