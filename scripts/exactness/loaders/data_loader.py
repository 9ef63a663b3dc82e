"""PyTorch's DataLoader: it has no state; an epoch is begun by its number, with `set_epoch`."""

from collections.abc import Iterator

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from exactness.loader import Base, Given, Records


class Loader(Base):
    name = "PyTorch `DataLoader`"
    package = "torch"
    make = DataLoader

    def __init__(self, given: Given) -> None:
        records = Records(given)
        self.sampler = DistributedSampler(records, given.ranks, given.rank, seed=given.seed)
        self.loader = self.make(
            records, given.batch_size, sampler=self.sampler, num_workers=given.workers
        )

    def epoch(self, number: int) -> Iterator[list[int]]:
        self.sampler.set_epoch(number)
        for batch in self.loader:
            yield batch.tolist()
