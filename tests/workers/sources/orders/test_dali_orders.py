"""DALI's sequences, recorded from DALI itself (tests/oracles), for any number of records."""

from __future__ import annotations

import json
from itertools import chain, count
from typing import Any

import numpy as np
import pytest
import xxhash

from calls import epoch_of
from feeder.workers.sources.array_rows import ArrayRecords
from feeder.workers.sources.source import Source
from project import TESTS

ORACLES = TESTS / "oracles"
ORDER_OPTIONS = (
    "num_shards", "shard_id", "stick_to_shard", "pad_last_batch", "random_shuffle",
    "initial_fill", "seed", "shuffle_after_epoch", "shuffle_after_epoch_seed",
)  # fmt: skip


def oracles(name: str) -> list[dict[str, Any]]:
    return json.loads((ORACLES / name).read_text())


def source_like(config: dict[str, Any]) -> Source:
    options = {name: config[name] for name in ORDER_OPTIONS if name in config}
    if options.get("shuffle_after_epoch") and not config["enable_checkpointing"]:
        options["shuffle_after_epoch"] = "compound"
    labels = ArrayRecords({0: np.arange(config["n"])})
    is_list = config["reader"] == "file"
    return Source(labels, list_shuffle=is_list, order="dali", **options)


def stream(source: Source, batch_size: int, rows: int) -> np.ndarray:
    """The rows of one epoch after the other, as a pipeline that never ends gives them."""
    epochs = (epoch_of(source, batch_size, epoch) for epoch in count())
    parts, num = [], 0
    for (labels,) in chain.from_iterable(epochs):
        parts.append(labels)
        num += len(labels)
        if num >= rows:
            return np.concatenate(parts)[:rows]
    raise AssertionError("unreachable")


def named(config: dict[str, Any]) -> str:
    shuffles = [name for name in ("random_shuffle", "shuffle_after_epoch") if config.get(name)]
    shards = f"{config['shard_id']}of{config['num_shards']}"
    flags = [name for name in ("stick_to_shard", "pad_last_batch") if config[name]]
    return "-".join(
        [config["reader"], f"n{config['n']}", f"b{config['batch']}", shards, *shuffles, *flags]
    )


@pytest.mark.parametrize("name", ["dali_readers_n10.json", "dali_shuffle_n10.json"])
def test_ten_records(name: str) -> None:
    for config in oracles(name):
        wanted = list(chain.from_iterable(config["batches"]))
        source = source_like(config)
        assert stream(source, config["batch"], len(wanted)).tolist() == wanted, config
        if "epoch_size" in config:
            assert source.epoch_size == len(source) == config["epoch_size"]
            assert source.epoch_size_padded == config["epoch_size_padded"]


@pytest.mark.parametrize("config", oracles("dali_orders_any_n.json"), ids=named)
def test_any_number_of_records(config: dict[str, Any]) -> None:
    labels = stream(source_like(config), config["batch"], config["rows"])
    assert labels[:8].tolist() == config["first"]
    assert xxhash.xxh3_64_hexdigest(labels.astype("<i8").tobytes()) == config["xxh3"]


def test_negative_seeds_are_taken_modulo_2_to_the_64() -> None:
    for config in oracles("dali_negative_seeds_n11.json"):
        seeds = {name: seed % 2**64 for name, seed in config.items() if name.endswith("seed")}
        assert all(config[name] < 0 for name in seeds)
        wanted = config["labels"]
        labels = stream(source_like(config | seeds), config["batch"], len(wanted))
        assert labels.tolist() == wanted, config
