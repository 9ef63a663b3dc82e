"""Sources put together are what plain Python makes of them: at every place that a feed is resumed
at, and, in pairs of all that may change, on threads and in processes, here and behind a server, and
for any number of ranks before and after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import combinations, cycle, product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import parts
import steps
from conformance.served import TRANSPORTS, running_over
from conformance.test_sources import SOURCES
from feeder import Processes, Threads
from feeder.workers import sources
from feeds import Record, assert_same, deal, note, note_naive, running
from naive_steps import COMPOSITIONS, Composition
from needs import needs
from project import TESTS
from shards import example, ints, numbered, write_table, write_tar, write_tfrecord

pytestmark = pytest.mark.process

WAYS = ("here", *TRANSPORTS)


@cache
def naive(name: str) -> list[Record]:
    return [note_naive(batch) for batch in COMPOSITIONS[name].batches()]


def drained(source: Any, settings: dict[str, Any], way: str = "here", **more: Any) -> list[Record]:
    """The batches that a feed has left, rank by rank in turns."""
    run = running if way == "here" else running_over(way)
    with run(source, **settings, **more) as (_, feed):
        return [note(batch) for batch in deal(feed)]


def taken(source: Any, settings: dict[str, Any], world: int = 1) -> list[tuple[Record, bytes]]:
    """The batches of a feed, each with its position."""
    with running(source, **settings, devices=world, num_threads=2) as (_, feed):
        return [(note(batch), batch.cut.token()) for batch in deal(feed)]


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composition_is_the_naive_one_from_every_place(name: str) -> None:
    composition, stream = COMPOSITIONS[name], naive(name)
    settings = composition.all_settings()
    begun = taken(composition.make(), settings)
    assert_same([record for record, _ in begun], stream, name)
    assert len(stream) > 7
    source = composition.make()
    for i, (threads, (_, token)) in enumerate(zip(cycle((1, 2, 3)), begun, strict=False), 1):
        # Fresh sources, and one that other feeds have used.
        rest = drained(
            composition.make() if i % 3 else source, settings, resume=token, num_threads=threads
        )
        assert_same(rest, stream[i:], name, i)


# ---- in pairs


def pairs(*axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Combinations of one value of each axis, such that each two values of two axes come together.
    The next one begins with two values that have not, and takes others that have not beside it."""
    left = {
        ((i, a), (k, b))
        for i, k in combinations(range(len(axes)), 2)
        for a, b in product(range(len(axes[i])), range(len(axes[k])))
    }
    while left:
        chosen = dict(min(left))
        for i in sorted(set(range(len(axes))) - chosen.keys()):
            chosen[i] = max(range(len(axes[i])), key=partial(_num_new, left, chosen, i))
        left -= {*combinations(sorted(chosen.items()), 2)}
        yield tuple(axis[chosen[i]] for i, axis in enumerate(axes))


def _num_new(left: set[Any], chosen: dict[int, int], axis: int, value: int) -> tuple[int, int]:
    """How many pairs a value adds to those that have been chosen; beside it, what decides a tie."""
    new = {tuple(sorted(((axis, value), other))) for other in chosen.items()}
    return len(new & left), crc32(repr((chosen, axis, value)).encode())


def chosen_for(name: str, axes: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """The combinations with a name; in the full part it comes with each two other values."""
    yield from pairs(*axes[1:]) if parts.is_full else (c[1:] for c in pairs(*axes) if c[0] == name)


COMPOSED = (
    tuple(COMPOSITIONS),
    (Threads(1), Processes(2), Threads(3), Processes(1)),
    WAYS,
    (1, 2, 3),
    (2, 1, 4, 3),
    (0.0, 0.3, 0.6, 0.9),
)
"""Who; executors; ways; ranks before, and after; where the job is stopped."""


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_ranks_executors_and_servers_change_nothing(name: str) -> None:
    composition, stream = COMPOSITIONS[name], naive(name)
    for chosen in chosen_for(name, COMPOSED):
        check(composition.make, composition.all_settings(), stream, *chosen)


def check(
    make: Any, settings: dict[str, Any], stream: list[Record], executor: Any, way: str,
    before: int, after: int, place: float,
) -> None:  # fmt: skip
    """A job of some ranks is stopped; another one goes on."""
    at = int(place * len(stream))
    token = taken(make(), settings, before)[at - 1][1] if at else None
    # A job goes on after a whole round of its ranks.
    at = min(-(-at // before) * before, len(stream))
    rest = drained(
        make(), settings, way, devices=after, executor=executor, resume=token,
    )  # fmt: skip
    assert_same(rest, stream[at:], executor, way, before, after, place)


# ---- every source


def of_parquet(path: Path) -> Any:
    tables = _tables(path, "parquet")
    return sources.parquet(tables, ["x", "v"]).shuffle(window=10)


def of_arrow(path: Path) -> Any:
    return sources.arrow(_tables(path, "arrow"), random_shuffle=True)


def _tables(path: Path, kind: str) -> list[Path]:
    needs("pyarrow")
    import pyarrow as pa

    paths = []
    for i in range(2):
        numbers = list(range(i * 12, i * 12 + 11))
        vectors = pa.array([[n, -n] for n in numbers], pa.list_(pa.int16(), 2))
        paths.append(write_table(path / f"{i}.{kind}", pa.table({"x": numbers, "v": vectors}), 4))
    return paths


def of_lines(path: Path) -> Any:
    (path / "x.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(23)))
    return sources.jsonl(path / "x.jsonl").map(length_of).shuffle()


def length_of(record: Any, rng: np.random.Generator) -> Any:
    return record["n"], rng.random()


def of_shards(path: Path) -> Any:
    write_tar(path / "a.tar", numbered(0, 9))
    write_tar(path / "b.tar", numbered(9, 23))
    return sources.webdataset(path / "*.tar", ["npy", "cls"], random_shuffle=True)


def of_tfrecords(path: Path) -> Any:
    write_tfrecord(path / "x.tfrecord", [example({"n": ints(i, -i)}) for i in range(23)])
    return sources.tfrecord(path / "x.tfrecord", random_shuffle=True)


def of_mds(path: Path) -> Any:
    needs("PIL")
    return sources.mds(TESTS / "oracles/mds", ["n", "fixed", "png"], random_shuffle=True)


def of_everything(path: Path) -> Any:
    """Files of three kinds in one mixture."""
    rows = {
        "lines": of_lines(path).map(first_of),
        "shards": of_shards(path).map(label_of),
        "table": of_parquet(path).map(x_of),
    }
    return sources.mix(rows, on_exhausted="repeat").map(steps.jitter)


def first_of(record: Any) -> Any:
    return int(record[0])


def label_of(record: Any) -> Any:
    return int(record["cls"])


def x_of(record: Any) -> Any:
    return int(record["x"])


STORES: dict[str, tuple[Any, list[str]]] = {
    **{
        name: (lambda path, make=make: make(path, random_shuffle=True), names)
        for name, (make, names) in SOURCES.items()
    },
    "parquet": (of_parquet, ["x", "v"]),
    "arrow": (of_arrow, ["x", "v"]),
    "jsonl": (of_lines, ["x", "u"]),
    "webdataset": (of_shards, ["npy", "cls"]),
    "tfrecord": (of_tfrecords, ["n"]),
    "mds": (of_mds, ["n", "fixed", "png"]),
    "mixture of files": (of_everything, ["x", "u"]),
}
STORED = (
    tuple(STORES), (Processes(2), Threads(3)), ("here", "shared", "tcp"), (1, 2), (3, 1), (0.3, 0.8)
)  # fmt: skip


@pytest.mark.parametrize("name", STORES)
def test_every_source_is_the_same_on_ranks_executors_and_servers(name: str, tmp_path: Path) -> None:
    make, names = STORES[name]
    settings = {
        "input_blob_names": names, "batch_size": 4, "seed": 9, "epochs": 2, "last_batch": "carry",
    }  # fmt: skip
    stream = drained(make(tmp_path), settings, executor=Threads(1))
    assert len(stream) > 7
    for chosen in chosen_for(name, STORED):
        check(lambda: make(tmp_path), settings, stream, *chosen)


def test_bfloat16_strings_and_bytes_keep_their_types() -> None:
    composition: Composition = COMPOSITIONS["strings, bytes, bfloat16"]
    for way in WAYS:
        run = running if way == "here" else running_over(way)
        with run(composition.make(), **composition.all_settings()) as (_, feed):
            batch = next(feed)
            types = [str(batch[name].dtype) for name in composition.names]
            assert types == ["int64", "bfloat16", "<U5", "|S6"], way
            assert batch["text"].tolist() == ["é" * (n % 4) for n in batch["n"].tolist()]
