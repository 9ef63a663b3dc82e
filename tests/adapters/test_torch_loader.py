"""`FeedLoader` in place of DataLoader: what it gives, in which order, and where it goes on."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import os
import random
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from needs import needs_framework

needs_framework("torch")

import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

import feeder
from adapters.loaders import Items, epoch_of
from feeder.adapters.torch import FeedLoader
from small import Walk
from small import make as make_feed

NUM = 23
SIZE = 4


class Pair(NamedTuple):
    left: Any
    right: Any


class Numbers(Dataset):
    """Item i is the number i; `reads` are those that were read."""

    def __init__(self, num: int = NUM) -> None:
        self.num = num
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> int:
        self.reads.append(i)
        return i


class Count(IterableDataset):
    """The numbers from 0 on."""

    def __init__(self, num: int = NUM) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))


def loader(dataset: Any = None, batch_size: Any = SIZE, **settings: Any) -> FeedLoader:
    return FeedLoader(Numbers() if dataset is None else dataset, batch_size, **settings)


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


# ---- DataLoader's arguments


def test_the_arguments_are_those_of_dataloader_in_its_order() -> None:
    theirs = inspect.signature(torch.utils.data.DataLoader).parameters
    ours = inspect.signature(FeedLoader).parameters
    positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [*ours][: len(positional)] == positional
    assert theirs.keys() <= ours.keys()
    assert {n: ours[n].default for n in theirs} == {n: p.default for n, p in theirs.items()}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"worker_init_fn": print}, "worker_init_fn is"),
        ({"multiprocessing_context": "fork"}, "multiprocessing_context is 'fork'"),
        ({"in_order": False}, "in_order is False"),
        ({"pin_memory_device": "cuda"}, "pin_memory_device is 'cuda'"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": True}, "num_workers is True"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"prefetch_factor": 0}, "prefetch_factor is 0"),
        ({"batch_size": None, "drop_last": True}, "drop_last is True"),
        ({"sampler": [1], "shuffle": True}, "shuffle is True: a sampler"),
        ({"sampler": [1], "batch_sampler": [[1]]}, "sampler and batch_sampler"),
        ({"batch_sampler": [[1]]}, "batch_size is 4: batch_sampler"),
        ({"sampler": [1], "rank": 0, "world_size": 2}, "rank is 0: a sampler"),
        ({"rank": 0}, "rank is 0 and world_size is None"),
        ({"rank": 2, "world_size": 2}, "rank is 2, expected 0 to 1"),
        ({"seed": 1, "generator": torch.Generator()}, "seed and generator"),
        ({"seed": -1}, "seed is -1"),
        ({"rank": 0, "world_size": 9, "drop_last": True}, "nothing is left"),
        ({"rank": "0", "world_size": "2"}, "rank is '0', expected a whole number"),
        ({"rank": 0, "world_size": 2.0}, "world_size is 2.0, expected a whole number"),
        ({"epochs": 0}, "epochs is 0, expected a whole number of at least 1"),
        ({"epochs": "2"}, "epochs is '2', expected a whole number"),
        ({"batch_size": 2.0}, "batch_size is 2.0, expected a whole number"),
        ({"batch_size": 40, "drop_last": True}, "an epoch has 0 whole batches"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(feeder.ConfigError, match=said.replace("[", r"\[")):
        loader(**settings)


@pytest.mark.parametrize(
    ("dataset", "settings", "said"),
    [
        (Count(), {"shuffle": True}, "shuffle is True: an iterable"),
        (Count(), {"sampler": [1]}, "sampler is"),
        (Items(int, 0), {}, "is empty"),
        (type("Bare", (Dataset,), {"__getitem__": int})(), {"shuffle": True}, "has no __len__"),
        (5, {}, "dataset is a int"),
        (feeder.sources.arrays(np.arange(9)), {"shuffle": True}, "a source has its own order"),
        (range(9), {"global_batch_size": 8}, "batch_size is 4: global_batch_size is given"),
    ],
)
def test_so_is_what_a_data_set_cannot_do(dataset: Any, settings: Any, said: str) -> None:
    with pytest.raises(feeder.ConfigError, match=said):
        loader(dataset, **settings)


def test_a_generator_gives_the_seed() -> None:
    drawn = loader(shuffle=True, generator=torch.Generator().manual_seed(7))
    assert epoch_of(drawn) == epoch_of(loader(shuffle=True, seed=7))


# ---- epochs and order


def test_each_loop_is_an_epoch_that_is_shuffled_anew() -> None:
    ours = loader(shuffle=True)
    epochs = [epoch_of(ours) for _ in range(3)]
    ours.set_epoch(1)
    epochs.append(epoch_of(ours))
    assert len({tuple(flat(epoch)) for epoch in epochs}) == 4
    assert all(sorted(flat(epoch)) == list(range(NUM)) for epoch in epochs)
    again = loader(shuffle=True, executor=feeder.Threads(3))
    assert [epoch_of(again) for _ in range(4)] == epochs


def test_a_loop_that_is_left_is_followed_by_the_next_epoch_and_reads_no_more_of_it() -> None:
    dataset = Numbers(400)
    ours, whole = loader(dataset), loader(Numbers(400), shuffle=False)
    for _ in ours:
        break
    epoch_of(whole)
    assert epoch_of(ours) == epoch_of(whole)
    assert dataset.reads.count(399) == 1


@pytest.mark.parametrize("at", [0, 2])
def test_what_is_looked_at_is_still_given(at: int) -> None:
    undisturbed = loader(shuffle=True)
    whole = [batch.tolist() for batch in undisturbed]
    first = loader(shuffle=True)
    loop = iter(first)
    for _ in range(at):
        next(loop)
    second = loader(shuffle=True)
    second.load_state_dict(first.state_dict())
    assert second.left == len(whole) - at
    assert [second.peek().tolist() for _ in range(2)] == [whole[at]] * 2
    assert second.state_dict() == first.state_dict()
    assert [(batch.tolist(), second.left) for batch in second] == [
        (batch, len(whole) - at - 1 - number) for number, batch in enumerate(whole[at:])
    ]
    # A state that is loaded in between is that of another place.
    second.peek()
    second.load_state_dict(first.state_dict())
    assert next(iter(second)).tolist() == whole[at]
    with pytest.raises(feeder.FeedError, match="a loop over the loader has begun"):
        second.peek()


def test_without_a_batch_size_samples_come_one_by_one() -> None:
    assert list(loader(batch_size=None)) == list(range(NUM))


def test_iter_has_no_effect_before_the_first_next() -> None:
    ours, whole = loader(shuffle=True), loader(shuffle=True)
    iter(ours)
    loop = iter(ours)
    first = next(loop).tolist()
    iter(ours)
    assert [first, *(batch.tolist() for batch in loop)] == epoch_of(whole)
    assert list(loop) == []


def test_a_loader_that_is_dropped_leaves_no_thread() -> None:
    before = threading.active_count()
    ours = FeedLoader(Numbers(), SIZE, executor=feeder.Threads(3))
    next(iter(ours))
    assert threading.active_count() > before
    ours.close()
    assert threading.active_count() == before


# ---- structures


STRUCTURES = {
    "tensor": lambda i: torch.full((2, 3), float(i)),
    "int": lambda i: i,
    "float": lambda i: i / 2,
    "bool": lambda i: bool(i % 2),
    "array": lambda i: np.full(3, i, np.uint8),
    "scalar": lambda i: np.float32(i),
    "text": lambda i: f"item {i}",
    "tuple": lambda i: (torch.tensor(i), i),
    "dict": lambda i: {"x": torch.ones(2) * i, "y": {"z": [i, f"{i}"]}},
    "named": lambda i: Pair(torch.tensor(i), np.arange(2) + i),
    "transposed": lambda i: (torch.arange(6).reshape(2, 3) + i).T,
    "needs a gradient": lambda i: torch.ones(2, requires_grad=True) * i,
    "parameter": lambda i: torch.nn.Parameter(torch.ones(2) * i),
    "negated": lambda i: torch.tensor([i + 2j, 1j]).conj().imag,
    "empty": lambda i: torch.ones(0, 3),
    "big": lambda i: torch.full((300, 301), i),
}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, (tuple, list)):
        # DataLoader makes lists of tuples.
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return bool(ours == theirs)


@pytest.mark.parametrize("name", STRUCTURES)
def test_batches_have_the_structure_and_the_values_that_dataloader_gives(name: str) -> None:
    dataset = Items(STRUCTURES[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = list(loader(dataset))
    theirs = list(torch.utils.data.DataLoader(dataset, SIZE))
    assert all(map(same, ours, theirs))
    assert len(ours) == len(theirs)


def test_a_tuple_stays_one_and_a_named_one_its_own() -> None:
    assert type(next(iter(loader(Items(STRUCTURES["tuple"]))))) is tuple
    assert type(next(iter(loader(Items(STRUCTURES["named"]))))) is Pair


def test_tensors_may_be_written_to_and_are_not_copied() -> None:
    batch = next(iter(loader(Items(lambda i: (torch.ones(4) * i, torch.ones(4) * i)))))
    left, right = batch
    left += 1
    assert right[0].tolist() == [0] * 4
    # Both lie in the memory of one batch.
    assert 0 < right.data_ptr() - left.data_ptr() < 256
    assert (right.data_ptr() - left.data_ptr()) % 64 == 0


DTYPES = [
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and dtype.itemsize in (1, 2, 4, 8, 16)
    and not str(dtype).startswith(("torch.q", "torch.bits", "torch.uint", "torch.int"))
] + [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int64]


@pytest.mark.parametrize("dtype", sorted(set(DTYPES), key=str), ids=str)
def test_every_dtype_comes_as_it_is(dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8)
    items = raw.view(dtype) if dtype is not torch.bool else raw % 2 == 0
    (batch,) = loader(Items(lambda i: items, 2), 2)
    assert batch.dtype is dtype
    assert torch.equal(batch[1].view(torch.uint8), items.view(torch.uint8))


def padded(samples: list[Any]) -> Any:
    longest = max(map(len, samples))
    rows = [torch.nn.functional.pad(s, (0, longest - len(s))) for s in samples]
    return {
        "ids": torch.stack(rows),
        "lengths": torch.tensor([len(s) for s in samples]),
        "longest": longest,
        "names": [str(len(s)) for s in samples],
        "nothing": None,
        "offsets": torch.arange(len(samples) + 1),
    }


def test_rows_of_any_length_come_through_collate_fn() -> None:
    dataset = Items(lambda i: torch.arange(i % 7 + 1))
    ours = list(loader(dataset, collate_fn=padded, shuffle=False))
    theirs = list(torch.utils.data.DataLoader(dataset, SIZE, collate_fn=padded))
    assert all(map(same, ours, theirs))


@pytest.mark.parametrize(
    ("make", "settings", "said"),
    [
        (lambda i: torch.ones(i + 1), {}, r"sample 1: sample is float32\[2\], sample 0 has"),
        (lambda i: (1, 2)[: i + 1], {}, "sample 1: sample is tuple of 2, sample 0 has tuple of 1"),
        (lambda i: {"a": 1} if i else {"b": 1}, {}, r"sample 1: sample has the keys \['a'\]"),
        (lambda i: object(), {}, "sample 0: sample is object, expected numbers"),
        (lambda i: {"x": None}, {}, r"sample 0: \['x'\] is None"),
        (int, {"collate_fn": lambda s: {"x": object()}}, r"collate_fn gave \['x'\] is object"),
        (lambda i: 1 / (i - 2), {}, "while reading sample 2"),
        (lambda i: next(iter(())), {}, "sample 0: raised StopIteration"),
        (int, {"collate_fn": lambda s: s[0] / 0}, "while collating the batch of sample 0"),
    ],
)
def test_an_item_that_does_not_fit_is_named(make: Any, settings: Any, said: str) -> None:
    with pytest.raises(feeder.FetchError) as caught:
        list(loader(Items(make), **settings))
    cause = caught.value.__cause__
    text = "\n".join([str(caught.value), str(cause), *getattr(cause, "__notes__", ())])
    assert re.search(said, text), text


def test_a_data_set_that_gives_several_items_at_once_is_asked_so() -> None:
    class Several(Numbers):
        def __getitems__(self, wanted: list[int]) -> list[int]:
            # It may empty the list.
            return [wanted.pop(0) + 100 for _ in range(len(wanted))]

    assert flat(epoch_of(loader(Several()))) == [i + 100 for i in range(NUM)]


def test_columns_by_name_are_no_items() -> None:
    class Columns(Numbers):
        def __getitems__(self, wanted: list[int]) -> Any:
            return {str(i): i for i in wanted}

    with pytest.raises(feeder.FetchError, match="__getitems__ returned a mapping"):
        list(loader(Columns()))


# ---- ranks


def in_order(rounds: Any) -> list[list[int]]:
    return [batch for batches in rounds for batch in batches]


def test_a_rank_reads_the_indices_of_its_batches_and_no_others() -> None:
    dataset = Numbers(40)
    first = loader(dataset, rank=1, world_size=2, epochs=1)
    assert epoch_of(first) == [list(range(i, i + 4)) for i in range(4, 40, 8)]
    # The first call of a run is made twice, to see that it gives the same rows.
    assert set(dataset.reads) == set(flat([list(range(i, i + 4)) for i in range(4, 40, 8)]))


def test_a_launcher_alone_deals_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, dealt = loader().state_dict(), loader(rank=1, world_size=2).state_dict()
    undated = {name: value for name, value in dealt.items() if name != "world_size"}
    # The process is alone: it reads all that is left.
    loader().load_state_dict(dealt)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="each of them reads all rows: give rank="):
        each = loader()
    assert epoch_of(each)[0] == [0, 1, 2, 3]
    each.load_state_dict(alone)
    for state, said in ((dealt, "to 2 ranks"), (undated, "an unknown number")):
        with pytest.raises(feeder.ResumeError, match=said):
            each.load_state_dict(state)
        loader(rank=0, world_size=1).load_state_dict(state)


def test_a_rank_says_once_what_it_reads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "feeder.adapters.streams")
    for rank in range(2):
        first = loader(rank=rank, world_size=2)
        assert sum(map(len, flat([epoch_of(first), epoch_of(first)]))) == 2 * (12 - rank)
    said = "rank {} of 2: reads {} of 23 rows; rank=0, world_size=1 reads all"
    assert caplog.messages == [said.format(0, 12), said.format(1, 11)]


def _uneven(kind: str) -> feeder.sources.Source:
    """A source whose rows are not one for each record."""
    numbers = feeder.sources.arrays({"x": np.arange(NUM)}).shuffle()
    if kind == "filter":
        return numbers.filter(lambda row: row["x"] % 3)
    if kind == "skip":
        return numbers.map(_skips_fifths, on_error="skip")
    texts = feeder.sources.samples(lambda info: np.arange(info.idx_in_epoch % 5 + 1), NUM)
    return feeder.sources.pack(texts, seq_len=8, window=4)


def _skips_fifths(row: dict[str, Any]) -> dict[str, Any]:
    if row["x"] % 5 == 0:
        raise ValueError
    return row


def _rows(batches: Any) -> list[list[Any]]:
    return [next(iter(batch.values())).tolist() for batch in batches]


@hypothesis.given(
    kind=st.sampled_from(["filter", "skip", "pack"]),
    size=st.integers(1, 5),
    drops=st.booleans(),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    data=st.data(),
)
@hypothesis.settings(max_examples=15)
@pytest.mark.filterwarnings("ignore:each of the . ranks makes all batches")
def test_batches_are_exact_where_rows_are_not_records(
    kind: str, size: int, drops: bool, worlds: tuple[int, int], data: st.DataObject
) -> None:
    source, rows = _uneven(kind), []
    with contextlib.suppress(StopIteration):
        for i in itertools.count():
            rows += _rows([source(feeder.Call(i, 0, 0, 1, 0))])[0]
    num = len(rows) // size if drops else -(-len(rows) // size)
    cut = [rows[i * size : (i + 1) * size] for i in range(num)]

    def made(world: int) -> list[FeedLoader]:
        settings = {"drop_last": drops, "world_size": world}
        return [loader(_uneven(kind), size, rank=rank, **settings) for rank in range(world)]

    first, then = worlds
    rounds = num // first if drops else -(-num // first)
    at = data.draw(st.integers(0, rounds))
    loaders = made(first)
    loops = [iter(each) for each in loaders]
    given = [_rows([next(loop)])[0] for _ in range(at) for loop in loops]
    (state,) = {repr(each.state_dict()): each.state_dict() for each in loaders}.values()
    rest = made(then)
    for each in rest:
        each.load_state_dict(state)
    left = num - at * first
    given += in_order(zip(*map(_rows, rest), strict=True))
    expected = cut[: len(cut) - max(0, left) % then] if drops else cut
    assert given[: len(expected)] == expected
    # What fills up the last rounds is the epoch's last batch.
    assert all(batch == cut[-1] for batch in given[len(expected) :])
    assert not drops or len(given) == len(expected)
    for each in loaders + rest:
        each.close()


@pytest.mark.parametrize(("first", "then"), [*itertools.permutations((1, 2, 3, 4), 2)])
def test_a_global_batch_stays_with_another_number_of_ranks(first: int, then: int) -> None:
    def rounds(world: int, state: Any = None) -> Iterator[tuple[list[int], Any]]:
        settings = {"shuffle": True, "world_size": world, "global_batch_size": 12}
        loaders = [FeedLoader(range(60), rank=rank, **settings) for rank in range(world)]
        for each in loaders:
            if state is not None:
                each.load_state_dict(state)
        for batches in zip(*loaders, strict=True):
            yield torch.cat(batches).tolist(), loaders[-1].state_dict()

    whole = [rows for rows, _ in rounds(first)]
    assert whole == [rows for rows, _ in rounds(then)]
    for at, (_, state) in enumerate(rounds(first), 1):
        assert [rows for rows, _ in rounds(then, state)] == whole[at:]
    with pytest.raises(feeder.ConfigError, match="expected a multiple of the 5 ranks"):
        FeedLoader(range(60), global_batch_size=12, rank=0, world_size=5)


# ---- position


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 5}, "source.batch_size: 4 then, 5 now"),
        ({"shuffle": True}, "source.shuffle: False then, True now"),
        ({"seed": 3}, "seed: 0 then, 3 now"),
        ({"drop_last": True}, "source.drop_last: False then, True now"),
        ({"dataset": Numbers(24)}, "source.samples: 23 then, 24 now"),
        ({"sampler": [1, 2]}, "source.sampler: None then, 'list' now"),
    ],
)
def test_a_state_of_another_loader_is_refused_by_what_differs(settings: Any, said: str) -> None:
    state = loader().state_dict()
    with pytest.raises(feeder.ResumeError, match=said):
        loader(**settings).load_state_dict(state)


def test_states_of_others_are_refused() -> None:
    for state in ({}, {"feeder": b"x"}, {"feeder": 1}, None, {"state": 1}):
        with pytest.raises(feeder.ResumeError):
            loader().load_state_dict(state)


# ---- samplers


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_gives_the_samples_that_dataloader_reads(drop_last: bool) -> None:
    num = NUM - 1  # Each rank has 11: the last batch is a short one.
    sampler = DistributedSampler(Numbers(num), num_replicas=2, rank=1, shuffle=True, seed=3)
    ours = loader(Numbers(num), sampler=copy.copy(sampler), drop_last=drop_last)
    theirs = torch.utils.data.DataLoader(Numbers(num), SIZE, sampler=sampler, drop_last=drop_last)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert epoch_of(ours) == epoch_of(theirs)
    assert len(ours) == len(theirs)


def test_a_sampler_of_another_length_or_order_is_refused() -> None:
    first = loader(sampler=list(range(12)))
    next(iter(first))
    state = first.state_dict()
    with pytest.raises(feeder.ResumeError, match=r"source\.sampler_len: 12 then, 11 now"):
        loader(sampler=list(range(11))).load_state_dict(state)
    other = loader(sampler=list(reversed(range(12))))
    other.load_state_dict(state)
    with pytest.raises(feeder.FeedError) as caught:
        next(iter(other))
    assert "the sampler gave other samples in epoch 0" in f"{caught.value} {caught.value.__cause__}"


# ---- iterables, sources, functions, feeds


class Again(Walk):
    """Begins anew when it is asked for an iterator."""

    def __init__(self, *worker: int) -> None:
        super().__init__(NUM)

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Again:
        self.at = 0
        return self


def test_what_is_its_own_iterator_is_asked_for_one_once_in_an_epoch() -> None:
    expected = in_order([[range(NUM)[i : i + SIZE] for i in range(0, NUM, SIZE)]])
    for made in (loader(Again()), loader(range(NUM), sampler=Again())):
        for _ in range(2):
            assert epoch_of(made) == list(map(list, expected))
    source = feeder.sources.iterable(Again)
    with feeder.init_data_input_workers(["x"], source, SIZE, num_worker_threads=1) as coordinator:
        assert _rows(coordinator["train"]) == list(map(list, expected))


def test_an_iterable_is_begun_anew_after_a_break() -> None:
    ours = loader(Count(10**9))
    for _ in range(3):
        for batch in ours:
            assert batch.tolist() == [0, 1, 2, 3]
            break
    with pytest.raises(TypeError, match="length of this loader is not known"):
        len(ours)


@pytest.mark.parametrize("num", [2, 3])
def test_ranks_of_an_iterable_keep_their_own_batches(num: int) -> None:
    with pytest.warns(UserWarning, match=f"each of the {num} ranks reads all"):
        all_ = [loader(Count(), rank=r, world_size=num) for r in range(num)]
    found = [epoch_of(one) for one in all_]
    whole = epoch_of(loader(Count()))
    assert in_order(zip(*found, strict=True))[: len(whole)] == whole
    loops = [iter(one) for one in all_]
    for loop in loops:
        next(loop)
    last = loader(Count())
    last.load_state_dict(all_[1].state_dict())
    with pytest.warns(feeder.ReplayWarning):
        assert epoch_of(last) == whole[num:]


def fetch(call: feeder.Call) -> Any:
    if call.index == 5:
        raise StopIteration
    return [np.arange(5) + 5 * call.index + 100 * call.epoch, np.ones((5, 2), np.float32)]


def feeds() -> feeder.Coordinator:
    return make_feed(fetch, ["x", "y"], SIZE, epochs=3)


def test_a_feed_is_looped_over_by_epoch() -> None:
    with feeds() as coordinator:
        ours = FeedLoader(coordinator["train"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = [[batch["x"].tolist() for batch in ours] for _ in range(3)]
        assert flat(found[2]) == list(range(200, 225))
        with pytest.raises(feeder.ConfigError, match="batch_size is 3: a feed has its own"):
            FeedLoader(coordinator["train"], batch_size=3)


@pytest.mark.parametrize("at", [0, 1, 3, 4])
def test_a_served_queue_is_resumed(at: int) -> None:
    with feeder.serve(feeds, "tcp://127.0.0.1:0") as server:
        address = server.addresses[0]
        first = FeedLoader.connect(address)
        whole = [[batch["x"].tolist() for batch in first] for _ in range(3)]
        first.close()
        second = FeedLoader.connect(address)
        loop = iter(second)
        for _ in range(at):
            next(loop)
        state = second.state_dict()
        second.close()
        third = FeedLoader.connect(address)
        third.load_state_dict(state)
        assert [[batch["x"].tolist() for batch in third] for _ in range(3)] == [
            whole[0][at:], *whole[1:],
        ]  # fmt: skip
        third.load_state_dict(state)
        assert [batch["x"].tolist() for batch in third] == whole[0][at:]


# ---- processes


class Drawing(Dataset):
    """Items that are drawn from the generators of the process."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> Any:
        return {
            "i": i,
            "draws": (torch.rand(2), np.random.rand(), random.random()),
            "process": os.getpid(),
        }


class DrawingStream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(Drawing()[i] for i in range(NUM))


def drawn(batches: Any) -> list[Any]:
    found = []
    for batch in batches:
        assert os.getpid() not in batch["process"].tolist()
        left, middle, right = batch["draws"]
        found.append((left.tolist(), middle.tolist(), right.tolist()))
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["map", "stream", "sampler"])
def test_in_processes_draws_of_the_generators_repeat_and_resume(kind: str) -> None:
    def make(**settings: Any) -> FeedLoader:
        if kind == "stream":
            return loader(DrawingStream(), **settings)
        if kind == "sampler":
            return loader(Drawing(), sampler=RandomSampler(Numbers()), **settings)
        return loader(Drawing(), shuffle=True, **settings)

    first = make(num_workers=2)
    whole = [drawn(first) for _ in range(2)]
    second = make(num_workers=1)
    drawn(second)
    loop = iter(second)
    next(loop)
    next(loop)
    state = second.state_dict()
    third = make(executor=feeder.Processes(1, preload=["feeder.adapters.torch"]))
    third.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", feeder.ReplayWarning)
        assert drawn(third) == whole[1][2:]
    assert whole[0] != whole[1]


class Walk(list[int]):
    """A sampler with a state."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_what_cannot_be_in_processes_is_told() -> None:
    with pytest.raises(feeder.ConfigError, match="num_workers is 2 and executor is Threads"):
        loader(num_workers=2, executor=feeder.Threads(2))
    with pytest.raises(feeder.ConfigError, match="sampler Walk has a state"):
        loader(sampler=Walk(range(NUM)), num_workers=1)
