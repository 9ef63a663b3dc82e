"""Draws compositions of sources, and asks their feeds which records each batch has, and when each
record comes.

The oracle is the data: a row has the number of its record, and of its source, as its value. What a
position alone answers is compared with what the feed answers, and `when` with all rows that came.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice, takewhile, zip_longest
from typing import Any

import numpy as np

from feeder import ConfigError, Coordinator, FeedError, init_data_input_workers, sources
from feeder.feeds.records import asked_of, records_of, when

UNIT = 10_000
"""More records than a source has: row v is record v % UNIT of source v // UNIT."""
_MOST_BATCHES = 24


def same(record: Any) -> Any:
    """A map that changes nothing."""
    return record


class Composition:
    """A random composition of sources of numbers."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.num_leaves = 0

    def leaf(self, *, shards: bool = False, dali: bool = False) -> tuple[Any, dict[int, str]]:
        draw, number = self.draw, self.num_leaves
        self.num_leaves += 1
        num = draw.randint(8, 60)
        kinds: list[dict[str, Any]] = [{}, {}, {}, {"random_shuffle": True}]
        if dali:
            # They are walked through, and a mixture may read the thousandth pass of a source.
            kinds = [
                {"random_shuffle": True, "order": "dali", "initial_fill": draw.randint(1, 9)},
                {"order": "dali", "shuffle_after_epoch": draw.choice([True, "compound"])},
            ]
        options = dict(draw.choice(kinds))
        if shards and draw.random() < 0.3:
            of = draw.randint(2, 3)
            options |= {"shard_id": draw.randrange(of), "num_shards": of}
            options |= {} if "shuffle_after_epoch" in options else {"stick_to_shard": True}
        source = sources.arrays(np.arange(num) + number * UNIT, **options)
        if not options and draw.random() < 0.4:
            source = source.exclude([draw.randrange(num), (2, 4)])
        return source, {number: ""}

    def tree(self, depth: int, *, shards: bool = False) -> tuple[Any, dict[int, str]]:
        """A source, and of each leaf what it is called."""
        draw = self.draw
        kind = draw.choice(["leaf", "concat", "mix", "mix", "mix"]) if depth else "leaf"
        if kind == "leaf":
            is_alone = not (shards or self.num_leaves) and depth == 0
            source, names = self.leaf(shards=shards, dali=is_alone and draw.random() < 0.5)
        else:
            labels = [f"s{k}" for k in range(draw.randint(2, 3))]
            parts = [self.tree(depth - 1, shards=kind == "mix") for _ in labels]
            if kind == "concat":
                labels = [*map(str, range(len(parts)))]
            names = {
                leaf: f"{label}/{name}" if name else label
                for label, (_, of) in zip(labels, parts, strict=True)
                for leaf, name in of.items()
            }
            made = [part for part, _ in parts]
            source = made[0].concat(*made[1:]) if kind == "concat" else self._mix(labels, made)
        sharding = source._plan.sharding
        if sharding.num_shards > 1:
            return source, names
        for _ in range(draw.randint(0, 2)):
            source = self._stepped(source)
        return source, names

    def _mix(self, labels: list[str], parts: list[Any]) -> Any:
        draw = self.draw
        weights = [draw.choice([1, 0.5, 3, 0.1234567]) for _ in parts]
        options: dict[str, Any] = {"on_exhausted": draw.choice(["drop", "repeat", "stop"])}
        if draw.random() < 0.3:
            options["schedule"] = [(draw.randint(5, 30), {labels[0]: 3, labels[1]: 1})]
        named = dict(zip(labels, zip(parts, weights, strict=True), strict=True))
        try:
            return sources.mix(named, **options)
        except ConfigError:
            return sources.mix(named, on_exhausted="drop")

    def _stepped(self, source: Any) -> Any:
        draw, size = self.draw, source.epoch_size
        step = draw.choice(["shuffle", "window", "take", "skip", "repeat", "map"])
        match step:
            case "shuffle":
                return source.shuffle(draw.choice([None, 3]))
            case "window":
                return source.shuffle(window=draw.randint(1, 9))
            case "map":
                return source.map(same)
            case "repeat":
                return source.repeat(2) if size < 500 else source
        return getattr(source, step)(draw.randint(1, max(1, size // 3))) if size > 1 else source

    def whole(self) -> tuple[Any, dict[int, str], list[str]]:
        """The source of a feed, its names, and its columns."""
        draw = self.draw
        if draw.random() < 0.15:
            (one, of), (two, others) = self.tree(1), self.tree(1)
            num = min(one.epoch_size, two.epoch_size)
            return one.take(num).zip(two.take(num)), of | others, ["x", "y"]
        source, names = self.tree(draw.randint(0, 2))
        sharding = source._plan.sharding
        if sharding.num_shards == 1 and draw.random() < 0.3 and source.epoch_size > 4:
            num = draw.randint(2, 4)
            source = source.shard(
                draw.randrange(num), num, stick_to_shard=draw.random() < 0.5,
                pad_last_batch=draw.random() < 0.3,
            )  # fmt: skip
        return source, names, ["x"]


def run(seed: int) -> Counter[str]:
    """One feed, of which all is asked."""
    draw = random.Random(seed)
    while True:
        try:
            source, names, columns = Composition(draw).whole()
            break
        except ConfigError:
            continue  # A composition that there is none of.
    num_queues = draw.choice([1, 1, 2, 3])
    coordinator, batch_size = Coordinator(), draw.randint(1, 9)
    init_data_input_workers(
        columns, source, batch_size, coordinator=coordinator, num_worker_threads=1,
        last_batch=draw.choice(["keep", "drop", "pad", "carry"]), seed=draw.randrange(2**64),
        epochs=draw.choice([1, 2, 4, None]), devices=num_queues,
    )  # fmt: skip
    came: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    done: Counter[str] = Counter()
    with coordinator:
        feed = coordinator["train"]
        queues = [feed.on(k) for k in range(num_queues)]
        rounds = islice(zip_longest(*queues), -(-_MOST_BATCHES // num_queues))
        try:
            batches = [batch for one in rounds for batch in one if batch is not None]
        except FeedError as error:
            assert "did not fill a batch" in str(error)
            # A shard has fewer than the whole.
            assert all(source.rows(epoch, batch_size) < batch_size for epoch in range(100))
            return Counter({"feeds without a batch": 1, "feeds": 1})
        (state,) = coordinator.snapshot().states
        alone, _ = asked_of(state)
        for batch in batches:
            rows = feed.records(batch.step)
            values = zip(*(batch[name][: batch.rows].tolist() for name in columns), strict=True)
            for number, (row, value) in enumerate(zip(rows, values, strict=True)):
                told = [(one.source, one.number) for one in row]
                assert told == [(names[v // UNIT], v % UNIT) for v in value], batch.step
                for one in dict.fromkeys(told):
                    came[one].append((batch.step, number, batch.turn % num_queues))
            again = [[one[:3] for one in row] for row in records_of(alone, batch.step)]
            assert again == [[one[:3] for one in row] for row in rows], batch.step
            done["rows"] += len(rows)
        end = len(batches)
        sizes = source.sizes_of()
        for name, size in sizes.items():
            numbers = sorted(n for of, n in came if of == name)
            for number in {*draw.sample(numbers, min(2, len(numbers))), draw.randrange(size)}:
                expected = sorted(came.get((name, number), []))
                for asked in (feed.when, lambda *record: when(alone, *record)):
                    try:
                        seen = [*takewhile(lambda one: one.step < end, asked(name, number))]
                    except ConfigError as error:
                        assert "no step has it" in str(error)
                        seen = []
                    assert [(s.step, s.row, s.queue) for s in seen] == expected, (name, number)
                done["records"] += 1
    done["feeds"] += 1
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    told, began = parser.parse_args(arguments), time.monotonic()
    done: Counter[str] = Counter()
    while done["rows"] < told.rows:
        one = told.seed * 1_000_000 + done["feeds"]
        try:
            done += run(one)
        except BaseException as error:
            error.add_note(f"feed {one}")
            raise
    counts = ", ".join(f"{count} {what}" for what, count in sorted(done.items()))
    print(f"seed {told.seed}: {counts} in {time.monotonic() - began:.0f} s, 0 differ")


if __name__ == "__main__":
    main()
