"""LitData: chunks of its own, and its loader with a state."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from litdata import StreamingDataLoader, StreamingDataset, optimize

from exactness.loader import Base, Given, read


class Numbers(StreamingDataset):
    def __getitem__(self, at: Any) -> int:
        return read(super().__getitem__(at)["number"])


def record(number: int) -> dict[str, int]:
    return {"number": number}


class Loader(Base):
    name = "LitData"
    package = "litdata"
    state = True
    offers = frozenset({"ranks"})

    @staticmethod
    def prepare(folder: Path, numbers: range) -> None:
        optimize(
            record, list(numbers), output_dir=str(folder), chunk_size=12, num_workers=1,
            verbose=False,
        )  # fmt: skip

    def __init__(self, given: Given) -> None:
        if given.ranks > 1:
            torch.distributed.init_process_group("gloo")
        data = Numbers(str(given.folder), shuffle=True, seed=given.seed, drop_last=True)
        self.loader = StreamingDataLoader(
            data, batch_size=given.batch_size, num_workers=given.workers
        )

    def epoch(self, number: int) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch.tolist()

    def save(self, path: Path) -> None:
        torch.save(self.loader.state_dict(), path)

    def load(self, path: Path) -> None:
        self.loader.load_state_dict(torch.load(path, weights_only=False))
