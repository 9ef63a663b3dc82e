"""`torch.distributed.checkpoint` and others that know a loader by its two methods."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from needs import needs_framework

needs_framework("torch", "torchdata")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

import feeder
from adapters.dcp_child import AT, NUM
from adapters.dcp_child import SIZE as SHARE
from adapters.loaders import epoch_of
from feeder.adapters.torch import FeedLoader
from project import PATHS

# JAX says so of each fork once another test has imported it, and DataLoader forks.
FORKS = pytest.mark.filterwarnings("ignore:os.fork")
SIZE = 4


def loader(**settings: Any) -> FeedLoader:
    return FeedLoader(list(range(22)), SIZE, shuffle=True, **settings)


def test_it_is_stateful_to_torch() -> None:
    assert isinstance(loader(), Stateful)


@pytest.mark.parametrize("at", [0, 1, 5, 6])
@pytest.mark.parametrize("is_async", [False, True])
def test_dcp_saves_and_loads_a_loader(tmp_path: Path, at: int, is_async: bool) -> None:
    whole = epoch_of(loader())
    first = loader()
    loop = iter(first)
    for _ in range(at):
        next(loop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = {"weights": torch.ones(3), "loader": first}
        if is_async:
            done = dcp.async_save(states, checkpoint_id=tmp_path / "job", no_dist=True)
            # The loader goes on while it is written.
            next(loop, None)
            done.result()
        else:
            dcp.save(states, checkpoint_id=tmp_path / "job", no_dist=True)
        second = loader()
        dcp.load({"weights": torch.zeros(3), "loader": second}, checkpoint_id=tmp_path / "job",
                 no_dist=True)  # fmt: skip
    assert epoch_of(second) == whole[at:]


def job(folder: Path, mode: str, num: int) -> list[Any]:
    """What each of so many ranks prints."""
    env = {**os.environ, "PYTHONPATH": PATHS}
    command = [sys.executable, "-m", "adapters.dcp_child", str(folder), mode]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(num)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=env,
        )
        for rank in range(num)
    ]  # fmt: skip
    try:
        printed = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * num, printed
    return [json.loads(out) for out, _ in printed]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_dcp_saves_one_loader_for_all_ranks(tmp_path: Path, mode: str) -> None:
    whole = [b.tolist() for b in FeedLoader(list(range(NUM)), SHARE, shuffle=True)]
    two = job(tmp_path, mode, 2)
    for rank, (gone, again) in enumerate(two):
        assert again == gone
        # The last batch comes again for the rank that has none.
        assert again == [*whole[2 * AT + rank :: 2], *[whole[-1]] * (rank == 1)]
    three = job(tmp_path, f"load-{mode}", 3)
    seen = [
        batch for batches in zip(*(again for _, again in three), strict=True) for batch in batches
    ]
    assert seen[: len(whole) - 2 * AT] == whole[2 * AT :]


def test_a_state_of_torchdata_is_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchdata.stateful_dataloader import StatefulDataLoader

        theirs = StatefulDataLoader(list(range(22)), SIZE)
        next(iter(theirs))
        state = theirs.state_dict()
    with pytest.raises(feeder.ResumeError, match="torchdata's StatefulDataLoader"):
        loader().load_state_dict(state)


def test_a_state_is_safe_to_load(tmp_path: Path) -> None:
    one = loader()
    next(iter(one))
    torch.save(one.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == one.state_dict()


@FORKS
def test_a_loader_in_a_forked_worker_of_dataloader_says_so() -> None:
    class Nested(torch.utils.data.IterableDataset):
        def __init__(self) -> None:
            self.loader = loader()
            next(iter(self.loader))

        def __iter__(self) -> Any:
            yield from self.loader

    nested = Nested()
    with pytest.raises(feeder.FeedError, match=r"after the fork|parent process"):
        list(torch.utils.data.DataLoader(nested, None, num_workers=1,
                                         multiprocessing_context="fork"))  # fmt: skip
