"""Trains with Lightning, and goes on from its newest checkpoint in the middle of an epoch:

python examples/lightning_fit/train.py runs
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset

from feeder.adapters.lightning import DataLoader, FeedCheckpoint


class Circles(Dataset):  # points, and whether each lies in a circle
    def __len__(self):
        return 400

    def __getitem__(self, i):
        point = torch.rand(2, generator=torch.Generator().manual_seed(i)) * 2 - 1
        return point, (point.norm() < 0.8).float()


class Data(lightning.LightningDataModule):
    def train_dataloader(self):  # made here, where the ranks are known
        return DataLoader(Circles(), batch_size=10, shuffle=True)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch, number):
        points, inside = batch
        logits = self.net(points)[:, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, inside)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(folder, max_steps=-1):
    lightning.seed_everything(0)
    saved = ModelCheckpoint(folder, every_n_train_steps=7, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=2, max_steps=max_steps, callbacks=[saved, FeedCheckpoint()], accelerator="cpu"
    )
    last = Path(folder) / "last.ckpt"
    model = Model()
    trainer.fit(model, datamodule=Data(), ckpt_path=last if last.exists() else None)
    print(f"weights {sum(weight.norm() for weight in model.parameters()):.9f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
