"""A source: an order and the records that it puts in order, as a fetch function `fetch(call)`.

How a feed drives it
    A source is called like any pure fetch function, `source(call)`, by any thread and in any
    order of calls: call `index` of an epoch gives the rows at the positions from
    `index * batch_size` to `(index + 1) * batch_size` - 1, fewer at the epoch's end, and raises
    StopIteration if no position is left. So a feed resumes by calling on, and nothing else is
    needed for the stream to be right.

    One order cannot compute its answer from the position, DALI's windowed shuffle. So that it
    need not be walked through again from the start, a feed may keep, beside the position,

        cursor = source.cursor(call)     # after a call, in the thread that made it
        source.seek(call, cursor)        # on a fresh source, before its first call

    `cursor` is what a fresh source needs to answer the calls *after* `call` at once: empty for
    every other order, otherwise 13 bytes and at most 4 per slot of the window (none if that is too
    much for a token, and the window is found from an earlier step). It names a checkpoint at or
    before the position, so it stays the same bytes for 4,096 rows (at a window of 1,024), and
    depends on the position alone. `seek(call, cursor)` takes it with the next call to come. A
    cursor changes how long the next call takes, never what it returns: if it is lost the source
    walks from the start of the stream, about 0.2 µs a row.

    Calls in order cost the batch. A call that lies behind costs a walk from the nearest checkpoint
    before it, of which a source keeps the 64 latest (fewer if the window is huge).

How sources are put together
    A source is records too: record p is what lies at position p of its order, in the epoch of the
    call. So a step that needs records (`steps/`) takes sources, and what it makes is a source
    again, with an order of its own. Steps that make one record of one (map, filter) go down to the
    records that were there first: what is drawn for a record depends on that record, and shuffling
    before or after is the same.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import lru_cache
from threading import Lock
from typing import Any, Unpack
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import whole
from feeder.workers.sources.far.ahead import Ahead, Touch
from feeder.workers.sources.far.cache import totals
from feeder.workers.sources.orders.edited import Selection, ranges_of
from feeder.workers.sources.orders.options import OrderOptions, plan_order
from feeder.workers.sources.orders.orders import LISTS_KEPT, Order
from feeder.workers.sources.steps.each import Filtered, Mapped, Zipped
from feeder.workers.sources.steps.following import check_follows, check_rows
from feeder.workers.sources.steps.ragged import Budgeted, Offsets, Padded, check_length
from feeder.workers.sources.steps.routed import (
    Excluding,
    Repeats,
    Routed,
    Stretch,
    concatenated,
)
from feeder.workers.sources.steps.rows import (
    faults_of,
    is_far,
)
from feeder.workers.sources.stores.reading import (
    NOW,
    Columns,
    Faults,
    LeftOut,
    OnError,
    Piece,
    Record,
    RecordError,
    aside,
)
from feeder.workers.sources.stores.records import Records, Traits, as_records
from feeder.workers.stream.batch import Call
from feeder.workers.stream.parts import PartCalls


@public("feeder.sources")
class Source(Records):
    """An order and records: a pure fetch function.

    Any thread may call it, and several sources may share records. What changes, the orders that
    are made and the columns without rows, is assigned whole; making an order is under a lock.
    """

    ignores_worker_ids = True
    """A call's rows follow from its index, epoch, seed and batch size."""

    def __init__(
        self, records: Any, *, list_shuffle: bool = False, **options: Unpack[OrderOptions]
    ) -> None:
        """`records` has what `Records` says that a store must have. `list_shuffle` is for records
        that DALI would have as a list of files: its `random_shuffle` then begins by shuffling the
        list."""
        self.records: Records = as_records(records)
        self._plan = plan_order(self.records.epoch_size, options, list_shuffle=list_shuffle)
        if self.traits.one_per_call and self._plan.sharding.pad_last_batch:
            raise ConfigError(f"pad_last_batch cannot be had of {self.kind}: its rows vary")
        self._remember_rows()
        # One for each seed; guarded by the lock while one is made, read without it.
        self._orders: dict[int, Order] = {}
        self._rowless: Columns | None = None
        self._lock = Lock()
        self._carries = False
        self._is_far = is_far(self.records)
        # What it will read, told to caches; made with the first call.
        self._ahead: Ahead | None = None
        self._made_here: PartCalls | None = None
        self._elsewhere = Faults("skip")
        # What its calls in other processes have met with in stores. Guarded by the lock.
        self._stores_elsewhere: Counter[str] = Counter()

    def __getstate__(self) -> dict[str, Any]:
        # In another process the orders are made anew: they follow from the plan.
        own: dict[str, Any] = {"_orders": {}, "_rows": None, "_lock": None, "_ahead": None}
        return {**self.__dict__, **own, "_stores_elsewhere": Counter()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())
        self._remember_rows()

    def _remember_rows(self) -> None:
        self._rows = lru_cache(maxsize=LISTS_KEPT)(self._plan.sharding.rows)

    def carrying(self) -> Source:
        """The same for a feed in which rows flow into the next epoch (`last_batch="carry"`).

        The first call of an epoch then gives what the batch before lacks, so that batches and
        calls stay in step, and a batch need not be put together from two of them. The rows and
        their order are the same.
        """
        # A shallow copy: records and orders are shared, and so is what they have cached.
        source = copy.copy(self)
        source._orders, source._lock = self._orders, self._lock
        source._carries, source._ahead = True, None
        return source

    def __call__(self, call: Call) -> Columns:
        NOW.place = call.epoch, call.index
        indices = self.indices(call)
        with self._looks_ahead().step(call, self._touched) if self._is_far else nullcontext():
            columns = self.records.read(indices, call)
        if columns is None:
            return self._no_rows(call)
        if self._rowless is None:
            self._rowless = _without_rows(columns)
        return columns

    def make_part(self, part: PartCalls | None) -> None:
        """From now on these calls alone are made, None for all: what others read is not brought
        here ahead of them. For the thread that begins a stream."""
        self._made_here = part
        if self._ahead is not None:
            self._ahead.part = part

    def _looks_ahead(self) -> Ahead:
        ahead = self._ahead
        if ahead is None:
            with self._lock:
                ahead = self._ahead
                if ahead is None:
                    ahead = self._ahead = Ahead(self._made_here)
                    finalize(self, ahead.close).atexit = False
        return ahead

    def _touched(self, call: Call) -> Iterator[Touch]:
        """What a call reads of objects. Raises StopIteration behind the end of its epoch."""
        if not self._order(call.seed).is_computed:
            return iter(())
        return self.records.touches(self.indices(call), call)

    def _no_rows(self, call: Call) -> Columns:
        if self._rowless is None:
            with aside():
                self._rowless = _without_rows(self._sound_row(call))
        return self._rowless

    def _sound_row(self, call: Call) -> Columns:
        """The first record that can be read: from rows alone is known what the columns are like."""
        for record in range(self.records.epoch_size):
            # From the start, whichever call came first: what a stream is like does not depend on
            # timing.
            columns = self.records.read(np.array([record]), call)
            if columns is not None:
                return columns
        why = "left out" if self.traits.filters else "defective"
        raise RecordError(f"{self.first_name(call)}: {why}, and so is every other record")

    def first_name(self, call: Call) -> str:
        """What an error message calls the record that a call begins with."""
        return self.records.name_in(int(self.indices(call)[0]), call)

    def records_of(self, call: Call) -> list[tuple[Record, ...]]:
        """The records that the rows of a call are made of; nothing is read. They are known if rows
        follow from numbers: of sources that are not filtered, packed, or read with "skip".

        Raises:
            StopIteration: the call lies behind the end of its epoch.
        """
        return self.records.origins(self.indices(call), call)

    def read_records_of(self, call: Call) -> list[tuple[Record | Piece, ...]]:
        """The same of sources that are filtered, packed, or read with "skip": what the call has is
        read for it, and what is left out counts for nothing.

        Raises:
            StopIteration: the call lies behind the end of its epoch.
        """
        with aside():
            return self.records.read_origins(self.indices(call), call)

    @property
    def num_turns(self) -> int:
        """After so many epochs they have as many rows again, each as the one so long before."""
        sharding = self._plan.sharding
        return 1 if sharding.stick_to_shard else sharding.num_shards

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
        sharding, size = self._plan.sharding, 1 if self.traits.one_per_call else call.batch_size
        start = call.index * size
        if self._carries and not sharding.pad_last_batch:
            # The epoch begins in the middle of a batch: its first call gives what that batch lacks.
            start -= sharding.offset(call.epoch) % size
        return max(0, start), max(0, min(start + size, self._rows(call.epoch, size)))

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
        if self.traits.walks:
            return self.cursor_at(call, self._span(call)[1])
        length = self._plan.sharding.length(call.epoch)
        # Padding is no position of the order.
        position = min(self._span(call)[1], length)
        return self._order(call.seed).cursor(call.epoch, position)

    def seek(self, call: Call, cursor: bytes) -> None:
        """Take the cursor of the call before `call`, the next one to come.

        Raises:
            ResumeError: it is not a cursor of such a source.
        """
        if self.traits.walks:
            self.seek_to(call, cursor)
        else:
            self._order(call.seed).seek(cursor)

    def cursor_at(self, call: Call, row: int) -> bytes:
        """The cursor of a mixture that is walked through, at a row of the call's epoch."""
        records: Any = self.records
        cursor: bytes = records.cursor_at(call, row)
        return cursor

    def seek_to(self, call: Call, cursor: bytes) -> None:
        """Take such a cursor."""
        records: Any = self.records
        records.seek_to(call, cursor)

    def __len__(self) -> int:
        """Records of all shards together.

        Raises:
            TypeError: a step of the source says which of them have rows, so that nobody knows.
        """
        if self.traits.filters or self.traits.is_last:
            raise TypeError(
                f"the number of rows of this source ({self.kind}) is not known before they are read"
            )
        return self.epoch_size

    def __bool__(self) -> bool:
        # Otherwise its length would be asked for.
        return True

    @property
    def epoch_size(self) -> int:
        """Records of all shards together."""
        return self._plan.sharding.epoch_size

    @property
    def epoch_size_padded(self) -> int:
        """`epoch_size`, or with `pad_last_batch` as if each shard were as long as the longest."""
        return self._plan.sharding.epoch_size_padded

    def rows(self, epoch: int, batch_size: int) -> int:
        """Rows that one epoch of this shard gives, repeats included.

        Raises:
            TypeError: it is a mixture that is walked through, whose rows nobody knows.
        """
        if self.traits.walks:
            raise TypeError("the number of rows of this mixture is not known before they are read")
        return self._plan.sharding.rows(epoch, batch_size)

    @property
    def gives_all_rows(self) -> bool:
        """Whether each call gives as many rows as it is asked for, the last of an epoch excepted:
        not where defective records may be left out."""
        return not self.traits.may_skip

    @property
    def skipped(self) -> int:
        """Reads of defective records that were left out since the source was made (with
        `on_error="skip"`), in processes and on actors too."""
        return self.records.skipped + self._elsewhere.skipped

    def _store_counts(self) -> dict[str, float] | None:
        """How long calls have waited for blocks of objects, and what the caches of this process
        have met with, and its calls in others; None if nothing was read from stores."""
        if self._ahead is None and not self._stores_elsewhere:
            return None
        here = {"wait_s": 0.0 if self._ahead is None else self._ahead.waits.seconds(), **totals()}
        return {name: value + self._stores_elsewhere[name] for name, value in here.items()}

    def _count_stores(self, counts: Mapping[str, float]) -> None:
        """Count what calls in another process have met with in stores."""
        with self._lock:
            self._stores_elsewhere.update(counts)

    @property
    def left_out(self) -> list[LeftOut]:
        """The first hundred of these, in the order in which the stream comes to them. A feed that
        goes on from a snapshot knows those before it."""
        whole = Faults("skip")
        for faults in faults_of(self):
            whole.count(0, faults.left_out)
        return whole.left_out

    def count_skipped(self, num: int, left_out: Iterable[tuple[int, int, str, str]] = ()) -> None:
        """Count reads that were left out elsewhere, as in another process, which has a copy of the
        source; and list those that are known."""
        self._elsewhere.count(num, left_out)

    # ---- as records of a step

    @property
    def kind(self) -> str:
        """What the user calls the records, such as "caffe_lmdb"."""
        return self.records.kind

    @property
    def traits(self) -> Traits:
        """What a step has to know of the records."""
        return self.records.traits

    def name(self, index: int) -> str:
        """What an error message calls what lies at a position."""
        in_order = self._plan.fingerprint_fields()["shuffle"] == "none"
        return self.records.name(index) if in_order else f"{self.kind} at position {index}"

    def name_in(self, position: int, call: Call) -> str:
        """What it calls what lies at a position of the call's epoch."""
        (record,) = self._order(call.seed).at(call.epoch, np.array([position])).tolist()
        return self.records.name_in(record, call)

    def origins(self, positions: NDArray[np.int64], call: Call) -> list[tuple[Record, ...]]:
        """The records that lie at positions of the call's epoch."""
        return self.records.origins(self._order(call.seed).at(call.epoch, positions), call)

    def places_of(self, source: str, number: int, call: Call) -> Iterator[int]:
        """The positions of the call's epoch at which a record of a source lies, in their order."""
        order, plan = self._order(call.seed), self._plan
        found = (
            position
            for record in self.records.places_of(source, number, call)
            for position in order.places(call.epoch, record)
        )
        # One after the other if they come so: of a source that is read again there may be many.
        is_in_order = plan.in_sequence and plan.sharding.num_shards == 1
        return found if is_in_order else iter(sorted(found))

    def rows_of(self, source: str, number: int, call: Call) -> Iterator[int]:
        """The rows of the call's epoch that are made of a record of a source: the inverse of
        `records_of`. Padding repeats an epoch's last record."""
        sharding, epoch = self._plan.sharding, call.epoch
        length = sharding.length(epoch)
        for position in self.places_of(source, number, call):
            is_last = position == length - 1
            yield from range(
                position, sharding.rows(epoch, call.batch_size) if is_last else position + 1
            )

    def leaves_out(self, source: str, number: int, call: Call) -> bool:
        """Whether a record of a source is excluded."""
        is_out = self._plan.leaves_out(number)
        return is_out or self.records.leaves_out(source, number, call)

    def sizes_of(self) -> dict[str, int]:
        """How many records each source has that it is made of, by the names that `records_of`
        gives."""
        return self.records.sizes_of()

    def read(self, positions: NDArray[np.int64], call: Call) -> Columns | None:
        """The records at positions of the call's epoch, as columns."""
        order = self._order(call.seed)
        return self.records.read(order.at(call.epoch, positions), call)

    def samples(self, positions: NDArray[np.int64], call: Call) -> list[Any]:
        """The same, sample by sample; `LEFT_OUT` if a record is left out."""
        return self.records.samples(self._order(call.seed).at(call.epoch, positions), call)

    def touches(self, positions: NDArray[np.int64], call: Call) -> Iterator[Touch]:
        """What the records at positions of the call's epoch read of objects."""
        order = self._order(call.seed)
        if not order.is_computed:
            return iter(())
        return self.records.touches(order.at(call.epoch, positions), call)

    def read_of_sources(self, call: Call) -> dict[str, dict[str, Any]]:
        """What has been read of each source of a mixture in the epoch, up to the end of a call:
        `rows`, `tokens` (None if they are not counted), and `skipped` in all epochs. Empty where
        that cannot be told: of other sources, of mixtures that are shuffled, of shards of a packed
        one."""
        return self.read_up_to(call, self._span(call)[1])

    def read_up_to(self, call: Call, record: int, first: int = 0) -> dict[str, dict[str, Any]]:
        """The same of a shard that begins with record `first`, up to a record of the call's
        epoch."""
        sharding = self._plan.sharding
        if not self._plan.in_sequence or sharding.pad_last_batch:
            return {}
        if sharding.num_shards > 1:
            first = sharding.first(call.epoch)
            record += first
        return self.records.read_up_to(call, record, first)

    def as_it_was(self) -> Source | None:
        """The same as it was in an earlier format, for positions of then; None if there was
        none."""
        older = self.records.as_it_was()
        return None if older is None else self._with(older)

    def dealt(self, num_shards: int) -> Source:
        """The same in an order of which each shard has the proportions of the whole, where these
        change in the course of an epoch; otherwise the same."""
        if not self._plan.in_sequence:
            return self
        records = self.records.dealt(num_shards)
        return self if records is self.records else self._with(records)

    def applied(self, step: Callable[[Records], Records]) -> Source:
        """The same order, with a step that makes one record of one between it and the records."""
        return self._with(self.records.applied(step))

    # ---- steps

    def map(self, fn: Callable[..., Any], *, on_error: OnError = "raise") -> Source:
        """Each record as `fn` makes it.

        What is drawn belongs to the record: shuffling before or after map is the same.

        Args:
            fn: `fn(record)`, or `fn(record, rng)` where it requires two arguments. A record is a
                row of the single column, a tuple of one row of each column, or a mapping of them by
                name. `rng` is a new generator, keyed by (seed, epoch, record) and by how many maps
                come before. It returns a sample: a tuple by column, a mapping by name that may hold
                other mappings, or one array or number. Its result depends on its arguments alone.
                It writes to a copy, since arrays of a record may be views of what is kept.
            on_error: What to do where `fn` raises ValueError or OSError: "raise", or "skip", which
                leaves the row out and counts it in `source.skipped`.

        Raises:
            ConfigError: `fn` is no such function, or the source's rows are not one for each record.
        """
        check_rows(self.kind, self.traits, "map")
        return self.applied(lambda records: Mapped(records, fn, on_error))

    def filter(self, fn: Callable[[Any], Any]) -> Source:
        """The records of which `fn(record)` is true; others have no row.

        A position counts the records before the filter, so resuming is as quick as without one; the
        number of rows is unknown, and `len` raises TypeError.

        Raises:
            ConfigError: `fn` is no function, or the source's rows are not one for each record.
        """
        check_rows(self.kind, self.traits, "filter")
        return self.applied(lambda records: Filtered(records, fn))

    def take(self, n: int) -> Source:
        """The first `n` records of each epoch's order; all of them where there are fewer.

        Raises:
            ConfigError: `n` is no whole number of at least 1, or take cannot follow.
        """
        part = as_part(self, "take", counts=True, rows=False)
        return self._stretch("take", part, 0, min(whole("n", n, 1), part.epoch_size))

    def skip(self, n: int) -> Source:
        """Each epoch's order without its first `n` records.

        Raises:
            ConfigError: `n` is no whole number, no record is left, or skip cannot follow.
        """
        part = as_part(self, "skip", counts=True, rows=False)
        first = whole("n", n)
        if first >= part.epoch_size:
            raise ConfigError(
                f"n is {n}, and the source has {part.epoch_size} records: none is left"
            )
        return self._stretch("skip", part, first, part.epoch_size - first)

    def exclude(self, records: Iterable[int | range | tuple[int, int]]) -> Source:
        """All records but these. It comes before `shuffle`: records are told by their numbers in
        the data, as `feed.records(step)` and errors tell them.

        Args:
            records: Numbers, ranges, or pairs of the first one and the one after the last.

        Raises:
            ConfigError: they are no numbers, no record is left, or exclude cannot follow.
        """
        part = as_part(self, "exclude", counts=True)
        if not part._plan.in_sequence:
            raise ConfigError(
                "exclude of a source that is shuffled: exclude comes before shuffle, since it is "
                "given the numbers that records have in the data"
            )
        excluded = ranges_of(records)
        if excluded and excluded[-1][1] > part.epoch_size:
            raise ConfigError(
                f"record {excluded[-1][1] - 1} is excluded, and the source has {part.epoch_size}"
            )
        selection = Selection(part.epoch_size, excluded)
        if not len(selection):
            raise ConfigError(f"all {part.epoch_size} records are excluded: none is left")
        return Source(Routed("exclude", [part], Excluding(selection), [None]))

    def _stretch(self, kind: str, part: Source, first: int, size: int) -> Source:
        return Source(Routed(kind, [part], Stretch(first, size), [None]))

    def concat(self, *others: Source) -> Source:
        """All records of this source, then those of the others, one after the other.

        Draws and shuffles of the others are keyed by their place too.

        Raises:
            ConfigError: another is no source, or concat cannot follow.
        """
        parts = [as_part(part, "concat") for part in (self, *others)]
        return Source(concatenated(parts))

    def zip(self, *others: Source) -> Source:
        """Record i of this source and of each other, with the columns of all: names must differ;
        without names the columns follow one another. A record that one of them leaves out is left
        out.

        Raises:
            ConfigError: another is no source or has another number of records, or zip cannot
                follow.
        """
        return Source(Zipped(*(as_part(part, "zip") for part in (self, *others))))

    def repeat(self, times: int) -> Source:
        """An epoch of `times` epochs of this source, each with its own shuffle and draws. (For more
        and more epochs there is `epochs=None` of a feed.)

        Raises:
            ConfigError: `times` is no whole number of at least 1, or repeat cannot follow.
        """
        part = as_part(self, "repeat", rows=False)
        route = Repeats(part.epoch_size, whole("times", times, 1))
        return Source(Routed("repeat", [part], route, [None]))

    def shuffle(self, seed: int | None = None, window: int | None = None) -> Source:
        """The records in random order, another one in each epoch, computed where it is asked.

        Args:
            seed: Seed of the shuffle; None takes the feed's.
            window: None shuffles all records. Else the windows of so many records that follow one
                another come in random order, and so do the records of each, so that reading stays
                within a window.

        Raises:
            ConfigError: an argument is wrong, or shuffle cannot follow.
        """
        part = as_part(self, "shuffle", rows=False)
        source = Source(part, random_shuffle=True, seed=seed)
        if window is not None:
            source._plan = source._plan.in_windows(whole("window", window, 1))
        return source

    def shard(
        self,
        shard_id: int,
        num_shards: int,
        *,
        stick_to_shard: bool = False,
        pad_last_batch: bool = False,
    ) -> Source:
        """The part of the records that a shard reads, as the options of the same names say.

        Raises:
            ConfigError: an option is wrong, or the source has shards already.
        """
        part = as_part(self, "shard", rows=False)
        return Source(
            part.dealt(num_shards) if isinstance(num_shards, int) and num_shards > 1 else part,
            shard_id=shard_id,
            num_shards=num_shards,
            stick_to_shard=stick_to_shard,
            pad_last_batch=pad_last_batch,
        )

    def pad(self, length: int | Mapping[Any, int] | None = None, value: Any = 0) -> Source:
        """Rows that differ in their first axis, filled up with `value`.

        Args:
            length: How long rows become; of strings the number of characters (NUL characters at
                their end are lost, as in all of NumPy's strings; `offsets` keeps them). One number
                for all columns that have an axis, or a mapping that says it for some. None takes
                the longest row of a call: batches then differ, which needs `dont_rebatch=True`.
            value: What is put behind a row.

        Raises:
            ConfigError: the length is wrong, or pad cannot follow. A row that is longer is a
                RecordError, and so is a value that a column cannot hold.
        """
        check_rows(self.kind, self.traits, "pad")
        return self._with(Padded(self.records, check_length(length), value))

    def offsets(self) -> Source:
        """Rows that differ in length, one after the other: `values` and `offsets` of each column.

        A call gives one row: of a column x, `x.values` (1, total, ...) and `x.offsets`, int64 of
        (1, rows + 1), where row i begins and ends. (Without names each column becomes two.) Strings
        become the bytes of their UTF-8. Needs `dont_rebatch=True`.

        Raises:
            ConfigError: offsets cannot follow.
        """
        check_rows(self.kind, self.traits, "offsets")
        return self._with(Offsets(self.records))

    def batch_by_tokens(
        self,
        budget: int,
        *,
        window: int = 64,
        length: Callable[[Any], int] | None = None,
        value: Any = 0,
    ) -> Source:
        """Batches of as many rows as fit: rows × the longest row is at most `budget`.

        Needs `dont_rebatch=True`; the batch size is not looked at. Records are sorted by length and
        cut into batches within windows, and the batches of a window are shuffled. A position is
        found at once, and reading begins at its window: a window is the most that is read twice.

        Args:
            budget: The most tokens that a batch holds, padding included.
            window: Records of a window. A larger one leaves less padding, and costs a call (some
                20 µs) for each record that is not the last of a batch.
            length: The tokens of a record, `length(record)`; None is the length of its first
                column.
            value: What rows are padded with.

        Raises:
            ConfigError: an argument is wrong, or batch_by_tokens cannot follow. A record longer
                than the budget is a RecordError.
        """
        part = as_part(self, "batch_by_tokens", turns=True)
        checked = whole("budget", budget, 1), whole("window", window, 1)
        return Source(Budgeted(part, *checked, length, value))

    def _with(self, records: Records) -> Source:
        """The same order of other records."""
        source = copy.copy(self)
        source.records, source._rowless, source._elsewhere = records, None, Faults("skip")
        source._ahead, source._stores_elsewhere = None, Counter()
        if (size := records.epoch_size) != source.epoch_size:
            source._plan = source._plan.resized(size)
            source._orders, source._lock = {}, Lock()
            source._remember_rows()
        return source

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position to fit: plain values by name, for the fingerprint."""
        below = self.records.describe()
        if isinstance(self.records, Source):
            # An order upon an order: both have the same fields.
            below = {f"of.{name}": value for name, value in below.items()}
        return {"source": self.kind, **self._plan.fingerprint_fields(), **below}

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.describe().items())
        return f"<Source {fields}>"


def as_part(source: Any, step: str, **needs: bool) -> Source:
    """A source, if a step may follow it: `needs` are those of `check_follows`.

    Raises:
        ConfigError: it is no source, or the step cannot follow.
    """
    if not isinstance(source, Source):
        step = step.rstrip(",")
        if not getattr(source, "_has_numbers", True):
            raise ConfigError(
                f"{step}: sources.iterable has no known length, and no record n: steps are for "
                "sources that find a record by its number; put such steps into the iterator"
            )
        raise ConfigError(
            f"{step}: {type(source).__name__} is no source, expected one of feeder.sources"
        )
    check_follows(source.kind, source.traits, source._plan.sharding, step, **needs)
    return source


def _without_rows(columns: Columns) -> Columns:
    if isinstance(columns, Mapping):
        return {name: np.atleast_1d(array)[:0].copy() for name, array in columns.items()}
    return tuple(np.atleast_1d(array)[:0].copy() for array in columns)
