"""What a loader keeps of a user's samplers and data sets, and tells them: seeds, states, epochs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from needs import needs_framework

needs_framework("torch")

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

import feeder
from adapters.loaders import epoch_of
from feeder.adapters.torch import FeedLoader

NUM, SIZE = 23, 4

READ_AGAIN = pytest.mark.filterwarnings("ignore::feeder.ReplayWarning")


def interrupted(make: Any, epochs: int, at: int) -> tuple[Any, Any]:
    """The epochs of a loader, and those of one that is resumed in the last of them, with what was
    had of it before."""
    one = make()
    whole = [epoch_of(one) for _ in range(epochs + 1)]
    two = make()
    for _ in range(epochs - 1):
        epoch_of(two)
    loop = iter(two)
    had = [next(loop).tolist() for _ in range(at)]
    three = make()
    three.load_state_dict(two.state_dict())
    return whole[epochs - 1 :], [had + epoch_of(three), epoch_of(three)]


# ---- data sets that are told the epoch


class Told(Dataset):
    """Items that follow from the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> int:
        return 100 * self.epoch + i


class ToldStream(IterableDataset):
    """Numbers in an order that follows from the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(NUM).tolist())


@READ_AGAIN
@pytest.mark.parametrize("kind", [Told, ToldStream])
@pytest.mark.parametrize("says_it", [False, True])
def test_a_data_set_is_told_the_epoch_that_is_read(kind: Any, says_it: bool) -> None:
    dataset = kind()
    ours = FeedLoader(dataset, SIZE, executor=feeder.Threads(1 if kind is ToldStream else 2))
    for epoch in range(4):
        if says_it:
            # As for DataLoader; nobody may have begun this epoch before.
            dataset.set_epoch(epoch)
        expected = kind()
        expected.set_epoch(epoch)
        assert epoch_of(ours) == epoch_of(torch.utils.data.DataLoader(expected, SIZE))


@READ_AGAIN
@pytest.mark.parametrize("kind", [Told, ToldStream])
@pytest.mark.parametrize("at", [0, 2, 6])
def test_and_so_it_goes_on_in_an_epoch(kind: Any, at: int) -> None:
    whole, resumed = interrupted(lambda: FeedLoader(kind(), SIZE), 3, at)
    assert resumed == whole


@pytest.mark.timeout(120)
@READ_AGAIN
def test_in_processes_it_is_told_too() -> None:
    for dataset in (Told(), ToldStream()):
        threads, processes = FeedLoader(dataset, SIZE), FeedLoader(dataset, SIZE, num_workers=1)
        assert [epoch_of(processes) for _ in range(2)] == [epoch_of(threads) for _ in range(2)]


def test_a_data_set_of_another_length_is_named() -> None:
    numbers = list(range(6))
    ours = FeedLoader(numbers, 2)
    epoch_of(ours)
    numbers.append(6)
    with pytest.raises(feeder.ConfigError, match="dataset list has 7 samples, and had 6 when"):
        epoch_of(ours)


def test_what_can_be_iterated_over_once_is_named() -> None:
    for ours, name in (
        (FeedLoader((i for i in range(5)), 2), "dataset"),
        (FeedLoader(range(5), 2, sampler=iter([3, 1])), "sampler"),
    ):
        assert epoch_of(ours)
        with pytest.raises(feeder.FetchError, match=f"{name} .* is an iterator, which is"):
            epoch_of(ours)


def test_an_epoch_of_nothing_is_an_error() -> None:
    class Nothing(ToldStream):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    for drop_last in (False, True):
        with pytest.raises(feeder.FetchError, match="epoch 0 of Nothing has no batch"):
            epoch_of(FeedLoader(Nothing(), SIZE, drop_last=drop_last))
    with pytest.raises(feeder.FetchError, match=r"nothing is left for epoch 0"):
        epoch_of(FeedLoader(range(4), SIZE, sampler=iter(())))


# ---- samplers with a generator


def seeded(seed: int | None, **settings: Any) -> Any:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return RandomSampler(range(NUM), generator=generator, **settings)


def test_the_seed_of_a_samplers_own_generator_counts() -> None:
    orders = [
        epoch_of(FeedLoader(range(NUM), SIZE, sampler=seeded(own), seed=seed))
        for own, seed in ((None, 0), (1, 0), (2, 0), (1, 5))
    ]
    assert len({str(order) for order in orders}) == 4
    batches = BatchSampler(seeded(1), SIZE, drop_last=False)
    assert epoch_of(FeedLoader(range(NUM), batch_sampler=batches)) == orders[1]


@pytest.mark.parametrize("at", [0, 2])
def test_a_state_has_that_seed(at: int) -> None:
    seeds = itertools.cycle([7, 7, 8])
    whole, resumed = interrupted(
        lambda: FeedLoader(range(NUM), SIZE, sampler=seeded(next(seeds))), 2, at
    )
    assert resumed == whole


def test_any_ranks_state_is_valid_with_pytorchs_sampler_for_ranks() -> None:
    def ranks(num: int, **settings: Any) -> list[FeedLoader]:
        return [
            FeedLoader(range(NUM), SIZE, sampler=DistributedSampler(
                range(NUM), num_replicas=num, rank=rank, **settings))
            for rank in range(num)
        ]  # fmt: skip

    whole = [epoch_of(one) for one in ranks(2)]
    first = ranks(2)
    for one in first:
        next(iter(one))
    states = [one.state_dict() for one in first]
    assert states[0] == states[1]
    again = ranks(2)
    for one in again:
        one.load_state_dict(states[0])
    assert [epoch_of(one) for one in again] == [epoch[1:] for epoch in whole]
    with pytest.raises(feeder.ResumeError, match=r"source\.sampler_seed: 0 then, 3 now"):
        ranks(2, seed=3)[0].load_state_dict(states[0])
    with pytest.raises(feeder.ResumeError, match=r"source\.num_replicas: 2 then, 3 now"):
        ranks(3)[0].load_state_dict(states[0])


# ---- states of samplers and iterables

DRAWS = {
    "numpy": (
        lambda: np.random.default_rng(3),
        lambda rng: rng.permutation(NUM).tolist(),
        lambda rng: rng.bit_generator.state,
        lambda rng, state: setattr(rng.bit_generator, "state", state),
    ),
    "python": (
        lambda: random.Random(3),
        lambda rng: rng.sample(range(NUM), NUM),
        lambda rng: rng.getstate(),
        lambda rng, state: rng.setstate(state),
    ),
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda rng: torch.randperm(NUM, generator=rng).tolist(),
        lambda rng: rng.get_state(),
        lambda rng, state: rng.set_state(state),
    ),
}


class Drawn:
    """An order that is drawn, and whose state is that of what draws. The state is one object, which
    goes on to change."""

    def __init__(self, name: str) -> None:
        make, self.draw, self.get, self.set = DRAWS[name]
        self.rng, self.state = make(), {}

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[int]:
        yield from self.draw(self.rng)

    def state_dict(self) -> dict[str, Any]:
        self.state |= {"of": [self.get(self.rng)], "beside": torch.ones(2, dtype=torch.bfloat16)}
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["beside"].dtype is torch.bfloat16
        self.set(self.rng, state["of"][0])


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("at", [0, 2])
def test_a_sampler_may_have_any_generators_state(name: str, at: int) -> None:
    whole, resumed = interrupted(lambda: FeedLoader(range(NUM), SIZE, sampler=Drawn(name)), 2, at)
    assert resumed == whole
    assert whole[0] != whole[1]


class Counted:
    """A sampler whose state says how many it gave, as torchdata's do: after an epoch, all."""

    def __init__(self) -> None:
        self.given = self.epoch = 0
        self.loaded: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[int]:
        self.given, self.loaded = self.loaded or 0, None
        for i in np.random.default_rng(self.epoch).permutation(NUM).tolist()[self.given :]:
            self.given += 1
            yield i

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["given"]


@pytest.mark.parametrize("at", [0, 2, 6])
def test_a_samplers_state_may_say_that_its_epoch_is_over(at: int) -> None:
    whole, resumed = interrupted(lambda: FeedLoader(range(NUM), SIZE, sampler=Counted()), 2, at)
    assert resumed == whole


class Endless:
    """A sampler without an end, which has a state."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at = (self.at + 1) % NUM
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_sampler_without_an_end_is_resumed_and_cannot_be_left() -> None:
    def make() -> FeedLoader:
        return FeedLoader(range(NUM), SIZE, sampler=Endless())

    first, second = make(), make()
    loop = iter(first)
    whole = [next(loop).tolist() for _ in range(9)]
    other = iter(second)
    for _ in range(4):
        next(other)
    third = make()
    third.load_state_dict(second.state_dict())
    assert [batch.tolist() for batch in itertools.islice(third, 5)] == whole[4:]
    with pytest.raises(feeder.ConfigError, match=r"Endless was left, .* may have no end"):
        next(iter(first))


def test_a_state_that_no_position_can_hold_is_named() -> None:
    class Odd(Drawn):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": object()}

    ours = FeedLoader(range(NUM), SIZE, sampler=Odd("numpy"))
    with pytest.raises((feeder.FeedError, TypeError), match="cannot save object"):
        next(iter(ours))
