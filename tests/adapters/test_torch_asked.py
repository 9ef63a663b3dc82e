"""Which records a loader's batches are made of, and when a record comes, against a column that
carries each row's own number."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import islice
from typing import Any

import numpy as np
import pytest

from needs import needs_framework

needs_framework("torch")

import torch

import feeder
from feeder import ConfigError, sources
from feeder.adapters.torch import FeedLoader
from feeder.sources import Record

FIRSTS = {"": 0, "web": 0, "code": 1000, "0": 0, "1": 1000}


class Samples(torch.utils.data.Dataset[int]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> int:
        return index


def draw_data(draw: random.Random) -> tuple[Any, dict[str, Any]]:
    """A data set of numbers, and settings of its loader."""

    def numbers(first: int) -> Any:
        source = sources.arrays(np.arange(draw.randint(5, 30)) + first)
        return source.shuffle(seed=draw.choice([None, 3])) if draw.random() < 0.7 else source

    kind = draw.choice(["map", "shuffled map", "one", "mix", "concat", "shards"])
    if "map" in kind:
        return Samples(draw.randint(5, 40)), {"shuffle": "shuffled" in kind}
    if kind == "mix":
        mode = draw.choice(["drop", "stop", "repeat"])
        return sources.mix(
            {"web": (numbers(0), 3), "code": (numbers(1000), 2)}, on_exhausted=mode
        ), {}
    if kind == "concat":
        return numbers(0).concat(numbers(1000)), {}
    source = numbers(0)
    return (source.shard(1, 3) if kind == "shards" else source), {}


def value(record: Record) -> int:
    return FIRSTS[record.source] + record.number


def run(seed: int) -> int:
    """How many batches a random program has asked for."""
    draw = random.Random(seed)
    num = draw.randint(1, 3)
    data, settings = draw_data(draw)
    settings |= {
        "batch_size": draw.choice([None, 1, 2, 3, 4]), "epochs": draw.choice([None, 5]), "seed": 7,
    }  # fmt: skip
    if settings["batch_size"]:
        settings["drop_last"] = draw.random() < 0.4

    def make(num: int) -> list[Any]:
        return [FeedLoader(data, rank=rank, world_size=num, **settings) for rank in range(num)]

    try:
        loaders = make(num)
    except ConfigError:
        return 0  # Fewer batches than ranks.
    begins, came = 0, [defaultdict[int, list[int]](list) for _ in range(3)]
    for _ in range(draw.randint(1, 4)):
        most = draw.choice([10**9, draw.randint(1, 4)])
        for rank, loader in enumerate(loaders):
            for batch in islice(loader, most):
                rows = batch[0] if isinstance(batch, tuple) else batch
                came[rank][loader.step - 1] = np.atleast_1d(np.asarray(rows)).tolist()
        if num == 1 or draw.random() < 0.6 or loaders[0]._is_begun:
            continue
        state = loaders[0].state_dict()
        num = draw.randint(1, num)
        loaders, begins = make(num), loaders[0].step
        for loader in loaders:
            loader.load_state_dict(state)
    num_asked = 0
    for rank, loader in enumerate(loaders):
        for step, rows in came[rank].items():
            if step < begins:
                with pytest.raises(ConfigError, match=f"at least {begins}, with which"):
                    loader.records(step)
                continue
            num_asked += 1
            assert [value(record) for (record,) in loader.records(step)] == rows, (seed, step)
    number = draw.choice([row for steps in came for rows in steps.values() for row in rows])
    names = {"mix": ("web", "code"), "concat": ("0", "1")}.get(getattr(data, "kind", ""), ("", ""))
    name = names[number >= 1000]
    newest = loaders[0].step
    seen = [
        (one.step, one.row, one.queue)
        for one in takewhile_below(loaders[0].when(number % 1000, name), newest)
    ]
    wanted = [
        (step, row, rank)
        for rank in range(num)
        for step, rows in came[rank].items() if begins <= step < newest
        for row, n in enumerate(rows) if n == number
    ]  # fmt: skip
    assert seen == sorted(wanted, key=lambda one: (one[0], one[1], one[2])), seed
    return num_asked


def takewhile_below(seen: Any, newest: int) -> list[Any]:
    found = []
    try:
        for one in seen:
            if one.step >= newest:
                break
            found.append(one)
    except ConfigError:
        assert not found
    return found


@pytest.mark.parametrize("seed", range(40))
def test_records_are_those_that_the_rows_carry(seed: int) -> None:
    run(seed)


def test_steps_to_come_are_told_without_reading() -> None:
    loader = FeedLoader(Samples(10**7), 256, shuffle=True, rank=1, world_size=4)
    rows = loader.records(10**9)
    assert len({record.number for (record,) in rows}) == 256
    assert {record.name for (record,) in rows} == {f"sample {r.number}" for (r,) in rows}
    seen = next(loader.when(17))
    assert (seen.epoch, 0 <= seen.queue < 4) == (0, True)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: FeedLoader(iter(range(9))), "an iterable says nothing of them"),
        (lambda: FeedLoader(Samples(9), sampler=[3, 1, 2]), "a sampler has an order of its own"),
        (lambda: FeedLoader(Samples(9), on_error="skip"), "may leave samples out"),
        (lambda: FeedLoader(sources.arrays(np.arange(9)).filter(bool), 2), "ask the feed"),
    ],
)
def test_what_does_not_follow_from_numbers_is_refused(made: Any, why: str) -> None:
    with made() as loader:
        for ask in (lambda: loader.records(0), lambda: next(loader.when(0))):
            with pytest.raises(ConfigError, match=why):
                ask()


def test_a_loader_of_a_feed_names_the_feed() -> None:
    source = sources.arrays(np.arange(9))
    coordinator = feeder.init_data_input_workers(["x"], source, 2, coordinator=feeder.Coordinator())
    with coordinator, pytest.raises(ConfigError, match=r"feed\.records\(batch\.step\)"):
        FeedLoader(coordinator["train"]).records(0)


def test_what_is_not_there_is_told() -> None:
    with FeedLoader(Samples(9), 2, epochs=2) as loader:
        with pytest.raises(ConfigError, match="has ended before it"):
            loader.records(10)
        with pytest.raises(ConfigError, match="record is 9, and the source has 9 records"):
            loader.when(9)
        with pytest.raises(ConfigError, match="step is -1"):
            loader.records(-1)
        assert [one.step for one in loader.when(8)] == [4, 9]
