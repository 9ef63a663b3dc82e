"""Jobs of one process, of JAX and of Lightning, that are killed and compared with one that was not.

A child trains, saves after each step, and says of each step its number, the epoch or the samples,
and the digests of batch, loss and weights. It is killed with SIGKILL when it has said so many
lines, which is often before it has saved the last one, and goes on from its newest checkpoint. What
it says of a step that it does again has to be the same, and all steps have to come.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHILDREN = {"jax": "adapters.jax_child", "lightning": "adapters.lightning_child"}

Notes = dict[int, Any]
"""By step, what was said of it."""


def start(framework: str, folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    flags = "--xla_force_host_platform_device_count=2"
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "XLA_FLAGS": flags,
           "JAX_PLATFORMS": "cpu"}  # fmt: skip
    command = [sys.executable, "-m", CHILDREN[framework], str(folder)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def run(framework: str, folder: Path, kill_after: int | None, notes: Notes) -> bool:
    """Run to the end, or until it has said so much; whether it ended."""
    with start(framework, folder) as child:
        assert child.stdout is not None
        try:
            # What libraries print is nothing of the job's.
            lines = (line for line in child.stdout if line[-2:] == "]\n" or line == "end\n")
            count = 0
            for count, line in enumerate(lines, 1):
                if line == "end\n":
                    return True
                num, *said = json.loads(line)
                before = notes.setdefault(num, said)
                assert before == said, f"step {num} was {before}, and after a kill {said}"
                if count == kill_after:
                    # What it has said until then it may have saved, too: that is read.
                    child.kill()
            if kill_after is not None and count >= kill_after:
                return False
        finally:
            child.kill()
        raise AssertionError(f"it ended with status {child.wait()}")


def compare(framework: str, kills: int, seed: int) -> int:
    """Kill a job so many times, and return the number of its steps; raises `AssertionError` where
    one of them differs from the undisturbed job's."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole: Notes = {}
        run(framework, folder / "whole", None, whole)
        notes: Notes = {}
        for _ in range(kills):
            if run(framework, folder / "killed", dice.choice([1, 1, 2, 3, 5, 6, 7]), notes):
                # It came to its end: it begins anew and repeats all of it.
                shutil.rmtree(folder / "killed")
        run(framework, folder / "killed", None, notes)
        assert notes == whole, f"steps {sorted(notes)} of {sorted(whole)} came, or others"
    return len(whole)
