"""Megatron-LM, Megatron Bridge and NeMo: a loader for `dataloader_type="external"`.

```python
def train_valid_test_dataloaders_provider(num_samples):
    loader = FeedLoader(dataset, batch_size=micro_batch_size, shuffle=True,
                        rank=mpu.get_data_parallel_rank(),
                        world_size=mpu.get_data_parallel_world_size())
    return ExternalLoader(loader), None, None
```

Megatron writes what `save_state` gives, a file for each data-parallel rank. It reads none: whoever
makes the loader does, and gives the state to `restore_state`.
"""

from __future__ import annotations

from typing import Any

from feeder.adapters.loop import EpochLoader, every_epoch


class ExternalLoader:
    """An iterator over the batches of one epoch after another. One thread iterates and owns all
    fields; any thread may ask for states.

    Args:
        loader: Gives the micro-batches of this data-parallel rank: peers of tensor, pipeline and
            context parallelism give the same rank.
    """

    def __init__(self, loader: EpochLoader) -> None:
        self.loader = loader
        self._batches = every_epoch(loader)

    def __iter__(self) -> ExternalLoader:
        # Itself: Megatron looks for `save_state` on what `iter` gives.
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def save_state(self) -> dict[str, Any]:
        """The position after the last batch that was given; the same for all ranks."""
        return self.loader.state_dict()

    def restore_state(self, state: dict[str, Any]) -> None:
        """Go on from a state of any rank. Raises `ResumeError`."""
        self.loader.load_state_dict(state)
        self._batches = every_epoch(self.loader)

    # The names that a loader of Energon's has.
    save_state_rank = save_state
    restore_state_rank = restore_state
