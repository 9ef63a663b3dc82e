"""torchtitan: its loader's base class, its configuration, and its checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from needs import needs_framework

needs_framework("torch", "torchtitan")

with warnings.catch_warnings():
    # What the libraries' own imports say is not ours.
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    import tyro
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config.manager import custom_registry

    from feeder.adapters.torchtitan import FeedDataLoader

import feeder
from adapters.examples import launched
from project import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")

NUM, SIZE, SEQ = 26, 4, 8
STEPS = NUM // SIZE


class Tokens(torch.utils.data.Dataset):
    def __init__(self, tokenizer: Any, seq_len: int) -> None:
        self.tokenizer, self.seq_len = tokenizer, seq_len

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> Any:
        tokens = torch.full((self.seq_len,), i)
        return {"input": tokens}, tokens + 1


def build(rank: int = 0, num: int = 1, **settings: Any) -> FeedDataLoader:
    config = FeedDataLoader.Config(samples=Tokens, **settings)
    # As the trainer of 0.3 does.
    return config.build(
        dp_world_size=num, dp_rank=rank, tokenizer="words", seq_len=SEQ, local_batch_size=SIZE,
        snapshot_every_n_steps=3,
    )  # fmt: skip


def take(batches: Iterator[Any], num: int) -> list[list[int]]:
    return [(next(batches)[1][:, 0] - 1).tolist() for _ in range(num)]


class Part(torch.nn.Linear):
    """Stands for what else a trainer saves."""

    def __init__(self) -> None:
        super().__init__(2, 2)


def checkpoints(folder: Path, loader: FeedDataLoader, **settings: Any) -> CheckpointManager:
    config = CheckpointManager.Config(enable=True, interval=1, folder=str(folder), **settings)
    return config.build(
        dataloader=loader, model_parts=[Part()], optimizers=Part(), lr_schedulers=Part(),
        states={"train_state": Part()}, sd_adapter=None,
    )  # fmt: skip


def close(manager: CheckpointManager) -> None:
    manager.close()
    if manager.pg is not None:
        dist.destroy_process_group(manager.pg)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def warm(group: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a process starts for its first checkpoint stays."""
    manager = checkpoints(tmp_path_factory.mktemp("warm"), build(), async_mode="async")
    manager.save(1)
    manager.maybe_wait_for_saving()
    close(manager)


def test_it_is_a_loader_to_torchtitan() -> None:
    loader = build()
    assert isinstance(loader, BaseDataLoader)
    assert loader.loader.dataset.tokenizer == "words"
    (inputs, labels) = next(iter(loader))
    assert inputs["input"].shape == labels.shape == (SIZE, SEQ)


def test_a_command_line_changes_its_configuration() -> None:
    default = FeedDataLoader.Config(samples=Tokens)
    config = tyro.cli(
        FeedDataLoader.Config, args=["--seed", "3", "--num-workers", "2"], default=default,
        registry=custom_registry,
    )  # fmt: skip
    assert (config.seed, config.num_workers, config.samples) == (3, 2, Tokens)
    assert config.to_dict()["seed"] == 3


def test_epochs_follow_one_another_until_the_data_is_exhausted() -> None:
    seen = take(iter(build()), 3 * STEPS)
    assert seen[:STEPS] != seen[STEPS : 2 * STEPS]
    batches = iter(build(epochs=2))
    assert take(batches, 2 * STEPS) == seen[: 2 * STEPS]
    with pytest.raises(StopIteration):
        next(batches)


def test_a_validator_reads_the_same_again() -> None:
    config = FeedDataLoader.Config(samples=Tokens, shuffle=False)
    for num, steps in ((STEPS, -1), (2, 2)):
        # As its Validator does; it makes a loader each time, and others keep theirs.
        loader = replace(config, infinite=steps != -1).build(
            dp_world_size=1, dp_rank=0, seq_len=SEQ, local_batch_size=SIZE
        )
        for _ in range(3):
            assert take(islice(loader, num), num) == take(iter(build(shuffle=False)), num)
    twice = build(shuffle=False, epochs=2)
    assert [len(list(islice(twice, 2))) for _ in range(4)] == [2] * 4
    # What is resumed at its end has nothing left.
    state = (ended := build(epochs=1), list(ended))[0].state_dict()
    (again := build(epochs=1)).load_state_dict(state)
    assert list(again) == []


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("at", [0, 1, STEPS, STEPS + 2])
def test_a_checkpoint_of_torchtitan_goes_on(tmp_path: Path, at: int, mode: str) -> None:
    whole = take(iter(build()), 3 * STEPS)
    first = build()
    batches = iter(first)
    take(batches, at)
    manager = checkpoints(tmp_path / "job", first, async_mode=mode)
    manager.save(at + 1)
    # The trainer goes on while it is written.
    take(batches, 1)
    manager.maybe_wait_for_saving()
    close(manager)
    # Another data-parallel degree.
    two = [build(rank, 2) for rank in range(2)]
    for loader in two:
        manager = checkpoints(tmp_path / "job", loader)
        assert manager.load()
        close(manager)
    loops = [iter(loader) for loader in two]
    left = (STEPS - at % STEPS) // 2 if at % STEPS else STEPS // 2
    seen = [batch for _ in range(left) for loop in loops for batch in take(loop, 1)]
    assert seen == whole[at : at + len(seen)]
    assert seen


def test_what_is_missing_is_named() -> None:
    with pytest.raises(feeder.ConfigError, match="has no samples"):
        FeedDataLoader.Config().build(dp_world_size=1, dp_rank=0, local_batch_size=1, seq_len=1)


@pytest.mark.timeout(240)
def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def run(name: str, num: int, *options: str) -> list[str]:
        script = ROOT / "examples/torchtitan_job/train.py"
        lines = launched(num, script, tmp_path / name, *options, limit_s=110.0)
        return [line for line in lines if line.startswith("rank ")]

    whole = run("whole", 2)
    assert len(whole) == 2
    assert run("halves", 2, "57") == []
    assert run("halves", 2) == whole
    # With another number of ranks it goes on, too: all samples of the epochs that are left.
    run("one", 2, "50")
    (line,) = run("one", 1)
    assert f"step {50 + 6 * 64 - 2 * 50}:" in line
