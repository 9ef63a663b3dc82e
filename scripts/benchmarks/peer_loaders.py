"""Loaders that users have, beside feeder's, each over the same data set.

A loader is imported where it is used, and only then. All shuffle, and keep the order of their
batches where they can be told to.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SEED = 1


class Loader:
    """One epoch of a data set, by `iter`."""

    _loader: Any
    """Made by `__init__(dataset, batch_size, workers)`."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        """End its workers, where they do not end with the epoch."""


class TorchLoader(Loader):
    """PyTorch's DataLoader."""

    module, name = "torch.utils.data", "DataLoader"

    def __init__(self, dataset: Any, batch_size: int, workers: int) -> None:
        kind = getattr(importlib.import_module(self.module), self.name)
        self._loader = kind(dataset, batch_size, shuffle=True, num_workers=workers)


class StatefulLoader(TorchLoader):
    """torchdata's, which has a state."""

    module, name = "torchdata.stateful_dataloader", "StatefulDataLoader"


class GrainLoader(Loader):
    """Grain, over the data set as a source. It reads as many batches ahead as the others: by itself
    it would read 500, and so a whole short epoch before its first batch."""

    def __init__(self, dataset: Any, batch_size: int, workers: int) -> None:
        grain: Any = importlib.import_module("grain")
        ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
        made = grain.MapDataset.source(dataset).shuffle(SEED).batch(batch_size)
        made = made.to_iter_dataset(ahead)
        self._loader = iter(made.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)))

    def close(self) -> None:
        self._loader.close()


class SpdlLoader(Loader):
    """SPDL's loader for data sets of PyTorch."""

    def __init__(self, dataset: Any, batch_size: int, workers: int) -> None:
        make = importlib.import_module("spdl.dataloader").get_pytorch_dataloader
        self._loader = make(
            dataset, batch_size, shuffle=True, num_workers=workers, in_order=True
        )  # fmt: skip


class FeederLoader(Loader):
    """feeder's own order, with processes."""

    name = "FeedLoader"

    def __init__(self, dataset: Any, batch_size: int, workers: int) -> None:
        make = getattr(importlib.import_module("feeder.adapters.torch"), self.name)
        self._loader = make(dataset, batch_size, shuffle=True, seed=SEED, **self._workers(workers))

    def _workers(self, workers: int) -> dict[str, Any]:
        return {"num_workers": workers}

    def close(self) -> None:
        self._loader.close()


class FeederDataLoader(FeederLoader):
    """PyTorch's order, with feeder's workers."""

    name = "DataLoader"


class FeederThreads(FeederLoader):
    """feeder's own order, with threads of the trainer's process."""

    def _workers(self, workers: int) -> dict[str, Any]:
        feeder = importlib.import_module("feeder")
        return {"executor": feeder.Threads(workers)}


@dataclass(frozen=True, slots=True)
class Peer:
    """A loader by the module that it comes from."""

    module: str
    make: Callable[[Any, int, int], Any]
    """A `Loader`, or a generator, which has all that is asked of one."""


PEERS: Mapping[str, Peer] = {
    "DataLoader": Peer("torch.utils.data", TorchLoader),
    "StatefulDataLoader": Peer("torchdata.stateful_dataloader", StatefulLoader),
    "Grain": Peer("grain", GrainLoader),
    "SPDL": Peer("spdl.dataloader", SpdlLoader),
    "feeder, DataLoader": Peer("feeder.adapters.torch", FeederDataLoader),
    "feeder, processes": Peer("feeder.adapters.torch", FeederLoader),
    "feeder, threads": Peer("feeder.adapters.torch", FeederThreads),
}
