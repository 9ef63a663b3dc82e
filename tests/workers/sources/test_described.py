"""Where records come is the inverse of which come where; and a description has the same order."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from feeder import ConfigError, sources
from feeder.workers.sources.described import described_source
from feeder.workers.sources.mixture import DealtRoute
from feeder.workers.stream.batch import Call


def base(num: int = 23, **options: Any) -> Any:
    return sources.arrays(np.arange(num), **options)


def mixed(mode: Any, **options: Any) -> Any:
    rare = 1 if mode == "stop" else 0.12345
    parts = {"a": (base(30).shuffle(), 7), "b": (base(23), 2), "c": (base(41).shuffle(1), rare)}
    return sources.mix(parts, [(20, {"a": 1, "b": 5})], mode, **options)


def dealt(mode: Any, shard: int) -> Any:
    """A shard of a mixture whose proportions change, which is dealt out."""
    parts = {"a": (base(90).shuffle(), 9), "b": (base(70), 1)}
    source = sources.mix(parts, [(60, {"a": 1, "b": 9})], mode).shard(shard, 3)
    of: Any = source.records
    assert isinstance(of.records.route, DealtRoute)
    return source


SOURCES = {
    **{f"{mode}, dealt, shard {shard} of 3": dealt(mode, shard)
       for mode in ("drop", "stop", "repeat") for shard in (0, 1, 2)},
    **{f"{mode}, shard {shard} of 3": mixed(mode).shard(shard, 3)
       for mode in ("drop", "stop", "repeat") for shard in (0, 2)},
    "repeat, uneven shards": sources.mix(
        {"a": (base(31, shard_id=1, num_shards=3), 1), "b": (base(8).shuffle(), 2)}, (), "repeat"),
    "repeat, own shards": sources.mix(
        {"a": (base(30, shard_id=1, num_shards=3, stick_to_shard=True), 1), "b": (base(8), 2)}, (),
        "repeat"),
    "shuffled mixture": mixed("repeat").shuffle(3),
    "windows": base().shuffle(window=5),
    "shards": base().shuffle().shard(1, 4),
    "own shards": base().shuffle().shard(1, 4, stick_to_shard=True),
    "shards in sequence": base().shard(1, 4),
    "padded": base().shuffle().shard(1, 4, pad_last_batch=True),
    "dali": base(random_shuffle=True, order="dali", initial_fill=5),
    "dali, shards": base(random_shuffle=True, order="dali", initial_fill=5, num_shards=3),
    "dali after epoch": base(order="dali", shuffle_after_epoch=True, num_shards=2, shard_id=1),
    "dali, compound": base(order="dali", shuffle_after_epoch="compound"),
    "excluded": base().exclude([0, (7, 9), 22]).shuffle(),
    "twice": base().shuffle().repeat(2).skip(3).take(30),
    "zip": base().shuffle(1).zip(base().shuffle(2)),
}  # fmt: skip


def told(source: Any, epoch: int) -> list[Any]:
    """The records of an epoch's rows."""
    rows: list[Any] = []
    for index in range(1000):
        try:
            rows += source.records_of(Call(index, epoch, 0, 4, 9))
        except StopIteration:
            return [[one[:3] for one in row] for row in rows]
    raise AssertionError(epoch)


@pytest.mark.parametrize("name", SOURCES)
def test_where_a_record_comes_is_where_it_is_told(name: str) -> None:
    source = SOURCES[name]
    for epoch in (0, 1, 5):
        where = defaultdict(list)
        for row, records in enumerate(told(source, epoch)):
            for of, number in dict.fromkeys(one[:2] for one in records):
                where[of, number].append(row)
        for of, size in source.sizes_of().items():
            for number in range(size):
                found = [*source.rows_of(of, number, Call(0, epoch, 0, 4, 9))]
                assert found == where.get((of, number), []), (epoch, of, number)


@pytest.mark.parametrize("name", SOURCES)
def test_a_description_has_the_order_of_its_source(name: str) -> None:
    alone = described_source(SOURCES[name].describe())
    for epoch in (0, 1, 5):
        assert told(alone, epoch) == told(SOURCES[name], epoch)


def test_what_a_description_does_not_say_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read: \['color'\]"):
        described_source({**base().shuffle().describe(), "color": "red"})
    uneven = {"a": (base(31, num_shards=3), 1), "b": (base(8), 1)}
    with pytest.raises(ConfigError, match="weights of a mixture whose sources have shards"):
        described_source(sources.mix(uneven).describe())
