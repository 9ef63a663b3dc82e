"""A source: an order and the records that it puts in order, as a fetch function `fetch(call)`.

How a feed drives it
    A source is called like any pure fetch function, `source(call)`, by any thread and in any
    order of calls: call `index` of an epoch gives the rows at the positions from
    `index * batch_size` to `(index + 1) * batch_size` - 1, fewer at the epoch's end, and raises
    StopIteration where no position is left. So a feed resumes by calling on, and nothing else is
    needed for the stream to be right.

    One order cannot compute its answer from the position, DALI's windowed shuffle. So that it
    need not be walked through again from the start, a feed may keep, beside the position,

        cursor = source.cursor(call)     # after a call, in the thread that made it
        source.seek(call, cursor)        # on a fresh source, before its first call

    `cursor` is what a fresh source needs to answer the calls *after* `call` at once: empty for
    every other order, else 13 bytes and at most 4 per slot of the window (none where that is too
    much for a token, and the window is found from an earlier step). It names a checkpoint at or
    before the position, so it stays the same bytes for 4,096 rows (at a window of 1,024), and
    depends on the position alone. `seek(call, cursor)` takes it with the next call to come. A
    cursor changes how long the next call takes, never what it returns: where it is lost the source
    walks from the start of the stream, about 0.2 µs a row.

    Calls in order cost the batch. A call that lies behind costs a walk from the nearest checkpoint
    before it, of which a source keeps the 64 latest (fewer where the window is huge).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from threading import Lock
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from feeder.workers.public import public
from feeder.workers.sources.orders.options import OrderOptions, plan_order
from feeder.workers.sources.orders.orders import Order
from feeder.workers.sources.stores.reading import Columns, RecordError, Records
from feeder.workers.stream.batch import Call


@public("feeder.sources")
class Source:
    """An order and records: a pure fetch function.

    Any thread may call it, and several sources may share records. What changes, the orders that
    are made and the columns without rows, is assigned whole; making an order is under a lock.
    """

    ignores_worker_ids = True
    """A call's rows follow from its index, epoch, seed and batch size."""

    def __init__(
        self, records: Records, *, list_shuffle: bool = False, **options: Unpack[OrderOptions]
    ) -> None:
        """`list_shuffle` is for records that DALI would have as a list of files: its
        `random_shuffle` then begins by shuffling the list."""
        self.records = records
        self._plan = plan_order(len(records), options, list_shuffle=list_shuffle)
        # One for each seed; guarded by the lock while one is made, read without it.
        self._orders: dict[int, Order] = {}
        self._rowless: Columns | None = None
        self._lock = Lock()
        self._carries = False

    def carrying(self) -> Source:
        """The same for a feed in which rows flow into the next epoch (`last_batch="carry"`).

        The first call of an epoch then gives what the batch before lacks, so that batches and
        calls stay in step, and a batch need not be put together from two of them. The rows and
        their order are the same.
        """
        # A shallow copy: records and orders are shared, and so is what they have cached.
        source = copy.copy(self)
        source._carries = True
        return source

    def __call__(self, call: Call) -> Columns:
        columns = self.records.read(self.indices(call), call)
        if columns is None:
            return self._no_rows(call)
        if self._rowless is None:
            self._rowless = _without_rows(columns)
        return columns

    def _no_rows(self, call: Call) -> Columns:
        if self._rowless is None:
            self._rowless = _without_rows(self._sound_row(call))
        return self._rowless

    def _sound_row(self, call: Call) -> Columns:
        """The first record that can be read: from rows alone is known what the columns are like."""
        for record in range(len(self.records)):
            # From the start, whichever call came first: what a stream is like does not depend on
            # timing.
            columns = self.records.read(np.array([record]), call)
            if columns is not None:
                return columns
        raise RecordError(f"{self.first_name(call)}: defective, and so is every other record")

    def first_name(self, call: Call) -> str:
        """What an error message calls the record that a call begins with."""
        return self.records.name(int(self.indices(call)[0]))

    def indices(self, call: Call) -> NDArray[np.int64]:
        """The records of a call, repeats of the last one included where it is padded.

        Raises:
            StopIteration: the call lies behind the end of its epoch.
        """
        start, stop = self._span(call)
        if start >= stop:
            raise StopIteration
        sharding, order = self._plan.sharding, self._order(call.seed)
        length = sharding.length(call.epoch) if sharding.pad_last_batch else stop
        # Positions behind `length` are padding: repeats of the epoch's last record.
        last = min(stop, length)
        indices = order.indices(call.epoch, min(start, last - 1), last)
        if stop <= length:
            return indices
        # Repeated by number; the record is read again, and its random draws are the same.
        repeats = np.full(stop - max(start, length), indices[-1])
        return repeats if start >= length else np.concatenate((indices, repeats))

    def _span(self, call: Call) -> tuple[int, int]:
        """The positions of a call's first row, and of the row after its last."""
        sharding, size = self._plan.sharding, call.batch_size
        start = call.index * size
        if self._carries and not sharding.pad_last_batch:
            # The epoch begins in the middle of a batch: its first call gives what that batch lacks.
            start -= sharding.offset(call.epoch) % size
        return max(0, start), max(0, min(start + size, sharding.rows(call.epoch, size)))

    def _order(self, seed: int) -> Order:
        # The feed's seed is known with the first call only. Two feeds may share a source.
        order = self._orders.get(seed)
        if order is None:
            with self._lock:
                order = self._orders.get(seed) or self._plan.make(seed)
                self._orders[seed] = order
        return order

    def cursor(self, call: Call) -> bytes:
        """What a fresh source needs to answer the calls after `call` at once."""
        length = self._plan.sharding.length(call.epoch)
        # Padding is no position of the order.
        position = min(self._span(call)[1], length)
        return self._order(call.seed).cursor(call.epoch, position)

    def seek(self, call: Call, cursor: bytes) -> None:
        """Take the cursor of the call before `call`, the next one to come.

        Raises:
            ResumeError: it is not a cursor of such a source.
        """
        self._order(call.seed).seek(cursor)

    def __len__(self) -> int:
        """Records of all shards together."""
        return self.epoch_size

    @property
    def epoch_size(self) -> int:
        """Records of all shards together."""
        return self._plan.sharding.epoch_size

    @property
    def epoch_size_padded(self) -> int:
        """`epoch_size`, or with `pad_last_batch` as if each shard were as long as the longest."""
        return self._plan.sharding.epoch_size_padded

    def rows(self, epoch: int, batch_size: int) -> int:
        """Rows that one epoch of this shard gives, repeats included."""
        return self._plan.sharding.rows(epoch, batch_size)

    @property
    def gives_all_rows(self) -> bool:
        """Whether each call gives as many rows as it is asked for, the last of an epoch excepted:
        not where defective records may be left out."""
        return not getattr(self.records, "may_skip", True)

    @property
    def skipped(self) -> int:
        """Reads of defective records that were left out since the source was made (with
        `on_error="skip"`)."""
        return self.records.skipped

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position to fit: plain values by name, for the fingerprint."""
        return {
            "source": self.records.kind,
            **self._plan.fingerprint_fields(),
            **self.records.describe(),
        }

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.describe().items())
        return f"<Source {fields}>"


def _without_rows(columns: Columns) -> Columns:
    if isinstance(columns, Mapping):
        return {name: np.atleast_1d(array)[:0].copy() for name, array in columns.items()}
    return tuple(np.atleast_1d(array)[:0].copy() for array in columns)
