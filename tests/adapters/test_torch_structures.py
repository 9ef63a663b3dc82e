"""Batches of other kinds of structures than tuples and dicts, and items that cannot be in one."""

from __future__ import annotations

import collections
import dataclasses
import enum
import re
from typing import Any

import pytest

from needs import needs_framework

needs_framework("torch")

import torch

import feeder
from feeder.adapters.torch import FeedLoader


class Colour(enum.Enum):
    RED = 1


class Encoding(collections.UserDict[str, Any]):
    """As the tokenizers of Hugging Face give: its keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Strict(dict[str, Any]):
    """A dict that is not made of one."""

    def __init__(self, *, x: Any) -> None:
        super().__init__(x=x)


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: Any
    name: str
    length: Any = dataclasses.field(init=False, default=None)


def one(items: Any, **settings: Any) -> Any:
    return next(iter(FeedLoader(items, 2, **settings)))


def test_mappings_stay_what_they_are() -> None:
    batch = one(range(4), collate_fn=lambda s: Encoding(ids=torch.tensor(s), n=None))
    assert type(batch) is Encoding
    assert batch.ids.tolist() == [0, 1]
    items = [collections.OrderedDict(b=i, a=f"{i}") for i in range(4)]
    batch = one(items)
    assert type(batch) is collections.OrderedDict
    assert list(batch) == ["b", "a"]
    # Some samples may be plain dicts.
    assert type(one([items[0], dict(items[1])])) is collections.OrderedDict
    for other in (collections.defaultdict(int, x=1), Strict(x=1)):
        batch = one([other, other])
        assert type(batch) is dict
        assert batch["x"].tolist() == [1, 1]


def test_dataclasses_stay_what_they_are() -> None:
    def collate(samples: list[int]) -> Point:
        return Point(torch.tensor(samples), "a")

    assert one(range(4), collate_fn=collate).name == "a"
    batch = one([{"p": (Point(i, f"{i}"),)} for i in range(4)], collate_fn=lambda s: s[1])
    (point,) = batch["p"]
    assert point == Point(1, "1")

    @dataclasses.dataclass
    class Full:
        x: Any

    with pytest.raises(feeder.FeedError, match=r"dataclass .*Full, which cannot be found"):
        one([Full(i) for i in range(4)])


def test_dataclasses_are_stacked_by_field() -> None:
    @dataclasses.dataclass
    class Pair:
        x: Any
        y: Any

    globals()["Pair"] = Pair
    Pair.__qualname__ = "Pair"
    try:
        batch = one([Pair(i, torch.ones(3) * i) for i in range(4)])
        assert type(batch) is Pair
        assert (batch.x.tolist(), batch.y.shape) == ([0, 1], (2, 3))
    finally:
        del globals()["Pair"]


def test_names_of_files_may_be_no_text() -> None:
    assert one(["\udc80a", "b"]) == ["\udc80a", "b"]


@pytest.mark.parametrize(
    ("items", "settings", "said"),
    [
        (["a", torch.ones(1)], {}, "sample 1: sample is Tensor, sample 0 has str"),
        ([{Colour.RED: 1}] * 2, {}, "sample 0: the batch has a key or a number that no layout"),
        ([1, 2], {"collate_fn": lambda s: 2**70}, "sample 0 and on: the batch has a key or a numb"),
        ([torch.ones(2).to_sparse()] * 2, {}, "sample 0: sample is a tensor of layout torch.spars"),
        ([(1, torch.ones(2).to_sparse())] * 2, {}, "sample 0: [1] is a tensor of layout torch.sp"),
    ],
)
def test_what_cannot_be_in_a_batch_is_named(items: Any, settings: Any, said: str) -> None:
    with pytest.raises(feeder.FetchError, match=re.escape(said)):
        one(items, **settings)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Strict, "dataset is the class Strict, expected an object"),
        (lambda call: 5, "dataset is a function and gave a int, expected a list"),
    ],
)
def test_a_data_set_that_is_none_is_named(dataset: Any, said: str) -> None:
    with pytest.raises(feeder.ConfigError, match=said):
        FeedLoader(dataset, 2)


@pytest.mark.parametrize("executor", ["threads", "processes"])
@pytest.mark.timeout(120)
def test_a_feed_takes_tensors(executor: str) -> None:
    with feeder.init_data_input_workers(
        ["x", "y"], tensors, 4, executor=executor, coordinator=feeder.Coordinator()
    ) as coordinator:
        batch = next(coordinator["train"])
    assert batch["x"].tolist() == [0, 1, 2, 0]
    assert (batch["y"].dtype.name, batch["y"].shape) == ("float32", (4, 2))


def tensors(call: feeder.Call) -> dict[str, torch.Tensor]:
    return {"y": torch.ones(3, 2, requires_grad=True), "x": torch.arange(3)}


def test_annotations_may_say_what_batches_are() -> None:
    ours: FeedLoader[int] = FeedLoader[int](range(4), 2)  # type: ignore[type-arg,misc]
    assert len(ours) == 2
