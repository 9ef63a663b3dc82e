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
import json, peers
loaders = [name for name in ("DataLoader", "feeder, processes")]
digests = {peers.ask_one("checked", "text", name, 2, 64 * 6)["digest"] for name in loaders}
timed = peers.time_one("tiny", "feeder, threads", 2, 64 * 30)
kills = {name: peers.resume("text", name) for name in ("StatefulDataLoader", "feeder, processes")}
print(json.dumps([len(digests), timed, kills]))
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
    assert len(timed) == 3 and all(value >= 0 for value in timed.values())
    # The text is masked by draws of `random`.
    assert kills == {
        "StatefulDataLoader": ["samples equal, draws not", "AssertionError"],
        "feeder, processes": ["equal", "equal"],
    }
