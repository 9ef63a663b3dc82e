"""The Trainer of Hugging Face, and Accelerate, go on with the batches of an undisturbed run."""

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

needs_framework("torch", "transformers", "accelerate")

with warnings.catch_warnings():
    # What the libraries' own imports say is not ours.
    warnings.simplefilter("ignore")
    import torch
    from accelerate import Accelerator
    from accelerate.utils import send_to_device
    from transformers import Trainer, TrainingArguments

    from adapters.hf_programs import differences, draw_training

import feeder
from adapters.examples import said
from adapters.loaders import count
from feeder.adapters.hf import FeedCallback, FeedTrainer
from feeder.adapters.torch import FeedLoader as PlainLoader
from small import Pure, make

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
SAMPLES, SIZE = 22, 4
STEPS = -(-SAMPLES // SIZE)


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        made = torch.Generator().manual_seed(i)
        return {"x": torch.randn(4, generator=made), "labels": torch.tensor([i / 10])}


@pytest.mark.timeout(120)
def test_random_trainings_go_on_from_every_step() -> None:
    kills, wrong = count(draw_training, differences, seed=1, num=8)
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
    with pytest.raises(feeder.ConfigError, match="step 1 has no position of a feed"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer.train()
    own = Own(Model(4, 1), TrainingArguments(**settings, ignore_data_skip=True))  # type: ignore[arg-type]
    own.add_callback(FeedCallback())
    with pytest.raises(feeder.ConfigError, match="ignore_data_skip is True, expected False"):
        own.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.timeout(240)
def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole, stopped, rest = said(
        "hf_trainer/train.py",
        [[tmp_path / "whole"], [tmp_path / "halves", "31"], [tmp_path / "halves"]], tmp_path,
    )  # fmt: skip
    whole, stopped, rest = (text.splitlines()[-1] for text in (whole, stopped, rest))
    assert whole.startswith("weights ")
    assert stopped != whole == rest


# ---- Accelerate


@pytest.mark.parametrize("at", [0, 2, STEPS])
def test_accelerate_saves_and_loads_a_loader(tmp_path: Path, at: int) -> None:
    def run(steps: int | None, resume: bool = False) -> list[list[float]]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(PlainLoader(Points(), SIZE, shuffle=True))
        accelerator.register_for_checkpointing(loader)
        if resume:
            accelerator.load_state(str(tmp_path / "state"))
        seen: list[list[float]] = []
        while loader.epoch < 2:
            for batch in loader:
                seen.append(batch["labels"][:, 0].tolist())
                if len(seen) == steps:
                    break
            if len(seen) == steps:
                break
        if not resume and steps is not None:
            accelerator.save_state(str(tmp_path / "state"))
        loader.close()
        return seen

    whole = run(None)
    if at:
        run(at)
        assert run(None, resume=True) == whole[at:]
    assert len(whole) == 2 * STEPS


def accelerate(folder: Path, save_at: int) -> Any:
    """What each of two ranks prints."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", "-m", "adapters.accelerate_child", str(folder), str(save_at)]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(map(json.loads, done.stdout.splitlines()))


@pytest.mark.timeout(240)
def test_accelerate_goes_on_with_ddp(tmp_path: Path) -> None:
    at = STEPS + 1
    undisturbed = accelerate(tmp_path / "state", at)
    resumed = accelerate(tmp_path / "state", 0)
    for (_, batches, weights), (_, rest, again) in zip(undisturbed, resumed, strict=True):
        assert rest == batches[at:]
        assert again == weights
    both = {i for _, batches, _ in undisturbed for batch in batches[:STEPS] for i in batch}
    assert both == set(range(SAMPLES))


def test_accelerate_moves_a_batch_of_a_feed() -> None:
    with make(Pure(2, 4)) as coordinator:
        batch = next(coordinator["train"])
        moved = send_to_device({"batch": batch, "x": torch.ones(2)}, "cpu")
    assert type(moved["batch"]) is feeder.Batch
    assert moved["batch"]["id"].tolist() == batch["id"].tolist()
