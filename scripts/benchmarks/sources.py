"""The ready-made sources: tokens, far tokens, tables; resuming every order far out.

Beside them run plain loops and pyarrow's own scan of the same files.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import cycle
from typing import Any

import numpy as np

import feeder
from benchmarks import data
from benchmarks.contenders import FEED, feed, first_batch, make_coordinator, stacking_loop
from benchmarks.fetches import Array, Size
from benchmarks.harness import Row, Take, Watch, batches, once
from benchmarks.report import Load
from feeder import sources

RESUME_AT = 1_000_000
"""Records that are taken before an order is resumed there."""


def size_of(batch_size: int, row_shape: tuple[int, ...], dtype: str, bound: int) -> Size:
    """Batches whose chunks a source makes."""
    return Size(
        batch_size=batch_size, row_shape=row_shape, dtype=dtype, chunk_rows=batch_size, bound=bound
    )


SEQUENCES = size_of(16, (data.SEQ_LEN,), "int64", 100)
TABLE = size_of(256, (data.ROW_BYTES // 4,), "float32", 100)
INDICES = size_of(256, (), "int64", 100)


def tokens() -> sources.Source:
    """The file of tokens, made int64."""
    return sources.tokens(data.token_file(), data.SEQ_LEN, np.uint16, as_type="int64")


def far_tokens() -> sources.Source:
    """The same by its URL, through a cache that soon holds all of it."""
    cache = feeder.Cache(data.make_folder() / "cache", 64 << 20)
    url = f"file://{data.token_file()}"
    return sources.tokens(url, data.SEQ_LEN, np.uint16, as_type="int64", offset=0, cache=cache)


def table(*, shuffled: bool) -> sources.Source:
    """The Parquet file, in order or shuffled within windows of a row group."""
    source = sources.parquet(data.parquet_file())
    return source.shuffle(window=data.GROUP_ROWS) if shuffled else source


@contextmanager
def pyarrow_scan() -> Iterator[Take]:
    """pyarrow's own scan, as arrays of NumPy."""

    def made() -> Iterator[Array]:
        pq = importlib.import_module("pyarrow.parquet")
        for _ in cycle((0,)):
            for batch in pq.ParquetFile(data.parquet_file()).iter_batches(TABLE.batch_size):
                flat = batch.column(1).flatten().to_numpy()
                batch.column(0).to_numpy().copy()
                yield flat.reshape(len(batch), -1).copy()

    yield partial(next, made())


# ---- resuming


def number(info: sources.SampleInfo) -> int:
    """The record's own number."""
    record: int = info.idx_in_epoch
    return record


def with_noise(record: Any, rng: np.random.Generator) -> Any:
    """A record with a draw in it."""
    return record + rng.random()


def numbers(**settings: Any) -> sources.Source:
    """Records that are their own numbers, so many that none comes twice."""
    return sources.samples(number, 10**12, **settings)


ORDERS: dict[str, Callable[[], sources.Source]] = {
    "in order": numbers,
    "shuffled": lambda: numbers(random_shuffle=True),
    "shuffled in a window": lambda: numbers().shuffle(window=4096).map(with_noise),
    "mixed": lambda: sources.mix(
        {"a": (numbers(random_shuffle=True), 0.6), "b": (numbers(), 0.4)}
    ),
}  # fmt: skip


def _coordinator(order: str, token: bytes | None) -> feeder.Coordinator:
    return make_coordinator(ORDERS[order](), INDICES, columns=("x",), epochs=None, resume=token)


@cache
def _far_token(order: str) -> bytes:
    with _coordinator(order, None) as coordinator:
        stream = coordinator[FEED]
        for _ in range(RESUME_AT // INDICES.batch_size):
            batch = next(stream)
        token: bytes = batch.cut.token()
        return token


def _begin(order: str, watch: Watch, *, far: bool) -> int:
    token = _far_token(order) if far else None
    return first_batch(lambda: _coordinator(order, token), "x")(watch)


def _feed(
    name: str, make: Callable[[], sources.Source], size: Size, columns: Sequence[str],
    *, num: int = 2, of: str | None = None, needs: str | None = None, **settings: Any,
) -> Row:  # fmt: skip
    contender = partial(feed, make, size, num, columns, **settings)
    return batches(name, contender, of=of, needs=needs)


LOAD = Load(
    name="sources",
    about=__doc__,
    rows=(
        _feed("cheap-sequences", lambda: sources.records(data.Sequences()), SEQUENCES, ("x",),
              of="loop of sequences", num_threads=2),
        _feed("cheap-tokens", tokens, SEQUENCES, ("x",), of="loop of sequences", num_threads=1),
        _feed("warm tokens of a URL", far_tokens, SEQUENCES, ("x",), of="cheap-tokens",
              needs="obstore", num_threads=1),
        batches("loop of sequences", partial(stacking_loop, data.Sequences, SEQUENCES.batch_size),
                ours=False),
        _feed("parquet", partial(table, shuffled=False), TABLE, ("n", "v"), of="pyarrow's scan",
              needs="pyarrow"),
        _feed("parquet, shuffled", partial(table, shuffled=True), TABLE, ("n", "v"),
              of="pyarrow's scan", needs="pyarrow"),
        batches("pyarrow's scan", pyarrow_scan, ours=False, needs="pyarrow"),
        *(once(f"start, {order}", partial(_begin, order, far=False)) for order in ORDERS),
        *(
            once(f"resume, {order}", partial(_begin, order, far=True), of=f"start, {order}")
            for order in ORDERS
        ),
    ),
)  # fmt: skip
main = LOAD.main
