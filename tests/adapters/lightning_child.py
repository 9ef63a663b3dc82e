"""Trains by Lightning, and says what it saw; for `killing_alone.py`.

Arguments: the folder of its checkpoints. It goes on from the newest, and is killed by whoever reads
what it says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    # What Lightning's own imports say is not ours.
    warnings.simplefilter("ignore")
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

from feeder.adapters.lightning import FeedCheckpoint, FeedLoader

SAMPLES, SIZE, EPOCHS = 22, 4, 3


class Points(torch.utils.data.Dataset):
    """Sample i: numbers that follow from i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        made = torch.Generator().manual_seed(i)
        return torch.randn(4, generator=made), torch.randn(1, generator=made), i


class Data(lightning.LightningDataModule):
    def train_dataloader(self) -> Any:
        return FeedLoader(Points(), SIZE, shuffle=True)


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y, _ = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def digest(*tensors: torch.Tensor) -> str:
    raw = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


class Tells(lightning.Callback):
    """Says a step before it is saved: a callback that saves comes last. Owned by the trainer."""

    def __init__(self, out: Any) -> None:
        self.out = out

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        weights = digest(*pl_module.parameters())
        said = [trainer.current_epoch, digest(*batch), digest(outputs["loss"]), weights]
        print(json.dumps([trainer.global_step, *said]), file=self.out, flush=True)


def newest(folder: Path) -> Path | None:
    found = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    return found[-1] if found else None


def main(folder: Path) -> None:
    # Lightning may print what it likes.
    out, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    saved = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, logger=False,
        callbacks=[Tells(out), saved, FeedCheckpoint()], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Model(), datamodule=Data(), ckpt_path=newest(folder))
    print("end", file=out, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
