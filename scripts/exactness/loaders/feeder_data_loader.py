"""feeder's DataLoader, which is PyTorch's with a state (docs/torch.md)."""

from pathlib import Path

import torch
from torch.utils.data.distributed import DistributedSampler

from exactness.loader import Given, Records
from exactness.loaders import data_loader
from feeder.adapters.torch import DataLoader


class Loader(data_loader.Loader):
    name = "feeder `DataLoader`"
    package = "feedworks"
    state = True
    offers = frozenset({"ranks", "skip"})

    def __init__(self, given: Given) -> None:
        records = Records(given)
        self.sampler = DistributedSampler(records, given.ranks, given.rank, seed=given.seed)
        self.loader = DataLoader(
            records, given.batch_size, sampler=self.sampler, num_workers=given.workers,
            on_error="skip" if given.skip else "raise",
        )  # fmt: skip

    def save(self, path: Path) -> None:
        torch.save(self.loader.state_dict(), path)

    def load(self, path: Path) -> None:
        self.loader.load_state_dict(torch.load(path))
