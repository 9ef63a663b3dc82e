"""The Trainer of Hugging Face, and Accelerate, go on with the batches of an undisturbed run."""

from __future__ import annotations

import gc
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from needs import needs_framework

needs_framework("torch", "transformers", "accelerate")

with warnings.catch_warnings():
    # What the libraries' own imports say is not ours.
    warnings.simplefilter("ignore")
    import torch
    from accelerate import Accelerator, skip_first_batches
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import DataLoaderConfiguration, send_to_device
    from transformers import Trainer, TrainingArguments

    from adapters.hf_programs import differences, draw_training

import feeder
from adapters.accelerate_programs import differences as loop_differences
from adapters.accelerate_programs import draw_loop
from adapters.campaigns import count
from adapters.examples import check_goes_on, launched
from feeder.adapters.hf import FeedCallback, FeedTrainer
from feeder.adapters.torch import DataLoader
from feeder.adapters.torch import FeedLoader as PlainLoader
from small import Pure, make

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES, SIZE = 22, 4


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        made = torch.Generator().manual_seed(i)
        return {"x": torch.randn(4, generator=made), "labels": torch.tensor([i / 10])}


@pytest.mark.timeout(120)
def test_random_trainings_go_on_from_every_step() -> None:
    kills, wrong = count(draw_training, differences, 1, range(8))
    assert kills > 15
    assert not wrong


def test_what_cannot_be_gone_on_from_is_refused(tmp_path: Path) -> None:
    class Plain(FeedTrainer):
        def add_callback(self, callback: Any) -> None: ...

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return PlainLoader(Points(), SIZE)

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": (super().forward(x) - labels).square().mean()}

    settings = {"output_dir": str(tmp_path), "save_steps": 1, "report_to": [], "use_cpu": True,
                "disable_tqdm": True, "max_steps": 2}  # fmt: skip
    arguments = TrainingArguments(**settings)  # type: ignore[arg-type]
    Plain(Model(4, 1), arguments, train_loader=PlainLoader(Points(), SIZE)).train()
    trainer = FeedTrainer(Model(4, 1), arguments, train_loader=PlainLoader(Points(), SIZE))
    with pytest.raises(feeder.ConfigError, match="step 1 has no position of a loader"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer.train()
    own = Own(Model(4, 1), TrainingArguments(**settings, ignore_data_skip=True))  # type: ignore[arg-type]
    own.add_callback(FeedCallback())
    with pytest.raises(feeder.ConfigError, match="ignore_data_skip is True, expected False"):
        own.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.timeout(240)
def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    check_goes_on("hf_trainer/train.py", 31, tmp_path)


# ---- Accelerate


@pytest.mark.timeout(120)
def test_random_loops_with_accelerate_go_on_from_every_step() -> None:
    kills, wrong = count(draw_loop, loop_differences, 1, range(12))
    assert kills > 30
    assert not wrong


def test_what_accelerate_would_lose_is_told(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(list(range(20)), 4, shuffle=True)
    prepared = accelerator.prepare(loader)
    accelerator.register_for_checkpointing(loader)
    assert len(list(skip_first_batches(prepared, 2))) == 3
    for _, _ in zip(range(2), prepared, strict=False):
        with pytest.warns(UserWarning, match="what came back is read in its place"):
            accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    with pytest.raises(
        feeder.ConfigError, match=r"behind the 2 batches .* leave skip_first_batches"
    ):
        skip_first_batches(prepared, 2)
    assert len(list(prepared)) == 3
    with pytest.warns(UserWarning, match="makes a loader without a state"):
        prepare_data_loader(DataLoader([1, 2]))
    stateful = DataLoaderConfiguration(use_stateful_dataloader=True)
    with pytest.raises(feeder.ConfigError, match="use_stateful_dataloader is True"):
        Accelerator(cpu=True, dataloader_config=stateful).prepare(DataLoader([1, 2]))


@pytest.mark.parametrize("cls", [DataLoader, PlainLoader])
def test_a_loop_that_accelerate_does_not_save_is_told(tmp_path: Path, cls: Any) -> None:
    gc.collect()
    accelerator, loader = Accelerator(cpu=True), cls(list(range(20)), 4)
    other = accelerator.prepare(DataLoader(list(range(20)), 4))
    validation = cls([1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(validation)
        next(iter(other))
        accelerator.save_state(str(tmp_path))
    next(iter(loader))
    with pytest.warns(UserWarning, match=f"a {cls.__name__} is being read, and save_state does"):
        accelerator.save_state(str(tmp_path))
    accelerator.register_for_checkpointing(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save_state(str(tmp_path))


def accelerate(kind: str, folder: Path, save_at: int) -> Any:
    """What each of two ranks prints."""
    command = ("-m", "adapters.accelerate_child", kind, folder, save_at)
    return sorted(map(json.loads, launched(2, *command, limit_s=110.0)))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["feed", "feeder"])
def test_accelerate_goes_on_with_ddp(tmp_path: Path, kind: str) -> None:
    # Eleven batches of two: six rounds.
    at = 7
    undisturbed = accelerate(kind, tmp_path / "state", at)
    resumed = accelerate(kind, tmp_path / "state", 0)
    for (_, batches, weights), (_, rest, again) in zip(undisturbed, resumed, strict=True):
        assert rest == batches[at:]
        assert again == weights
    both = {i for _, batches, _ in undisturbed for batch in batches[:6] for i in batch}
    assert both == set(range(SAMPLES))


def test_accelerate_moves_a_batch_of_a_feed() -> None:
    with make(Pure(2, 4)) as coordinator:
        batch = next(coordinator["train"])
        moved = send_to_device({"batch": batch, "x": torch.ones(2)}, "cpu")
    assert type(moved["batch"]) is feeder.Batch
    assert moved["batch"]["id"].tolist() == batch["id"].tolist()
