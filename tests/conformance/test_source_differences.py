"""A feed whose source changed since a position was taken refuses it, naming each difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feeder import Call, ConfigError, Coordinator, ResumeError, init_data_input_workers, sources
from small import Walk

NUM_RECORDS = 23
DALI = {"order": "dali", "random_shuffle": True, "initial_fill": 5, "seed": 3}


def numbers(num: int = NUM_RECORDS, **order: Any) -> sources.Source:
    return sources.arrays(np.arange(num), **order)


def add_feed(fetch: Any, resume: Any = None, **settings: Any) -> Coordinator:
    """A coordinator with one feed of a column, not started."""
    coordinator = Coordinator()
    defaults = {"input_blob_names": ["x"], "batch_size": 4, "coordinator": coordinator}
    init_data_input_workers(fetch_fun=fetch, resume=resume, **{**defaults, **settings})
    return coordinator


def position_of(fetch: Any, **settings: Any) -> bytes:
    """A position after two batches."""
    with add_feed(fetch, **settings) as coordinator:
        next(coordinator["train"])
        next(coordinator["train"])
        return bytes(coordinator.snapshot())


def told(fetch: Any, resume: Any, **settings: Any) -> list[str]:
    """The differences that the ResumeError names."""
    with pytest.raises(ResumeError) as caught:
        add_feed(fetch, resume, **settings)
    head, _, differences = str(caught.value).partition("'train': ")
    assert head == "the snapshot is of another feed than "
    return differences.partition("; to go on with what is given now")[0].split("; ")


ORDERS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "fewer records": ({}, {"num": 17}, ["source.size: 23 then, 17 now"]),
    "more records": ({}, {"num": 24}, ["source.size: 23 then, 24 now"]),
    "more shards": ({}, {"num_shards": 2}, ["source.num_shards: 1 then, 2 now"]),
    "another shard": (
        {"num_shards": 2}, {"num_shards": 2, "shard_id": 1}, ["source.shard_id: 0 then, 1 now"],
    ),
    "sticking to a shard": (
        {}, {"stick_to_shard": True}, ["source.stick_to_shard: False then, True now"],
    ),
    "padding": ({}, {"pad_last_batch": True}, ["source.pad_last_batch: False then, True now"]),
    "a shuffle": ({}, {"random_shuffle": True}, ["source.shuffle: 'none' then, 'feeder' now"]),
    "no shuffle": (
        {"random_shuffle": True, "seed": 4}, {},
        ["source.shuffle: 'feeder' then, 'none' now", "source.seed: 4 then, None now"],
    ),
    "another shuffle": (
        {"random_shuffle": True, "seed": 3}, DALI,
        ["source.shuffle: 'feeder' then, 'dali' now", "source.initial_fill: None then, 5 now"],
    ),
    "another seed": (DALI, {**DALI, "seed": 4}, ["source.seed: 3 then, 4 now"]),
    "another window": (
        DALI, {**DALI, "initial_fill": 6}, ["source.initial_fill: 5 then, 6 now"],
    ),
    "shuffling after the epoch": (
        {"order": "dali"},
        {"order": "dali", "shuffle_after_epoch": True, "shuffle_after_epoch_seed": 9},
        [
            "source.stick_to_shard: False then, True now",
            "source.shuffle: 'none' then, 'dali after epoch' now",
            "source.seed: None then, 9 now",
        ],
    ),
    "several at once": (
        {}, {"num": 64, "num_shards": 2, "pad_last_batch": True, "random_shuffle": True, "seed": 1},
        [
            "source.size: 23 then, 64 now",
            "source.num_shards: 1 then, 2 now",
            "source.pad_last_batch: False then, True now",
            "source.shuffle: 'none' then, 'feeder' now",
            "source.seed: None then, 1 now",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("then", "now", "differences"), ORDERS.values(), ids=ORDERS.keys())
def test_a_changed_order_is_refused_with_each_difference(
    then: dict[str, Any], now: dict[str, Any], differences: list[str]
) -> None:
    position = position_of(numbers(**then))
    assert told(numbers(**now), position) == differences


def tokens(path: Path, **changes: Any) -> sources.Source:
    np.arange(200, dtype=np.uint16).tofile(path / "tokens.bin")
    return sources.tokens(path / "tokens.bin", **{"seq_len": 5, "dtype": np.uint16, **changes})


READERS: dict[str, Callable[[Path], Any]] = {
    "arrays": lambda path: numbers(),
    "tokens": tokens,
    "samples": lambda path: sources.samples(lambda info: info.idx_in_epoch, NUM_RECORDS),
    "records": lambda path: sources.records(list(range(NUM_RECORDS))),
    "iterable": lambda path: sources.iterable(lambda worker_id: Walk(NUM_RECORDS)),
}


@pytest.mark.parametrize("now", READERS)
@pytest.mark.parametrize("then", READERS)
def test_another_reader_is_refused(tmp_path: Path, then: str, now: str) -> None:
    position = position_of(READERS[then](tmp_path))
    if then == now:
        with add_feed(READERS[now](tmp_path), position) as coordinator:
            assert next(coordinator["train"]).step == 2
        return
    assert f"source.source: {then!r} then, {now!r} now" in told(READERS[now](tmp_path), position)


class Saying:
    """A fetch function with a `describe` of its own."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def __call__(self, call: Call) -> list[Any]:
        return [np.arange(4)]

    def describe(self) -> Any:
        return self.said


def test_a_users_fetch_function_may_describe_itself() -> None:
    position = position_of(Saying({"files": ("a", "b"), "rows": 2**64 - 1}))
    with add_feed(Saying({"files": ("a", "b"), "rows": 2**64 - 1}), position) as coordinator:
        assert next(coordinator["train"]).step == 2
    assert told(Saying({"files": ("a", "c"), "rows": 1}), position) == [
        "source.files: ['a', 'b'] then, ['a', 'c'] now",
        "source.rows: 18446744073709551615 then, 1 now",
    ]


@pytest.mark.parametrize("said", [None, 7, {"x": object()}, {"x": 2**65}, {"x": np.arange(2)}])
def test_what_cannot_be_kept_is_a_config_error(said: Any) -> None:
    with pytest.raises(ConfigError, match="describe\\(\\) of fetch_fun returned"):
        add_feed(Saying(said))
