"""DDP jobs that are killed at random steps go on bit for bit, with any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from needs import needs_framework

needs_framework("torch")

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    """What a Python of its own says: jobs fork, and this process has threads of PyTorch."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "tests", "examples"))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1",
           "TORCH_CPP_LOG_LEVEL": "ERROR"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_a_job_that_is_killed_again_and_again_trains_the_same() -> None:
    said = run("-m", "adapters.killing", "--kills", "12", "--seed", "1")
    assert "12 kills of 2 ranks, 33 steps: batches, losses and weights are equal" in said


@pytest.mark.timeout(240)
def test_the_order_of_samples_stays_with_another_world_size() -> None:
    said = run("-m", "adapters.killing", "--ranks", "2", "3", "1", "2", "--seed", "3")
    assert "the samples come in one order" in said


@pytest.mark.timeout(240)
def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def train(name: str, *options: str) -> list[str]:
        script = str(ROOT / "examples/torch_ddp/train.py")
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        return sorted(run(*launcher, script, str(tmp_path / name), *options).splitlines())

    whole = train("whole.pt")
    assert whole[0].startswith("rank 0, step 100: weights")
    train("halves.pt", "--stop-at", "57")
    assert train("halves.pt") == whole


@pytest.mark.timeout(240)
def test_the_demo_is_equal_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    said = run("-m", "demo.torch_ddp", "--epochs", "2", "--output", str(picture))
    assert said.splitlines()[-1] == "EQUAL: the order of all samples, and every loss of 2 ranks"
    assert "2 ranks: steps 1 to 4" in said and said.count("killed") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
