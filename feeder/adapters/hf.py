"""Hugging Face: a `Trainer` that reads a `FeedLoader`, and goes on in the middle of an epoch.

```python
trainer = FeedTrainer(model, args, train_loader=FeedLoader(dataset, batch_size=8, shuffle=True))
trainer.train(resume_from_checkpoint=True)
```

The position is in each checkpoint's `trainer_state.json`: so the two are whole together. Nothing is
skipped by reading it again.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from feeder.adapters import torch
from feeder.adapters.loop import from_plain, to_plain
from feeder.errors import ConfigError


class FeedLoader(torch.FeedLoader):
    """A loader for a `Trainer`, with the arguments of PyTorch's DataLoader. The thread that trains
    owns it.

    The trainer knows by `len` when an epoch ends, and does not ask for a batch after the last one:
    so the state after it is one of the next epoch.
    """

    counts_batches = True


class FeedCallback(TrainerCallback, ExportableState):
    """Keeps the position of the training loader in the trainer's checkpoints, and loads it where
    the trainer goes on. Owned by the trainer's thread."""

    def __init__(self) -> None:
        self._loader: Any = None

    def state(self) -> dict[str, Any]:
        """The position as JSON has it."""
        state = {} if self._loader is None else self._loader.state_dict()
        return {"args": {}, "attributes": {"position": to_plain(state)}}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Load the position of the checkpoint that the trainer goes on from."""
        self._loader = train_dataloader
        if not state.global_step:
            return
        found = state.stateful_callbacks.get(type(self).__name__)
        position = found and found["attributes"].get("position")
        if not position:
            raise ConfigError(
                f"the checkpoint of step {state.global_step} has no position of a feed: it was "
                "saved without FeedCallback"
            )
        self._loader.load_state_dict(from_plain(position))


class FeedTrainer(Trainer):
    """A trainer whose training batches come from `train_loader`; all else is Trainer's. The thread
    that trains owns it.

    Args:
        train_loader: Gives the batches, as dicts of the model's inputs.
    """

    def __init__(self, *arguments: Any, train_loader: FeedLoader, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._train_loader = train_loader
        # It would read the batches that it had again, to pass them over.
        self.args.ignore_data_skip = True
        self.add_callback(FeedCallback())

    def get_train_dataloader(self) -> Any:
        """The loader."""
        return self._train_loader
