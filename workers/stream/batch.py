"""The nouns of the stream: a call, a batch, and the cut after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.workers.public import public
from feeder.workers.stream.buffers import Slot
from feeder.workers.stream.position import Cut, LazyPosition

# The second word of the Philox key keeps the two families of draws apart.
_DRAWS_OF_CALL = 1
_DRAWS_OF_RECORD = 2


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
    """

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


def _generator(seed: int, family: int, epoch: int, item: int) -> np.random.Generator:
    # The seed in the key and (epoch, item) in the high words of the counter: streams of draws do
    # not overlap, and each may draw 2**128 times.
    key = np.array([seed, family], dtype=np.uint64)
    counter = np.array([0, 0, epoch, item], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@public("feeder")
class Batch(Mapping[str, NDArray[Any]]):
    """Exactly `batch_size` rows: a mapping from column name to array.

    The arrays are read-only unless the feed was made with `writable=True`. Their memory goes
    back to the feed when the last array over it is gone, so they may be kept for as long as they
    are wanted. Written once, by the thread that merges; then the user's.
    """

    # A plain class: it is made once per batch, and a frozen dataclass takes ten times as long.
    __slots__ = (
        "__weakref__", "_names", "_slot", "arrays", "epoch", "held_bytes", "index", "kept_rows",
        "place", "rows", "step", "turn",
    )  # fmt: skip

    arrays: tuple[NDArray[Any], ...]
    """The columns in the order of the feed's input names."""
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
    turn: int
    """Its number among what this run deals out to its queues; negative where it is dropped."""

    def __init__(
        self,
        names: tuple[str, ...],
        arrays: tuple[NDArray[Any], ...],
        place: LazyPosition,
        epoch: int,
        index: int,
        step: int,
        rows: int,
        *,
        slot: Slot | None = None,
    ) -> None:
        self._names = names
        # Internal: the slot that the reader of this batch gives back (`Slots.reserved`). It is
        # None where the memory comes back by itself, when the last array over it is gone.
        self._slot = slot
        self.arrays = arrays
        self.place = place
        self.epoch = epoch
        self.index = index
        self.step = step
        self.rows = rows
        self.held_bytes = 0
        self.kept_rows = 0
        self.turn = step

    @property
    def cut(self) -> Cut:
        """The place in the stream just after this batch."""
        return self.place.cut()

    def with_arrays(self, arrays: tuple[Any, ...]) -> Batch:
        """The same batch in other memory; it counts for as much in the bound."""
        batch = Batch(self._names, arrays, self.place, self.epoch, self.index, self.step, self.rows)
        # The slot is not taken over: its memory was given back when the copy was done.
        batch.held_bytes, batch.kept_rows = self.held_bytes, self.kept_rows
        batch.turn = self.turn
        return batch

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            return self.arrays[self._names.index(name)]
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{name}: {array.dtype}{list(array.shape)}"
            for name, array in zip(self._names, self.arrays, strict=True)
        )
        return f"<Batch {self.step} (epoch {self.epoch}, index {self.index}) {columns}>"

    # Mapping compares by items, which is ambiguous for arrays; two batches are the same batch
    # or they are not.
    __eq__ = object.__eq__
    __hash__ = object.__hash__
