"""torchdata's StatefulDataLoader: PyTorch's with a state."""

from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from exactness.loaders import data_loader


class Loader(data_loader.Loader):
    name = "`StatefulDataLoader`"
    package = "torchdata"
    state = True
    make = StatefulDataLoader

    def save(self, path: Path) -> None:
        torch.save(self.loader.state_dict(), path)

    def load(self, path: Path) -> None:
        self.loader.load_state_dict(torch.load(path, weights_only=False))
