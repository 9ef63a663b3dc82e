"""Which records a batch was made of, against a column with the number of each record."""

from __future__ import annotations

import operator
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import feeder
from feeder import sources
from small import Pure, make

FAR = 10**12

numbers = st.integers


def base(first: int, num: int) -> Any:
    return sources.arrays(np.arange(first, first + num))


def same(record: Any) -> Any:
    return record


@st.composite
def parts(draw: st.DrawFn, first: int) -> Any:
    """A source whose rows are `first` and on, with some steps on it."""
    source = base(first, draw(numbers(8, 40)))
    for _ in range(draw(numbers(0, 3))):
        step = draw(st.sampled_from(["shuffle", "window", "take", "skip", "repeat", "map"]))
        if step == "shuffle":
            source = source.shuffle(draw(st.none() | numbers(0, 9)))
        elif step == "window":
            source = source.shuffle(window=draw(numbers(1, 9)))
        elif step == "map":
            source = source.map(same)
        elif step == "repeat":
            source = source.repeat(2)
        else:
            source = getattr(source, step)(draw(numbers(1, max(1, source.epoch_size // 3))))
    return source


@st.composite
def composed(draw: st.DrawFn) -> Any:
    """A source, and the number of the first row of each source in it, by its name."""
    one, two = draw(parts(0)), draw(parts(1000))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options = {"shuffle": True}
    kind = draw(st.sampled_from(["one", "concat", "mix", "mix in mix", "zip", "shard"]))
    firsts = {"": 0}
    if kind == "one":
        source = one
    elif kind == "shard":
        num = draw(numbers(1, 4))
        source = base(0, draw(numbers(8, 40))).shard(draw(numbers(0, num - 1)), num)
    elif kind == "concat":
        source, firsts = one.concat(two), {"0": 0, "1": 1000}
    elif kind == "zip":
        num = min(one.epoch_size, two.epoch_size)
        source = one.take(num).zip(two.take(num))
    else:
        how = draw(st.sampled_from(["drop", "stop", "repeat"]))
        source = sources.mix({"a": (one, 0.5), "b": (two, 0.5)}, on_exhausted=how)
        firsts = {"a": 0, "b": 1000}
        if kind == "mix in mix":
            three = draw(parts(2000))
            source = sources.mix({"c": (three, 1), "d": (source, 2)}, on_exhausted="repeat")
            firsts = {"c": 2000, "d/a": 0, "d/b": 1000}
    return (source.shuffle() if options and kind != "shard" else source), firsts


@given(
    composed(), numbers(1, 9), st.sampled_from(["keep", "drop", "pad", "carry"]), numbers(1, 3),
    numbers(0, 2**64 - 1), numbers(1, 3),
)  # fmt: skip
def test_they_are_those_that_the_rows_say(
    source: Any, size: int, last_batch: str, epochs: int, seed: int, num_devices: int
) -> None:
    made, firsts = source
    devices = tuple(f"cpu:{i}" for i in range(num_devices))
    names = ["x", "y"] if made.kind == "zip" else ["x"]
    with make(
        made, names, size, last_batch=last_batch, epochs=epochs, seed=seed, devices=devices,
        num_worker_threads=1,
    ) as coordinator:  # fmt: skip
        feed = coordinator["train"]
        rounds = zip_longest(*map(feed.on, devices))
        batches = [batch for batches in rounds for batch in batches if batch is not None]
        for batch in batches:
            rows = feed.records(batch.step)
            values = zip(*(batch[name][: batch.rows].tolist() for name in names), strict=True)
            if len(names) == 2:
                firsts = {"": 0}
                told = [(row[0].number, row[1].number + 1000) for row in rows]
            else:
                told = [(one.number + firsts[one.source],) for (one,) in rows]
            assert told == list(values)
        with pytest.raises(feeder.ConfigError, match="the feed has ended"):
            feed.records(1 + max((batch.step for batch in batches), default=-1))


def test_shards_of_two_sizes_come_in_turn() -> None:
    source = base(0, 7).shard(0, 3)
    with make(source, ["x"], 2, epochs=6) as coordinator:
        feed = coordinator["train"]
        told = [[one.number for (one,) in feed.records(batch.step)] for batch in feed]
        assert [number for batch in told for number in batch] == [*range(7)] * 2


def test_a_round_that_is_dropped_is_no_step() -> None:
    devices = ("cpu:0", "cpu:1")
    with make(base(0, 10), ["x"], 4, devices=devices, last_round="drop") as coordinator:
        assert len(coordinator["train"].records(1)) == 4
        with pytest.raises(feeder.ConfigError, match="the feed has ended"):
            coordinator["train"].records(2)


@pytest.mark.parametrize("was", [1, 2, 3])
@pytest.mark.parametrize("now", [2, 3, 4])
@pytest.mark.parametrize("num_rounds", [1, 2])
def test_the_round_that_is_dropped_is_another_after_a_resume(
    was: int, now: int, num_rounds: int
) -> None:
    settings: Any = {"last_round": "drop"}
    with make(base(0, 20), ["x"], 2, devices=was, **settings) as coordinator:
        feed = coordinator["train"]
        for _ in range(num_rounds):
            for device in feed.devices:
                next(feed.on(device))
        state = coordinator.state_dict()
    with make(base(0, 20), ["x"], 2, devices=now, resume=state, **settings) as coordinator:
        feed = coordinator["train"]
        for row in zip(*map(feed.on, feed.devices), strict=True):
            for batch in row:
                last = batch.step
                numbers = [one.number for (one,) in feed.records(batch.step)]
                assert numbers == batch["x"].tolist()
                (seen,) = feed.when("", numbers[0])
                assert seen[:2] == (batch.step, 0)
        with pytest.raises(feeder.ConfigError, match="the feed has ended"):
            feed.records(last + 1)


SHUFFLED = base(0, 8).shuffle(seed=1), base(100, 8).shuffle(seed=2)


@pytest.mark.parametrize(
    "source",
    [
        sources.mix({"a": (base(0, 8), 1), "b": (base(100, 8), 1)}), SHUFFLED[0].take(6),
        SHUFFLED[0].repeat(2), sources.mix({"a": (SHUFFLED[0], 1), "b": (SHUFFLED[1], 1)}),
        base(0, 8).repeat(2), base(0, 8).take(6),
    ],
)  # fmt: skip
def test_what_is_excluded_by_place_is_another_record_in_each_epoch(source: Any) -> None:
    with make(source.exclude([1, 3]), ["x"], 5, epochs=4) as coordinator:
        feed = coordinator["train"]
        came: dict[int, list[tuple[int, int]]] = {}
        for batch in feed:
            for row, value in enumerate(batch["x"].tolist()):
                came.setdefault(value, []).append((batch.step, row))
        for value, places in came.items():
            name = "" if source.kind != "mix" else "b" if value >= 100 else "a"
            assert [(seen.step, seen.row) for seen in feed.when(name, value % 100)] == places


@pytest.mark.parametrize("step", [-1, True, 1.0, None])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with (
        make(base(0, 9), ["x"]) as coordinator,
        pytest.raises(feeder.ConfigError, match="expected a whole number of at least 0"),
    ):
        coordinator["train"].records(step)


def test_epochs_without_a_batch_have_no_step() -> None:
    """Such a feed does not start; asked before it does, it ends."""
    coordinator = make(base(0, 3), ["x"], 4, last_batch="drop", epochs=None)
    with pytest.raises(feeder.ConfigError, match="the feed has ended"):
        coordinator["train"].records(0)


def test_a_pass_and_a_name_are_told() -> None:
    source = sources.mix({"a": (base(0, 4), 1), "b": (base(0, 8), 1)}, on_exhausted="repeat")
    with make(source, ["x"], 16, epochs=2) as coordinator:
        rows = coordinator["train"].records(0)
    of = [one for (one,) in rows if one.source == "a"]
    assert [(one.number, one.epoch) for one in of] == [(i % 4, i // 4) for i in range(8)]
    assert of[5].name == "row 1"


def test_a_step_far_away_is_found_at_once() -> None:
    source = sources.samples(operator.index, FAR).shuffle()
    with make(source, ["x"], 8, epochs=None) as coordinator:
        assert len({one.number for (one,) in coordinator["train"].records(10**11)}) == 8
        ((one,), *_) = coordinator["train"].records(10**13)
        assert one.epoch == 80


@pytest.mark.parametrize(
    ("fetch", "settings", "why"),
    [
        (Pure(), {}, "of a fetch function are its own"),
        (base(0, 9).filter(bool), {}, "filter has depends"),
        (sources.pack(base(0, 9), 4), {}, "pack has depends"),
        (sources.mix({"a": base(0, 9)}, unit="tokens"), {}, "mix has depends"),
        (base(0, 9), {"dont_rebatch": True}, "as they come"),
        (base(0, 9), {"order": "arrival"}, "as they come"),
        (base(0, 9), {"batch_size": None, "global_batch_size": 4}, "number of queues"),
        (base(0, 9), {"rounds": "epoch", "devices": ("cpu:0", "cpu:1")}, "rounds end with"),
    ],
)
def test_what_does_not_follow_from_numbers_is_told(
    fetch: Any, settings: dict[str, Any], why: str
) -> None:
    with (
        make(fetch, ["x"] if fetch.__class__ is not Pure else ["id"], **settings) as coordinator,
        pytest.raises(feeder.ConfigError, match=why),
    ):
        coordinator["train"].records(0)
