"""SPDL's loader for data sets of PyTorch, with its sampler: no state."""

from collections.abc import Iterator

from spdl.dataloader import get_pytorch_dataloader
from spdl.source import DistributedRandomSampler

from exactness.loader import Base, Given, Records


class Loader(Base):
    name = "SPDL"
    package = "spdl"

    def __init__(self, given: Given) -> None:
        self.given = given
        self.sampler = DistributedRandomSampler(
            given.records, rank=given.rank, world_size=given.ranks
        )
        self.loader = get_pytorch_dataloader(
            Records(given), given.batch_size, sampler=self.sampler, num_workers=given.workers,
            in_order=True,
        )  # fmt: skip

    def epoch(self, number: int) -> Iterator[list[int]]:
        self.sampler.shuffle(seed=self.given.seed + number)
        for batch in self.loader:
            yield batch.tolist()
