"""What all steps stand on: records sample by sample, in the order they were asked for.

A step is records made of records: it knows its parts by numbers, keeps nothing between two calls,
and so can be read anywhere and by any thread. A record that is left out holds its place
(`LEFT_OUT`) until the columns are made, as the numbers behind it would shift otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.collate import make_columns
from feeder.workers.sources.stores.reading import Columns, Faults, Record
from feeder.workers.sources.stores.records import LEFT_OUT, Records, Traits
from feeder.workers.stream.batch import Call


def is_far(records: Any) -> bool:
    """Whether some of what records are made of lies in stores."""
    parts = (*getattr(records, "parts", ()), *filter(None, [getattr(records, "records", None)]))
    return bool(getattr(records, "has_objects", False)) or any(map(is_far, parts))


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


class Step(Records):
    """Records that are made of those of one or several parts.

    A step never changes; what it stands on has its own locks, so any thread reads.
    """

    kind = "step"
    traits = Traits()

    def __init__(self, *parts: Records) -> None:
        self.parts = parts
        each = [part.traits for part in parts]
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
        return self.parts[0].name_in(index, call)

    def origins(self, indices: NDArray[np.int64], call: Call) -> list[tuple[Record, ...]]:
        """The records of all parts that each row is made of."""
        each = [part.origins(indices, call) for part in self.parts]
        return [tuple(chain(*row)) for row in zip(*each, strict=True)]

    def places_of(self, source: str, number: int, call: Call) -> Iterator[int]:
        """Which rows are made of a record of a source, in any of the parts."""
        each = [part.places_of(source, number, call) for part in self.parts]
        return each[0] if len(each) == 1 else iter(sorted(set(chain(*each))))

    def leaves_out(self, source: str, number: int, call: Call) -> bool:
        """Whether a record of a source is excluded in all parts that have the source."""
        having = [part for part in self.parts if source in part.sizes_of()]
        return all(part.leaves_out(source, number, call) for part in having)

    def sizes_of(self) -> dict[str, int]:
        """How many records the sources of all parts have."""
        sizes: dict[str, int] = {}
        for part in self.parts:
            for name, size in part.sizes_of().items():
                sizes[name] = max(size, sizes.get(name, 0))
        return sizes

    def read_up_to(self, call: Call, record: int, first: int = 0) -> dict[str, dict[str, Any]]:
        """What has been read of each source of a mixture below, up to a record of the epoch."""
        is_same = len(self.parts) == 1 and not self.traits.is_last
        return self.parts[0].read_up_to(call, record, first) if is_same else {}

    def as_it_was(self) -> Step | None:
        """The same as it was in an earlier format; None if there was none."""
        older = [part.as_it_was() for part in self.parts]
        if not any(older):
            return None
        return self.of_parts([o or p for o, p in zip(older, self.parts, strict=True)])

    def dealt(self, num_shards: int) -> Step:
        """The same in an order of which each shard has the proportions of the whole, where parts
        may come in other proportions at the start than at the end; otherwise the same."""
        # Records of several parts belong together; rows that are not one for each record come last.
        if len(self.parts) > 1 or self.traits.is_last:
            return self
        part = self.parts[0].dealt(num_shards)
        return self if part is self.parts[0] else self.of_parts([part])

    def of_parts(self, parts: Sequence[Records]) -> Step:
        """The same of other parts with the same traits."""
        step = copy.copy(self)
        step.parts = tuple(parts)
        return step

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """The samples, stacked."""
        return self.stacked(self.samples(indices, call), indices, call)

    def stacked(
        self, samples: Sequence[Any], indices: NDArray[np.int64], call: Call
    ) -> Columns | None:
        """Columns of the samples that are there; None if none is."""
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
                "source": part.kind, "size": part.epoch_size, **part.describe()
            }.items()
        }  # fmt: skip

    def labels(self) -> list[str]:
        """What the parts are called in a description."""
        return ["of"] if len(self.parts) == 1 else [*map(str, range(len(self.parts)))]


def size_in(records: Records, epoch: int) -> int:
    """The number of records of an epoch: those of mixtures of shards may differ in size."""
    if not hasattr(records, "rows") or records.traits.walks:
        return records.epoch_size
    num: int = records.rows(epoch, 1)
    return num


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
