"""A function that makes one sample at a time, and datasets with `__getitem__`.

The sample function is the user's, so nothing is known of it but that it takes a number. Samples are
asked for in the order of the call and stacked at once; a data set that can give several together
(`__getitems__`) is asked for a call's samples together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Unpack

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError, FeedError
from feeder.workers.fetch.seeding import RECORD_SEEDS
from feeder.workers.public import public
from feeder.workers.sources.arguments import whole
from feeder.workers.sources.collate import Collate, check_collate, make_columns
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.orders.options import OrderOptions
from feeder.workers.sources.source import Source
from feeder.workers.sources.stores.reading import Columns, Faults, OnError, RecordError
from feeder.workers.sources.stores.records import LEFT_OUT, Records, split
from feeder.workers.stream.batch import Call


@public("feeder.sources")
@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInfo:
    """Which sample is wanted. The names are those of DALI's SampleInfo."""

    idx_in_epoch: int
    """The record: without a shuffle and shards, the sample's number in the epoch."""
    idx_in_batch: int
    """Its row in the call."""
    iteration: int
    """The call's number in the epoch."""
    epoch_idx: int
    """The epoch."""
    call: Call
    """The call."""

    @property
    def rng(self) -> np.random.Generator:
        """A new generator keyed by (seed, epoch, record)."""
        return self.call.rng_for(self.idx_in_epoch)


class Dataset(Protocol):
    """What can be indexed, such as PyTorch's map-style datasets."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@public("feeder.sources")
def samples(
    fn: Callable[[SampleInfo], Any],
    epoch_size: int,
    *,
    collate: Collate | None = None,
    on_error: OnError = "raise",
    **options: Unpack[OrderOptions],
) -> Source:
    """Samples that a function makes, `fn(info)`, in any thread: stacked into columns.

    Args:
        fn: Returns a sample: a tuple by column, a mapping by name, or one array or number. Its
            result depends on the info alone. For the first sample of a call it may raise
            StopIteration, which ends the epoch.
        epoch_size: Number of samples; at most, where `fn` ends the epoch.
        collate: Makes columns of a list of samples, in place of stacking.
        on_error: What to do where `fn` raises ValueError or OSError: "raise", or "skip", which
            leaves the row out and counts it in `source.skipped`.
        options: `OrderOptions`.

    Raises:
        ConfigError: an option is wrong.
    """
    if not callable(fn):
        raise ConfigError(f"fn is {fn!r}, expected a function of a SampleInfo")
    size = whole("epoch_size", epoch_size, 1)
    # `len` of a source could not say it.
    if size > sys.maxsize:
        raise ConfigError(f"epoch_size is {size}, expected at most {sys.maxsize}")

    read = SampleRecords("samples", size, partial(_CallSamples, fn), collate, on_error)
    return Source(read, **options)


@public("feeder.sources")
def records(
    dataset: Dataset,
    *,
    collate: Collate | None = None,
    on_error: OnError = "raise",
    **options: Unpack[OrderOptions],
) -> Source:
    """The items of a dataset with `__len__` and `__getitem__`, stacked into columns.

    Args:
        dataset: Gives a sample for an index, in any thread: a tuple by column, a mapping by name,
            or one array or number. Where it has `__getitems__(indices)`, as PyTorch calls it, that
            gives the list of a call's samples, and only where it raises are they read one by one.
        collate: Makes columns of a list of samples, in place of stacking.
        on_error: What to do where an item raises ValueError or OSError: "raise", or "skip", which
            leaves the row out and counts it in `source.skipped`.
        options: `OrderOptions`.

    Raises:
        ConfigError: the dataset is none, or an option is wrong.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"dataset is {type(dataset).__name__}, expected an object with __len__ and "
            "__getitem__: one that is iterated over is for sources.iterable"
        )

    read = SampleRecords(
        "records", len(dataset), partial(_for_any_call, dataset), collate, on_error
    )
    return Source(read, **options)


def _for_any_call(dataset: Dataset, call: Call) -> Dataset:
    """A dataset, which is the same for all calls."""
    return dataset


class _EpochIsOver(Exception):
    """A function of samples says so."""


class _CallSamples:
    """What a function makes for one call. Never changes."""

    def __init__(self, fn: Callable[[SampleInfo], Any], call: Call) -> None:
        self._fn = fn
        self._call = call

    def make(self, row: int, record: int) -> Any:
        """The sample of a record, for a row of the call."""
        call = self._call
        # Made for each sample: it may be kept by the function, which other threads call too.
        info = SampleInfo(
            idx_in_epoch=record,
            idx_in_batch=row,
            iteration=call.index,
            epoch_idx=call.epoch,
            call=call,
        )
        try:
            return self._fn(info)
        except StopIteration as error:
            # Later in a call it would take the samples before it along.
            if row == 0:
                raise _EpochIsOver from error
            raise


def take_together(take: Callable[[list[int]], Any], records: Sequence[int]) -> list[Any] | None:
    """What `__getitems__` returns for these records; None for a mapping, whose keys are no
    samples."""
    # A list of its own: the dataset may sort it, or empty it.
    given = take([*records])
    return None if isinstance(given, Mapping) else list(given)


def check_together(made: list[Any] | None, records: Sequence[int], first: str) -> list[Any]:
    """The same, where it is a sample for each record; `first` names the first one. Raises
    `RecordError`."""
    if made is None or len(made) != len(records):
        what = "a mapping" if made is None else f"{len(made)} samples"
        raise RecordError(
            f"{first} and on: __getitems__ returned {what}, expected a list of {len(records)}"
        )
    return made


class SampleRecords(Records):
    """Samples of what can be indexed, such as a dataset; `samples_of` gives that for a call.
    Read-only; any fetcher thread calls it. `one_by_one`: where the generators are seeded for each
    record, samples are not taken at once, since a function of the user's makes each."""

    kind = ""

    def __init__(
        self,
        kind: str,
        size: int,
        samples_of: Callable[[Call], Any],
        collate: Collate | None,
        on_error: OnError,
        *,
        one_by_one: bool = False,
    ) -> None:
        self.kind = kind
        self._size = size
        self._one_by_one = one_by_one
        self._samples_of = samples_of
        self._collate = check_collate(collate)
        self._faults = Faults(on_error)

    def __len__(self) -> int:
        return self._size

    @property
    def may_skip(self) -> bool:
        """Whether defective records are left out."""
        return self._faults.may_skip

    @property
    def skipped(self) -> int:
        """Samples that were left out because making them failed."""
        return self._faults.skipped

    def name(self, index: int) -> str:
        """The sample's number."""
        return f"sample {index}"

    @property
    def by_sample(self) -> bool:
        """Whether samples are stacked, and may have to be made alike before."""
        return self._collate is None

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """Take the samples of a call, as columns."""
        samples, records = self._take(indices, call), indices.tolist()
        there = [i for i, sample in enumerate(samples) if sample is not LEFT_OUT]
        # Every sample of the call is defective: the source asks for what columns are like.
        if not there:
            return None
        made = samples if len(there) == len(samples) else [samples[i] for i in there]
        return make_columns(made, lambda i: self.name(records[there[i]]), self._collate, call)

    def samples(self, indices: NDArray[np.int64], call: Call) -> list[Any]:
        """Take the samples of a call; `LEFT_OUT` where one is defective."""
        if self._collate is None:
            return self._take(indices, call)
        # What the user's function makes of one sample is one row, else nobody knows whose it is.
        rows: list[Any] = []
        for i in range(len(indices)):
            columns = self.read(indices[i : i + 1], call)
            made = [LEFT_OUT] if columns is None else split(columns)
            if len(made) != 1:
                raise RecordError(
                    f"{self.name(int(indices[i]))}: collate made {len(made)} rows of 1 sample, "
                    "which no further step can take apart"
                )
            rows += made
        return rows

    def _take(self, indices: NDArray[np.int64], call: Call) -> list[Any]:
        samples, records = self._samples_of(call), indices.tolist()
        made = self._take_at_once(samples, records)
        return self._take_each(samples, records, call) if made is None else made

    def _take_at_once(self, samples: Any, records: list[int]) -> list[Any] | None:
        """Samples of a dataset that gives several at a time; None if it does not."""
        take = getattr(samples, "__getitems__", None)
        if take is None or (self._one_by_one and RECORD_SEEDS.are_on):
            return None
        try:
            made = take_together(take, records)
        except FeedError:
            raise
        # One of them is defective: which one it is, is told where they are taken one by one.
        except Exception:
            return None
        return check_together(made, records, self.name(records[0]))

    def _take_each(self, samples: Any, records: list[int], call: Call) -> list[Any]:
        """The samples, one by one."""
        made: list[Any] = []
        seed = RECORD_SEEDS.seed if RECORD_SEEDS.are_on else None

        def take(row: int, record: int) -> Any:
            if seed is not None:
                seed(call, record)
            return samples.make(row, record) if is_made else samples[record]

        is_made = isinstance(samples, _CallSamples)
        # Then to take a record is that alone: two more frames take as long as a cheap record.
        is_plain = not (is_made or self.may_skip or RECORD_SEEDS.are_on)
        for row, record in enumerate(records):
            try:
                made.append(
                    samples[record]
                    if is_plain
                    else self._faults.attempt(partial(take, row, record))
                )
            except _EpochIsOver as over:
                # An exception of our own carries it past `Faults`, which refuses a plain
                # StopIteration.
                raise StopIteration from over
            except Exception as error:
                self._faults.handle(self.name, record, error)
                made.append(LEFT_OUT)
        return made

    def describe(self) -> dict[str, Any]:
        """Whether samples are stacked or collated."""
        # The function itself cannot be compared; that there is one can.
        return {"collate": self._collate is not None}


# ---- Files of records


class RecordFiles(Dataset, Protocol):
    """Files whose records are found by number."""

    def name(self, record: int) -> str:
        """Where a record lies."""

    @property
    def has_objects(self) -> bool:
        """Whether some of the files are objects of stores."""

    def touches(self, records: Sequence[int]) -> Iterator[Touch]:
        """What records read of objects."""

    def describe(self) -> dict[str, Any]:
        """How records are read, and what tells each file from another."""


class FileRecords(SampleRecords):
    """Records of files, as samples. `decodes`: a function of the user's decodes them. Never
    changes; any thread reads."""

    def __init__(
        self, kind: str, files: RecordFiles, on_error: OnError, *, decodes: bool, **fields: Any
    ) -> None:
        of_call = partial(_for_any_call, files)
        super().__init__(kind, len(files), of_call, None, on_error, one_by_one=decodes)
        self._files, self._fields = files, fields

    def name(self, index: int) -> str:
        """The file, and where the record begins."""
        return self._files.name(index)

    @property
    def has_objects(self) -> bool:
        """Whether some of the files are objects of stores."""
        return self._files.has_objects

    def touches(self, indices: NDArray[np.int64], call: Call) -> Iterator[Touch]:
        """What records read of objects."""
        return self._files.touches(indices.tolist())

    def describe(self) -> dict[str, Any]:
        """How records are read, and of each file how many it has and where they lie."""
        return {**self._fields, **self._files.describe()}
