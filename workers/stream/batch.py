"""The nouns of the stream: a call, a batch, and the cut after it.

A batch carries the cut after it, so that whoever has a batch has the position, in whichever thread
or process, and nobody has to ask the feed, which is ahead by then. A cut is made of a batch's place
only if somebody asks: most batches are never resumed from.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from feeder.workers.errors import FeedError
from feeder.workers.public import public
from feeder.workers.stream.buffers import Slot
from feeder.workers.stream.chunks import arrow_chunks
from feeder.workers.stream.memory import POOL
from feeder.workers.stream.position import Cut, LazyPosition

# The second word of the Philox key keeps the families of draws apart.
_DRAWS_OF_CALL = 1
_DRAWS_OF_RECORD = 2
_DRAWS_OF_BATCH = 3


class PlaceOfCall(Protocol):
    """The memory of a batch that a call's rows belong to. Owner: the thread that makes the call."""

    @property
    def out(self) -> dict[str, NDArray[Any]]:
        """An array for each column, by name."""

    def find(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any] | None:
        """A column that is like this and was not given yet; None where there is none."""


class _CallFields(NamedTuple):
    """The fields of `Call`, which adds a cache of its `rng`: a named tuple by itself has none."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    epoch: int
    worker_id: int
    batch_size: int
    seed: int


@public("feeder")
class Call(_CallFields):
    """What a pure fetch function `fetch(call)` is given; its result depends on nothing else.

    `index` counts calls from 0 in each epoch, `worker_id` is the index modulo the number of
    workers, `batch_size` is a hint, and `seed` is the feed's.

    With `rows_per_call`, `out` and `empty` give memory of the batch that the call's rows belong to:
    what is written there is not copied. It is the call's until the call returns.
    """

    # Set for as long as the fetch function runs (`placement.py`).
    _place: PlaceOfCall | None = None

    @property
    def out(self) -> dict[str, NDArray[Any]] | None:
        """An array of `rows_per_call` rows for each column, by name, to be filled and returned, or
        their first rows where an epoch ends. None without `rows_per_call`, before the first rows
        have told what columns there are, and where the place of the rows is not known."""
        return None if self._place is None else self._place.out

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """An array with anything in it, as `numpy.empty` makes one: a column of `out` that is like
        this, if there is one that was not given yet; else memory that is used again. In a process
        of an executor it lies where the rows are sent from, so that they are not copied there."""
        size = (int(shape),) if isinstance(shape, int | np.integer) else tuple(shape)
        found = None if self._place is None else self._place.find(size, dtype)
        return POOL.empty(size, dtype) if found is None else found

    def __reduce__(self) -> Any:
        # What it writes to is of one process, and its generator follows from its fields.
        return Call, tuple(self)

    @cached_property
    def rng(self) -> np.random.Generator:
        """The random numbers of this call: one generator, keyed by (seed, epoch, index).

        Philox is counter-based (Salmon et al., SC 2011): the key and the high words of the
        counter name the stream of draws, so nothing has to be saved to draw it again.
        """
        return _generator(self.seed, _DRAWS_OF_CALL, self.epoch, self.index)

    def rng_for(self, record: int | str | bytes) -> np.random.Generator:
        """A new generator keyed by (seed, epoch, record): its draws belong to the record,
        whichever call reads it. `record` is a whole number from 0 to 2**64 - 1, or a name."""
        # A name becomes a number by a hash that never changes: the draws of a record are part of
        # the stream.
        if isinstance(record, str):
            record = record.encode()
        if isinstance(record, bytes):
            record = xxhash.xxh3_64_intdigest(record)
        return _generator(self.seed, _DRAWS_OF_RECORD, self.epoch, int(record))


def rng_of_batch(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random numbers of a batch, by its number in the order of the epoch: whoever reads it, on
    whichever device, draws the same."""
    return _generator(seed, _DRAWS_OF_BATCH, epoch, index)


def _generator(seed: int, family: int, epoch: int, item: int) -> np.random.Generator:
    # The seed in the key and (epoch, item) in the high words of the counter: streams of draws do
    # not overlap, and each may draw 2**128 times.
    key = np.array([seed, family], dtype=np.uint64)
    counter = np.array([0, 0, epoch, item], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Standing(Protocol):
    """Where the stream stands after a batch."""

    def cut(self) -> Cut:
        """The same as the user reads it."""


class EpochOfBatch(Protocol):
    """The epoch of a batch, as its reader knows it."""

    def ends_with(self, batch: Batch) -> bool:
        """Whether the batch is its last."""

    def records_of(self, batch: Batch) -> tuple[tuple[Any, ...], ...]:
        """The records that the rows of the batch were made of."""


# What `x, y = batch` is to the interpreter: else it would get the names of the columns.
_UNPACKING = {dis.opmap["UNPACK_SEQUENCE"], dis.opmap["UNPACK_EX"]}


@public("feeder")
class Batch(Mapping[str, NDArray[Any]]):
    """Exactly `batch_size` rows: a mapping from column name to array.

    The arrays are read-only unless the feed was made with `writable=True`. Their memory goes
    back to the feed when the last array over it is gone, so they may be kept for as long as they
    are wanted. Written once, by the thread that merges; then the user's.
    """

    # A plain class: it is made once per batch, and a frozen dataclass takes ten times as long.
    __slots__ = (
        "__weakref__",
        "_is_copied",
        "_names",
        "_slot",
        "columns",
        "epoch",
        "held_bytes",
        "index",
        "kept_rows",
        "of",
        "place",
        "rows",
        "step",
        "turn",
    )  # fmt: skip

    columns: tuple[NDArray[Any], ...]
    """What `arrays` returns."""
    epoch: int
    """The epoch that the batch belongs to."""
    index: int
    """Its number in the epoch, from 0."""
    step: int
    """Its number in the stream, from 0, counted through epochs."""
    rows: int
    """Its real rows; fewer than the arrays' with `last_batch="pad"`."""
    place: LazyPosition
    """Where the stream stands after it; `cut` reads it."""
    held_bytes: int
    """Bytes that its rows count for in the bound until it is handed out."""
    kept_rows: int
    """Rows of a chunk that is kept for the cut before this batch, until this is handed out."""
    _is_copied: bool
    """Whether rows were copied into its memory, which caches may still hold."""
    of: EpochOfBatch | None
    """Its epoch, as whoever hands it out knows it; None before."""
    turn: int
    """Its number among what this run deals out to its queues; negative where it is dropped."""

    def __init__(
        self,
        names: tuple[str, ...] | Mapping[str, Any],
        columns: tuple[NDArray[Any], ...] | None = None,
        place: Any = None,
        epoch: int = -1,
        index: int = -1,
        step: int = -1,
        rows: int = -1,
        *,
        slot: Slot | None = None,
    ) -> None:
        if columns is None:
            # Libraries that move data to a device make a new mapping of the same type.
            moved: Any = names
            names, columns = tuple(moved), tuple(moved.values())
        self._names: tuple[str, ...] = names  # type: ignore[assignment]  # a tuple by now
        # Internal: the slot that the reader of this batch gives back (`Slots.reserved`). It is
        # None where the memory comes back by itself, when the last array over it is gone.
        self._slot = slot
        self.columns = columns
        self.of = None
        self.place = place
        self.epoch = epoch
        self.index = index
        self.step = step
        self.rows = rows
        self.held_bytes = 0
        self.kept_rows = 0
        self._is_copied = False
        self.turn = step

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """The columns in the order of the feed's input names: ``x, y = batch.arrays()``."""
        return self.columns

    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]:
        """The batch for libraries that read Arrow's tables, over its memory; needs pyarrow."""
        return self._as_table().__arrow_c_array__(requested_schema)  # type: ignore[no-any-return]

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """The same as a stream of one record batch: ``polars.from_arrow(batch)``."""
        return self._as_table().__arrow_c_stream__(requested_schema)

    def _as_table(self) -> Any:
        return arrow_chunks().to_record_batch(dict(zip(self._names, self.columns, strict=True)))

    @property
    def cut(self) -> Cut:
        """The place in the stream just after this batch."""
        if self.place is None:
            raise FeedError(
                "this batch was made of a mapping, as libraries do that move data to a device, and "
                "has no place in a stream: ask the batch that the feed gave"
            )
        return self.place.cut()

    @property
    def last_of_epoch(self) -> bool:
        """Whether no other batch of its epoch comes out of the feed or consumer that gave it.
        Where that is not known yet, the next batch is waited for; for the thread that reads."""
        if self.of is None:
            raise FeedError(
                "whether this batch is the last of its epoch is known to the feed or consumer that "
                "gave it: ask the batch before it is copied, pickled or moved"
            )
        return self.of.ends_with(self)

    def records(self) -> tuple[tuple[Any, ...], ...]:
        """The records that each real row was made of: for each a tuple of `sources.Record`, or of
        `sources.Piece` if rows are packed. Behind a filter, `on_error="skip"` and `pack` the calls
        of the batch are read again, in process alone; otherwise nothing is read.

        Raises `ConfigError` as `feed.records` does.
        """
        if self.of is None:
            raise FeedError(
                "the records of a batch are known to the feed or consumer that gave it: ask the "
                "batch before it is copied, pickled or moved"
            )
        # A batch that was repeated to fill a round has no real row, and is none of the stream's.
        return self.of.records_of(self) if self.rows else ()

    def with_arrays(self, arrays: tuple[Any, ...], names: tuple[str, ...] = ()) -> Batch:
        """The same batch in other memory, or of other columns; it counts for as much in the
        bound."""
        numbers = self.epoch, self.index, self.step, self.rows
        batch = Batch(names or self._names, arrays, self.place, *numbers)
        # The slot is not taken over: its memory was given back when the copy was done.
        batch.held_bytes, batch.kept_rows = self.held_bytes, self.kept_rows
        batch.turn = self.turn
        return batch

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            return self.columns[self._names.index(name)]
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        caller = sys._getframe(1)
        if caller.f_code.co_code[caller.f_lasti] in _UNPACKING:
            names = ", ".join(self._names)
            raise TypeError(
                f"a batch is a mapping, and unpacking it would give the names of its columns; "
                f"write {names} = batch.arrays()"
            )
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{name}: {array.dtype}{list(array.shape)}"
            for name, array in zip(self._names, self.columns, strict=True)
        )
        return f"<Batch {self.step} (epoch {self.epoch}, index {self.index}) {columns}>"

    # Mapping compares by items, which is ambiguous for arrays; two batches are the same batch
    # or they are not.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> Any:
        # Its position goes as a token: what encodes it may be bound to a fetch function.
        cut = self.place and self.cut
        cut = cut and replace(cut, encode=_Written(cut.token()))
        numbers = self.epoch, self.index, self.step, self.rows
        return _restored, (self._names, self.columns, cut, *numbers)


class _Written:
    """The token of a position that was written before."""

    def __init__(self, token: bytes) -> None:
        self._token = token

    def __call__(self, cut: Cut) -> bytes:
        return self._token


class _FixedPlace:
    """The position of a batch that came out of a pickle."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut

    def cut(self) -> Cut:
        """The place as the user is given it."""
        return self._cut


def _restored(
    names: tuple[str, ...], columns: tuple[Any, ...], cut: Cut | None, *numbers: int
) -> Batch:
    """A batch out of a pickle."""
    return Batch(names, columns, cut and _FixedPlace(cut), *numbers)
