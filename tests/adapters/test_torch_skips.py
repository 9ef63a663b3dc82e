"""`on_error="skip"` of both loaders against naive ones, over random data sets, from every state."""

from __future__ import annotations

import collections
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from needs import needs_framework
from parts import examples

needs_framework("torch")

import torch
import torch.utils.data as tud

import feeder
from adapters.torch_programs import seed_all
from feeder.adapters.torch import DataLoader, FeedLoader
from feeder.sources import RecordError

GONE = object()
ERRORS: dict[str, Any] = {
    "value": ValueError("no number"), "runtime": RuntimeError("no JPEG"),
    "gone": FileNotFoundError(2, "No such file"), "lost": OSError("truncated"),
}  # fmt: skip


class Data(tud.Dataset):
    """Its samples draw; some are defective, and some come after several reads ("late")."""

    def __init__(self, num: int, bad: dict[int, str]) -> None:
        self.num, self.bad = num, bad
        self.reads: collections.Counter[int] = collections.Counter()

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Any:
        drawn, kind = torch.rand(()).item(), self.bad.get(i)
        self.reads[i] += 1
        if kind == "late" and self.reads[i] < 4:
            raise TimeoutError
        if kind in ERRORS:
            raise ERRORS[kind]
        return i, drawn


class Together(Data):
    """The same, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[indices.pop(0)] for _ in range(len(indices))]


class Naive(Data):
    """The same, without an error."""

    def __getitem__(self, i: int) -> Any:
        drawn = torch.rand(()).item()
        return GONE if self.bad.get(i) in ERRORS else (i, drawn)


class Endless(tud.IterableDataset):
    """Has no samples by number."""

    def __iter__(self) -> Any:
        return iter(range(3))


def rest(made: Any) -> Any:
    """A batch of what is there, as `Naive` gives it."""
    if not isinstance(made, list):
        return None if made is GONE else made
    return [one for one in made if one is not GONE] or None


def listed(made: Any) -> Any:
    """A batch as it is."""
    return made


bad = st.dictionaries(st.integers(0, 15), st.sampled_from((*ERRORS, "late")), max_size=8)
ORDERS = ("in turn", "shuffle", "replacement", "distributed")


def build(cls: Any, data: Data, size: int | None, order: str, **named: Any) -> Any:
    """A loader, in whose process the generators are as they always are."""
    seed_all(3)
    if order == "shuffle":
        named["shuffle"] = True
    elif order != "in turn":
        named["sampler"] = (
            tud.RandomSampler(data, replacement=True)
            if order == "replacement"
            else tud.DistributedSampler(data, 2, 1)
        )
    return cls(data, size, **named)


def check(num: int, size: int | None, bad: dict[int, str], order: str, kind: Any, **named: Any):  # type: ignore[no-untyped-def]
    """Two epochs, and resumed after each batch, are those of a naive loader."""

    def make() -> Any:
        data, skip = kind(num, bad), "skip"
        return build(DataLoader, data, size, order, on_error=skip, collate_fn=listed, **named)

    naive = build(DataLoader, Naive(num, bad), size, order, collate_fn=rest, **named)
    want = [[batch for batch in naive if batch is not None] for _ in range(2)]
    loader, states = make(), []
    for epoch, batches in enumerate(want):
        if not batches:
            with pytest.raises(RecordError, match=f"no sample of epoch {epoch} can be read"):
                list(loader)
            return
        given = []
        for batch in loader:
            given.append(batch)
            states.append((epoch, len(given), json.dumps(loader.state_dict())))
            assert loader.step == len(states)
        assert given == batches
    # Without workers others draw from the generators of the process meanwhile.
    for epoch, taken, state in states[:: 1 if not named else 4]:
        again = make()
        again.load_state_dict(json.loads(state))
        left = [b if isinstance(b, list) else [b] for b in again]
        numbers = [[i for i, _ in batch] for batch in left]
        assert numbers == [
            [i for i, _ in (b if isinstance(b, list) else [b])] for b in want[epoch][taken:]
        ]
        if epoch == 1:
            assert (again.left_out, again.skipped) == (loader.left_out, loader.skipped)


@settings(max_examples=examples(240))
@given(
    st.integers(1, 16), st.sampled_from((1, 2, 3, 5, None)), bad, st.sampled_from(ORDERS),
    st.sampled_from((Data, Together)),
)  # fmt: skip
def test_what_is_defective_is_left_out_of_its_batch(
    num: int, size: int | None, bad: dict[int, str], order: str, kind: Any
) -> None:
    check(num, size, bad, order, kind)


@pytest.mark.filterwarnings("ignore:os.fork")
@settings(max_examples=examples(24))
@given(
    st.integers(1, 16), st.sampled_from((1, 2, 3, None)), bad, st.sampled_from(ORDERS),
    st.sampled_from((Data, Together)), st.integers(1, 2),
)  # fmt: skip
def test_workers_leave_out_the_same(
    num: int, size: int | None, bad: dict[int, str], order: str, kind: Any, workers: int
) -> None:
    check(num, size, bad, order, kind, num_workers=workers)


@settings(max_examples=examples(100))
@given(st.integers(1, 16), st.integers(1, 5), bad, st.booleans(), st.sampled_from((Data, Together)))
def test_a_feed_loader_leaves_out_the_same(
    num: int, size: int, bad: dict[int, str], shuffle: bool, kind: Any
) -> None:
    settings = {"shuffle": shuffle, "epochs": 1}
    naive = FeedLoader(tud.StackDataset(range(num)), size, **settings)
    want = [
        [int(i) for (each,) in [batch] for i in each if bad.get(int(i)) not in ERRORS]
        for batch in naive
    ]

    def make() -> FeedLoader:
        return FeedLoader(kind(num, bad), size, on_error="skip", **settings)

    given, loader = [], make()
    try:
        for numbers, _ in loader:
            given.append(numbers.tolist())
            again = make()
            again.load_state_dict(loader.state_dict())
            assert again.left_out == [one for one in loader.left_out if one.call < len(given)]
    except feeder.FetchError as error:
        assert [] in want and "no sample of a batch can be read" in str(error.__cause__)
        want = want[: want.index([])]
        assert given == want[: len(given)]
        return
    assert given == want
    assert {one.name for one in loader.left_out} == {
        f"sample {i}" for i, why in bad.items() if i < num and why in ERRORS
    }


def test_what_accelerate_makes_of_a_loader_leaves_out_the_same() -> None:
    accelerate = pytest.importorskip("accelerate")
    data = Data(9, {4: "value", 7: "late"})
    prepared = accelerate.Accelerator(cpu=True).prepare(DataLoader(data, 3, on_error="skip"))
    assert [numbers.tolist() for numbers, _ in prepared] == [[0, 1, 2], [3, 5], [6, 7, 8]]


@pytest.mark.parametrize("of", [Endless(), feeder.sources.records([1]), lambda call: [call]])
def test_only_samples_that_are_asked_for_can_be_left_out(of: Any) -> None:
    for cls in (FeedLoader, DataLoader):
        with pytest.raises(feeder.ConfigError, match="on_error is 'skip'"):
            cls(of, on_error="skip")
