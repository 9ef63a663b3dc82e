"""Packing: every token once, in its document's order, and little padding; a window by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import steps
from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import (
    RecordError,
    arrays,
    mix,
    pack,
    packing_efficiency,
    records,
)
from parts import examples
from steps import numbers


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_windows_are_what_a_naive_packer_makes(data: st.DataObject) -> None:
    size, window = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 25))
    length = st.integers(0, 40) | st.sampled_from([size - 1, size, size + 1, 2 * size])
    lengths = data.draw(st.lists(length, min_size=1, max_size=60))
    long = data.draw(st.sampled_from(["split", "drop", "truncate"]))
    # Tokens alone, as of a file of tokens; or with columns of their own, in arrays or lists.
    is_plain, mask = data.draw(st.booleans()), data.draw(st.sampled_from([None, list, np.array]))
    kind = data.draw(st.sampled_from(["i4", "i8"]))
    docs: list[dict[str, Any]] = [
        {
            "tokens": np.arange(1, n + 1, dtype=kind) + 100 * i,
            "w": np.full((n, 2), i + 0.5),
            "doc": i + 1,
        }
        for i, n in enumerate(lengths)
    ]
    for doc in docs if mask is not None and not is_plain else ():
        doc["loss_mask"] = mask([k % 2 for k in range(len(doc["tokens"]))])
    given_docs = [doc["tokens"] for doc in docs] if is_plain else docs
    extra = {} if is_plain else {"per_token": ["w"], "per_document": ["doc"]}
    ends = [None] if size < 3 else [None, 7001, 7002]
    bos, eos = (data.draw(st.sampled_from(ends)) for _ in range(2))
    pad, most = data.draw(st.sampled_from([0, 9])), data.draw(st.sampled_from([None, 1, 3]))
    bound = data.draw(st.sampled_from([None, 1, 25, 60]))
    source = pack(
        records(given_docs), size, window, long, bos=bos, eos=eos, pad=pad, cu_seqlens=most,
        window_tokens=bound, **extra,
    )  # fmt: skip
    wanted, held, places = [], 0, 0
    for start in range(0, len(docs), window):
        pieces: list[list[Any]] = [[]]
        for doc in docs[start : start + window]:
            num = sum(len(one["tokens"]) for one in pieces[-1])
            if pieces[-1] and bound is not None and num + len(doc["tokens"]) > bound:
                pieces.append([])
            pieces[-1].append(doc)
        made = []
        for piece in pieces:
            rows = naive_documents(piece, size, long, bos, eos)
            made += [
                naive_columns([rows[i] for i in row], size, pad, most)
                for row in limited_rows([*map(len, rows)], size, most)
            ]
        wanted.append([{k: v for k, v in row.items() if k not in ("w", "doc")} for row in made]
                      if is_plain else made)  # fmt: skip
        sizes = [*map(len, naive_documents(docs[start : start + window], size, long, None, None))]
        held, places = held + sum(sizes), places + size * len(limited_rows(sizes, size, None))
    assert packing_efficiency(lengths, size, window, long) == pytest.approx(
        held / places if places else 1.0
    )
    if not any(wanted):
        return
    found = [
        [{name: column[i].tolist() for name, column in chunk.items()}
         for i in range(len(chunk["tokens"]))] for chunk in epoch_of(source, 1)
    ]  # fmt: skip
    # The rows of pieces come in turn of their windows.
    assert sorted(map(repr, chain(*found))) == sorted(map(repr, chain(*wanted)))
    assert bound is not None or found == wanted
    num_left_out = sum(n + (bos is not None) + (eos is not None) > size for n in lengths if n)
    assert source.skipped >= (num_left_out if long == "drop" else 0)


def test_empty_windows_have_no_rows() -> None:
    docs = [np.arange(1, n + 1) for n in (3, 3, 9, 9, 9, 2)]
    source = pack(records(docs), 4, 2, "drop")
    assert [len(c["tokens"]) for c in epoch_of(source, 1)] == [2, 0, 1]
    assert source.skipped == 3
    filtered = pack(numbers(num=20).filter(lambda x: x > 7).map(steps.ragged), 8, 4)
    assert [len(c["tokens"]) > 0 for c in epoch_of(filtered, 1)] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("docs", "told"),
    [
        ([np.ones(3)], r"sample 0: the document is float64\[3\], expected whole numbers"),
        ([np.ones((2, 2), int)], r"sample 0: the document is int64\[2, 2\]"),
        ([np.ones(3, ml_dtypes.bfloat16)], "sample 0: the document is bfloat16"),
        (["text"], "sample 0: the document is <U4"),
        ([{"text": 1}], r"sample 0: has the columns \['text'\], expected 'tokens'"),
        ([{"tokens": [1, 2], "loss_mask": [1]}], r"sample 0: loss_mask has the shape \[1\]"),
        (
            [np.ones(3, "i4"), np.ones(3, "i8")],
            "^sample 1: documents of a window are int32 and int64",
        ),
        ([(np.ones(3, "i4"), np.ones(3, "?"))], "sample 0: has 2 columns without names"),
    ],
)
def test_what_is_no_document_is_named(docs: list[Any], told: str) -> None:
    with pytest.raises(RecordError, match=told):
        pack(records(docs), 8)(call(0, 1))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "seq_len": (lambda: pack(numbers(), 0), "seq_len is 0"),
    "window": (lambda: pack(numbers(), 8, 0), "window is 0"),
    "long": (lambda: pack(numbers(), 8, long="cut"), "long is 'cut', expected one of"),  # type: ignore[arg-type]
    "no source": (lambda: pack(5, 8), "int is no source"),  # type: ignore[arg-type]
    "shards": (lambda: pack(numbers(num_shards=2), 8), "pack of a source with shards"),
    "column twice": (
        lambda: pack(numbers(), 8, per_token=["w"], per_document=["w"]),
        r"name \['w'\] twice",
    ),
    "column of pack": (lambda: pack(numbers(), 8, per_token=["positions"]), "or pack has it"),
    "twice": (lambda: pack(steps.packed(), 8), "pack of pack, whose rows are not one for each"),
    "map": (lambda: steps.packed().map(len), "pack comes after map"),
    "padding": (lambda: steps.packed(pad_last_batch=True), "pad_last_batch cannot be had of pack"),
    "length": (lambda: packing_efficiency([-1], 8), "a length is -1"),
    "long of lengths": (
        lambda: packing_efficiency([1], 8, long="cut"),  # type: ignore[arg-type]
        "long is 'cut', expected one of",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_window_far_out_is_packed_by_itself() -> None:
    read: list[int] = []

    class Documents:
        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return np.arange(index % 7 + 1)

    source = pack(records(Documents()), 16, 32)
    source(call(10**9, 4))
    assert read == list(range(32 * 10**9, 32 * 10**9 + 32))


def a_document(number: Any) -> Any:
    return np.full(int(number) % 5 + 1, number + 1)


WINDOWED: dict[str, Callable[[Any, int], Any]] = {
    "pack": lambda source, window: pack(source, 8, window),
    "window_tokens": lambda source, window: pack(source, 8, window, window_tokens=12),
    "batch_by_tokens": lambda source, window: source.batch_by_tokens(12, window=window),
}


def rows_of(source: Any, epoch: int) -> list[list[int]]:
    chunks = ([*c.values()] if isinstance(c, dict) else c for c in epoch_of(source, 1, epoch))
    return [row.tolist() for chunk in chunks for row in chunk[0]]


@pytest.mark.parametrize("kind", WINDOWED)
@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_windows_of_uneven_shards_and_shards_of_windows(kind: str, data: st.DataObject) -> None:
    num, window = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 12))
    parts = {
        name: numbers(1000 * k, data.draw(st.integers(num, 60)))
        .shuffle()
        .shard(data.draw(st.integers(0, num - 1)), num)
        for k, name in enumerate("ab")
    }
    made = WINDOWED[kind](mix({k: part.map(a_document) for k, part in parts.items()}), window)
    for epoch in range(3):
        # What an epoch of the mixture has, by itself.
        (chunk,) = epoch_of(mix(parts), 200, epoch)
        alone = WINDOWED[kind](arrays(chunk[0]).map(a_document), window)
        assert rows_of(made, epoch) == rows_of(alone, epoch)
        num_shards = data.draw(st.integers(1, -(-len(chunk[0]) // window)))
        shards = [rows_of(alone.shard(i, num_shards), epoch) for i in range(num_shards)]
        assert sorted(chain(*shards)) == sorted(rows_of(alone, epoch))
        sizes = [len({token for row in rows for token in row} - {0}) for rows in shards]
        assert max(sizes) - min(sizes) <= 2 * window
    with pytest.raises(ConfigError, match="num_shards is 999, more than the"):
        alone.shard(0, 999)


@pytest.mark.parametrize("bound", [None, 12])
def test_shards_as_options_are_those_of_the_step(bound: int | None) -> None:
    # The first source ends early: windows of the end are of the second alone.
    source = mix({"a": numbers(0, 20), "b": numbers(100, 90)}, on_exhausted="drop").map(a_document)
    whole = pack(source, 8, 5, window_tokens=bound)
    for i in range(3):
        shard = pack(source, 8, 5, window_tokens=bound, shard_id=i, num_shards=3)
        assert rows_of(shard, 0) == rows_of(whole.shard(i, 3), 0)


@pytest.mark.parametrize("num_shards", [3, 4, 7])
def test_windows_of_changing_proportions_are_dealt_in_turn(num_shards: int) -> None:
    parts = {"a": (numbers(0, 200), 9), "b": (numbers(1000, 201), 1)}
    source = mix(parts, [(150, {"a": 1, "b": 9})], on_exhausted="drop")
    (chunk,) = epoch_of(source, 401, 0)
    windows = [arrays(chunk[0][at : at + 5]).map(a_document) for at in range(0, 401, 5)]
    rows = [rows_of(pack(one, 8, 5), 0) for one in windows]
    bounds = [len(rows) * i // num_shards for i in range(num_shards + 1)]
    # Shards are as long as stretches would be: the longer ones have the first turns.
    sizes = np.diff(bounds)
    turns = np.argsort(-sizes, kind="stable").tolist()
    for i in range(num_shards):
        shard = pack(source.map(a_document), 8, 5, shard_id=i, num_shards=num_shards)
        mine = rows[turns.index(i) :: num_shards]
        assert len(mine) == sizes[i] and rows_of(shard, 0) == [*chain(*mine)]


def naive_documents(docs: list[Any], size: int, long: str, bos: Any, eos: Any) -> list[Any]:
    """Tokens, whether they count, weight and number of the document, of each piece."""
    made = []
    for doc in docs:
        n = len(doc["tokens"])
        counts = [*map(bool, doc.get("loss_mask", [True] * n))]
        has_own = "loss_mask" in doc
        one = [
            *zip(doc["tokens"].tolist(), counts, doc["w"].tolist(), [doc["doc"]] * n, strict=True)
        ]
        if n and bos is not None:
            one.insert(0, (bos, not has_own, [0.0, 0.0], doc["doc"]))
        if n and eos is not None:
            one.append((eos, True, [0.0, 0.0], doc["doc"]))
        if long == "drop" and len(one) > size:
            continue
        one = one[:size] if long == "truncate" else one
        made += [one[at : at + size] for at in range(0, len(one), size)]
    return made


def limited_rows(lengths: list[int], size: int, most: int | None) -> list[list[int]]:
    """Best fit decreasing, with at most so many documents in a row, by looking at every row."""
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = [size - sum(lengths[k] for k in row) for row in rows]
        fitting = [
            (free, row) for row, free in enumerate(room)
            if free >= lengths[i] and len(rows[row]) != most
        ]  # fmt: skip
        rows[min(fitting)[1]].append(i) if fitting else rows.append([i])
    return sorted(sorted(row) for row in rows)


def naive_columns(row: list[Any], size: int, pad: int, most: int | None) -> dict[str, Any]:
    nothing = (pad, False, [0.0, 0.0], 0)
    flat = [entry for one in row for entry in one]
    tokens, mask, weights, docs = zip(*flat, *[nothing] * (size - len(flat)), strict=True)
    rest = [0] * (size - len(flat))
    columns = {
        "tokens": [*tokens],
        "segment_ids": [k for k, one in enumerate(row, 1) for _ in one] + rest,
        "positions": [i for one in row for i in range(len(one))] + rest,
        "loss_mask": [*mask], "w": [*weights], "doc": [*docs],
    }  # fmt: skip
    if most is not None:
        ends = np.cumsum([0, *map(len, row)]).tolist()
        columns["cu_seqlens"] = ends + [size] * (most + 2 - len(ends))
        columns["max_seqlen"] = max(*map(len, row), size - len(flat))
    return columns


PACKINGS: dict[str, Any] = {
    "batch_by_tokens": lambda of, budget, window: of.batch_by_tokens(budget, window=window),
    "shuffled": lambda of, budget, window: of.shuffle(3).batch_by_tokens(budget, window=window),
    "pack": lambda of, budget, window: pack(of, 8, window),
    "pieces": lambda of, budget, window: pack(of, 8, window, window_tokens=budget),
}


@pytest.mark.parametrize("packed", PACKINGS.values(), ids=PACKINGS.keys())
@pytest.mark.parametrize("seed", range(40))
def test_what_is_left_out_before_a_position_does_not_depend_on_the_order_of_calls(
    seed: int, packed: Any
) -> None:
    # Which call reads a window depends on the pace of threads; which have rows of it does not.
    draw = random.Random(seed)
    num = draw.randint(5, 60)
    defects = {*draw.sample(range(1, num), draw.randint(1, min(9, num - 1)))}
    budget, window = draw.randint(6, 20), draw.randint(1, 9)

    def document(record: Any) -> Any:
        if int(record) in defects:
            raise ValueError("defective")
        return np.arange(int(record) * 7919 % 6 + 1)

    def left_out(calls: Sequence[int]) -> list[Any]:
        source = packed(arrays(np.arange(num)).map(document, on_error="skip"), budget, window)
        for index in calls:
            source(call(index, batch_size=1))
        assert source.skipped == len(source.left_out)
        return [one for one in source.left_out if one.call < low]

    most = len(packed(arrays(np.arange(num)), budget, window).records)
    low = draw.randint(1, most)
    ahead = draw.sample(range(low, most), draw.randint(0, most - low))
    assert left_out(draw.sample([*range(low), *ahead], low + len(ahead))) == left_out(range(low))
