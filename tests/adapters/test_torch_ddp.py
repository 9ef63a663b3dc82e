"""DDP jobs that are killed at random steps go on bit for bit, with any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from needs import needs_framework

needs_framework("torch")

from adapters.examples import launched, printed
from project import PATHS, ROOT

# Jobs fork, and this process has threads of PyTorch.
run = partial(printed, TORCH_CPP_LOG_LEVEL="ERROR")


@pytest.mark.timeout(240)
def test_a_job_that_is_killed_again_and_again_trains_the_same() -> None:
    said = run("-m", "adapters.killing", "--kills", "5", "--seed", "1")
    assert "5 kills of 2 ranks, 33 steps: batches, losses and weights are equal" in said


@pytest.mark.timeout(240)
def test_the_order_of_samples_stays_with_another_world_size() -> None:
    said = run("-m", "adapters.killing", "--ranks", "2", "3", "1", "2", "--seed", "3")
    assert "the samples come in one order" in said


_LOADS = """
import sys
import warnings
import torch.distributed as dist
from feeder.adapters.torch import FeedLoader
from feeder.errors import ConfigError, ResumeError
from feeder.sources import tokens

group, rank, *steps = sys.argv[1], *map(int, sys.argv[2:])
dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=2)
for i, step in enumerate(steps):
    loader = FeedLoader(range(40), 2, shuffle=True)
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    try:
        loader.load_state_dict(states[step])
        print(f"loaded {step}")
    except ResumeError as error:
        print(error)
    dist.barrier()
with warnings.catch_warnings(record=True) as found:
    if rank == 1:
        dist.barrier()
    FeedLoader([0] * (6 - rank), 2)
    if rank == 0:
        dist.barrier()
print(*(warning.message for warning in found))
paths = [f"{group}.{name}.bin" for name in "ab"]
if rank == 1:
    dist.barrier()
else:
    for path in paths:
        open(path, "wb").write(bytes(64))
try:
    FeedLoader(tokens(paths[::-1] if rank else paths, 4, "uint16"), 2)
    print("same files")
except ConfigError as error:
    print(error)
if rank == 0:
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(240)
def test_ranks_whose_states_are_of_different_steps_are_told(tmp_path: Path) -> None:
    steps = (("2", "5", "0"), ("2", "6", "0"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _LOADS, str(tmp_path / "group"), str(rank), *some],
            env={**os.environ, "PYTHONPATH": PATHS}, stdout=subprocess.PIPE, text=True,
        )
        for rank, some in enumerate(steps)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=220)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [lines[0] for lines in said] == ["loaded 2"] * 2
    assert [lines[2] for lines in said] == ["loaded 0"] * 2
    # Rows that each rank has by itself would be dealt out once more.
    expected = "rank 1 has 5 samples in its list, and rank 0 has 6 in one with others"
    assert said[0][3] == "" and said[1][3].startswith(expected)
    assert said[0][4] == "same files" and "all ranks must read the same files" in said[1][4]
    # The later one sees both; each may.
    told = {
        f"rank {rank}'s checkpoint is of step {5 + rank}, rank {1 - rank}'s of step {6 - rank}; "
        "have all ranks load the checkpoint of one step"
        for rank in (0, 1)
    }
    found = {lines[1] for lines in said}
    assert found & told and found <= told | {"loaded 5", "loaded 6"}


@pytest.mark.timeout(240)
def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def train(name: str, *options: str) -> list[str]:
        return launched(2, ROOT / "examples/torch_ddp/train.py", tmp_path / name, *options)

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
