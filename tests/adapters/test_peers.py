"""The benchmark of other loaders: all loaders give the same samples, and each has its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from needs import needs_framework

needs_framework("torch")
needs_framework("torchdata")

SCRIPTS = Path(__file__).parents[2] / "scripts"
CODE = """
import json
from benchmarks.harness import Settings
from benchmarks.peers import Reading
loaders = ("DataLoader", "StatefulDataLoader", "feeder, processes", "feeder, threads")
digests = {Reading(work="text", loader=name, workers=2).ask("checked", 64 * 6) for name in loaders}
cost = Reading(work="tiny", loader="feeder, threads", workers=2).measure(Settings(timed_s=0.01))
print(json.dumps([len(digests), cost.wall_s, cost.cpu_s, cost.more["first_s"]]))
"""


@pytest.mark.timeout(240)
def test_what_it_finds_is_so() -> None:
    paths = os.pathsep.join((str(SCRIPTS.parent), str(SCRIPTS)))
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=220,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    num_digests, *seconds = json.loads(done.stdout)
    assert num_digests == 1
    assert all(0 < value < 60 for value in seconds)
