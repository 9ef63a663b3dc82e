"""`FeedLoader(on_device=...)` on the host: the function's draws, what it may return, and errors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from needs import needs_framework

needs_framework("torch")

import torch

import feeder
from conformance.served import serving
from feeder.adapters.torch import DataLoader, FeedLoader
from standin.making import factors_of
from watching import says

NUM, SIZE, SEED = 57, 4, 6
NUM_BATCHES = 15


class Items(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.full((3,), float(i)), "at": (i, f"item {i}")}


def draw(batch: Any, rng: np.random.Generator) -> Any:
    factors = torch.from_numpy(rng.random(4, np.float32))
    assert not torch.is_grad_enabled()
    return batch["at"][0], batch["x"] * factors[: len(batch["x"]), None], batch["at"][1]


def load(dataset: Any = None, *, on_device: Any = draw, **more: Any) -> Any:
    settings = {"shuffle": True} | more if dataset is None else more
    return FeedLoader(dataset or Items(), SIZE, seed=SEED, on_device=on_device, **settings)


def note(batch: Any) -> Any:
    numbers, scaled, texts = batch
    assert texts == [f"item {i}" for i in numbers]
    return numbers.tolist(), scaled.tolist()


def wanted(epoch: int) -> list[Any]:
    """The batches of all ranks of an epoch, by the order alone."""
    with load(on_device=None) as loader:
        loader.begin_epoch(epoch)
        found = []
        for index, batch in enumerate(loader):
            factors = torch.from_numpy(factors_of(SEED, epoch, index)[: len(batch["x"])])
            scaled = (batch["x"] * factors[:, None]).tolist()
            found.append((batch["at"][0].tolist(), scaled))
    return found


@pytest.mark.parametrize("num_workers", (0, 2))
def test_draws_follow_the_epoch_and_the_place_of_the_batch(num_workers: int) -> None:
    with load(num_workers=num_workers) as loader:
        assert [[note(batch) for batch in loader] for _ in range(2)] == [wanted(0), wanted(1)]


def test_any_number_of_ranks_draws_the_same_for_a_batch() -> None:
    """The last batch, which comes again for a rank without one, included; also from a state of
    another number of ranks."""
    want, state = wanted(0), {}
    for num, from_ in ((2, 0), (3, 6), (1, 12)):
        got: dict[int, Any] = {}
        for rank in range(num):
            with load(rank=rank, world_size=num) as loader:
                if state:
                    loader.load_state_dict(state)
                places = range(from_ + rank, NUM_BATCHES + num, num)
                for place, batch in zip(places, loader, strict=False):
                    assert got.setdefault(min(place, NUM_BATCHES - 1), note(batch)) == note(batch)
                    if place - rank - from_ == 6 - num:
                        later = loader.state_dict()
        assert [got[place] for place in range(from_, NUM_BATCHES)] == want[from_:]
        state = later


def test_resumed_anywhere_it_draws_the_same() -> None:
    with load() as loader:
        states = [loader.state_dict() for _ in range(2) for _ in loader]
    want = wanted(0) + wanted(1)
    for step in random.Random(3).sample(range(2 * NUM_BATCHES - 1), 8):
        with load() as loader:
            loader.load_state_dict(states[step])
            rest = [note(batch) for batch in loader]
            rest += [note(batch) for batch in loader] if (step + 1) % NUM_BATCHES == 0 else []
        end = (step // NUM_BATCHES + 1) * NUM_BATCHES
        assert rest == want[step + 1 : end] or rest == want[step + 1 : end + NUM_BATCHES]


def test_an_iterable_a_source_and_a_function_draw_by_their_batches() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(10))

    def scale(batch: Any, rng: np.random.Generator) -> Any:
        values = batch["x"] if isinstance(batch, dict) else batch
        return values * torch.from_numpy(rng.random(4, np.float32))[: len(values)]

    def fetch(call: feeder.Call) -> Any:
        if call.index == 10:
            raise StopIteration
        return {"x": np.full((1,), call.index)}

    want = [
        (np.arange(at, min(at + 4, 10)) * factors_of(SEED, 0, at // 4)[: 10 - at]).tolist()
        for at in range(0, 10, 4)
    ]
    for dataset in (Stream(), feeder.sources.arrays({"x": np.arange(10)}), fetch):
        with load(dataset, on_device=scale, epochs=1) as loader:
            assert [batch.double().tolist() for batch in loader] == [
                pytest.approx(one) for one in want
            ]


def test_a_connected_loader_gives_its_function_tensors() -> None:
    def make() -> feeder.Coordinator:
        return feeder.init_data_input_workers(
            ["x"], feeder.sources.arrays({"x": np.arange(12.0)}), 4, seed=SEED,
            coordinator=feeder.Coordinator(),
        )  # fmt: skip

    def scale(batch: Any, rng: np.random.Generator) -> Any:
        return {"y": batch["x"] * torch.from_numpy(rng.random(4, np.float32)), "rows": 4}

    with (
        serving(make) as server,
        FeedLoader.connect(server.addresses[0], on_device=scale) as loader,
    ):
        found = [batch["y"].numpy() for batch in loader if batch["rows"] == 4]
    for index, values in enumerate(found):
        assert np.array_equal(values, (np.arange(4.0) + 4 * index) * factors_of(SEED, 0, index))
    assert len(found) == 3


def test_an_epoch_of_which_nothing_is_left_calls_no_function() -> None:
    """What stands for it in the feed is no batch."""

    class Stateful(torch.utils.data.IterableDataset[Any]):
        at = 0

        def __iter__(self) -> Any:
            while self.at < 8:
                self.at += 1
                yield {"x": torch.zeros(3), "at": (self.at, f"item {self.at}")}
            self.at = 0

        def state_dict(self) -> Any:
            return {"at": self.at}

        def load_state_dict(self, state: Any) -> None:
            self.at = state["at"]

    with load(Stateful()) as loader:
        for _ in loader:
            state = loader.state_dict()
    with load(Stateful()) as loader:
        loader.load_state_dict(state)
        assert list(loader) == []
        assert [numbers.tolist() for numbers, *_ in loader] == [[1, 2, 3, 4], [5, 6, 7, 8]]


WRONG = {
    "None, expected a batch of tensors": lambda batch: None,
    "a list, expected a batch of tensors": lambda batch: [1, "two"],
    "tensor 0 with 3 rows, and the batch has 4: a batch keeps its rows": lambda batch: batch["x"].T,
    "a batch with object in it, expected tensors, numbers, texts, None, or tuples, lists, dicts "
    "and dataclasses of these": lambda batch: {"x": batch["x"], "y": object()},
}


@pytest.mark.parametrize("told", WRONG)
def test_what_is_no_batch_is_told_with_the_loaders_step(told: str) -> None:
    with load() as loader:
        for _, _ in zip(range(6), loader, strict=False):
            pass
        state = loader.state_dict()
    with load(on_device=WRONG[told]) as loader:
        loader.load_state_dict(state)
        for _ in range(2):
            with says(
                feeder.DeviceError, f"on_device at step 6 (batch 6 of epoch 0): it returned {told}"
            ):
                next(iter(loader))
            assert loader.step == 6
            loader.load_state_dict(state)


@pytest.mark.parametrize("given", (3, lambda: None, lambda a, b, c: None))
def test_what_is_no_function_is_told_before_anything_begins(given: Any) -> None:
    with pytest.raises(feeder.ConfigError, match=r"^on_device is .*, expected (a|fn)"):
        load(on_device=given)
    with pytest.raises(feeder.ConfigError, match="on_device is an argument of FeedLoader"):
        DataLoader(Items(), on_device=given)


def test_a_feed_has_its_own() -> None:
    feeds = feeder.init_data_input_workers(
        ["x"], feeder.sources.arrays({"x": np.arange(12)}), 4, coordinator=feeder.Coordinator()
    )
    with pytest.raises(feeder.ConfigError, match="a feed has its own; leave it out"):
        FeedLoader(feeds, on_device=draw)
