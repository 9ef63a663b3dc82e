"""What tests of trainers share: data sets that a function makes, and loaders by PyTorch's names on
either library's class."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data as tud

from adapters.torch_programs import ITEMS, Counted, Data, Resumed, Stream
from feeder.adapters.torch import DataLoader, FeedLoader

ITEMS["row"] = lambda i: torch.tensor([float(i), 0.0])
ITEMS["noisy"] = lambda i: torch.stack([torch.tensor(float(i)), torch.rand(())])

CLASSES: dict[str, Any] = {"torch": tud.DataLoader, "feeder": DataLoader, "feed": FeedLoader}
STREAMS = ("sharded", "sharded len", "sharded len less", "sharded len more")
KINDS = ("plain", "shuffle", "generator", "weighted", "distributed", "seed", "sharded state",
         *STREAMS)  # fmt: skip
OF_FEED_LOADER = ("plain", "shuffle", *STREAMS)


class Items(tud.Dataset):
    """What a function makes of each number."""

    def __init__(self, make: Callable[[int], Any], num: int = 24) -> None:
        self.make, self.num = make, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


def epoch_of(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


@dataclasses.dataclass(frozen=True)
class Source:
    """One loader."""

    kind: str
    num: int
    size: int
    drop_last: bool
    is_noisy: bool
    workers: int
    persistent: bool

    @property
    def has_length(self) -> bool:
        return self.kind not in ("sharded", "sharded state")

    @property
    def differs(self) -> bool:
        """Whether its rows are on purpose not PyTorch's: orders of a seed, draws in workers."""
        return self.kind == "seed" or (self.is_noisy and self.workers > 0)

    def make(self, name: str, seed: int, stage: int = 0, collate: Any = None) -> Any:
        """The loader, new; `seed` is that of a generator of its own."""
        item = "noisy" if self.is_noisy else "row"
        named: dict[str, Any] = {"drop_last": self.drop_last, "collate_fn": collate}
        if self.workers:
            named |= {"num_workers": self.workers, "persistent_workers": self.persistent}
        data: Any = Data(self.num, item, None, "")
        if self.kind.startswith("sharded"):
            cls = Counted if "len" in self.kind else Resumed if "state" in self.kind else Stream
            data = cls(self.num, item, self.kind)
        data.stage = stage
        match self.kind:
            case "shuffle":
                named["shuffle"] = True
            case "generator":
                named |= {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}
            case "weighted":
                named["sampler"] = tud.WeightedRandomSampler(torch.ones(self.num), self.num + 2)
            case "distributed":
                named["sampler"] = tud.DistributedSampler(data, 2, 1, shuffle=True)
            case "seed":
                named |= {"shuffle": True} | ({} if name == "torch" else {"seed": 5})
        return CLASSES[name](data, self.size, **named)


def draw_source(rng: random.Random, loader: str) -> Source:
    """A random one, with workers now and then: they take time."""
    pick, is_feeder = rng.choice, loader == "feeder"
    num = rng.randint(4, 13)
    return Source(
        pick(KINDS if is_feeder else OF_FEED_LOADER), num, pick((2, 3, 4)),
        # A FeedLoader refuses a length with no whole batch in it.
        (is_feeder or num > 6) and rng.random() < 0.2, is_feeder and rng.random() < 0.3,
        2 * (is_feeder and rng.random() < 0.04), rng.random() < 0.5,
    )  # fmt: skip
