"""Mixtures by tokens, and of packed and filtered sources, against a few lines of plain Python."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calls import epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, Source, mix, pack
from feeder.workers.sources.steps import walked
from feeder.workers.sources.steps.rows import part_of
from feeder.workers.sources.stores.records import LEFT_OUT
from feeder.workers.stream.batch import Call
from parts import examples
from small import make as make_feed
from steps import numbers

SEED, NAMES = 4, ["tokens", "segment_ids", "positions", "loss_mask"]


def keeps(record: Any) -> bool:
    return bool(record % 5)


def is_rare(record: Any) -> bool:
    return record % 100 % 11 == 4


def document(record: Any) -> Any:
    return {"tokens": np.full(int(record) % 9 + 1, record)}


KINDS: dict[str, Callable[[int, int], Source]] = {
    "plain": lambda first, num: numbers(first, num).shuffle().map(document),
    "filtered": lambda first, num: numbers(first, num).filter(keeps).map(document).shuffle(3),
    "rare": lambda first, num: numbers(first, num).filter(is_rare).map(document),
    "sharded": lambda first, num: numbers(first, num).map(document).shard(1, 2),
}

PACKED: dict[str, Callable[[int, int], Source]] = {
    "packed": lambda first, num: pack(numbers(first, num).map(document), 12, window=5).shuffle(),
    "packed, filtered": lambda first, num: pack(KINDS["filtered"](first, num), 12, window=5),
}
Rows = list[tuple[Any, int]]
"""Rows, and the tokens of each."""


def rows_of(part: Source, name: str, epoch: int, unit: str) -> Rows:
    """The rows of a source of a mixture in one of its epochs, and what each counts."""
    call = part_of(Call(0, epoch, 0, 1, SEED), name)
    if not part.traits.is_last:
        samples = part.samples(np.arange(part.rows(epoch, 1)), call)
        documents = [sample["tokens"] for sample in samples if sample is not LEFT_OUT]
        return [(one, len(one) if unit == "tokens" else 1) for one in documents]
    rows: Rows = []
    for chunk in epoch_of(part, 1, epoch, call.seed):
        for row in zip(*(chunk[column] for column in NAMES), strict=True):
            rows.append((row, int(np.count_nonzero(row[1])) if unit == "tokens" else 1))
    return rows


def naive(
    rows_in: Callable[[str, int], Rows], schedule: list[Any], mode: str, num: int
) -> list[list[Any]]:
    """The first rows of two epochs: always of the source that is furthest behind its share."""
    names, epochs = sorted(schedule[0][1]), []
    at, behind = dict.fromkeys(names, (0, 0)), dict.fromkeys(names, Fraction(0))
    for epoch in range(2):
        if mode != "repeat":
            at, behind = dict.fromkeys(names, (epoch, 0)), dict.fromkeys(names, Fraction(0))
        begun, used = dict(at), 0
        rows: list[Any] = []
        while len(rows) < num:
            left = [w for start, w in schedule[1:] if start > used]
            (_, now) = [step for step in schedule if step[0] <= used][-1]
            over = all(at[k] >= (begun[k][0] + 1, begun[k][1]) for k in schedule[-1][1])
            if mode == "repeat" and over and not left:
                break
            for weights in (now, *left):
                total = Fraction(sum(weights.values()))
                shares = {
                    k: w / total for k, w in weights.items() if mode != "drop" or at[k][0] <= epoch
                }
                if shares:
                    break
            if not shares:
                break
            k = max(shares, key=lambda k: (behind[k], shares[k], -ord(k)))
            own, place = at[k]
            if mode == "stop" and own > epoch:
                break
            has = rows_in(k, own)
            row, size = has[place]
            at[k] = (own, place + 1) if place + 1 < len(has) else (own + 1, 0)
            for other in shares:
                behind[other] += shares[other] * size
            behind[k] -= sum(shares.values()) * size
            used += size
            rows.append(row)
        epochs.append(rows)
    return epochs


@pytest.fixture(autouse=True)
def few_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rare ones the first chunk has no row, and nor have others."""
    monkeypatch.setattr(walked, "_TOGETHER", 3)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_it_is_the_naive_mixture_from_every_place(data: st.DataObject) -> None:
    kinds = data.draw(st.sampled_from([KINDS, PACKED]))
    unit = data.draw(st.sampled_from(["records", "tokens"])) if kinds is PACKED else "tokens"
    mode = data.draw(st.sampled_from(["drop", "stop", "repeat"]))
    weight = st.sampled_from([1, 3, Fraction(1, 3), Fraction(1, 100), Fraction(1, 10**6)])
    parts = {
        name: kinds[data.draw(st.sampled_from([*kinds]))](
            1 + 100 * i, data.draw(st.integers(5, 40))
        )
        for i, name in enumerate("abc")
    }
    first = {name: data.draw(weight) for name in parts}
    some = st.dictionaries(st.sampled_from("abc"), weight, min_size=1)
    starts = sorted(data.draw(st.sets(st.integers(1, 100), max_size=2)))
    schedule = [(start, data.draw(some)) for start in starts]

    def make() -> Any:
        return mix({k: (part, first[k]) for k, part in parts.items()}, schedule, mode, unit=unit)

    rows_in = cache(lambda name, epoch: rows_of(parts[name], name, epoch, unit))
    whole = naive(rows_in, [(0, first), *schedule], mode, most := 120)
    mixture = make()
    size = data.draw(st.integers(1, 9))
    for epoch, wanted in enumerate(whole):
        ends = len(wanted) < most
        calls = [*range(0, len(wanted), size)] if ends else [*range(0, most - size, size)]
        # Threads call in nearly any order; a fresh one goes on from a cursor.
        calls.sort(key=lambda at: at + data.draw(st.integers(0, 4)) * size)
        for at in calls:
            call = Call(at // size, epoch, 0, size, SEED)
            if data.draw(st.integers(0, 9)) == 0:
                cursor, mixture = mixture.cursor_at(call, at), make()
                if cursor:
                    mixture.seek_to(call, cursor)
            found = mixture.records.samples(np.arange(at, at + size), call)
            assert plain(found) == plain(wanted[at : at + size])
        if not ends:
            break
        with pytest.raises(StopIteration):
            mixture.records.samples(np.arange(len(wanted), len(wanted) + 3), call)


def plain(rows: list[Any]) -> list[Any]:
    """Rows as lists: of a document its tokens, of a packed row its columns."""
    each = (row.values() if isinstance(row, dict) else row for row in rows)
    listed = [[np.asarray(value).tolist() for value in row] for row in each]
    return [row[0] if len(row) == 1 and isinstance(row[0], list) else row for row in listed]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["drop", "repeat"])
def test_a_feed_of_it_goes_on_at_every_place(mode: Any, packed: bool) -> None:
    def feed(**options: Any) -> Any:
        kinds = PACKED if packed else KINDS
        parts = {k: (kinds[k](1 + 100 * i, 20), 1 + i) for i, k in enumerate(kinds)}
        mixture = mix(parts, on_exhausted=mode, unit="tokens")
        source = mixture if packed else pack(mixture, 12, window=7)
        return make_feed(source, NAMES, 6, seed=SEED, epochs=2, **options)

    with feed() as made:
        taken = [([batch[name].tolist() for name in NAMES], batch.cut) for batch in made["train"]]
        # That the last batch is the epoch's last may not be known yet.
        assert {cut.epoch for _, cut in taken} >= {0, 1}
    with feed() as made:
        row = next(made["train"])
        told = made["train"].stats()
        names = PACKED if packed else KINDS
        assert (
            sum(told[f"source/{name}/tokens"] for name in names) >= (row["segment_ids"] > 0).sum()
        )
    for at in range(len(taken) - 1):
        with feed(resume=taken[at][1].token(), num_threads=1 + at % 3) as made:
            for batch, (told, _) in zip(islice(made["train"], 4), taken[at + 1 :], strict=False):
                assert [batch[name].tolist() for name in NAMES] == told


def test_a_source_of_which_nothing_is_left_ends_at_once() -> None:
    def rows(mode: Any) -> Any:
        empty = numbers(0, 9).filter(lambda record: False).map(document)
        parts = {"empty": (empty, 2), "plain": (numbers(1, 4).map(document), 1)}
        mixture = mix(parts, (), mode, unit="tokens")
        return mixture.records.samples(np.arange(9), Call(0, 0, 0, 9, SEED))

    assert [len(row["tokens"]) for row in rows("drop")] == [2, 3, 4, 5]
    with pytest.raises(StopIteration):
        rows("stop")
    with pytest.raises(RecordError, match="'empty': no record has a row"):
        rows("repeat")


@pytest.mark.parametrize("rare", [1e-2, 1e-4])
def test_proportions_are_those_of_tokens(rare: float) -> None:
    long = numbers(1, 50).map(lambda record: np.full(1000, 1))
    short = numbers(1, 50).map(lambda record: np.full(3, 2))
    mixture = mix({"long": (long, rare), "short": (short, 1 - rare)}, (), "repeat", unit="tokens")
    place = mixture.records
    given = [0, 0]
    for start in range(0, 3000, 500):
        for row in place.samples(np.arange(start, start + 500), Call(0, 0, 0, 1, SEED)):
            given[int(row[0]) - 1] += len(row)
            assert abs(given[0] - rare * sum(given)) <= 1000


WRONG: dict[str, Callable[[Any], Any]] = {
    "shuffle": lambda mixture: mixture.shuffle(),
    "shard": lambda mixture: mixture.shard(0, 2),
    "map": lambda mixture: mixture.map(document),
    "filter": lambda mixture: mixture.filter(keeps),
    "take": lambda mixture: mixture.take(5),
    "mix": lambda mixture: mix({"m": mixture}),
    "pad": lambda mixture: mixture.pad(5),
    "counts": lambda mixture: mixture.counts(5),
}


@pytest.mark.parametrize("step", WRONG)
def test_what_needs_numbers_of_records_is_refused_by_name(step: str) -> None:
    told = rf"^{step}.* of a mixture by tokens, or of packed or"
    for part, unit in ((numbers().map(document), "tokens"), (numbers().filter(keeps), "records")):
        mixture = mix({"a": (part, 1), "b": (part, 2)}, unit=unit)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=told):
            WRONG[step](mixture)
        with pytest.raises(TypeError, match="the number of rows of this source"):
            len(mixture)
    with pytest.raises(ConfigError, match=r"takes no \['random_shuffle'\]: shuffle and shard its"):
        mix({"a": numbers().filter(keeps)}, random_shuffle=True)
    with pytest.raises(ConfigError, match="unit is 'bytes', expected one of"):
        mix({"a": numbers()}, unit="bytes")  # type: ignore[arg-type]
