"""What steps on sources make, as one would write it in plain Python: each composition of `steps` as
the rows of an epoch, or as the chunks of its calls. It shares with the product the orders of a
single shuffle, and how a record's generator is made of its seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import xxhash

import steps
from feeder import Call
from feeder.workers.sources import arrays
from feeder.workers.sources.orders.permutation import Permutation
from naive import NaiveBatch, naive_stream
from steps import NUM

SEED, BATCH_SIZE, EPOCHS = 9, 6, 2

Rows = list[tuple[Any, ...]]


def keyed(seed: int, *tags: str) -> int:
    """The seed of a part of a whole."""
    for tag in tags:
        seed = xxhash.xxh3_64_intdigest(f"{seed}/{tag}".encode())
    return seed


def draw(record: int, epoch: int, *tags: str) -> float:
    """What `jitter` draws for a record of a part, as the first map."""
    return Call(0, epoch, 0, 1, keyed(SEED, *tags, "map/1")).rng_for(record).random()


@cache
def order_of(
    num: int, epoch: int, own: int | None = None, window: int | None = None, seed: int = SEED
) -> list[int]:
    """The order of a shuffle with a seed of its own, or with the feed's."""
    (order,) = arrays(np.arange(num)).shuffle(own, window)(Call(0, epoch, 0, num, seed))
    return [int(record) for record in order]


def words_of(record: int) -> tuple[np.ndarray, str, bytes]:
    row = steps.lines(record)
    return row["v"], row["text"], row["raw"]


# ---- one row for each record


def chained(epoch: int) -> Rows:
    def once(epoch: int) -> Rows:
        first = [(x, draw(x, epoch)) for x in order_of(NUM, epoch, 5)]
        more = [(100 + i, draw(i, epoch, "1")) for i in range(2, 9)]
        whole = first + more
        return [whole[i] for i in order_of(len(whole), epoch, window=4)]

    return (once(2 * epoch) + once(2 * epoch + 1))[:50]


def filtered(epoch: int) -> Rows:
    return [(x, draw(x, epoch)) for x in order_of(60, epoch) if x % 2]


def zipped(epoch: int) -> Rows:
    pairs = zip(order_of(NUM, epoch, 5), order_of(NUM, epoch), strict=True)
    return [(x + y + 100, y + 100) for x, y in pairs]


def strings(epoch: int) -> Rows:
    rows = []
    for x in order_of(NUM, epoch, window=5):
        v, text, raw = words_of(x)
        v = np.concatenate((v, np.ones((4 - len(v), 2), v.dtype)))
        rows.append((np.int64(x), v, np.array(text, "U5"), np.array(raw, "S6")))
    return rows


def trees(epoch: int) -> Rows:
    return [(np.full(2, x), x, -x) for x in order_of(NUM, epoch, 3)]


# ---- mixtures


def blocks_that_drop(lengths: list[int], weights: list[str]) -> Iterator[list[int]]:
    """The records of each source in block after block, until all are read."""
    left = list(lengths)
    while any(left):
        alive = [Fraction(w) if n else Fraction(0) for w, n in zip(weights, left, strict=True)]
        shares = [weight / sum(alive) for weight in alive]
        size = lcm(*(share.denominator for share in shares))
        block = [min(n, int(share * size)) for n, share in zip(left, shares, strict=True)]
        left = [n - c for n, c in zip(left, block, strict=True)]
        yield block


def splitmix(x: int) -> int:
    """The finish of SplitMix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def mixed(blocks: list[list[int]], epoch: int) -> list[int]:
    """The source of each record: the slots of a block, sorted by random numbers."""
    gamma, key = 0x9E3779B97F4A7C15, xxhash.xxh3_64_intdigest(f"{SEED}/{epoch}/mix".encode())
    sources = []
    for number, block in enumerate(blocks):
        slots = [part for part, count in enumerate(block) for _ in range(count)]
        first = splitmix(number * gamma % 2**64 ^ key)
        random = [splitmix((first + (i + 1) * gamma) % 2**64) for i in range(len(slots))]
        sources += [slots[i] for i in sorted(range(len(slots)), key=random.__getitem__)]
    return sources


def record_of(part: int, position: int, epoch: int) -> int:
    """What a part of `steps.mixture` has at a position of its epoch."""
    return order_of(70, epoch, seed=keyed(SEED, "a"))[position] if part == 0 else position


def mixture_row(part: int, position: int, epoch: int) -> tuple[Any, ...]:
    record = record_of(part, position, epoch)
    return 1000 * part + record, draw(record, epoch, "abc"[part])


def mixture(epoch: int) -> Rows:
    rows, used = [], [0, 0, 0]
    for part in mixed([*blocks_that_drop([70, 25, 10], ["0.7", "0.2", "0.1"])], epoch):
        rows.append(mixture_row(part, used[part], epoch))
        used[part] += 1
    return rows


def scheduled(epoch: int) -> Rows:
    # Three whole blocks; one that is cut short; then until all that is read has come once.
    blocks = [[7, 2, 1]] * 3 + [[1, 1, 1]] + [[1, 1, 0]] * 48
    used = [epoch * sum(counts) for counts in zip(*blocks, strict=True)]
    rows = []
    for part in mixed(blocks, epoch):
        passes, position = divmod(used[part], (70, 25, 10)[part])
        rows.append(mixture_row(part, position, passes))
        used[part] += 1
    return rows


def packed(epoch: int) -> Rows:
    blocks, lengths = [[2, 1]] * 45, (90, 30)
    used, documents = [epoch * 90, epoch * 45], []
    for part in mixed(blocks, epoch):
        passes, position = divmod(used[part], lengths[part])
        order = order_of(90, passes, seed=keyed(SEED, "a")) if part == 0 else range(30)
        documents.append(steps.ragged(1000 * part + order[position]))
        used[part] += 1
    return [row for at in range(0, 135, 20) for row in naive_window(documents[at : at + 20], 16)]


def naive_window(documents: list[np.ndarray], size: int) -> Rows:
    """Best fit decreasing, by looking at every row."""
    held: list[list[int]] = []
    for i in sorted(range(len(documents)), key=lambda i: (-len(documents[i]), i)):
        room = [size - sum(len(documents[k]) for k in row) for row in held]
        fits = [(free, row) for row, free in enumerate(room) if free >= len(documents[i])]
        held[min(fits)[1]].append(i) if fits else held.append([i])
    rows = []
    for row in sorted(sorted(row) for row in held):
        inside = [documents[i] for i in row]
        tokens, segments, positions = (
            np.zeros(size, int),
            np.zeros(size, "i4"),
            np.zeros(size, "i4"),
        )
        stop = sum(map(len, inside))
        tokens[:stop] = np.concatenate(inside)
        segments[:stop] = np.repeat(np.arange(1, len(row) + 1), [*map(len, inside)])
        positions[:stop] = np.concatenate([np.arange(len(one)) for one in inside])
        rows.append((tokens, segments, positions, segments > 0))
    return rows


# ---- chunks that are batches as they come


def filled(rows: list[np.ndarray]) -> np.ndarray:
    column = np.zeros((len(rows), max(map(len, rows))), rows[0].dtype)
    for i, row in enumerate(rows):
        column[i, : len(row)] = row
    return column


def calls_of(epoch: int) -> Iterator[list[int]]:
    order = order_of(NUM, epoch, 5)
    for start in range(0, NUM, BATCH_SIZE):
        yield order[start : start + BATCH_SIZE]


def padded(epoch: int) -> Rows:
    return [(filled([steps.ragged(x) for x in records]),) for records in calls_of(epoch)]


def joined(epoch: int) -> Rows:
    chunks = []
    for records in calls_of(epoch):
        v, texts, raws = zip(*map(words_of, records), strict=True)
        values = [
            np.concatenate(v),
            np.frombuffer("".join(texts).encode(), np.uint8),
            np.frombuffer(b"".join(raws), np.uint8),
        ]
        sizes = [[*map(len, v)], [len(t.encode()) for t in texts], [*map(len, raws)]]
        columns = [np.array([records])]
        for value, size in zip(values, sizes, strict=True):
            columns += [value[np.newaxis], np.array([np.cumsum([0, *size])])]
        chunks.append(tuple(columns))
    return chunks


def budgeted(epoch: int) -> Rows:
    order, windows = order_of(50, epoch), []
    for number, start in enumerate(range(0, 50, 8)):
        batches: list[list[np.ndarray]] = []
        rows = [steps.ragged(x) for x in order[start : start + 8]]
        inside = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for i in inside:
            if not batches or (len(batches[-1]) + 1) * len(rows[i]) > 20:
                batches.append([])
            batches[-1].append(i)  # type: ignore[arg-type]
        turn = Permutation(len(batches), f"{SEED}/{epoch}/budget/{number}")(0, len(batches))
        windows.append([filled([rows[i] for i in sorted(batches[k])]) for k in turn])
    return [(window[number],) for number in range(8) for window in windows if number < len(window)]


# ---- all of them


class Composition(NamedTuple):
    """A source of `steps`, and what it gives."""

    make: Callable[[], Any]
    naive: Callable[[int], Rows]
    """The rows of an epoch, or with `dont_rebatch` its chunks."""
    names: tuple[str, ...]
    settings: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def all_settings(self) -> dict[str, Any]:
        """The arguments of its feed."""
        return {
            "input_blob_names": list(self.names), "batch_size": BATCH_SIZE, "seed": SEED,
            "epochs": EPOCHS, **self.settings,
        }  # fmt: skip

    def batches(self) -> Iterator[NaiveBatch]:
        """The batches of a feed."""
        if self.settings.get("dont_rebatch"):
            step = 0
            for epoch in range(EPOCHS):
                for index, columns in enumerate(self.naive(epoch)):
                    yield epoch, index, step, len(columns[0]), columns
                    step += 1
            return

        def fetch(call: Call) -> Any:
            rows = self.naive(call.epoch)[call.index * BATCH_SIZE : (call.index + 1) * BATCH_SIZE]
            if not rows:
                raise StopIteration
            return [np.stack(column) for column in zip(*rows, strict=True)]

        stream = naive_stream(
            fetch, self.names, pure=True, batch_size=BATCH_SIZE, num_workers=1, epochs=EPOCHS,
            last_batch=self.settings.get("last_batch", "keep"),
        )  # fmt: skip
        # Row by row strings lose the width of their column.
        types = [np.stack(column).dtype for column in zip(*self.naive(0), strict=True)]
        for epoch, index, step, rows, columns in stream:
            yield (
                epoch,
                index,
                step,
                rows,
                tuple(column.astype(dtype) for column, dtype in zip(columns, types, strict=True)),
            )


PACKED = ("tokens", "segment_ids", "positions", "loss_mask")
JOINED = ("n", "v.values", "v.offsets", "text.values", "text.offsets", "raw.values", "raw.offsets")
CARRY, AS_THEY_COME = {"last_batch": "carry"}, {"dont_rebatch": True}
COMPOSITIONS = {
    "map, concat, shuffle, repeat, take": Composition(steps.chained, chained, ("x", "u")),
    "filter": Composition(steps.filtered, filtered, ("x", "u"), CARRY),
    "zip": Composition(steps.zipped, zipped, ("x", "y"), {"last_batch": "pad"}),
    "strings, bytes, bfloat16": Composition(
        steps.strings, strings, ("n", "v", "text", "raw"), CARRY
    ),
    "nested": Composition(steps.trees, trees, ("image.left", "image.size.h", "n")),
    "mixture": Composition(steps.mixture, mixture, ("x", "u"), {"last_batch": "drop"}),
    "mixture by schedule": Composition(steps.scheduled, scheduled, ("x", "u"), CARRY),
    "packed mixture": Composition(steps.packed, packed, PACKED),
    "padded": Composition(steps.padded, padded, ("x",), AS_THEY_COME),
    "offsets": Composition(steps.joined, joined, JOINED, AS_THEY_COME),
    "batches by tokens": Composition(steps.budgeted, budgeted, ("t",), AS_THEY_COME),
}
