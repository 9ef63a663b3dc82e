"""Batches as NumPy arrays, for frameworks that make their own arrays of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Self

import numpy as np

from feeder.adapters.datasets import Batched, Ordered, States, check_samples
from feeder.adapters.loop import EpochLoader
from feeder.adapters.packing import COLUMNS, Leaf, read_none, unpack
from feeder.adapters.streams import (
    FEEDS,
    Connection,
    MadeStream,
    ReadStream,
    executor_settings,
    find_ranks,
    has_row_per_record,
    read_feed,
    read_function,
    whole,
)
from feeder.errors import ConfigError
from feeder.sources import Source
from feeder.workers.stream.batch import Batch


class ArrayLoader(EpochLoader):
    """Batches of this process as NumPy arrays, an epoch per loop, in the structure of the samples.

    Args:
        dataset: What has `__getitem__` and `__len__`, a source of `feeder.sources`, an iterable, or
            a feed or consumer, whose batches are dicts of arrays and which takes no other argument.
        batch_size: Rows of a batch of this process.
        shuffle: Whether each epoch is shuffled, by `seed`.
        collate_fn: Makes a batch of a list of samples; by default they are stacked.
        num_workers: Processes that read ahead; 0 is one thread.
        drop_last: Whether an epoch's last batch is left out if it is shorter, and what does not
            go round all processes.
        prefetch_factor: Batches that are read ahead for each worker.
        seed: Of shuffles, from 0 to 2**64 - 1.
        epochs: After so many epochs a further loop raises; None is without end.
        rank, world_size: By default 0 and 1, with a warning if the launcher has started more
            processes.
        executor: What reads ahead, in place of `num_workers`: `feeder.Threads(n)`, or
            `feeder.Processes(n)` with its options.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        prefetch_factor: int = 2,
        seed: int = 0,
        epochs: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        executor: Any = None,
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self._is_iterable = False
        if isinstance(dataset, FEEDS):
            named = {"batch_size": batch_size, "shuffle": shuffle, "collate_fn": collate_fn,
                     "num_workers": num_workers, "seed": seed, "epochs": epochs,
                     "executor": executor}  # fmt: skip
            super().__init__(_feed_stream(dataset, named), None)
            return
        batch_size = whole("batch_size", batch_size, 1)
        num_workers = whole("num_workers", num_workers, 0)
        prefetch_factor = whole("prefetch_factor", prefetch_factor, 1)
        epochs = None if epochs is None else whole("epochs", epochs, 1)
        self.batch_size = batch_size
        ranks = find_ranks(rank, world_size, drops=drop_last)
        batched = Batched(batch_size, drop_last, collate_fn, read_none)
        is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        kind: Any = "source" if isinstance(dataset, Source) else "map" if is_map else "iterable"
        self._is_iterable = kind == "iterable"
        if shuffle and kind != "map":
            what = "a source has" if kind == "source" else "an iterable is"
            raise ConfigError(
                f"shuffle is True: {what} its own order; leave it out, or give a data set with "
                "__getitem__ and __len__"
            )
        indices = None
        if kind == "map":
            indices = Ordered(check_samples(dataset), batched, shuffle=shuffle, seed=seed)
        settings = {
            "seed": seed,
            "max_buffered_batches": max(2, prefetch_factor * max(1, num_workers)),
            **executor_settings(num_workers, executor, ()),
        }
        if kind == "source" and not has_row_per_record(dataset):
            super().__init__(read_function(dataset, batched, ranks, settings, epochs), epochs)
            return
        stream = MadeStream(
            kind, dataset, batched, ranks, indices=indices, settings=settings, epochs=epochs,
            states=States(),
        )  # fmt: skip
        super().__init__(stream, epochs)

    @classmethod
    def connect(cls, addresses: Any = None, **options: Any) -> Self:
        """A loader over one queue of a served feed, with the arguments of `feeder.connect`. Batches
        are dicts of arrays by column."""
        return cls(Connection(addresses, options))

    def _convert(self, batch: Batch) -> Any:
        if tuple(batch) == COLUMNS:
            return unpack(batch.columns, _array)
        made = {name: batch[name] for name in batch}
        # A function that returned a tuple has no names.
        return tuple(made.values()) if "0" in made else made


def _feed_stream(feed: Any, given: dict[str, Any]) -> ReadStream:
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name} is {value!r}: a feed has its own; leave it out")
    return read_feed(feed)


def _array(row: Any, leaf: Leaf) -> Any:
    return np.ndarray(leaf.shape, _dtype(leaf.dtype), row, leaf.offset)


@lru_cache(maxsize=64)
def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        # JAX's and TensorFlow's own, as bfloat16: a batch that has them has come with the package.
        import ml_dtypes

        of: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return of
