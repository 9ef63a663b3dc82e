"""feeder's FeedLoader: one order for all ranks (docs/torch.md)."""

from collections.abc import Iterator
from pathlib import Path

import torch

from exactness.loader import Base, Given, Records
from feeder.adapters.torch import FeedLoader


class Loader(Base):
    name = "feeder `FeedLoader`"
    package = "feedworks"
    state = True
    offers = frozenset({"ranks", "skip"})

    def __init__(self, given: Given) -> None:
        self.loader = FeedLoader(
            Records(given), given.batch_size, shuffle=True, seed=given.seed,
            num_workers=given.workers, rank=given.rank, world_size=given.ranks,
            on_error="skip" if given.skip else "raise",
        )  # fmt: skip

    def epoch(self, number: int) -> Iterator[list[int]]:
        self.loader.set_epoch(number)
        for batch in self.loader:
            yield batch.tolist()

    def save(self, path: Path) -> None:
        torch.save(self.loader.state_dict(), path)

    def load(self, path: Path) -> None:
        self.loader.load_state_dict(torch.load(path))

    def close(self) -> None:
        self.loader.close()
