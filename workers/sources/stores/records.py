"""What a store of records is: what it must have, and what a step asks of it beside that.

A step (`steps/`) asks of what it stands on, a store, a source or another step, what each row is
made of, which bytes of objects it is read from, and where a record comes. Most stores know no more
than the numbers of their records; so the answers that follow from these alone stand here, and a
class that knows more has a method of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from feeder.workers.public import public
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.stores.reading import Columns, Record
from feeder.workers.stream.batch import Call


class _LeftOut:
    """Stands where a sample would be that was left out."""

    # One object, so that it is told by identity; unpickled it is the same one.
    def __reduce__(self) -> str:
        return "LEFT_OUT"


LEFT_OUT = _LeftOut()


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
    """Whether they are read sample by sample if others come between them: samples may have to be
    made alike before they are rows of a column, or some may be missing."""
    walks: bool = False
    """Whether record n is found by reading those before it, so that only rows in order are had."""
    depth: int = 0
    """How many functions of the user's follow one another."""


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


@public("feeder.sources")
class Records:
    """A fixed number of records, read in any order, by any thread.

    A store must have `kind`, `skipped`, a length, `read`, `name` and `describe`; it need not be a
    subclass.
    """

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """What the user calls them, such as "caffe_lmdb"."""

        @property
        def skipped(self) -> int:
            """Reads of defective records that were left out."""

        def __len__(self) -> int: ...

        def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
            """One row per index, in their order; as a tuple, or a mapping by column name. None if
            every record of the call is defective and left out.

            The call is for random draws, `call.rng_for(index)`, which then belong to the record.

            Raises:
                RecordError: a record cannot be read.
            """

        def name(self, index: int) -> str:
            """What an error message calls the record, such as its path and key."""

        def describe(self) -> dict[str, Any]:
            """What, beside the number of records, must be equal for a position to fit."""

    # ---- what a step asks beside that

    @property
    def may_skip(self) -> bool:
        """Whether a defective record may be left out."""
        return True

    @property
    def by_sample(self) -> bool:
        """Whether a row is made of a sample, and not of a part of a column."""
        return False

    @property
    def traits(self) -> Traits:
        """What a step has to know of them."""
        may_skip = self.may_skip
        return Traits(may_skip=may_skip, by_sample=may_skip or self.by_sample)

    @property
    def epoch_size(self) -> int:
        """The number of records, those included that a filter leaves out."""
        return len(self)

    def samples(self, indices: NDArray[np.int64], call: Call) -> list[Any]:
        """One sample for each index, in their order; `LEFT_OUT` if the record is left out. What is
        made sample by sample is given before it is stacked, and shapes may differ then; otherwise
        a sample is a row of the columns."""
        if not self.traits.may_skip:
            columns = self.read(indices, call)
            assert columns is not None
            return split(columns)
        # From the columns of several records it cannot be told which of them were left out.
        each = (self.read(indices[i : i + 1], call) for i in range(len(indices)))
        return [LEFT_OUT if columns is None else split(columns)[0] for columns in each]

    def touches(self, indices: NDArray[np.int64], call: Call) -> Iterator[Touch]:
        """Which bytes of objects of stores are read for records; nothing if that is not known
        before they are read."""
        return iter(())

    def name_in(self, index: int, call: Call) -> str:
        """What an error message calls a record in the epoch of a call: records whose order, or
        whose part, depends on the epoch say it so."""
        return self.name(index)

    def origins(self, indices: NDArray[np.int64], call: Call) -> list[tuple[Record, ...]]:
        """The records that some rows of a call's epoch are made of, from numbers alone: nothing is
        read. A row of several sources (`zip`) has one of each."""
        return [(Record("", i, call.epoch, self.name(i)),) for i in indices.tolist()]

    def read_origins(self, indices: NDArray[np.int64], call: Call) -> list[tuple[Any, ...]]:
        """The records of the rows that some records of a call's epoch give: they are read, to know
        which are left out, or how long they are."""
        made = zip(self.origins(indices, call), self.samples(indices, call), strict=True)
        return [row for row, sample in made if sample is not LEFT_OUT]

    def places_of(self, source: str, number: int, call: Call) -> Iterator[int]:
        """Which records of a call's epoch are made of a record of a source, by the names that
        `origins` gives: its inverse. In their order; nothing is read."""
        return iter([number] if not source and 0 <= number < self.epoch_size else [])

    def leaves_out(self, source: str, number: int, call: Call) -> bool:
        """Whether a record of a source is excluded, from now on or from the start."""
        return False

    def sizes_of(self) -> dict[str, int]:
        """How many records each source has, by the names that `origins` gives; those that are
        excluded count, too."""
        return {"": self.epoch_size}

    def read_up_to(self, call: Call, record: int, first: int = 0) -> dict[str, dict[str, Any]]:
        """What has been read of each source of a mixture, up to a record of the call's epoch, of a
        shard that begins with record `first`; empty if that cannot be told."""
        return {}

    def as_it_was(self) -> Records | None:
        """The same as it was in an earlier format, for positions of then; None if there was
        none."""
        return None

    def dealt(self, num_shards: int) -> Records:
        """The same in an order of which each shard has the proportions of the whole, if these
        change in the course of an epoch; otherwise the same."""
        return self

    def applied(self, step: Callable[[Records], Records]) -> Records:
        """A step that makes one record of one, put on the records that were there first."""
        return step(self)


class _Given(Records):
    """A store that is no subclass. Never changes."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_store":
            raise AttributeError(name)
        return getattr(self._store, name)


def as_records(given: Any) -> Records:
    """A store as steps ask it."""
    return given if isinstance(given, Records) else _Given(given)
