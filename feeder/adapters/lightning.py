"""Lightning: a `FeedLoader` whose state goes into Lightning's checkpoints.

```python
class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return FeedLoader(dataset, batch_size=32, shuffle=True)
```

A trainer finds `state_dict` and `load_state_dict` by itself, saves them with the fit loop, and goes
on in the middle of an epoch. It keeps the state of one rank, which is one for all. The loader is to
be made in `train_dataloader`, where the ranks are known.

After some resumes a trainer takes an epoch for finished that is not, and does not load the states
of its loaders. `callbacks=[FeedCheckpoint()]` has them loaded then, too.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from feeder.adapters import torch
from feeder.adapters.packing import leaves


class FeedLoader(torch.FeedLoader):
    """A loader for `lightning.Trainer`, with the arguments of PyTorch's DataLoader. The thread
    that trains owns it.

    The trainer knows by `len` when an epoch ends, and does not ask for a batch after the last one:
    so the state after it is one of the next epoch. From a checkpoint of an epoch's end it loads no
    state of loaders: so the epoch is the one that it tells samplers.
    """

    counts_batches = True

    def __init__(self, dataset: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(dataset, *arguments, **named)
        self.sampler = _TellsEpoch(self)


class _TellsEpoch:
    """Stands where the trainer looks for a sampler. Owned by the loader's thread."""

    def __init__(self, loader: FeedLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """The trainer begins this epoch, or goes on in it."""
        self._loader.begin_epoch(epoch)


class FeedCheckpoint(Callback):
    """Keeps the positions of the training loaders in Lightning's checkpoints, whatever the trainer
    takes an epoch for. Owned by the trainer's thread."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._states: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remember whose loaders it keeps."""
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """The states of the loaders."""
        states = [loader.state_dict() for loader in self._loaders()]
        return {"loaders": states or self._states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep states until there are loaders."""
        self._states = state_dict["loaders"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load them: the loaders are there, and none has been read."""
        if self._states:
            for loader, state in zip(self._loaders(), self._states, strict=True):
                loader.load_state_dict(state)
        self._states = []

    def _loaders(self) -> list[FeedLoader]:
        found = None if self._trainer is None else self._trainer.train_dataloader
        return [loader for loader in leaves(found) if isinstance(loader, FeedLoader)]


DataLoader = FeedLoader
"""The same by the name that is replaced."""
