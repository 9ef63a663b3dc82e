"""Loaders without a framework: epochs, states and lengths, as all adapters share them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import feeder
import parts
from feeder import sources
from feeder.adapters.arrays import ArrayLoader
from feeder.adapters.loop import RING, every_epoch
from small import Pure, Walk, make
from watching import around

NUM, SIZE = 23, 4


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loaders end with their test."""
    loaders: list[ArrayLoader] = []
    around(monkeypatch, ArrayLoader, "__init__", after=lambda self, *_, **__: loaders.append(self))
    yield
    for loader in loaders:
        loader.close()


def numbers(**settings: Any) -> ArrayLoader:
    return ArrayLoader(range(NUM), SIZE, **settings)


def of_source(num: int, size: int = SIZE, *, order: Any = None, **settings: Any) -> ArrayLoader:
    return ArrayLoader(sources.arrays(np.arange(num), **(order or {})), size, **settings)


def rows(batch: Any) -> list[int]:
    return (batch[0] if isinstance(batch, tuple) else batch).tolist()


def epoch_of(loader: Any) -> list[list[int]]:
    return [rows(batch) for batch in loader]


# ---- epochs of different lengths


def test_a_later_epoch_without_a_whole_batch_is_told_when_the_loader_is_made() -> None:
    shards = {"num_shards": 2, "shard_id": 1}
    with pytest.raises(feeder.ConfigError, match=r"epoch 1 has 0 whole batches, .* the rest"):
        of_source(7, drop_last=True, order=shards)
    with pytest.raises(feeder.ConfigError, match=r"epoch 1 has 1 whole batches, .* all 2 ranks"):
        of_source(7, 2, drop_last=True, order=shards, rank=0, world_size=2)
    # Where that epoch is never read, or is padded, there is nothing to tell.
    assert epoch_of(of_source(7, drop_last=True, order=shards, epochs=1)) == [[3, 4, 5, 6]]
    padded = of_source(7, drop_last=True, order={**shards, "pad_last_batch": True})
    assert [len(epoch_of(padded)) for _ in range(3)] == [1, 1, 1]


@settings(max_examples=100 if parts.is_full else 30)
@given(st.data())
def test_lengths_and_steps_are_those_of_the_loops(data: st.DataObject) -> None:
    num, size = data.draw(st.integers(3, 20)), data.draw(st.integers(1, 5))
    shards = data.draw(st.integers(1, min(3, num)))
    order = {
        "num_shards": shards, "shard_id": data.draw(st.integers(0, shards - 1)),
        "stick_to_shard": data.draw(st.booleans()), "pad_last_batch": data.draw(st.booleans()),
    }  # fmt: skip
    ranks, drop_last = data.draw(st.integers(1, 2)), data.draw(st.booleans())
    source = sources.arrays(np.arange(num), **order)

    def new() -> ArrayLoader:
        return ArrayLoader(source, size, drop_last=drop_last, rank=0, world_size=ranks)

    def length(epoch: int) -> int:
        batches = source.rows(epoch, size) / size
        batches = int(batches) if drop_last else int(np.ceil(batches))
        return batches // ranks if drop_last else -(-batches // ranks)

    lengths = [length(epoch) for epoch in range(4)]
    if not all(lengths):
        with pytest.raises(feeder.ConfigError, match="whole batches"):
            new()
        return
    with new() as loader, new() as other:
        assert len(loader) == lengths[0]
        for epoch in range(3):
            assert loader.left == lengths[epoch]
            assert len(epoch_of(loader)) == lengths[epoch]
        # Who is told to begin an epoch counts as who came to it.
        other.begin_epoch(3)
        assert (other.step, other.state_dict()) == (loader.step, loader.state_dict())
        assert epoch_of(other) == epoch_of(loader)


def test_an_error_names_its_sample() -> None:
    class Holed(list[int]):
        def __getitem__(self, i: Any) -> Any:
            if i == 5:
                raise ValueError("no 5")
            return super().__getitem__(i)

    with pytest.raises(feeder.FetchError, match=r"ValueError: no 5, while reading sample 5$"):
        epoch_of(ArrayLoader(Holed(range(NUM)), SIZE))


def test_of_an_unknown_length_it_is_a_type_error() -> None:
    loader = ArrayLoader(iter(range(5)), 2)
    for ask in (lambda: len(loader), lambda: loader.left):
        with pytest.raises(TypeError, match="the length of this loader is not known"):
            ask()
    assert loader


# ---- another epoch than its own


def test_the_next_loop_is_the_epoch_that_it_is_told_to_begin() -> None:
    whole = numbers(shuffle=True)
    epochs = [epoch_of(whole) for _ in range(5)]
    loader = numbers(shuffle=True)
    next(iter(loader))
    loader.begin_epoch(3)
    assert (loader.epoch, loader.step, loader.left) == (3, 18, 6)
    assert epoch_of(loader) == epochs[3]
    # Its turn anyway: nothing changes, also within it.
    loader.begin_epoch(4)
    loop = iter(loader)
    first = rows(next(loop))
    loader.begin_epoch(4)
    assert [first, *(rows(batch) for batch in loop)] == epochs[4]
    loader.begin_epoch(1)
    assert epoch_of(loader) == epochs[1]


def test_no_epoch_can_be_begun_of_a_feed() -> None:
    with make(Pure(4, 3), epochs=2) as coordinator:
        loader = ArrayLoader(coordinator["train"])
        next(iter(loader))
        loader.begin_epoch(0)
        with pytest.raises(feeder.ConfigError, match="begins epoch 1, and the feed stands in"):
            loader.begin_epoch(1)


def test_a_loop_over_a_feed_that_is_left_is_followed_by_the_next_epoch() -> None:
    with make(Pure(4, 3), epochs=3) as whole:
        epochs = [[batch["id"].tolist() for batch in epoch] for epoch in whole["train"].epochs()]
    with make(Pure(4, 3), epochs=3) as coordinator:
        loader = ArrayLoader(coordinator["train"])
        next(iter(loader))
        assert [[b["id"].tolist() for b in loader] for _ in range(2)] == epochs[1:]


def test_a_feed_of_several_devices_is_read_by_a_loader_of_each() -> None:
    with (
        make(Pure(4, 3), devices=2) as coordinator,
        pytest.raises(feeder.ConfigError, match=r"devices .*: give one queue of it"),
    ):
        ArrayLoader(coordinator["train"])


LEAVES: dict[str, Callable[[ArrayLoader], object]] = {
    "another loop": lambda loader: next(iter(loader)),
    "close": lambda loader: loader.close(),
    "begin_epoch": lambda loader: loader.begin_epoch(2),
    "load_state_dict": lambda loader: loader.load_state_dict(loader.state_dict()),
    "rewind": lambda loader: loader.rewind(loader.step),
}


@pytest.mark.parametrize("how", LEAVES)
def test_a_loop_that_the_loader_has_left_says_so(how: str) -> None:
    loader = numbers()
    loop = iter(loader)
    next(loop)
    LEAVES[how](loader)
    with pytest.raises(feeder.FeedError, match="ended: another one has begun, or the loader was"):
        next(loop)


# ---- states of batches before


def test_a_state_may_be_of_any_of_the_last_batches() -> None:
    loader, whole = numbers(shuffle=True), numbers(shuffle=True)
    batches = epoch_of(whole) + epoch_of(whole)
    taken = [rows(next(loop)) for loop in [iter(loader)] for _ in range(5)]
    assert taken == batches[:5]
    for used in range(6):
        other = numbers(shuffle=True)
        other.load_state_dict(loader.state_dict(used=used))
        assert epoch_of(other) == batches[used:6]


@pytest.mark.parametrize(
    ("how", "at"), [("load_state_dict", 2), ("begin_epoch", 12), ("rewind", 2)]
)
def test_batches_of_before_a_load_are_not_asked_for(how: str, at: int) -> None:
    loader, other = numbers(), numbers()
    loader.keep()  # So that a rewind reads nothing again.
    for _ in zip(range(4), loader, strict=False):
        pass
    loop = iter(other)
    next(loop), next(loop)
    getattr(loader, how)(other.state_dict() if how == "load_state_dict" else 2)
    assert loader.state_dict(used=at) == loader.state_dict()
    for used in {0, 1, 2, 3, 4, 5, 11, 12, 13} - {at}:
        told = f"used is {used}, expected a number from {at} to {at}"
        with pytest.raises(feeder.ConfigError, match=re.escape(told)):
            loader.state_dict(used=used)


def test_batches_too_long_ago_are_forgotten() -> None:
    loader = ArrayLoader(range(RING + 9), 1)
    epoch_of(loader)
    with pytest.raises(feeder.ConfigError, match=f"at most {RING} ago"):
        loader.state_dict(used=3)


def test_a_feeds_own_state_is_loaded_and_counts_from_there() -> None:
    with make(Pure(8, 3), epochs=3) as whole:
        batches = [batch["id"].tolist() for batch in whole["train"]]
    with make(Pure(8, 3), epochs=3) as first:
        for _ in range(4):
            next(first["train"])
        state = first["train"].state_dict()
    second = make(Pure(8, 3), epochs=3)
    loader = ArrayLoader(second["train"])
    loader.load_state_dict(state)
    assert loader.step == 4
    with second:
        next(iter(loader))
        assert (loader.step, loader.epoch) == (5, 0)
        third = make(Pure(8, 3), epochs=3)
        again = ArrayLoader(third["train"])
        again.load_state_dict(loader.state_dict())
        with third:
            assert [b["id"].tolist() for b in again] == batches[5:6]
            assert again.step == 6


def test_what_is_kept_is_given_again_and_one_epoch_follows_another() -> None:
    with numbers(shuffle=True, epochs=2) as whole:
        batches = epoch_of(whole) + epoch_of(whole)
    with numbers(shuffle=True, epochs=2) as loader:
        loader.keep()
        taken = every_epoch(loader)
        assert [rows(next(taken)) for _ in range(4)] == batches[:4]
        loader.rewind(2)
        assert [rows(batch) for batch in every_epoch(loader)] == batches[2:]
        with pytest.raises(StopIteration):
            next(every_epoch(loader))
    assert not loader._stream.reaches(1), "its threads go on"


def test_what_is_kept_is_given_once_if_the_loader_was_closed() -> None:
    with numbers(shuffle=True, epochs=1) as whole:
        batches = epoch_of(whole)
    with numbers(shuffle=True, epochs=1) as loader:
        loader.keep()
        loop = iter(loader)
        assert [rows(next(loop)) for _ in range(3)] == batches[:3]
        loader.close()
        loader.rewind(1)
        assert epoch_of(loader) == batches[1:]


class Reading(Walk):
    """An iterator that has a state, and notes what it reads."""

    def __init__(self, read: list[int]) -> None:
        super().__init__(NUM)
        self.read = read

    def __next__(self) -> int:
        self.read.append(item := super().__next__())
        return item


class Read:
    """An iterable that has no state, whose iterators may have one."""

    def __init__(self, *, has_state: bool = True) -> None:
        self.has_state, self.read = has_state, list[int]()

    def __iter__(self) -> Iterator[int]:
        return Reading(self.read) if self.has_state else iter(range(NUM))


def test_an_iterator_goes_on_from_its_state_and_nothing_is_read_again() -> None:
    with ArrayLoader(Read(), SIZE) as whole:
        batches = epoch_of(whole) + epoch_of(whole)
    with ArrayLoader(Read(), SIZE) as loader:
        for _ in zip(range(2), loader, strict=False):
            pass
        state = loader.state_dict()
    dataset = Read()
    with ArrayLoader(dataset, SIZE) as resumed:
        resumed.load_state_dict(state)
        assert epoch_of(resumed) + epoch_of(resumed) == batches[2:]
    assert dataset.read[0] == 2 * SIZE
    with ArrayLoader(Read(has_state=False), SIZE) as other:
        other.load_state_dict(state)
        with pytest.raises(feeder.FetchError, match="has a state, and the iterable takes none"):
            next(iter(other))


# ---- what data sets are told


class Told:
    """Items that follow from the epoch that it was told; it tells when that was another one."""

    epoch = -1

    def __init__(self) -> None:
        self.is_told_another = threading.Event()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if epoch:
            self.is_told_another.set()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> int:
        return 100 * self.epoch + i


def test_nothing_is_read_ahead_of_another_epoch_where_the_data_set_is_told_it() -> None:
    dataset = Told()
    loader = ArrayLoader(dataset, 1, executor=feeder.Threads(3), prefetch_factor=9)
    loop = iter(loader)
    first = rows(next(loop))
    # Nobody reads the next epoch while others may read this one.
    assert not dataset.is_told_another.wait(0.2)
    assert [first, *(rows(batch) for batch in loop)] == [[0], [1], [2]]
    assert epoch_of(loader) == [[100], [101], [102]]
