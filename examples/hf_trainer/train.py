"""Trains with the Trainer of Hugging Face, and goes on from its newest checkpoint:

python examples/hf_trainer/train.py runs
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import TrainingArguments, set_seed

from feeder.adapters.hf import DataLoader, FeedTrainer


class Circles(Dataset):  # points, and whether each lies in a circle
    def __len__(self):
        return 400

    def __getitem__(self, i):
        point = torch.rand(2, generator=torch.Generator().manual_seed(i)) * 2 - 1
        return {"points": point, "labels": (point.norm() < 0.8).float()}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        self.net = torch.nn.Sequential(*layers)

    def forward(self, points, labels):
        logits = self.net(points)[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return {"loss": loss, "logits": logits}


def main(folder, max_steps=-1):
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,
        max_steps=max_steps,
        save_steps=7,
        lr_scheduler_type="constant",  # others depend on max_steps
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = Model()
    loader = DataLoader(Circles(), batch_size=10, shuffle=True)
    trainer = FeedTrainer(model, arguments, train_loader=loader)
    trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))
    print(f"weights {sum(weight.norm() for weight in model.parameters()):.9f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
