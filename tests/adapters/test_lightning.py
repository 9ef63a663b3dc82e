"""Lightning's trainer goes on from its checkpoints with the batches of an undisturbed run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from needs import needs_framework

needs_framework("torch", "lightning")

with warnings.catch_warnings():
    # What Lightning's own imports say is not ours.
    warnings.simplefilter("ignore")
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.utilities import CombinedLoader

from adapters.examples import said
from adapters.killing_alone import compare
from adapters.lightning_child import EPOCHS, SAMPLES, SIZE, Points
from feeder.adapters.lightning import FeedCheckpoint, FeedLoader

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
STEPS = -(-SAMPLES // SIZE)


class Model(lightning.LightningModule):
    """Notes the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        batch = batch["one"] if isinstance(batch, dict) else batch
        x, y, ids = batch
        self.seen.append((self.global_step, ids.tolist()))
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Data(lightning.LightningDataModule):
    def __init__(self, combined: bool = False) -> None:
        super().__init__()
        self.combined = combined

    def train_dataloader(self) -> Any:
        loader = FeedLoader(Points(), SIZE, shuffle=True)
        if not self.combined:
            return loader
        other = FeedLoader(Points(), SIZE, shuffle=True, seed=1)
        return CombinedLoader({"one": loader, "two": other}, mode="min_size")


def fit(
    folder: Path, resume: Any = None, *, steps: int = -1, combined: bool = False,
    every: int | None = 1,
) -> Model:  # fmt: skip
    lightning.seed_everything(0, verbose=False)
    model = Model()
    saved = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=every, save_top_k=-1,
        every_n_epochs=None if every else 1,
    )  # fmt: skip
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, max_steps=steps, logger=False,
        callbacks=[saved, FeedCheckpoint()], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, datamodule=Data(combined), ckpt_path=resume)
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return fit(tmp_path_factory.mktemp("whole"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("step", [1, STEPS - 1, STEPS, STEPS + 1, 2 * STEPS, 3 * STEPS - 1])
def test_a_checkpoint_at_any_step_goes_on_bit_for_bit(
    whole: Model, tmp_path: Path, step: int
) -> None:
    fit(tmp_path, steps=step)
    resumed = fit(tmp_path, tmp_path / f"step={step}.ckpt")
    assert len(whole.seen) == EPOCHS * STEPS
    assert resumed.seen == whole.seen[step:]
    assert torch.equal(resumed.net.weight, whole.net.weight)


@pytest.mark.timeout(120)
def test_so_does_one_of_an_epochs_end_and_a_second_resume(whole: Model, tmp_path: Path) -> None:
    fit(tmp_path, steps=STEPS, every=None)
    (saved,) = tmp_path.glob("*.ckpt")
    # Without `max_steps`, with which Lightning ends the epoch after such a checkpoint at its first
    # batch, whatever the loader is.
    second = fit(tmp_path / "second", saved)
    third = fit(tmp_path / "third", tmp_path / f"second/step={STEPS + 3}.ckpt")
    assert second.seen == whole.seen[STEPS:]
    assert third.seen == whole.seen[STEPS + 3 :]


@pytest.mark.timeout(120)
def test_a_combined_loader_is_resumed(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", combined=True)
    fit(tmp_path, combined=True, steps=4)
    resumed = fit(tmp_path, tmp_path / "step=4.ckpt", combined=True)
    assert resumed.seen == whole.seen[4:]


@pytest.mark.timeout(240)
def test_a_killed_trainer_goes_on_bit_for_bit() -> None:
    assert compare("lightning", 2, seed=3) == 3 * STEPS


@pytest.mark.timeout(240)
def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole, stopped, rest = said(
        "lightning_fit/train.py",
        [[tmp_path / "whole"], [tmp_path / "halves", "33"], [tmp_path / "halves"]], tmp_path,
    )  # fmt: skip
    whole, stopped, rest = (text.splitlines()[-1] for text in (whole, stopped, rest))
    assert whole.startswith("weights ")
    assert stopped != whole == rest
