"""The order of a source whose set of records has changed in the course of a run.

A *pass* is one reading of all its records. A change takes place at a position of a pass: what came
before it stays, the rest of the pass has each record that is left once, and later passes have an
order of the new set. A source that has grown in the middle of a pass has its new records among the
rest if it is shuffled, otherwise behind it.

All is arithmetic: a question costs as much as a change was made within the pass, and a logarithm of
the records that were excluded then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.orders.options import OrderPlan
from feeder.workers.sources.orders.orders import LISTS_KEPT, BlockOrder, Order
from feeder.workers.sources.orders.permutation import Permutation
from feeder.workers.sources.orders.sharding import Sharding

Numbers = NDArray[np.int64]
Ranges = tuple[tuple[int, int], ...]
"""First record and the one after the last: sorted, and apart from each other."""


def ranges_of(records: Iterable[Any]) -> Ranges:
    """Numbers, ranges and pairs (first, stop) as ranges. Raises `ConfigError`."""
    found = []
    for one in records:
        is_pair = isinstance(one, tuple | list) and len(one) == 2
        pair = (one.start, one.stop) if isinstance(one, range) else one if is_pair else (one, None)
        is_whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool)
                       for n in pair if n is not None)  # fmt: skip
        start, stop = int(pair[0]) if is_whole else -1, pair[1]
        stop = start + 1 if stop is None else int(stop) if is_whole else -1
        if not 0 <= start <= stop or (isinstance(one, range) and one.step != 1):
            raise ConfigError(
                f"a record to exclude is {one!r}, expected its number, a range, or a pair of the "
                "first one and the one after the last"
            )
        found.append((start, stop))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(pair for pair in found if pair[0] < pair[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def differing(one: Iterable[Sequence[int]], other: Iterable[Sequence[int]]) -> Ranges:
    """The records that are in the ranges of one of two sets alone. Of one set and of what differs
    it is the other set."""
    ends = sorted({*chain(*one)} ^ {*chain(*other)})
    return tuple(zip(ends[::2], ends[1::2], strict=True))


@dataclass(frozen=True)
class Selection:
    """All of so many records but for some ranges. Never changes."""

    size: int
    """Records, those that are excluded too."""
    excluded: Ranges = ()

    @property
    def num_excluded(self) -> int:
        """How many are excluded."""
        return sum(stop - start for start, stop in self.excluded)

    def __len__(self) -> int:
        return self.size - self.num_excluded

    @cached_property
    def _stretches(self) -> tuple[Numbers, Numbers, Numbers]:
        """Of each stretch of records that are left its first record, the one after its last, and
        how many of those that are left come before it."""
        firsts, stops = np.array(self.excluded, np.int64).reshape(-1, 2).T
        starts, ends = np.append(0, stops), np.append(firsts, self.size)
        return starts, ends, starts - np.append(0, np.cumsum(stops - firsts))

    def at(self, ranks: Numbers) -> Numbers:
        """The records that are left, by their number among these."""
        if not self.excluded:
            return ranks
        starts, _, before = self._stretches
        found = np.searchsorted(before, ranks, side="right") - 1
        records: Numbers = starts[found] + ranks - before[found]
        return records

    def ranks(self, records: Numbers) -> Numbers:
        """How many of those that are left come before each record."""
        if not self.excluded:
            return records
        starts, ends, before = self._stretches
        found = np.searchsorted(starts, records, side="right") - 1
        ranks: Numbers = before[found] + np.minimum(records, ends[found]) - starts[found]
        return ranks

    def holds(self, records: Numbers) -> NDArray[np.bool_]:
        """Which records are left."""
        starts, ends, _ = self._stretches
        found = np.searchsorted(starts, records, side="right") - 1
        is_there: NDArray[np.bool_] = (records >= 0) & (records < ends[found])
        return is_there

    def taken_out(self, before: Selection) -> Numbers:
        """The records that `before` has and this one has not."""
        mine = [np.arange(start, min(stop, before.size)) for start, stop in self.excluded]
        numbers = np.concatenate([np.empty(0, np.int64), *mine])
        ranks = before.ranks(numbers)
        return numbers[before.ranks(numbers + 1) > ranks]

    def follows(self, before: Selection) -> bool:
        """Whether it is the other one, grown at the end, or with more excluded."""
        still = Selection(before.size, tuple((a, min(b, before.size)) for a, b in self.excluded
                                             if a < before.size))  # fmt: skip
        return self.size >= before.size and not len(before.taken_out(still))


class Change(NamedTuple):
    """A place at which another set of records begins to count."""

    epoch: int
    """The pass."""
    position: int
    """Records of the pass before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedPlan(OrderPlan):
    """An order of records whose set changes: `sets[0]` at first, `sets[i + 1]` from `changes[i]`
    on."""

    sets: tuple[Selection, ...]
    changes: tuple[Change, ...]

    def leaves_out(self, record: int) -> bool:
        """Whether the set that is the last one does not have a record."""
        return not self.sets[-1].holds(np.array([record]))[0]

    def make(self, seed: int) -> Order:
        """The order, with the seed of a pass."""
        return EditedOrder(self, seed)

    def plain(self, size: int, seed: int) -> Order:
        """The order that so many records have without changes."""
        plan = OrderPlan(
            sharding=Sharding(num_records=size),
            order=self.order,
            random_shuffle=self.random_shuffle,
            initial_fill=self.initial_fill,
            seed=self.seed,
            shuffle_after_epoch=self.shuffle_after_epoch,
            shuffle_after_epoch_seed=self.shuffle_after_epoch_seed,
            list_shuffle=self.list_shuffle,
            window=self.window,
        )
        return plan.make(seed)


class EditedOrder(Order):
    """See the module. Any thread may ask it; what is kept lies in an `lru_cache`."""

    def __init__(self, plan: EditedPlan, seed: int) -> None:
        super().__init__(plan.sharding)
        self._plan, self._sets, self._changes = plan, plan.sets, plan.changes
        self._seed = seed if plan.seed is None else plan.seed
        self._orders = [plan.plain(len(one), seed) for one in plan.sets]
        self._rest = lru_cache(maxsize=LISTS_KEPT * len(plan.sets))(self._make_rest)

    def indices(self, epoch: int, start: int, stop: int) -> Numbers:
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, epoch: int, positions: Numbers) -> Numbers:
        return self._at(epoch, positions, len(self._changes))

    def find(self, epoch: int, records: Numbers) -> Numbers:
        """Also of records that a pass does not have: -1."""
        return self._find(epoch, records, len(self._changes))

    def places(self, epoch: int, record: int) -> list[int]:
        found = self.find(epoch, np.array([record])).tolist()
        return [position for position in found if position >= 0]

    def length(self, epoch: int, changes: int | None = None) -> int:
        """Records of a pass, with the first so many changes."""
        changes = self._of(epoch, len(self._changes) if changes is None else changes)
        if not self._is_within(epoch, changes):
            return len(self._sets[changes])
        return self._changes[changes - 1].position + self._rest(epoch, changes).size

    def _of(self, epoch: int, changes: int) -> int:
        """How many changes, of the first ones, have been made up to the end of a pass."""
        while changes and self._changes[changes - 1].epoch > epoch:
            changes -= 1
        return changes

    def _is_within(self, epoch: int, changes: int) -> bool:
        # A pass of which nothing had come is one of the new set.
        return changes > 0 and self._changes[changes - 1].epoch == epoch and (
            self._changes[changes - 1].position > 0
        )  # fmt: skip

    def _at(self, epoch: int, positions: Numbers, changes: int) -> Numbers:
        if not len(positions):
            return positions
        changes = self._of(epoch, changes)
        if not self._is_within(epoch, changes):
            return self._sets[changes].at(self._orders[changes].at(epoch, positions))
        place = self._changes[changes - 1].position
        found, late = np.empty_like(positions), positions >= place
        found[~late] = self._at(epoch, positions[~late], changes - 1)
        older, new, is_new = self._rest(epoch, changes).at(positions[late] - place)
        rest = np.empty_like(is_new, np.int64)
        rest[~is_new] = self._at(epoch, older + place, changes - 1)
        rest[is_new] = self._sets[changes].at(new)
        found[late] = rest
        return found

    def _find(self, epoch: int, records: Numbers, changes: int) -> Numbers:
        if not len(records):
            return records
        changes = self._of(epoch, changes)
        chosen = self._sets[changes]
        found, is_left = np.full_like(records, -1), chosen.holds(records)
        if not self._is_within(epoch, changes):
            ranks = chosen.ranks(records[is_left])
            found[is_left] = self._orders[changes].find(epoch, ranks)
            return found
        place, is_new = self._changes[changes - 1].position, records >= self._sets[changes - 1].size
        older = self._find(epoch, records[~is_new], changes - 1)
        rest = self._rest(epoch, changes)
        late = older >= place
        stays = late & is_left[~is_new]
        older[stays] = place + rest.find(older[stays] - place)
        # What is excluded now has come before, or comes no more.
        older[late & ~stays] = -1
        found[~is_new] = older
        is_new &= is_left
        found[is_new] = place + rest.find_new(chosen.ranks(records[is_new]))
        return found

    def _make_rest(self, epoch: int, changes: int) -> _Rest:
        place, before = self._changes[changes - 1].position, self._sets[changes - 1]
        now = self._sets[changes]
        out = self._find(epoch, now.taken_out(before), changes - 1)
        out = np.sort(out[out >= place]) - place
        size = self.length(epoch, changes - 1) - place - len(out)
        first = int(now.ranks(np.array([before.size]))[0])
        key = f"{self._seed}/{epoch}/grown/{place}/{len(now)}"
        return _Rest(out, size, first, len(now) - first, self._plan, key)


class _Rest:
    """The rest of a pass after a change: `old` records that were left, by where they came before,
    and `new` ones."""

    def __init__(
        self, out: Numbers, old: int, first: int, new: int, plan: EditedPlan, key: str
    ) -> None:
        # How many of those that stay come before each that was taken out.
        self._out, self._stay = out, out - np.arange(len(out))
        self._old, self._first = old, first
        self.size = old + new
        self._mixed: Permutation | None = None
        self._behind: Any = None
        if not new or not plan.random_shuffle:
            return
        if plan.window is None:
            # Old and new ones are mixed; without new ones the order stays as it was.
            self._mixed = Permutation(self.size, key)
        else:
            seed = xxhash.xxh3_64_intdigest(key.encode())
            self._behind = BlockOrder(Sharding(num_records=new), seed, plan.window)

    def at(self, positions: Numbers) -> tuple[Numbers, Numbers, NDArray[np.bool_]]:
        """Where the old ones came before, numbers of the new ones in their set, and which are
        new."""
        numbers = positions if self._mixed is None else self._mixed.at(positions)
        is_new = numbers >= self._old
        old, new = numbers[~is_new], numbers[is_new] - self._old
        if self._behind is not None and len(new):
            new = self._behind.at(0, new)
        return old + np.searchsorted(self._stay, old, side="right"), new + self._first, is_new

    def find(self, old: Numbers) -> Numbers:
        """The positions of old ones, by where they came before."""
        return self._place(old - np.searchsorted(self._out, old))

    def find_new(self, numbers: Numbers) -> Numbers:
        """The positions of new ones, by their numbers in their set."""
        new = numbers - self._first
        if self._behind is not None and len(new):
            new = self._behind.find(0, new)
        return self._place(new + self._old)

    def _place(self, numbers: Numbers) -> Numbers:
        return numbers if self._mixed is None else self._mixed.find(numbers)
