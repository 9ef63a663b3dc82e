"""torchtitan: a `BaseDataLoader` over a data set that ranks share, for any number of them.

```python
def samples(tokenizer, seq_len):
    return dataset    # its items are ({"input": tokens}, labels)

config = Trainer.Config(dataloader=FeedDataLoader.Config(samples=samples), ...)
```

torchtitan keeps the state of one rank, which is one for all, also for another data-parallel degree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader

from feeder.adapters.loop import every_epoch
from feeder.adapters.torch import FeedLoader
from feeder.errors import ConfigError


class FeedDataLoader(BaseDataLoader):
    """The batches of a data-parallel rank, as torchtitan's trainer builds its loader.

    Peers of tensor, context and pipeline parallelism have one rank there, and get the same batches.
    Owned by the trainer's thread; any thread may ask for states.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What a job's configuration says of it."""

        samples: Callable[[Any, int], Any] | None = None
        """Makes the data set: given the tokenizer and the length of sequences, it returns whatever
        `FeedLoader` takes; items are `({"input": tokens}, labels)`."""
        shuffle: bool = True
        """Whether each epoch is shuffled, by `seed`."""
        seed: int = 0
        """Of shuffles: the same order in each run."""
        num_workers: int = 0
        """Processes that read ahead; 0 is one thread."""
        epochs: int | None = None
        """After so many the data is exhausted; None is one if not `infinite`, otherwise no end."""
        infinite: bool = True
        """Whether epochs follow one another; torchtitan's Validator sets it."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        seq_len: int,
        tokenizer: Any = None,
        **others: Any,
    ) -> None:
        if config.samples is None:
            raise ConfigError("FeedDataLoader.Config has no samples: give what makes the data set")
        self.loader = FeedLoader(
            config.samples(tokenizer, seq_len), local_batch_size,
            shuffle=config.shuffle or None, seed=config.seed, num_workers=config.num_workers,
            epochs=config.epochs or (None if config.infinite else 1), drop_last=True,
            rank=dp_rank, world_size=dp_world_size,
        )  # fmt: skip
        self._begin, self._is_read = self.loader.state_dict(), False

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        # A validator reads its loader again. A job that is resumed at the end has nothing left.
        if self._is_read and self.loader.is_over:
            self.loader.load_state_dict(self._begin)
        self._is_read = True
        return every_epoch(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was given."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of any rank. Raises `ResumeError`."""
        self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """End its threads."""
        self.loader.close()
