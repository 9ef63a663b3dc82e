"""What the harnesses of frameworks share: loaders by PyTorch's names on either library's class, and
the campaign."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

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


def first_difference(got: list[Any], want: list[Any]) -> str:
    """Where two logs part."""
    at = next((i for i, (x, y) in enumerate(zip(got, want, strict=False)) if x != y), -1)
    if at == -1:
        return f"{len(got)} entries, expected {len(want)}"
    return f"entry {at} of {len(want)}: {got[at]}, expected {want[at]}"


def resume_all(
    kills: list[tuple[Path, int]], want: list[Any], resume: Callable[[Path, Path], list[Any]]
) -> list[str]:
    """How what goes on from checkpoints differs from what was logged after them."""
    found = []
    for path, at in kills:
        try:
            rest = resume(path, path.with_suffix(".resumed"))
        except Exception as error:
            found.append(f"killed after {at} entries: {error!r}")
            continue
        if rest != want[at:]:
            told = first_difference(rest, want[at:])
            found.append(f"killed after {at} of {len(want)} entries: {told}")
    return found


def count(draw: Any, differences: Any, seed: int, num: int) -> tuple[int, int]:
    """How many kills there were in so many configurations, and how many of these differ."""
    kills = wrong = 0
    # The frameworks collect garbage at each run.
    gc.collect()
    gc.freeze()
    for number in range(num):
        configuration = draw(random.Random(f"{seed} {number}"))
        with tempfile.TemporaryDirectory() as folder:
            killed, found = differences(configuration, Path(folder))
        kills, wrong = kills + killed, wrong + bool(found)
        if found:
            print(f"{number}: {configuration}", *found, sep="\n    ", flush=True)
    gc.unfreeze()
    return kills, wrong


def campaign(draw: Any, differences: Any, about: str | None) -> NoReturn:
    """The command of a harness."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--configurations", type=int, default=300)
    told, began = parser.parse_args(), time.monotonic()
    warnings.simplefilter("ignore")
    logging.disable()
    kills, wrong = count(draw, differences, told.seed, told.configurations)
    print(f"seed {told.seed}: {told.configurations} configurations, {kills} kills, {wrong} differ, "
          f"in {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    # Loaders that runs have left have threads; a process with hundreds of them may not end.
    os._exit(bool(wrong))
