"""States of loaders as trainers save them: of each kind of data, and in each framework."""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from feeder import sources
from small import Pure
from small import make as make_feed

NUM, SIZE = 23, 4
STEPS = (0, 2, 6, 8)
"""After so many batches: at the beginning, in an epoch, at its end, and in the next."""
THEN = 5


class Reader(NamedTuple):
    """A loader, as a framework reads, saves and resumes it."""

    batches: Iterator[Any]
    save: Callable[[], Any]
    load: Callable[[Any], object]

    def take(self, num: int) -> list[Any]:
        return [
            np.asarray(batch[0] if isinstance(batch, tuple) else batch).tolist()
            for batch in islice(self.batches, num)
        ]


def every(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def plain(loader: Any) -> Reader:
    return Reader(every(loader), loader.state_dict, loader.load_state_dict)


# ---- kinds of data


class Drawn:
    """A sampler whose state is that of what draws."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(NUM).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class Stream:
    """An iterable without a state, which is told its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(NUM).tolist())


class Walk:
    """An iterable with a state."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < NUM:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def of(dataset: Any, **settings: Any) -> Callable[[], Reader]:
    def make() -> Reader:
        from feeder.adapters.torch import FeedLoader

        given = {name: value() if callable(value) else value for name, value in settings.items()}
        return plain(FeedLoader(dataset(), **{"batch_size": SIZE, "seed": 3, **given}))

    return make


def of_torchs(dataset: Any, **settings: Any) -> Callable[[], Reader]:
    """PyTorch's own loader with a state: its draws are those of a generator."""

    def make() -> Reader:
        import torch

        from feeder.adapters.torch import DataLoader

        given = {name: value() if callable(value) else value for name, value in settings.items()}
        # A state holds those of the process, too.
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        if "seed" not in given:
            given["generator"] = torch.Generator().manual_seed(5)
        return plain(DataLoader(dataset(), **{"batch_size": SIZE, **given}))

    return make


def iterable(kind: type) -> Callable[[], Any]:
    """An iterable as PyTorch's loader knows one."""

    def make() -> Any:
        import torch

        return type(kind.__name__, (kind, torch.utils.data.IterableDataset), {})()

    return make


def numbers() -> list[int]:
    return list(range(NUM))


def seeded() -> Any:
    import torch

    own = torch.Generator().manual_seed(5)
    return torch.utils.data.RandomSampler(range(NUM), generator=own)


def batches() -> Any:
    import torch

    return torch.utils.data.BatchSampler(range(NUM), SIZE, drop_last=False)


def source() -> Any:
    return sources.arrays(np.arange(NUM)).shuffle()


def of_feed() -> Reader:
    from feeder.adapters.torch import FeedLoader

    coordinator = make_feed(Pure(8, 3), epochs=3, writable=True)
    reader = plain(FeedLoader(coordinator["train"]))

    def begun() -> Iterator[Any]:
        with coordinator:
            for batch in reader.batches:
                yield batch["id"]

    return reader._replace(batches=begun())


KINDS: dict[str, Callable[[], Reader]] = {
    "map": of(numbers),
    "map, shuffled": of(numbers, shuffle=True),
    "map, shuffled, one of two ranks": of(numbers, shuffle=True, rank=1, world_size=2),
    "map, drop_last": of(numbers, shuffle=True, drop_last=True),
    "map, without batches": of(numbers, shuffle=True, batch_size=None),
    "sampler": of(numbers, sampler=lambda: [*range(0, NUM, 2), *range(1, NUM, 2)]),
    "sampler with a generator": of(numbers, sampler=seeded),
    "sampler with a state": of(numbers, sampler=Drawn),
    "batch_sampler": of(numbers, batch_size=1, batch_sampler=batches),
    "source": of(source),
    "source, one of two ranks": of(source, rank=0, world_size=2, drop_last=True),
    "iterable": of(Stream),
    "iterable with a state": of(Walk),
    "feed": of_feed,
    "DataLoader": of_torchs(numbers),
    "DataLoader, shuffled": of_torchs(numbers, shuffle=True),
    "DataLoader, shuffled by feeder": of_torchs(numbers, shuffle=True, seed=3),
    "DataLoader, two workers": of_torchs(numbers, shuffle=True, num_workers=2),
    "DataLoader, sampler with a state": of_torchs(numbers, sampler=Drawn),
    "DataLoader, batch_sampler": of_torchs(numbers, batch_size=1, batch_sampler=batches),
    "DataLoader, iterable": of_torchs(iterable(Stream)),
    "DataLoader, iterable with a state": of_torchs(iterable(Walk)),
}

# ---- frameworks


def of_lightning() -> Reader:
    from feeder.adapters.lightning import FeedLoader

    return plain(FeedLoader(numbers(), SIZE, shuffle=True, seed=3))


def of_hf() -> Reader:
    from feeder.adapters.hf import FeedLoader

    return plain(FeedLoader(numbers(), SIZE, shuffle=True, seed=3))


def of_jax() -> Reader:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from feeder.adapters.jax import FeedLoader, global_batches

    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("rows",)), PartitionSpec("rows"))
    loader = global_batches(FeedLoader(numbers(), SIZE, shuffle=True, seed=3), sharding)
    return Reader(loader, loader.get_state, loader.set_state)


def of_tensorflow() -> Reader:
    from feeder.adapters.tensorflow import FeedLoader, FeedState

    loader = FeedLoader(numbers(), SIZE, shuffle=True, seed=3)
    state = FeedState(loader)

    def used() -> Iterator[Any]:
        for batch in every(loader):
            state.used.assign(loader.step)
            yield batch

    return Reader(used(), state.serialize, state.deserialize)


def of_megatron() -> Reader:
    from feeder.adapters.megatron import ExternalLoader
    from feeder.adapters.torch import FeedLoader

    loader = ExternalLoader(FeedLoader(numbers(), SIZE, shuffle=True, seed=3))
    return Reader(loader, loader.save_state, loader.restore_state)


def of_torchtitan() -> Reader:
    from feeder.adapters.torchtitan import FeedDataLoader

    def samples(tokenizer: Any, seq_len: int) -> list[Any]:
        return [({"input": i}, i) for i in range(NUM)]

    config = FeedDataLoader.Config(samples=samples, seed=3)
    loader = config.build(
        dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=1, local_batch_size=SIZE
    )
    labels = (batch for _, batch in loader)
    return Reader(labels, loader.state_dict, loader.load_state_dict)


FRAMEWORKS: dict[str, Callable[[], Reader]] = {
    "torch": of(numbers, shuffle=True),
    "lightning": of_lightning,
    "hf": of_hf,
    "jax": of_jax,
    "tensorflow": of_tensorflow,
    "megatron": of_megatron,
    "torchtitan": of_torchtitan,
}
MADE = {**KINDS, **FRAMEWORKS}


# ---- as JSON


def to_json(state: Any) -> Any:
    if isinstance(state, bytes):
        return {"bytes": b64encode(state).decode()}
    if isinstance(state, dict):
        return {key: to_json(value) for key, value in state.items()}
    return [to_json(value) for value in state] if isinstance(state, list) else state


def from_json(state: Any) -> Any:
    if isinstance(state, dict):
        if [*state] == ["bytes"]:
            return b64decode(state["bytes"])
        return {key: from_json(value) for key, value in state.items()}
    return [from_json(value) for value in state] if isinstance(state, list) else state


def at(make_one: Callable[[], Reader], step: int) -> dict[str, Any]:
    reader = make_one()
    reader.take(step)
    return {"state": to_json(reader.save()), "then": str(reader.take(THEN))}


def states_of(name: str) -> dict[str, Any]:
    # Those of PyTorch's loader hold whole generators.
    steps = STEPS[1:2] if name.startswith("DataLoader") else STEPS
    return {f"{step} batches": at(MADE[name], step) for step in steps}


def make(folder: Path) -> dict[str, Any]:
    return {name: states_of(name) for name in MADE}


def rest(name: str, state: Any) -> str:
    """The batches after a state that was kept."""
    reader = MADE[name]()
    reader.load(from_json(state))
    return str(reader.take(THEN))
