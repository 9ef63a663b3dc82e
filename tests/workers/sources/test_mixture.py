"""Mixtures: each record of each source once per pass, exact proportions at each block's end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import chain, count, islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import feeder
import steps
from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import (
    Mixture,
    RecordError,
    Source,
    arrays,
    iterable,
    mix,
    pack,
)
from feeder.workers.sources.steps.rows import part_of
from parts import examples
from small import make as make_feed
from steps import numbers


def rows_of(source: Any, epoch: int = 0, batch_size: int = 7) -> list[int]:
    return [row for chunk in epoch_of(source, batch_size, epoch) for row in chunk[0].tolist()]


def of(
    lengths: dict[str, int], weights: dict[str, Any], shuffled: str | None = None, **options: Any
) -> Mixture:
    """A mixture of numbers: source k has k * 1000 and on, perhaps shuffled."""
    parts = {name: numbers(1000 * i, length) for i, (name, length) in enumerate(lengths.items())}
    if shuffled is not None:
        window = None if shuffled == "all" else 3
        parts = {name: part.shuffle(window=window) for name, part in parts.items()}
    return mix({name: (part, weights[name]) for name, part in parts.items()}, **options)


def shares(rows: list[int]) -> Counter[int]:
    return Counter(row // 1000 for row in rows)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_mixture_is_a_bijection_with_exact_blocks(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 4))
    names = "abcd"[:num]
    lengths = {name: data.draw(st.integers(1, 80)) for name in names}
    mode = data.draw(st.sampled_from(["drop", "stop", "repeat"]))
    # With "repeat" an epoch of rare sources is too long to be read here.
    rare = [] if mode == "repeat" else [1e-3, 1e-6]
    weight = st.one_of(st.integers(1, 9), st.sampled_from([0.1, 0.25, 1.5, 2.7, 2**0.5, *rare]))
    some = st.dictionaries(st.sampled_from(names), weight, min_size=1)
    starts = sorted(data.draw(st.sets(st.integers(1, 120), max_size=3)))
    schedule = [(start, data.draw(some)) for start in starts]
    weights = {name: data.draw(weight) for name in names}
    shuffled = data.draw(st.sampled_from([None, "all", "windows"]))
    try:
        mixture = of(lengths, weights, shuffled, schedule=schedule, on_exhausted=mode)
    except ConfigError as error:
        assert mode == "stop" and "fewer than one block" in str(error)
        return
    passes: dict[int, list[int]] = {k: [] for k in range(num)}
    for epoch in range(3):
        rows = rows_of(mixture, epoch, data.draw(st.integers(1, 30)))
        assert len(rows) == len(mixture)
        for k in range(num):
            own = [row % 1000 for row in rows if row // 1000 == k]
            if mode == "repeat":
                # It goes on where the epoch before ended.
                passes[k] += own
            elif shuffled is None:
                assert own == list(range(len(own)))
            else:
                # Each at most once; all of them where the whole source is read.
                assert len(set(own)) == len(own)
                assert len(own) < [*lengths.values()][k] or sorted(own) == list(range(len(own)))
        if mode == "drop" and not schedule:
            assert shares(rows) == {k: n for k, n in enumerate(lengths.values())}
        segments = mixture.records.route.segments
        for segment in segments:
            for block in range(segment.blocks):
                first = segment.first + block * segment.size
                got = shares(rows[first : min(first + segment.size, segment.end)])
                held = np.subtract(segment.made(block + 1), segment.made(block)).tolist()
                assert got == {k: c for k, c in enumerate(held) if c}
                assert segment.varies or held == [*segment.counts]
        assert {s.first for s in segments} >= {start for start in starts if start < len(rows)} or (
            mode != "repeat"
        )
        told = mixture.counts(at := data.draw(st.integers(0, len(rows))), epoch=epoch)
        assert [*told.values()] == [shares(rows[:at])[k] for k in range(num)]
    for k, length in enumerate(lengths.values()):
        for start in range(0, len(passes[k]), length):
            one = passes[k][start : start + length]
            # A whole pass has each record once; the last one is not whole.
            assert len(set(one)) == len(one) and set(one) <= set(range(length))
            assert shuffled is not None or one == list(range(len(one)))


@pytest.mark.parametrize(
    ("weights", "block"),
    [
        ({"a": 0.7, "b": 0.2, "c": 0.1}, (7, 2, 1)),
        ({"a": 70, "b": 20, "c": 10}, (7, 2, 1)),
        ({"a": 1, "b": 1, "c": 1}, (1, 1, 1)),
        ({"a": 0.5, "b": 0.25, "c": 0.125}, (4, 2, 1)),
        ({"a": np.float64(0.3), "b": np.int64(1), "c": 0.2}, (3, 10, 2)),
        ({"a": 3 * 2**0.5, "b": 2 * 2**0.5, "c": 3 * 2**0.5}, (3, 2, 3)),
    ],
)
def test_blocks_hold_the_weights(weights: dict[str, Any], block: tuple[int, ...]) -> None:
    mixture = of({"a": 10**4, "b": 10**4, "c": 10**4}, weights)
    assert mixture.records.route.segments[0].counts == block


def off_by(
    mixture: Mixture, steps: list[tuple[int, dict[str, float]]], at: int
) -> tuple[float, int]:
    """By how many records the first ones of a mixture are off what its weights say, of the source
    where that is most; and the records of its largest block."""
    wanted = dict.fromkeys(mixture.counts(0), 0.0)
    for (start, weights), (stop, _) in pairwise([*steps, (at, {})]):
        for name, weight in weights.items():
            wanted[name] += max(0, min(at, stop) - start) * weight / sum(weights.values())
    told = mixture.counts(at)
    segments = mixture.records.route.segments
    largest = max(min(segment.size, segment.end - segment.first) for segment in segments)
    return max(abs(told[name] - wanted[name]) for name in wanted), largest


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_mixture_is_less_than_a_block_off_however_rare_a_source(data: st.DataObject) -> None:
    names = "abcdefgh"[: data.draw(st.integers(2, 8))]
    weight = st.one_of(
        st.floats(-6, 0).map(lambda power: float(f"{10**power:.9f}")), st.integers(1, 9)
    )
    every = st.fixed_dictionaries(dict.fromkeys(names, weight))
    some = st.dictionaries(st.sampled_from(names), weight, min_size=1)
    starts = data.draw(st.lists(st.integers(1, 3000), max_size=30))
    schedule = [(int(at), data.draw(some)) for at in np.cumsum(starts)]
    first = data.draw(every)
    mixture = of(dict.fromkeys(names, 10**5), first, schedule=schedule, on_exhausted="repeat")
    ends = [start for start, _ in schedule] or [10**4]
    for at in [*ends, *data.draw(st.lists(st.integers(0, len(mixture)), min_size=3))]:
        if at <= len(mixture):
            off, block = off_by(mixture, [(0, first), *schedule], at)
            assert off < block


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_shards_of_a_mixture_have_its_proportions_at_each_place(data: st.DataObject) -> None:
    names = "abcd"[: data.draw(st.integers(2, 4))]
    mode = data.draw(st.sampled_from(["drop", "stop", "repeat"]))
    # Small blocks, in which a part of an epoch is soon off; or large ones.
    kinds: list[list[float]] = [[1, 9], [1, 9, 2], [1, 2, 0.7, 2**0.5, 0.01]]
    weight = st.sampled_from(data.draw(st.sampled_from(kinds)))
    every = st.fixed_dictionaries(dict.fromkeys(names, weight))
    starts = sorted(data.draw(st.sets(st.integers(1, 400), max_size=4)))
    schedule = [(start, data.draw(every)) for start in starts]
    lengths = {name: data.draw(st.integers(50, 300)) for name in names}
    try:
        mixture = of(lengths, first := data.draw(every), schedule=schedule, on_exhausted=mode)
    except ConfigError:
        return
    num, epoch = data.draw(st.integers(2, 7)), data.draw(st.integers(0, 3))
    # However the shards are asked for: after the mixture, or by its options.
    if data.draw(st.booleans()):
        shards: list[Any] = [mixture.shard(i, num) for i in range(num)]
    else:
        options = {"schedule": schedule, "on_exhausted": mode, "num_shards": num}
        shards = [of(lengths, first, shard_id=i, **options) for i in range(num)]
    size = data.draw(st.integers(20, 90))
    rows = [rows_of(shard, epoch, size) for shard in shards]
    whole = rows_of(mixture, epoch, 100)
    # Together they read what the mixture reads.
    assert sorted(chain(*rows)) == sorted(whole)
    assert max(map(len, rows)) - min(map(len, rows)) <= 1
    segments = mixture.records.route.segments
    block = max(min(segment.size, segment.end - segment.first) for segment in segments)
    for own in rows:
        for at in data.draw(st.lists(st.integers(0, len(own)), max_size=4)):
            told = mixture.counts(min(at * num, len(whole)), epoch=epoch)
            has = shares(own[:at])
            read = shards[rows.index(own)].read_up_to(call(0, 1, epoch), at)
            assert [one["rows"] for one in read.values()] == [has[k] for k in range(len(read))]
            assert all(abs(has[k] - n / num) <= block for k, n in enumerate(told.values()))


@pytest.mark.parametrize("mode", ["drop", "repeat"])
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_sources_may_have_shards(mode: str, data: st.DataObject) -> None:
    num, stick = data.draw(st.integers(2, 4)), data.draw(st.booleans())
    parts = {
        name: numbers(1000 * k, data.draw(st.integers(num, 30)))
        .shuffle()
        .shard(data.draw(st.integers(0, num - 1)), num, stick_to_shard=stick)
        for k, name in enumerate("abc")
    }
    weights = {name: data.draw(st.sampled_from([1, 3, 0.3, 2**0.5])) for name in parts}
    schedule = [(data.draw(st.integers(1, 40)), {"a": 1, "b": 1, "c": 1})]
    mixture = mix({name: (part, weights[name]) for name, part in parts.items()}, schedule, mode)
    have: list[list[int]] = [[], [], []]
    for epoch in range(4):
        rows = rows_of(mixture, epoch, 64)
        assert len(rows) == mixture.rows(epoch, 1)
        told = mixture.counts(at := len(rows) // 2, epoch=epoch)
        assert [*told.values()] == [shares(rows[:at])[k] for k in range(3)]
        for k in range(3):
            have[k] += [row for row in rows if row // 1000 == k]
    for k, (name, part) in enumerate(parts.items()):
        # The mixture's draws and shuffles of a source are keyed by its name.
        seed = part_of(call(0, 1, 0), name).seed
        passes = (epoch_of(part, 64, epoch, seed) for epoch in count())
        wanted = (row for one in passes for chunk in one for row in chunk[0].tolist())
        assert have[k] == [*islice(wanted, len(have[k]))]
    if mode == "drop":
        assert sum(map(len, have)) == sum(
            part.rows(e, 1) for e in range(4) for part in parts.values()
        )


@pytest.mark.parametrize("shard_id", [0, 1, 2])
def test_a_mixture_of_shards_stops_after_what_each_of_them_has(shard_id: int) -> None:
    """Or its epochs would differ in size with the shard."""
    parts = {"a": numbers(0, 10).shard(shard_id, 3), "b": numbers(1000, 8).shard(shard_id, 3)}
    mixture = mix({name: (part, 1) for name, part in parts.items()}, on_exhausted="stop")
    for epoch in range(3):
        first, other = 10 * ((shard_id + epoch) % 3) // 3, 8 * ((shard_id + epoch) % 3) // 3
        assert rows_of(mixture, epoch) == [first, 1000 + other, first + 1, 1001 + other]


@pytest.mark.parametrize("rare", [1e-4, 1e-5, 1e-6])
def test_a_rare_source_is_not_raised(rare: float) -> None:
    mixture = of({"a": 200, "b": 200}, {"a": 1 - rare, "b": rare}, on_exhausted="repeat")
    at = round(100 / rare)
    assert abs(mixture.counts(at)["b"] - 100) < 2
    # No step of the schedule has room for a block.
    cut = [(100 * i, {"a": 1, "b": rare + i % 2 / 1000}) for i in range(1, 500)]
    mixture = of({"a": 9000, "b": 100}, {"a": 1, "b": rare}, schedule=cut, on_exhausted="repeat")
    assert off_by(mixture, [(0, {"a": 1, "b": rare}), *cut], 49_900)[0] < 2


def test_temperature_and_weights_by_size() -> None:
    lengths = {"a": 9000, "b": 1000}
    parts = {name: numbers(0, n) for name, n in lengths.items()}
    assert mix(parts).records.route.segments[0].counts == (9, 1)
    assert mix(parts, temperature=2).records.route.segments[0].counts == (3, 1)
    flat = mix(parts, temperature=1000).records.route.segments[0].counts
    assert abs(flat[0] - flat[1]) < 4


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: mix({}), "sources is {}, expected a mapping of name to"),
    "no source": (lambda: mix({"a": (5, 1)}), "int is no source"),
    "iterator": (
        lambda: mix({"a": iterable(lambda: iter([]))}),  # type: ignore[dict-item]
        r"^mix, 'a': sources.iterable has no known length, and no record n",
    ),
    "fetch function": (
        lambda: mix({"a": lambda call: call}),  # type: ignore[dict-item]
        "^mix, 'a': function is no source, expected one of feeder.sources",
    ),
    "zero": (lambda: of({"a": 5}, {"a": 0}), "the weight of 'a' is 0, expected a finite"),
    "infinite": (lambda: of({"a": 5}, {"a": float("inf")}), "the weight of 'a' is inf"),
    "no number": (lambda: of({"a": 5}, {"a": float("nan")}), "the weight of 'a' is nan"),
    "too large": (lambda: of({"a": 5}, {"a": 10**400}), "the weight of 'a' is 10000"),
    "too large by temperature": (
        lambda: of({"a": 5}, {"a": 1e300}, temperature=0.5),
        "the weight of 'a', to the power of 1 / temperature, is inf",
    ),
    "names": (lambda: mix({1: numbers(), "1": numbers()}), "names are .*different ones as text"),  # type: ignore[dict-item]
    "mode": (lambda: of({"a": 5}, {"a": 1}, on_exhausted="go"), "on_exhausted is 'go'"),
    "small": (
        lambda: of({"a": 5, "b": 1}, {"a": 1, "b": 2}, on_exhausted="stop"),
        r"records, fewer than one block of the mixture needs, {'a': 1, 'b': 2}",
    ),
    "shards": (
        lambda: mix({"a": (numbers(pad_last_batch=True), 1)}),
        "mix, 'a', of a source with shards",
    ),
    "uneven shards": (
        lambda: mix({"a": (numbers(num=9, num_shards=2), 1)}, random_shuffle=True),
        "shards of the sources differ in size, .* shuffle the sources instead",
    ),
    "step on uneven shards": (
        lambda: mix({"a": (numbers(num=9, num_shards=2), 1)}).take(3),
        "^take of a mixture of shards that differ in size, .* give the shards stick_to_shard=True",
    ),
    "budgeted": (lambda: mix({"a": (steps.budgeted(), 1)}), "mix, 'a', of batch_by_tokens, whose"),
    "temperature": (lambda: of({"a": 5}, {"a": 1}, temperature=0), "temperature is 0"),
    "seed": (lambda: of({"a": 5}, {"a": 1}, seed=-1), "seed is -1"),
    "schedule": (lambda: of({"a": 5}, {"a": 1}, schedule=5), "schedule is 5, expected pairs"),
    "step": (lambda: of({"a": 5}, {"a": 1}, schedule=[(0, {"a": 1})]), "a record of the schedule"),
    "unsorted": (
        lambda: of({"a": 5}, {"a": 1}, schedule=[(4, {"a": 1}), (2, {"a": 1})]),
        r"schedule has the records \[4, 2\], expected them to grow",
    ),
    "unknown": (lambda: of({"a": 5}, {"a": 1}, schedule=[(4, {"b": 1})]), r"weights of \['b'\]"),
    "empty": (lambda: of({"a": 5}, {"a": 1}, schedule=[(4, {})]), "weights are {}"),
    "too far": (lambda: of({"a": 5}, {"a": 1}).counts(6), "records is 6, and an epoch has 5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        make()


# ---- what goes wrong in a source of a mixture


def failing(record: Any) -> Any:
    if record == 1006:
        raise ValueError("no such text")
    return record


def buggy(record: Any) -> Any:
    return record if record < 1000 else record.missing


def texts(record: Any) -> Any:
    return np.full(record % 7 + 1, record) if record < 1000 else np.ones(9)


def mixed(fn: Callable[[Any], Any] | None, *, shuffled: bool = False) -> Source:
    """Sources "text" and "code" of 20 numbers, code from 1000 on, mapped each for itself."""
    parts = {"text": numbers(num=20), "code": numbers(1000, 20)}
    if shuffled:
        parts = {name: part.shuffle(3) for name, part in parts.items()}
    return mix({name: (part if fn is None else part.map(fn), 1) for name, part in parts.items()})


BROKEN: dict[str, tuple[Callable[[], Source], str]] = {
    "map": (lambda: mixed(failing), r"mix: source 'code': row 6: no such text$"),
    "mixture of mixtures": (
        lambda: mix({"all": mixed(failing), "more": numbers()}),
        r"mix: source 'all': mix: source 'code': row 6: no such text$",
    ),
    "filter": (
        lambda: mixed(None).filter(failing), r"mix: source 'code': row 6: no such text$",
    ),
    "concat in it": (
        lambda: mix({"code": numbers().concat(numbers(1000, 20).map(failing)), "more": numbers()}),
        r"mix: source 'code': concat: source 1: row 6: no such text$",
    ),
    "dtypes": (
        lambda: mix({"a": (numbers(), 1), "b": (arrays(np.ones(9)), 1)}),
        r"mix: source 'b': column 0 is float64\[\], that of source 'a' is int64\[\]",
    ),
    "names": (
        lambda: mix({"a": numbers(), "b": arrays({"x": np.arange(23)})}),
        r"mix: source '.': has the columns .*, source '.' has .*: sources that come together must",
    ),
    "shapes of samples": (
        lambda: mixed(lambda x: np.zeros(1 + (x >= 1000))),
        r"^mix: source '(code|text)': row \d+: sample is float64\[.\], "
        r"mix: source '(code|text)': row \d+ has float64\[.\]",
    ),
    "pad": (
        lambda: mixed(lambda x: np.zeros(9 if x >= 1000 else 3)).pad(8),
        r"^mix: source 'code': row \d+: column 0 has 9 values, length is 8$",
    ),
    "offsets": (
        lambda: mixed(lambda x: np.zeros(3) if x < 1000 else np.zeros((3, 1))).offsets(),
        r"mix: source '....': row \d+: column 0 is float64",
    ),
    "budget": (
        lambda: mixed(texts).batch_by_tokens(8),
        r"^mix: source 'code': row \d+: has 9 tokens, the budget is 8$",
    ),
    "pack": (
        lambda: pack(mixed(texts), 8),
        r"^mix: source 'code': row \d+: the document is float64\[9\], expected whole numbers",
    ),
    "pack, shuffled": (
        lambda: pack(mixed(texts, shuffled=True), 8),
        r"^mix: source 'code': row \d+: the document is float64\[9\], expected whole numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_names_the_source_of_the_mixture(name: str) -> None:
    make, told = BROKEN[name]
    with pytest.raises(RecordError, match=told):
        rows_of(make())


def test_a_bug_in_a_source_of_a_mixture_is_noted() -> None:
    with pytest.raises(AttributeError) as caught:
        rows_of(mixed(buggy))
    assert caught.value.__notes__[0].startswith("while reading row ")
    assert caught.value.__notes__[1] == "in mix: source 'code'"


@pytest.mark.process
@pytest.mark.parametrize("executor", [None, feeder.Processes(2)])
def test_a_feed_names_the_source_of_the_mixture(executor: Any) -> None:
    mixture = mix({"text": numbers(), "code": numbers(100).map(steps.odd_fails)})
    made = make_feed(mixture, ["x"], executor=executor)
    with made, pytest.raises(feeder.FetchError) as caught:
        list(made["train"])
    assert re.match(r"mix: source 'code': row \d+: odd$", str(caught.value.__cause__))


def test_a_skipped_record_leaves_the_others_in_their_places() -> None:
    bad = numbers(1000, 10).map(steps.odd_fails, on_error="skip")
    mixture = mix({"a": (numbers(0, 10), 1), "b": (bad, 1)})
    whole = rows_of(mix({"a": (numbers(0, 10), 1), "b": (numbers(1000, 10), 1)}))
    assert rows_of(mixture) == [row for row in whole if row < 1000 or row % 2 == 0]
    assert mixture.skipped == 5


# ---- in feeds


@pytest.mark.parametrize("last_batch", ["keep", "drop", "carry"])
def test_a_snapshot_tells_how_much_of_each_source_has_come(last_batch: str) -> None:
    mixture = steps.mixture(on_exhausted="repeat").map(lambda record: record[0]).pad(1)
    with make_feed(mixture, ["x"], 9, seed=4, epochs=3, last_batch=last_batch) as made:
        rows: list[list[int]] = [[], [], [], []]
        for batch in made["train"]:
            cut = batch.cut
            if last_batch == "carry":
                # Batches reach over the ends of epochs.
                flat = [*chain(*rows), *batch["x"].tolist()]
                rows = [flat[i * len(mixture) : (i + 1) * len(mixture)] for i in range(4)]
            else:
                rows[batch.epoch] += batch["x"].tolist()
            told = made.snapshot().describe().splitlines()
            stats = made["train"].stats()
            if batch.cut.epoch != cut.epoch:
                continue  # That it is the last of its epoch became known meanwhile.
            came = shares(rows[cut.epoch])
            assert told[1:] == [
                f"  read in epoch {cut.epoch}: {came[0]} of 'a', {came[1]} of 'b', {came[2]} of 'c'"
            ]
            assert [stats[f"source/{name}/rows"] for name in "abc"] == [came[k] for k in range(3)]
            wanted = mixture.counts(came.total(), epoch=cut.epoch, seed=4)
            assert [*wanted.values()] == [came[k] for k in range(3)]


def test_a_snapshot_of_an_edited_run_tells_no_counts_of_one_that_was_not() -> None:
    with make_feed(of({"a": 20, "b": 20}, {"a": 2, "b": 1}), ["x"], 4) as made:
        next(made["train"])
        before = made.snapshot()
    edited = of({"a": 20, "b": 20}, {"a": 1, "b": 3})
    with make_feed(edited, ["x"], 4, resume=before, edit="more b") as made:
        next(made["train"])
        assert made.snapshot().describe().endswith("(step 2), 0 rows left over, token of 52 bytes")


def test_a_snapshot_tells_of_names_that_begin_alike() -> None:
    mixture = of({"a": 20, "a.b": 20, "a.of": 20}, {"a": 1, "a.b": 2, "a.of": 1})
    with make_feed(mixture, ["x"], 8) as made:
        next(made["train"])
        told = made.snapshot().describe()
    assert "4 of 'a.b'" in told and "2 of 'a'" in told and "2 of 'a.of'" in told


def test_of_a_mixture_in_another_order_nothing_is_told() -> None:
    shuffled = steps.mixture().shuffle(1)
    for source in (shuffled, steps.mixture(num_shards=2), steps.chained()):
        with make_feed(source, ["x", "u"], 5) as made:
            next(made["train"])
            snapshot = made.snapshot()
    assert len(snapshot.describe().splitlines()) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"source.blocks": 5}, {"source.blocks": []}, {"source.blocks": [[0, 1]]},
        {"source.blocks": [[0, 1, 10**15, 1, 1]]}, {"source.blocks": [[0, 0, 0, 0, 0]]},
        {"source.blocks": [[0, 1, 1, 1, 1], [3, 1, 10**15, 1, 1]]},
        {"source.blocks": [["a", "b", "c", "d", "e"]]}, {"source.size": None}, {"batch_size": "x"},
        {"source.source": [], "source.of.source": "mix"}, {"source.on_exhausted": []},
        {"seed": None},
    ],
)  # fmt: skip
def test_of_fields_that_somebody_else_wrote_nothing_is_told(wrong: dict[str, Any]) -> None:
    with make_feed(steps.mixture(), ["x", "u"], 6, last_batch="carry") as made:
        next(made["train"])
        (state,) = made.snapshot().states
    strange = state._replace(fingerprint={**state.fingerprint, **wrong})
    assert len(feeder.Snapshot((strange,)).describe().splitlines()) <= 2


def test_a_position_depends_on_the_schedule() -> None:
    schedules = [(), [(33, {"a": 1, "b": 1})], [(34, {"a": 1, "b": 1})], [(33, {"a": 1, "b": 2})]]
    said = [repr(steps.mixture(schedule=schedule).describe()) for schedule in schedules]
    assert len(set(said)) == len(said)


# ---- positions of the first format


def rounded(**options: Any) -> Mixture:
    """A mixture whose weights no block holds."""
    return of({"a": 900, "b": 900, "c": 2}, {"a": 1, "b": 2**0.5, "c": 1e-4}, **options)


FOLLOWED: dict[str, Callable[[Mixture], Any]] = {
    "alone": lambda mixture: mixture,
    "mapped": lambda mixture: mixture.map(steps.jitter).map(lambda record: record[0]),
    "shuffled": lambda mixture: mixture.shuffle(3).take(900),
    "repeated": lambda mixture: mixture.repeat(2).concat(numbers()),
    "mixed": lambda mixture: mix({"m": mixture, "n": (numbers(7000), 300)}, on_exhausted="repeat"),
    "padded": lambda mixture: mixture.map(steps.ragged).pad(7),
    "sharded": lambda mixture: mixture.shard(1, 2),
}


@pytest.mark.parametrize("is_first", [False, True])
def test_an_epoch_of_shards_has_the_blocks_of_its_own_format(is_first: bool) -> None:
    sizes, weights = {"a": 901, "b": 907, "c": 5}, {"a": 1, "b": 2**0.5, "c": 1e-4}

    def blocks(parts: dict[str, Any]) -> Any:
        mixture = mix({k: (part, weights[k]) for k, part in parts.items()}, on_exhausted="drop")
        made = mixture.as_it_was() if is_first else mixture
        return made.records.route

    route = blocks({name: numbers(0, num).shard(0, 2) for name, num in sizes.items()})
    for epoch in range(2):
        alone = blocks({name: numbers(0, (num + epoch) // 2) for name, num in sizes.items()})
        assert route.at(epoch).segments == alone.segments
    assert (len(route.at(0).segments) == 2) == is_first


@pytest.mark.parametrize("follows", FOLLOWED)
@pytest.mark.parametrize("mode", ["drop", "repeat"])
def test_a_position_of_the_first_format_goes_on_with_its_blocks(mode: Any, follows: str) -> None:
    source = FOLLOWED[follows](rounded(on_exhausted=mode))
    was = source.as_it_was()
    assert "mix" in repr(source.describe()) and was.as_it_was() is None

    def feed(source: Any, **options: Any) -> feeder.Coordinator:
        return make_feed(source, ["x"], 90, seed=4, epochs=2, **options)

    def rest(made: feeder.Coordinator) -> list[Any]:
        return [batch["x"].tolist() for batch in islice(made["train"], 9)]

    with feed(was) as made:
        wanted = rest(made)
    with feed(was) as made:
        next(made["train"])
        positions: list[Any] = [made.state_dict(), made.snapshot(), next(made["train"]).cut.token()]
    for position, begun in zip(positions, [1, 1, 2], strict=True):
        with feed(source, resume=position) as made:
            rows = [next(made["train"])["x"].tolist()]
            again = made.snapshot()
            rows += rest(made)
        assert rows[: len(wanted) - begun] == wanted[begun:]
        # What it saves is of the first format, too.
        with feed(source, resume=again) as made:
            assert next(made["train"])["x"].tolist() == wanted[begun + 1]
    with feed(source) as made:
        assert rest(made) != wanted
