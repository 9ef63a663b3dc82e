"""Random fits of Lightning: killed after every step and resumed, they go on as if nothing had been.

A fit is data: the loaders and how they are combined, limits, accumulation, validation, and when it
is saved. The undisturbed one is run with PyTorch's loader, too: the same batches in the same steps.
A killed one is left, and another process's generators, objects and trainer take its checkpoint.
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.utils.data as tud

with warnings.catch_warnings():
    # What Lightning's own imports say is not ours.
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

from adapters.campaigns import campaign, first_difference, resume_all
from adapters.loaders import Source, draw_source
from feeder.adapters.lightning import FeedCheckpoint

MODES = ("min_size", "max_size", "max_size_cycle")


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fit."""

    loader: str
    sources: tuple[Source, ...]
    mode: str
    epochs: int
    max_steps: int
    accumulate: int
    limit: int | float | None
    validation: Any
    every: int | None
    reload: int
    saves: str

    def combined(self, name: str, seed: int) -> Any:
        """The loaders, new."""
        made = [one.make(name, seed + at, at) for at, one in enumerate(self.sources)]
        return made[0] if len(made) == 1 else CombinedLoader(dict(enumerate(made)), self.mode)


def draw_fit(rng: random.Random) -> Fit:
    """A random one."""
    pick = rng.choice
    loader = pick(("feeder", "feeder", "feeder", "feed"))
    num = pick((1, 1, 1, 2, 2, 3))
    sources = tuple(draw_source(rng, loader) for _ in range(num))
    has_length = all(one.has_length for one in sources)
    limits: list[Any] = [None, None, rng.randint(1, 4)] + [0.5] * has_length
    saves = pick(("batch", "batch", "epoch", "validation"))
    validation = pick((None, None, 1, 0.5 if has_length else 1.0)) if saves != "validation" else 1.0
    by_steps = rng.random() < 0.2 and saves == "batch"
    return Fit(
        loader, sources, pick(MODES), rng.randint(2, 3), rng.randint(3, 9) if by_steps else -1,
        pick((1, 1, 1, 2, 3)), pick(limits), validation, pick((1, 1, 2)),
        pick((0, 0, 0, 0, 1)), saves,
    )  # fmt: skip


class Model(lightning.LightningModule):
    """Logs its steps; its weights depend on all of them, and on draws."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.log_of: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.log_of.append((self.current_epoch, batch_idx, self.global_step, rate,
                            [part is not None and part.tolist() for part in parts]))  # fmt: skip
        total = sum(part.sum() for part in parts if part is not None) / 1000 + torch.rand(())
        return (self.net(total.reshape(1, 1)) - 1).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[:, :1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Saves(lightning.Callback):
    """Saves at its moments, and notes how much was logged by then."""

    def __init__(self, folder: Path, moment: str) -> None:
        self.folder, self.moment = folder, moment
        self.kills: list[tuple[Path, int]] = []

    def _save(self, trainer: Any, model: Any) -> None:
        path = self.folder / f"{len(self.kills)}.ckpt"
        trainer.save_checkpoint(path)
        self.kills.append((path, len(model.log_of)))

    def on_train_batch_end(self, trainer: Any, model: Any, *arguments: Any) -> None:
        # The gradients of a group that is not complete are in no checkpoint of Lightning's.
        if self.moment == "batch" and not trainer.fit_loop._should_accumulate():
            self._save(trainer, model)

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        if self.moment == "epoch":
            self._save(trainer, model)

    def on_validation_end(self, trainer: Any, model: Any) -> None:
        if self.moment == "validation" and not trainer.sanity_checking:
            self._save(trainer, model)


def run(fit: Fit, name: str, folder: Path, *, seed: int = 1, resume: Path | None = None,
        moment: str = "") -> tuple[list[Any], list[tuple[Path, int]]]:  # fmt: skip
    """The log of a fit, and what it saved."""
    lightning.seed_everything(seed, verbose=False)
    model, saves = Model(), Saves(folder, moment)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        max_epochs=fit.epochs, max_steps=fit.max_steps, accumulate_grad_batches=fit.accumulate,
        limit_train_batches=fit.limit, val_check_interval=fit.validation,
        check_val_every_n_epoch=fit.every, reload_dataloaders_every_n_epochs=fit.reload,
        limit_val_batches=0 if fit.validation is None else None, num_sanity_val_steps=0,
        callbacks=[*([] if name == "torch" else [FeedCheckpoint()]), saves],
    )  # fmt: skip

    class Module(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return fit.combined(name, 1 if fit.reload else seed)

        def val_dataloader(self) -> Any:
            # After a resume Lightning may leave one out, or repeat one, with its draws.
            return tud.DataLoader(torch.ones(3, 2), 2, generator=torch.Generator())

    trainer.fit(model, datamodule=Module(), ckpt_path=resume, weights_only=False)
    end = (trainer.global_step, trainer.current_epoch,
           [weight.tolist() for weight in model.parameters()])  # fmt: skip
    return [*model.log_of, end], saves.kills


def differences(fit: Fit, folder: Path) -> tuple[int, list[str]]:
    """How often it was killed, and where it went on differently."""
    found = []
    try:
        want, kills = run(fit, fit.loader, folder, moment=fit.saves)
    except MisconfigurationException:
        return 0, []  # Lightning has rules of what goes together.
    if fit.loader == "feeder" and not any(one.differs for one in fit.sources):
        theirs, _ = run(fit, "torch", folder)
        if want != theirs:
            found.append(f"not as PyTorch's: {first_difference(want, theirs)}")
    if fit.max_steps != -1:
        # Lightning counts another epoch where it goes on from its end.
        kills = [(path, at) for path, at in kills if at < len(want) - 1]
    found += resume_all(
        kills, want, lambda path, to: run(fit, fit.loader, to, seed=77, resume=path)[0]
    )
    return len(kills), found


if __name__ == "__main__":
    campaign(draw_fit, differences, __doc__)
