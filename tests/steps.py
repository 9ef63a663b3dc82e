"""Functions of steps that tests put on sources, importable in other processes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from feeder import sources

NUM = 23


def double(record: Any) -> Any:
    return record * 2


def jitter(record: Any, rng: np.random.Generator) -> Any:
    return record, rng.random()


def add(record: Any) -> Any:
    return record[0] + record[1], record[1]


def is_odd(record: Any) -> bool:
    return bool(record % 2)


def ragged(record: Any) -> Any:
    """A row as long as the record says."""
    return np.arange(int(record) % 7 + 1) + int(record)


def words(record: Any) -> Any:
    return {"n": record, "text": "x" * (int(record) % 4), "raw": b"y" * (int(record) % 3 + 1)}


def lines(record: Any) -> Any:
    """A row of each kind that may differ in length: numbers, bfloat16, a string and bytes."""
    size = int(record) % 4
    return {
        "n": record, "v": np.full((size + 1, 2), record, ml_dtypes.bfloat16), "text": "é" * size,
        "raw": b"y" * (size + 1),
    }  # fmt: skip


def tree(record: Any) -> Any:
    """A sample with samples in it."""
    return {"image": {"left": np.full(2, record), "size": {"h": record}}, "n": -record}


def odd_fails(record: Any) -> Any:
    if record % 2:
        raise ValueError("odd")
    return record


def named(record: Any) -> Any:
    return {"x": record}


def numbers(first: int = 0, num: int = NUM, **options: Any) -> Any:
    return sources.arrays(np.arange(first, first + num), **options)


def chained() -> Any:
    """Many steps over two sources."""
    whole = numbers().shuffle(5).map(jitter).concat(numbers(100, 9).map(jitter).skip(2))
    return whole.shuffle(window=4).repeat(2).take(50)


def zipped() -> Any:
    return numbers().shuffle(5).zip(numbers(100).shuffle()).map(add)


def strings() -> Any:
    """Strings and bytes of one width, and bfloat16 of one length."""
    return numbers().map(lines).pad({"v": 4, "text": 5, "raw": 6}, value=1).shuffle(window=5)


def trees() -> Any:
    return numbers().map(tree).shuffle(3)


def filtered() -> Any:
    return numbers(num=60).shuffle().filter(is_odd).map(jitter)


def budgeted() -> Any:
    return numbers(num=50).shuffle().map(ragged).batch_by_tokens(20, window=8)


def padded() -> Any:
    """Rows as long as the longest of a call."""
    return numbers().shuffle(5).map(ragged).pad()


def joined() -> Any:
    """Rows of a call one after the other."""
    return numbers().shuffle(5).map(lines).offsets()


def scheduled() -> Any:
    """A mixture without end, whose weights change."""
    return mixture(schedule=[(33, {"a": 1, "b": 1})], on_exhausted="repeat")


def mixture(**options: Any) -> Any:
    """Three sources, one of them shuffled, one with draws."""
    parts = {
        "a": (numbers(0, 70).shuffle().map(jitter), 0.7),
        "b": (numbers(1000, 25).map(jitter), 0.2),
        "c": (numbers(2000, 10).map(jitter), 0.1),
    }
    return sources.mix(parts, **options)


def packed(**options: Any) -> Any:
    """Windows of a mixture of documents."""
    parts = {
        "a": (numbers(0, 90).shuffle().map(ragged), 2),
        "b": (numbers(1000, 30).map(ragged), 1),
    }
    return sources.pack(sources.mix(parts, on_exhausted="repeat"), 16, window=20, **options)
