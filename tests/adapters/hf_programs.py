"""Random trainings of Hugging Face's Trainer: killed after every step and resumed, they go on as if
nothing had been.

A training is data: the loader, limits, accumulation, evaluation, and when it is saved. The
undisturbed one is run with PyTorch's loader, too: the same batches in the same steps. A killed one
is left, and another process's generators, objects and trainer take its checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

with warnings.catch_warnings():
    # What the libraries' own imports say is not ours.
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.trainer_callback import PrinterCallback

from adapters.campaigns import campaign, first_difference, resume_all
from adapters.loaders import Source, draw_source
from feeder.adapters.hf import FeedCallback, FeedTrainer

DOORS = ("feed trainer", "feed trainer", "callback")


@dataclasses.dataclass(frozen=True)
class Training:
    """A training."""

    door: str
    loader: str
    source: Source
    epochs: float
    max_steps: int
    accumulate: int
    saves: str
    evaluates: bool
    stops_epoch_at: int | None
    schedule: str


def draw_training(rng: random.Random) -> Training:
    """A random one."""
    pick = rng.choice
    loader, door = pick(("feeder", "feeder", "feeder", "feed")), pick(DOORS)
    source = draw_source(rng, loader)
    if door == "callback":
        # A Trainer by itself counts epochs by their length, draws what it reads first before it
        # loads its generators, and trains one step more from the checkpoint of its end.
        kind = (
            "shuffle" if not source.has_length or source.kind == "sharded len more" else source.kind
        )
        source = dataclasses.replace(source, is_noisy=False, kind=kind)
    by_steps = not source.has_length or (door != "callback" and rng.random() < 0.3)
    stops = pick((None, None, None, 3)) if door != "callback" else None
    saves, accumulate = pick(("steps", "steps", "steps", "epoch")), pick((1, 1, 2, 3))
    if saves == "epoch" and (not source.has_length or source.kind == "sharded len more"):
        # The gradients of a group that such an epoch leaves incomplete are in no checkpoint.
        accumulate = 1
    if not source.has_length and source.num < 2 * source.size * accumulate:
        # An epoch that has no whole group makes no step, and Trainer goes on for ever.
        accumulate = 1
    return Training(
        door, loader, source, pick((1, 2, 2.5)), rng.randint(2, 8) if by_steps else -1, accumulate,
        saves, rng.random() < 0.2, stops, pick(("constant", "linear")),
    )  # fmt: skip


class Model(torch.nn.Module):
    """Logs its batches; its weights depend on all of them, and on draws."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.log: list[Any] = []

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.log.append(x.tolist())
        noise = torch.rand(()) if self.training else 0
        return {"loss": (self.net((x.sum() / 1000 + noise).reshape(1, 1)) - 1).square().mean()}


class Steps(TrainerCallback):
    """Logs steps and rates, ends epochs early, and notes what was logged by each checkpoint."""

    def __init__(self, training: Training, model: Model, folder: Path) -> None:
        self.training, self.model, self.folder = training, model, folder
        self.kills: list[tuple[Path, int]] = []
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        rate = named["optimizer"].param_groups[0]["lr"]
        self.model.log.append((state.global_step, rate))
        if self.training.stops_epoch_at and state.global_step % self.training.stops_epoch_at == 0:
            control.should_epoch_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        # An epoch that was ended early saves twice at one step: the second one is the newest.
        path = self.folder / f"checkpoint-{state.global_step}"
        kept = self.folder / f"kept-{len(self.kills)}"
        shutil.copytree(path, kept)
        self.kills.append((kept, len(self.model.log)))


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows as the model's input."""
    return {"x": torch.stack(samples)}


def run(training: Training, folder: Path, *, theirs: bool = False, seed: int = 1,
        resume: Path | None = None) -> tuple[list[Any], list[tuple[Path, int]]]:  # fmt: skip
    """The log of a training, and what it saved."""
    set_seed(seed)
    model = Model()
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=training.epochs, max_steps=training.max_steps,
        gradient_accumulation_steps=training.accumulate, save_strategy=training.saves,
        save_steps=1, eval_strategy="steps" if training.evaluates else "no", eval_steps=2,
        lr_scheduler_type=training.schedule, learning_rate=0.05, optim="sgd", report_to=[],
        seed=seed, use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    steps = Steps(training, model, folder)
    loader = training.source.make(
        "torch" if theirs else training.loader, seed, collate=collate)  # fmt: skip
    named: dict[str, Any] = {
        "eval_dataset": [{"x": torch.ones(2)}] * 3 if training.evaluates else None}  # fmt: skip
    trainer: Any
    if training.door == "feed trainer" and not theirs:
        trainer = FeedTrainer(model, arguments, train_loader=loader, callbacks=[steps], **named)
    else:

        class Own(Trainer):
            def get_train_dataloader(self) -> Any:
                return loader

        callbacks = [steps] if theirs else [steps, FeedCallback()]
        trainer = Own(model, arguments, callbacks=callbacks, **named)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    end = (trainer.state.global_step, [weight.tolist() for weight in model.parameters()])
    return [*model.log, end], steps.kills


def differences(training: Training, folder: Path) -> tuple[int, list[str]]:
    """How often it was killed, and where it went on differently."""
    found = []
    try:
        want, kills = run(training, folder / "whole")
    except (ValueError, ZeroDivisionError):
        return 0, []  # Trainer takes no loader whose length is 0.
    if training.loader == "feeder" and not training.source.differs:
        theirs, _ = run(training, folder / "theirs", theirs=True)
        if want != theirs:
            found.append(f"not as PyTorch's: {first_difference(want, theirs)}")
    if training.door == "callback":
        kills = [(path, at) for path, at in kills if at < len(want) - 1]
    found += resume_all(kills, want, lambda path, to: run(training, to, seed=77, resume=path)[0])
    return len(kills), found


if __name__ == "__main__":
    campaign(draw_training, differences, __doc__)
