"""Hugging Face's iterable `datasets`, shuffled by a buffer, in torchdata's loader."""

from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from exactness.loader import Base, Given, read


def look(row: dict[str, int]) -> dict[str, int]:
    return {"number": read(row["number"])}


class Loader(Base):
    name = "`datasets`"
    package = "datasets"
    state = True

    def __init__(self, given: Given) -> None:
        rows = Dataset.from_dict({"number": list(range(given.records))})
        shards = rows.to_iterable_dataset(num_shards=12).shuffle(seed=given.seed, buffer_size=16)
        self.data = shards.map(look)
        self.loader = StatefulDataLoader(
            self.data, batch_size=given.batch_size, num_workers=given.workers
        )

    def epoch(self, number: int) -> Iterator[list[int]]:
        self.data.set_epoch(number)
        for batch in self.loader:
            yield batch["number"].tolist()

    def save(self, path: Path) -> None:
        torch.save(self.loader.state_dict(), path)

    def load(self, path: Path) -> None:
        self.loader.load_state_dict(torch.load(path, weights_only=False))
