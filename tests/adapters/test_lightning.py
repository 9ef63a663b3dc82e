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

    from adapters.lightning_programs import Model, differences, draw_fit

from adapters.campaigns import count
from adapters.examples import check_goes_on
from feeder.adapters.lightning import DataLoader, FeedCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.timeout(120)
def test_random_fits_go_on_from_every_step() -> None:
    kills, wrong = count(draw_fit, differences, 1, range(12))
    assert kills > 20
    assert not wrong


def fit(folder: Path, *callbacks: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        callbacks=list(callbacks), enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(torch.ones(12, 2), 4, shuffle=True))
    return trainer


@pytest.mark.timeout(60)
def test_a_missing_callback_is_told(tmp_path: Path) -> None:
    trainer = fit(tmp_path)
    with pytest.warns(UserWarning, match=r"callbacks=\[FeedCheckpoint\(\)\]"):
        trainer.save_checkpoint(tmp_path / "one.ckpt")
    kept = fit(tmp_path, FeedCheckpoint())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Lightning by itself")
        kept.save_checkpoint(tmp_path / "two.ckpt")


@pytest.mark.timeout(240)
def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    check_goes_on("lightning_fit/train.py", 33, tmp_path)
