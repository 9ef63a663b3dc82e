"""Steps that say which record of which part comes where: take, skip, repeat, concat, and mixtures.

Such a step is one function, a *route*: record numbers → parts, epochs of the parts, and positions
in them. Reading, and putting rows in their places, is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import FeedError
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.orders.edited import Selection
from feeder.workers.sources.steps.rows import (
    Step,
    is_same_each_epoch,
    part_of,
)
from feeder.workers.sources.stores.reading import Columns, Record, RecordError
from feeder.workers.sources.stores.records import Records
from feeder.workers.stream.batch import Call

Numbers = NDArray[np.int64]


class Places(NamedTuple):
    """Where records are found; three arrays, an entry for each record."""

    parts: Numbers
    """The number of the part."""
    epochs: Numbers
    """The epoch of the part."""
    positions: Numbers
    """The position in that epoch."""


class Route(Protocol):
    """Record numbers → places. Picklable, and the same for the same call, whoever asks."""

    @property
    def size(self) -> int:
        """Number of records."""

    def __call__(self, indices: Numbers, call: Call) -> Places:
        """Where records of the epoch of the call are found."""

    def passes(self, part: int, epoch: int) -> range:
        """The epochs of a part that an epoch has records of."""

    def find(self, part: int, in_pass: int, position: int, call: Call) -> int | None:
        """Which record of the epoch of the call is that of a part, by its place: the inverse. None
        if it is in another epoch, or in none."""

    def resized(self, sizes: Sequence[int]) -> Route:
        """The same for parts that have so many records."""

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""


class Routed(Step):
    """Records of the parts, in the order that a route says."""

    def __init__(
        self, kind: str, parts: Sequence[Records], route: Route, tags: Sequence[str | None]
    ) -> None:
        super().__init__(*parts)
        self.kind = kind
        self.route = route
        self.tags = tuple(tags)
        """What the draws and shuffles of a part are keyed by, beside the seed; None for the
        seed's own."""

    def __len__(self) -> int:
        return self.route.size

    def applied(self, step: Callable[[Records], Records]) -> Routed:
        """The same with a step below it."""
        return Routed(self.kind, [part.applied(step) for part in self.parts], self.route, self.tags)

    def read_up_to(self, call: Call, record: int, first: int = 0) -> dict[str, dict[str, Any]]:
        """What has been read of each source of a mixture, up to a record of the epoch."""
        counts = getattr(self.route, "counts_of", None)
        if counts is None:
            return {}
        rows = counts(first, record, call.epoch, call.seed).values()
        return {
            str(tag): {"rows": num, "tokens": None, "skipped": part.skipped}
            for tag, num, part in zip(self.tags, rows, self.parts, strict=True)
        }

    def as_it_was(self) -> Routed | None:
        """The same as it was in an earlier format; None if there was none."""
        parts = [part.as_it_was() for part in self.parts]
        own: Route | None = getattr(self.route, "older", None)
        if own is None and not any(parts):
            return None
        return self.of_parts(
            [o or p for o, p in zip(parts, self.parts, strict=True)], own or self.route
        )

    def dealt(self, num_shards: int) -> Routed:
        """The same in an order of which each shard has the proportions of the whole, where these
        change in the course of an epoch; otherwise the same."""
        deal: Callable[[int], Route] | None = getattr(self.route, "dealt", None)
        route = self.route if deal is None else deal(num_shards)
        return self if route is self.route else Routed(self.kind, self.parts, route, self.tags)

    def of_parts(self, parts: Sequence[Records], route: Route | None = None) -> Routed:
        """The same of other parts, which may have other sizes."""
        route = (route or self.route).resized([part.epoch_size for part in parts])
        return Routed(self.kind, parts, route, self.tags)

    def name(self, index: int) -> str:
        """The record's number: which record it is depends on the epoch."""
        return f"{self.kind} record {index}"

    def name_in(self, index: int, call: Call) -> str:
        """The part, and what that calls the record."""
        ((number, part, _, positions, own),) = self._groups(np.array([index]), call)
        return self._of(number) + part.name_in(int(positions[0]), own)

    def _of(self, number: int) -> str:
        """What errors of a part begin with, where there are others or it has a name."""
        named = None not in self.tags
        if not named and len(self.parts) == 1:
            return ""
        return f"{self.kind}: {self._label(number)}: "

    def _label(self, number: int) -> str:
        return f"source {number if None in self.tags else self.tags[number]!r}"

    @contextmanager
    def _named(self, number: int) -> Iterator[None]:
        """Errors say which part they are of."""
        try:
            yield
        except RecordError as error:
            # The same error, with the place that it comes from.
            error.args = (f"{self._of(number)}{error}",)
            raise
        except FeedError:
            raise
        except Exception as error:
            if of := self._of(number):
                error.add_note(f"in {of.removesuffix(': ')}")
            raise

    def _groups(
        self, indices: Numbers, call: Call
    ) -> Iterator[tuple[int, Records, Any, Numbers, Call]]:
        """Each part that is asked: its number, its rows in the whole, positions, and its call."""
        places = self.route(indices, call)
        keys = np.stack((places.parts, places.epochs))
        if (keys[:, :1] == keys).all():
            rows: Any = slice(None)
            groups = [(rows, int(keys[0, 0]), int(keys[1, 0]))]
        else:
            unique, inverse = np.unique(keys, axis=1, return_inverse=True)
            groups = [
                (np.flatnonzero(inverse.reshape(-1) == i), int(part), int(epoch))
                for i, (part, epoch) in enumerate(unique.T.tolist())
            ]
        for rows, part, epoch in groups:
            own = self._own(part, call._replace(epoch=epoch))
            yield part, self.parts[part], rows, places.positions[rows], own

    def _own(self, part: int, call: Call) -> Call:
        """The call as a part sees it."""
        tag = self.tags[part]
        return call if tag is None else part_of(call, tag)

    def touches(self, indices: Numbers, call: Call) -> Iterator[Touch]:
        """What the records of each part read."""
        for _, part, _, positions, own in self._groups(indices, call):
            yield from part.touches(positions, own)

    def read(self, indices: Numbers, call: Call) -> Columns | None:
        """Whole columns of each part, put into their places."""
        groups = list(self._groups(indices, call))
        if len(groups) == 1:
            number, part, _, positions, own = groups[0]
            with self._named(number):
                return part.read(positions, own)
        # Which rows are missing is known sample by sample only; and a sample that has yet to be
        # made alike to the others is no row of a column.
        if self.traits.by_sample:
            return super().read(indices, call)
        whole: Any = None
        for number, part, rows, positions, own in groups:
            with self._named(number):
                columns = part.read(positions, own)
                assert columns is not None
                whole = _scatter(whole, columns, rows, len(indices), self._label(groups[0][0]))
        return tuple(whole.values()) if 0 in whole else dict(whole)

    def samples(self, indices: Numbers, call: Call) -> list[Any]:
        """The samples of each part, put into their places."""
        whole: list[Any] = [None] * len(indices)
        for number, part, rows, positions, own in self._groups(indices, call):
            places = range(len(indices)) if isinstance(rows, slice) else rows.tolist()
            with self._named(number):
                for row, sample in zip(places, part.samples(positions, own), strict=True):
                    whole[row] = sample
        return whole

    def origins(self, indices: Numbers, call: Call) -> list[tuple[Record, ...]]:
        """The records of the parts, in their places."""
        whole: list[tuple[Record, ...]] = [()] * len(indices)
        for number, part, rows, positions, own in self._groups(indices, call):
            places = range(len(indices)) if isinstance(rows, slice) else rows.tolist()
            for row, found in zip(places, part.origins(positions, own), strict=True):
                whole[row] = tuple(
                    one._replace(source=self._outside(number, one.source)) for one in found
                )
        return whole

    def places_of(self, source: str, number: int, call: Call) -> Iterator[int]:
        """Which records are those of a part's source, in the order in which they come of it."""
        for part, records in enumerate(self.parts):
            if (below := self._inside(part, source)) is None:
                continue
            for in_pass in self.route.passes(part, call.epoch):
                own = self._own(part, call._replace(epoch=in_pass))
                for position in records.places_of(below, number, own):
                    found = self.route.find(part, in_pass, position, call)
                    if found is not None:
                        yield found

    def leaves_out(self, source: str, number: int, call: Call) -> bool:
        """Whether a record of a source is excluded in all epochs. What is excluded behind a shuffle
        or a mixture is others in each."""
        for part, records in enumerate(self.parts):
            if (below := self._inside(part, source)) is None:
                continue
            if records.leaves_out(below, number, self._own(part, call)):
                return True
            if isinstance(self.route, Excluding) and is_same_each_epoch(records):
                places = np.array([*records.places_of(below, number, call)], np.int64)
                return not self.route.selection.holds(places).any()
        return False

    def _name_of(self, part: int) -> str:
        """What a part is called; the only one has no name if it is none of a mixture."""
        if None not in self.tags:
            return str(self.tags[part])
        return str(part) if len(self.parts) > 1 else ""

    def _outside(self, part: int, source: str) -> str:
        """What a source of a part is called."""
        return "/".join(filter(None, (self._name_of(part), source)))

    def _inside(self, part: int, source: str) -> str | None:
        """What a part calls a source; None if it is none of the part's."""
        name = self._name_of(part)
        if not name or source == name:
            return source.removeprefix(name)
        return source.removeprefix(f"{name}/") if source.startswith(f"{name}/") else None

    def sizes_of(self) -> dict[str, int]:
        """How many records the sources of all parts have."""
        return {
            self._outside(part, below): size
            for part, records in enumerate(self.parts)
            for below, size in records.sizes_of().items()
        }

    def labels(self) -> list[str]:
        """The tags of the parts, where each has one."""
        return super().labels() if None in self.tags else [*map(str, self.tags)]

    def describe(self) -> dict[str, Any]:
        """The parts and the route."""
        return {**super().describe(), **self.route.describe()}


def _scatter(
    whole: dict[Any, NDArray[Any]] | None, columns: Columns, rows: Any, size: int, first: str
) -> dict[Any, NDArray[Any]]:
    """Put the columns of a part where they belong, in arrays of so many rows."""
    named = dict(columns) if isinstance(columns, Mapping) else dict(enumerate(columns))
    if whole is None:
        whole = {key: np.empty((size, *c.shape[1:]), c.dtype) for key, c in named.items()}
    if whole.keys() != named.keys():
        raise RecordError(
            f"has the columns {list(named)}, {first} has {list(whole)}: sources that come together "
            "must have the same ones"
        )
    for key, column in named.items():
        target = whole[key]
        if column.dtype != target.dtype or column.shape[1:] != target.shape[1:]:
            raise RecordError(
                f"column {key!r} is {column.dtype}{list(column.shape[1:])}, that of {first} is "
                f"{target.dtype}{list(target.shape[1:])}: sources that come together must have the "
                "same columns"
            )
        target[rows] = column
    return whole


# ---- routes


@dataclass(frozen=True, slots=True)
class Stretch:
    """`size` records of one part, from `first` on."""

    first: int
    size: int

    def __call__(self, indices: Numbers, call: Call) -> Places:
        return Places(
            np.zeros_like(indices), np.full_like(indices, call.epoch), self.first + indices
        )

    def passes(self, part: int, epoch: int) -> range:
        return range(epoch, epoch + 1)

    def find(self, part: int, in_pass: int, position: int, call: Call) -> int | None:
        found = position - self.first
        return found if 0 <= found < self.size else None

    def resized(self, sizes: Sequence[int]) -> Stretch:
        return replace(self, size=min(self.size, sizes[0] - self.first))

    def describe(self) -> dict[str, Any]:
        return {"first": self.first}


@dataclass(frozen=True)
class Excluding:
    """The records of one part that are not excluded."""

    selection: Selection

    @property
    def size(self) -> int:
        """Number of records."""
        return len(self.selection)

    def __call__(self, indices: Numbers, call: Call) -> Places:
        epochs = np.full_like(indices, call.epoch)
        return Places(np.zeros_like(indices), epochs, self.selection.at(indices))

    def passes(self, part: int, epoch: int) -> range:
        return range(epoch, epoch + 1)

    def find(self, part: int, in_pass: int, position: int, call: Call) -> int | None:
        records = np.array([position])
        return int(self.selection.ranks(records)[0]) if self.selection.holds(records)[0] else None

    def resized(self, sizes: Sequence[int]) -> Excluding:
        return Excluding(replace(self.selection, size=sizes[0]))

    def describe(self) -> dict[str, Any]:
        return {"excluded": [list(one) for one in self.selection.excluded]}


@dataclass(frozen=True, slots=True)
class Repeats:
    """An epoch is so many epochs of the part."""

    length: int
    times: int

    @property
    def size(self) -> int:
        """Number of records."""
        return self.length * self.times

    def __call__(self, indices: Numbers, call: Call) -> Places:
        passes, positions = np.divmod(indices, self.length)
        return Places(np.zeros_like(indices), passes + call.epoch * self.times, positions)

    def passes(self, part: int, epoch: int) -> range:
        return range(epoch * self.times, (epoch + 1) * self.times)

    def find(self, part: int, in_pass: int, position: int, call: Call) -> int | None:
        return (in_pass - call.epoch * self.times) * self.length + position

    def resized(self, sizes: Sequence[int]) -> Repeats:
        return replace(self, length=sizes[0])

    def describe(self) -> dict[str, Any]:
        return {"times": self.times}


@dataclass(frozen=True, slots=True)
class OneAfterTheOther:
    """All records of a part, then those of the next."""

    ends: tuple[int, ...]
    """The number of records up to the end of each part."""

    @property
    def size(self) -> int:
        """Number of records."""
        return self.ends[-1]

    def __call__(self, indices: Numbers, call: Call) -> Places:
        parts = np.searchsorted(np.array(self.ends), indices, side="right")
        firsts = np.array((0, *self.ends[:-1]))
        return Places(parts, np.full_like(indices, call.epoch), indices - firsts[parts])

    def passes(self, part: int, epoch: int) -> range:
        return range(epoch, epoch + 1)

    def find(self, part: int, in_pass: int, position: int, call: Call) -> int | None:
        return position + (0, *self.ends)[part]

    def resized(self, sizes: Sequence[int]) -> OneAfterTheOther:
        return OneAfterTheOther(tuple(np.cumsum(sizes).tolist()))

    def describe(self) -> dict[str, Any]:
        return {}


def concatenated(parts: Sequence[Records]) -> Routed:
    """All records of a part, then those of the next."""
    ends = tuple(np.cumsum([part.epoch_size for part in parts]).tolist())
    # The first keeps the seed's own draws; else equal records would have equal draws.
    tags = [None, *(str(number) for number in range(1, len(parts)))]
    return Routed("concat", parts, OneAfterTheOther(ends), tags)
