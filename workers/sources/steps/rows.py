"""What all steps stand on: records sample by sample, in the order they were asked for.

A step is records made of records: it knows its parts by numbers, keeps nothing between two calls,
and so can be read anywhere and by any thread. A record that is left out holds its place
(`LEFT_OUT`) until the columns are made, as the numbers behind it would shift otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.collate import make_columns
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.stores.reading import Columns, Faults, Record, Records
from feeder.workers.stream.batch import Call


class _LeftOut:
    """Stands where a sample would be that was left out."""

    # One object, so that it is told by identity; unpickled it is the same one.
    def __reduce__(self) -> str:
        return "LEFT_OUT"


LEFT_OUT = _LeftOut()


def samples_of(records: Records, indices: NDArray[np.int64], call: Call) -> list[Any]:
    """One sample for each index, in their order; `LEFT_OUT` where the record is left out.

    Records that have `samples(indices, call)` make them so, before they are stacked, and they may
    be of different shapes then. A sample of any other records is a row of their columns.
    """
    take: Callable[..., list[Any]] | None = getattr(records, "samples", None)
    if take is not None:
        return take(indices, call)
    if not traits_of(records).may_skip:
        columns = records.read(indices, call)
        assert columns is not None
        return split(columns)
    # From the columns of several records it cannot be told which of them were left out.
    each = (records.read(indices[i : i + 1], call) for i in range(len(indices)))
    return [LEFT_OUT if columns is None else split(columns)[0] for columns in each]


def touches(records: Records, indices: NDArray[np.int64], call: Call) -> Iterator[Touch]:
    """Which bytes of objects of stores are read for records; nothing if that is not known before
    they are read."""
    found: Callable[..., Iterator[Touch]] | None = getattr(records, "touches", None)
    return iter(()) if found is None else found(indices, call)


def is_far(records: Any) -> bool:
    """Whether some of what records are made of lies in stores."""
    parts = (*getattr(records, "parts", ()), *filter(None, [getattr(records, "records", None)]))
    return bool(getattr(records, "has_objects", False)) or any(map(is_far, parts))


def split(columns: Columns) -> list[Any]:
    """The rows of columns: mappings, tuples, or of a single column without a name its rows."""
    if isinstance(columns, Mapping):
        names = list(columns)
        return [dict(zip(names, row, strict=True)) for row in split_each(columns.values())]
    rows = split_each(columns)
    return [row[0] for row in rows] if len(columns) == 1 else rows


def split_each(arrays: Iterable[NDArray[Any]]) -> list[tuple[NDArray[Any], ...]]:
    """The rows of arrays, as tuples of views."""
    # With the ellipsis a number stays an array: a string would lose its width.
    rows = ([array[i, ...] for i in range(len(array))] for array in arrays)
    return list(zip(*rows, strict=True))


def plain(sample: Any) -> Any:
    """A sample as a user's function is given it: numbers and strings, not arrays of no axis."""
    if isinstance(sample, Mapping):
        return {name: plain(value) for name, value in sample.items()}
    if type(sample) is tuple:
        return tuple(plain(value) for value in sample)
    return sample[()] if isinstance(sample, np.ndarray) and sample.ndim == 0 else sample


def part_of(call: Call, tag: str) -> Call:
    """The call as one part of a whole sees it: draws and shuffles are the part's own."""
    return call._replace(seed=xxhash.xxh3_64_intdigest(f"{call.seed}/{tag}".encode()))


@dataclass(frozen=True, slots=True)
class Traits:
    """What a step has to know of the records that it stands on."""

    may_skip: bool = False
    """Whether a record may have no row."""
    filters: bool = False
    """Whether a filter says which records have a row, so that their number is unknown."""
    is_last: bool = False
    """Whether rows are no longer one for each record, so that no other step can follow."""
    one_per_call: bool = False
    """Whether a call takes one record, whatever the batch size."""
    by_sample: bool = False
    """Whether they are read sample by sample where others come between them: samples may have to
    be made alike before they are rows of a column, or some may be missing."""
    walks: bool = False
    """Whether record n is found by reading those before it, so that only rows in order are had."""
    depth: int = 0
    """How many functions of the user's follow one another."""


def traits_of(records: Records) -> Traits:
    """The traits of any records."""
    traits: Traits | None = getattr(records, "traits", None)
    if traits is not None:
        return traits
    may_skip = getattr(records, "may_skip", True)
    by_sample = getattr(records, "by_sample", hasattr(records, "samples"))
    return Traits(may_skip=may_skip, by_sample=may_skip or by_sample)


class Step:
    """Records that are made of those of one or several parts.

    A step never changes; what it stands on has its own locks, so any thread reads.
    """

    kind = "step"

    def __init__(self, *parts: Records) -> None:
        self.parts = parts
        each = [traits_of(part) for part in parts]
        self.traits = Traits(
            may_skip=any(t.may_skip for t in each),
            filters=any(t.filters for t in each),
            is_last=any(t.is_last for t in each),
            one_per_call=any(t.one_per_call for t in each),
            by_sample=any(t.by_sample for t in each),
            walks=any(t.walks for t in each),
            depth=max(t.depth for t in each),
        )

    def __len__(self) -> int:
        return len(self.parts[0])

    @property
    def skipped(self) -> int:
        """Reads of defective records that were left out."""
        return sum(part.skipped for part in self.parts)

    def name(self, index: int) -> str:
        """What the first part calls the record."""
        return self.parts[0].name(index)

    def name_in(self, index: int, call: Call) -> str:
        """The same in the epoch of a call, where more is known of it."""
        return name_in(self.parts[0], index, call)

    def origins(self, indices: NDArray[np.int64], call: Call) -> list[tuple[Record, ...]]:
        """The records of all parts that each row is made of."""
        each = [origins(part, indices, call) for part in self.parts]
        return [tuple(chain(*row)) for row in zip(*each, strict=True)]

    def places_of(self, source: str, number: int, call: Call) -> Iterator[int]:
        """Which rows are made of a record of a source, in any of the parts."""
        each = [places_of(part, source, number, call) for part in self.parts]
        return each[0] if len(each) == 1 else iter(sorted(set(chain(*each))))

    def leaves_out(self, source: str, number: int, call: Call) -> bool:
        """Whether a record of a source is excluded in all parts that have the source."""
        having = [part for part in self.parts if source in sizes_of(part)]
        return all(leaves_out(part, source, number, call) for part in having)

    def sizes_of(self) -> dict[str, int]:
        """How many records the sources of all parts have."""
        sizes: dict[str, int] = {}
        for part in self.parts:
            for name, size in sizes_of(part).items():
                sizes[name] = max(size, sizes.get(name, 0))
        return sizes

    def read_up_to(self, call: Call, record: int, first: int = 0) -> dict[str, dict[str, Any]]:
        """What has been read of each source of a mixture below, up to a record of the epoch."""
        read = getattr(self.parts[0], "read_up_to", None)
        if read is None or len(self.parts) > 1 or self.traits.is_last:
            return {}
        found: dict[str, dict[str, Any]] = read(call, record, first)
        return found

    def as_it_was(self) -> Step | None:
        """The same as it was in an earlier format; None where there was none."""
        older = [as_it_was(part) for part in self.parts]
        if not any(older):
            return None
        return self.of_parts([o or p for o, p in zip(older, self.parts, strict=True)])

    def dealt(self, num_shards: int) -> Step:
        """The same in an order of which each shard has the proportions of the whole, where parts
        may come in other proportions at the start than at the end; else the same."""
        deal = getattr(self.parts[0], "dealt", None)
        # Records of several parts belong together; rows that are not one for each record come last.
        if deal is None or len(self.parts) > 1 or self.traits.is_last:
            return self
        part = deal(num_shards)
        return self if part is self.parts[0] else self.of_parts([part])

    def of_parts(self, parts: Sequence[Records]) -> Step:
        """The same of other parts with the same traits."""
        step = copy.copy(self)
        step.parts = tuple(parts)
        return step

    def samples(self, indices: NDArray[np.int64], call: Call) -> list[Any]:
        """One sample for each index; `LEFT_OUT` where the record is left out."""
        raise NotImplementedError

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """The samples, stacked."""
        return self.stacked(self.samples(indices, call), indices, call)

    def stacked(
        self, samples: Sequence[Any], indices: NDArray[np.int64], call: Call
    ) -> Columns | None:
        """Columns of the samples that are there; None where none is."""
        there = [i for i, sample in enumerate(samples) if sample is not LEFT_OUT]
        if not there:
            return None
        return make_columns(
            [samples[i] for i in there],
            lambda i: self.name_in(int(indices[there[i]]), call),
            None,
        )

    def describe(self) -> dict[str, Any]:
        """What the parts say, each field by itself: where one differs, it alone is named."""
        labels = self.labels()
        return {
            f"{label}.{field}": value
            for label, part in zip(labels, self.parts, strict=True)
            for field, value in {
                "source": part.kind, "size": size_of(part), **part.describe()
            }.items()
        }  # fmt: skip

    def labels(self) -> list[str]:
        """What the parts are called in a description."""
        return ["of"] if len(self.parts) == 1 else [*map(str, range(len(self.parts)))]


def size_of(records: Records) -> int:
    """The number of records, those included that a filter leaves out."""
    size = getattr(records, "epoch_size", None)
    return len(records) if size is None else int(size)


def size_in(records: Records, epoch: int) -> int:
    """The number of records of an epoch: those of mixtures of shards may differ in size."""
    if not hasattr(records, "rows") or traits_of(records).walks:
        return size_of(records)
    num: int = records.rows(epoch, 1)
    return num


def as_it_was(records: Records) -> Records | None:
    """Records as they were in an earlier format; None where there was none."""
    older: Callable[[], Records | None] | None = getattr(records, "as_it_was", None)
    return None if older is None else older()


def name_in(records: Records, index: int, call: Call) -> str:
    """What an error message calls a record in the epoch of a call: records whose order, or whose
    part, depends on the epoch say it so."""
    name: Callable[[int, Call], str] | None = getattr(records, "name_in", None)
    return records.name(index) if name is None else name(index, call)


def origins(records: Records, indices: NDArray[np.int64], call: Call) -> list[tuple[Record, ...]]:
    """The records that some rows of a call's epoch are made of, from numbers alone: nothing is
    read. A row of several sources (`zip`) has one of each."""
    own: Callable[..., list[tuple[Record, ...]]] | None = getattr(records, "origins", None)
    if own is not None:
        return own(indices, call)
    return [(Record("", i, call.epoch, records.name(i)),) for i in indices.tolist()]


def read_origins(records: Any, indices: NDArray[np.int64], call: Call) -> list[tuple[Any, ...]]:
    """The records of the rows that some records of a call's epoch give: they are read, to know
    which are left out, or how long they are."""
    own: Callable[..., list[tuple[Any, ...]]] | None = getattr(records, "read_origins", None)
    if own is not None:
        return own(indices, call)
    made = zip(origins(records, indices, call), samples_of(records, indices, call), strict=True)
    return [row for row, sample in made if sample is not LEFT_OUT]


def places_of(records: Records, source: str, number: int, call: Call) -> Iterator[int]:
    """Which records of a call's epoch are made of a record of a source, by the names that `origins`
    gives: its inverse. In their order; nothing is read."""
    own: Callable[..., Iterator[int]] | None = getattr(records, "places_of", None)
    if own is not None:
        return own(source, number, call)
    return iter([number] if not source and 0 <= number < size_of(records) else [])


def leaves_out(records: Records, source: str, number: int, call: Call) -> bool:
    """Whether a record of a source is excluded, from now on or from the start."""
    own: Callable[..., bool] | None = getattr(records, "leaves_out", None)
    return own is not None and own(source, number, call)


def has_inverse(records: Any) -> bool:
    """Whether `places_of` reckons where a record is. DALI's shuffles look at all records."""
    plan = getattr(records, "_plan", None)
    walks = plan is not None and plan.order == "dali" and not plan.in_sequence
    return not walks and all(map(has_inverse, _below(records)))


def is_same_each_epoch(records: Any) -> bool:
    """Whether each epoch has the same records in the same places: it is neither shuffled nor
    mixed."""
    plan = getattr(records, "_plan", None)
    mixes = hasattr(getattr(records, "route", None), "counts_of")
    is_in_sequence = plan is None or plan.in_sequence
    return is_in_sequence and not mixes and all(map(is_same_each_epoch, _below(records)))


def _below(records: Any) -> tuple[Any, ...]:
    return (*getattr(records, "parts", ()), *filter(None, [getattr(records, "records", None)]))


def sizes_of(records: Records) -> dict[str, int]:
    """How many records each source has, by the names that `origins` gives; those that are excluded
    count, too."""
    own: Callable[[], dict[str, int]] | None = getattr(records, "sizes_of", None)
    return {"": size_of(records)} if own is None else own()


def apply(step: Callable[[Records], Records], records: Records) -> Records:
    """A step that makes one record of one, put on the records that were there first."""
    applied: Callable[..., Records] | None = getattr(records, "applied", None)
    return step(records) if applied is None else applied(step)


def function(name: str, fn: Any) -> Any:
    """A function of the user's, else a ConfigError."""
    if not callable(fn):
        raise ConfigError(f"{name} is {fn!r}, expected a function")
    return fn


def faults_of(records: Any) -> Iterator[Faults]:
    """What has noted defective records: of a source, and of all that it is made of."""
    if isinstance(elsewhere := getattr(records, "_elsewhere", None), Faults):
        # A source, which is told of those in other processes.
        yield elsewhere
        yield from faults_of(records.records)
    elif isinstance(own := getattr(records, "_faults", None), Faults):
        yield own
    for part in getattr(records, "parts", ()):
        yield from faults_of(part)
