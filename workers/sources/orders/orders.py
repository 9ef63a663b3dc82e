"""Orders: which record comes when.

An order answers one question, `indices(epoch, start, stop)`: the records at the positions from
`start` to `stop` - 1 of an epoch of one shard. It has no threads of its own, reads nothing, and
gives the same answer whatever it was asked before, so a feed resumes by asking for the next
position. Positions count records; the repeats that padding adds are the source's business.

Most orders compute the answer from the position. The windowed shuffle cannot: it must be walked
through from the start. It is given wings by a *cursor*, which holds the window at a position near
the one it is for, or the step that a walk to it begins at. A cursor never changes an answer, only
how long it takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from threading import Lock

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.workers.errors import ResumeError
from feeder.workers.sources.orders.libstdcxx import draw_mt19937, shuffle
from feeder.workers.sources.orders.permutation import Permutation
from feeder.workers.sources.orders.sharding import Sharding
from feeder.workers.sources.orders.shuffles import shuffle_again

LISTS_KEPT = 4
"""So many shuffled lists, or keyed permutations, of an order are kept."""
# Calls of two epochs are under way at once where one goes over into the next, and two feeds may
# share a source (2026-11-21).

_KEPT_BLOCKS = 64
"""So many permutations of windows are kept, where a shuffle keeps records together."""
# Rows of one call lie in a few windows, and calls of some threads in the same ones; not
# measured (2026-11-25).


_LOOKED_AT = 1 << 20
"""So many records are looked at together, if an order has no inverse."""
# They bound memory; not measured (2026-11-29).


# The seed that DALI shuffles its lists of files with, so that all shards do it alike.
DALI_LIST_SEED = 524287


class Order(ABC):
    """Which record comes when. Any thread may call any method."""

    is_computed = True
    """Whether any position is found at once, so that it costs little to look ahead."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding

    @abstractmethod
    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """The records at positions `start` to `stop` - 1 of an epoch; `stop` is at most
        `sharding.length(epoch)`."""

    def at(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The records at any positions of an epoch: at once where they follow each other, and
        else stretch by stretch."""
        starts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1).tolist()
        first, last = int(positions[0]), int(positions[-1])
        if len(starts) == 1:
            return self.indices(epoch, first, last + 1)
        stops = [*starts[1:], len(positions)]
        return np.concatenate(
            [
                self.indices(epoch, int(positions[start]), int(positions[start]) + stop - start)
                for start, stop in zip(starts, stops, strict=True)
            ]
        )

    def find(self, epoch: int, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of an epoch at which records come: the inverse of `at`, of a source without
        shards. DALI's orders have none."""
        raise NotImplementedError

    def places(self, epoch: int, record: int) -> list[int]:
        """The positions of an epoch of the shard at which a record comes: none, or one. Any record
        may be asked for. DALI's orders look at all records of the epoch."""
        length, found = self.sharding.length(epoch), []
        for start in range(0, length, _LOOKED_AT):
            records = self.indices(epoch, start, min(start + _LOOKED_AT, length))
            found += (np.flatnonzero(records == record) + start).tolist()
        return found

    def _place(self, epoch: int, record: int) -> list[int]:
        """The same by `find`, of an order that every shard takes its share of."""
        if not 0 <= record < self.sharding.num_records:
            return []
        position = int(self.find(epoch, np.array([record]))[0]) - self.sharding.first(epoch)
        return [position] if 0 <= position < self.sharding.length(epoch) else []

    def cursor(self, epoch: int, position: int) -> bytes:
        """What a fresh order must be given, by `seek`, to reach this position at once; empty
        where it needs nothing."""
        return b""

    def seek(self, cursor: bytes) -> None:
        """Take a cursor of an order that was made with the same arguments.

        Raises:
            ResumeError: it is not one.
        """
        if cursor:
            raise ResumeError(
                f"cursor of {len(cursor)} bytes for an order that needs none: the position is of "
                "a feed with another order"
            )


class SequentialOrder(Order):
    """The records of the epoch's shard as they lie. Never changes, so any thread may ask it."""

    def __init__(self, sharding: Sharding) -> None:
        super().__init__(sharding)
        self._first = lru_cache(maxsize=LISTS_KEPT)(sharding.first)

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        first = self._first(epoch)
        return np.arange(first + start, first + stop, dtype=np.int64)

    def at(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions + self.sharding.first(epoch)

    def find(self, epoch: int, records: NDArray[np.int64]) -> NDArray[np.int64]:
        return records

    def places(self, epoch: int, record: int) -> list[int]:
        return self._place(epoch, record)


class PermutedOrder(Order):
    """A pseudo-random permutation, another one in each epoch, that is computed where it is asked.

    Every epoch permutes all records and each shard takes its share of the positions, so that
    shards are disjoint and their contents change. With `stick_to_shard` the records of the one
    shard are permuted among themselves. Any thread may ask it: the permutations that are kept lie
    in an `lru_cache`, which has a lock of its own.
    """

    def __init__(self, sharding: Sharding, seed: int) -> None:
        super().__init__(sharding)
        self._seed = seed
        self._permutation = lru_cache(maxsize=LISTS_KEPT)(self._permute)

    def _permute(self, epoch: int) -> Permutation:
        sharding = self.sharding
        if sharding.stick_to_shard:
            # Shard and number of shards in the key: each shard has a permutation of its own.
            key = f"{self._seed}/{epoch}/{sharding.shard_id}/{sharding.num_shards}"
            return Permutation(sharding.length(epoch), key)
        return Permutation(sharding.num_records, f"{self._seed}/{epoch}")

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        first, permutation = self.sharding.first(epoch), self._permutation(epoch)
        if self.sharding.stick_to_shard:
            return permutation(start, stop) + first
        return permutation(first + start, first + stop)

    def at(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        first, permutation = self.sharding.first(epoch), self._permutation(epoch)
        if self.sharding.stick_to_shard:
            return permutation.at(positions) + first
        return permutation.at(positions + first)

    def find(self, epoch: int, records: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._permutation(epoch).find(records)

    def places(self, epoch: int, record: int) -> list[int]:
        if not self.sharding.stick_to_shard:
            return self._place(epoch, record)
        inside = record - self.sharding.first(epoch)
        is_there = 0 <= inside < self.sharding.length(epoch)
        return self._permutation(epoch).find(np.array([inside])).tolist() if is_there else []


class BlockOrder(Order):
    """Windows of `window` records that lie together come in random order, and so do the records of
    each window: what is read lies together. The last window has what is left, and comes at a random
    place among the others.

    Computed where it is asked, from one permutation of the windows and one of each. Any thread may
    ask it: the permutations that are kept lie in an `lru_cache`. It knows no shards.
    """

    def __init__(self, sharding: Sharding, seed: int, window: int) -> None:
        super().__init__(sharding)
        self._seed, self._window = seed, window
        self._whole, self._rest = divmod(sharding.num_records, window)
        self._permutation = lru_cache(maxsize=_KEPT_BLOCKS)(self._permute)

    def _permute(self, epoch: int, block: int | None) -> Permutation:
        if block is None:
            return Permutation(max(1, self._whole), f"{self._seed}/{epoch}/windows")
        size = self._window if block < self._whole else self._rest
        return Permutation(size, f"{self._seed}/{epoch}/window/{block}")

    def _place_of_rest(self, epoch: int) -> int:
        """How many whole windows come before what is left."""
        if not self._rest:
            return self._whole
        digest: int = xxhash.xxh3_64_intdigest(f"{self._seed}/{epoch}/rest".encode())
        return digest % (self._whole + 1)

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        # Window by window, of which each keeps what it has computed for the next call: 256 records
        # of windows of 4,096 take 0.04 ms, and 0.18 ms by `at` (2026-11-28).
        found = np.empty(stop - start, dtype=np.int64)
        before = self._place_of_rest(epoch) * self._window
        at = start
        while at < stop:
            if before <= at < before + self._rest:
                number, inside, size = self._whole, at - before, self._rest
            else:
                slot, inside = divmod(at - (at >= before) * self._rest, self._window)
                number, size = int(self._permutation(epoch, None)(slot, slot + 1)[0]), self._window
            num = min(size - inside, stop - at)
            images = self._permutation(epoch, number)(inside, inside + num)
            found[at - start : at - start + num] = images + number * self._window
            at += num
        return found

    def at(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        window, before = self._window, self._place_of_rest(epoch)
        is_rest = (positions >= before * window) & (positions < before * window + self._rest)
        # Without what is left, all windows are of one size.
        moved = np.where(positions < before * window, positions, positions - self._rest)
        numbers, inside = np.divmod(moved, window)
        numbers[is_rest] = self._whole
        inside[is_rest] = positions[is_rest] - before * window
        whole = ~is_rest
        if whole.any():
            numbers[whole] = self._permutation(epoch, None).at(numbers[whole])
        found = np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            images = self._permutation(epoch, number).at(inside[chosen])
            found[chosen] = number * window + images
        return found

    def find(self, epoch: int, records: NDArray[np.int64]) -> NDArray[np.int64]:
        window, before = self._window, self._place_of_rest(epoch) * self._window
        numbers, inside = np.divmod(records, window)
        slots = np.empty_like(records)
        whole = numbers < self._whole
        slots[whole] = self._permutation(epoch, None).find(numbers[whole]) * window
        # Windows that come after what is left are so many positions later.
        slots[whole & (slots >= before)] += self._rest
        slots[~whole] = before
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            slots[chosen] += self._permutation(epoch, number).find(inside[chosen])
        return slots

    def places(self, epoch: int, record: int) -> list[int]:
        return self._place(epoch, record)


class ReshuffledOrder(Order):
    """DALI's `shuffle_after_epoch`: the list of records is shuffled for every epoch, and each
    shard takes its fixed share of it.

    Each epoch shuffles the sorted list, as DALI does with `enable_checkpointing`; with `compound`
    it shuffles the list of the epoch before, as DALI does without. A list takes 8 bytes and about
    0.2 µs per record. Reaching epoch e with `compound` takes e + 1 of them, at about 0.01 µs: each
    is made of the one before, which no cursor of a few bytes can hold. The lists that are kept are
    guarded by the order's own lock, so any thread may ask.
    """

    def __init__(self, sharding: Sharding, seed: int, compound: bool) -> None:
        super().__init__(sharding)
        self._seed = seed
        self._compound = compound
        self._lists: dict[int, NDArray[np.int64]] = {}
        self._lock = Lock()

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        first = self.sharding.first(epoch)
        return self._list(epoch)[first + start : first + stop]

    def _list(self, epoch: int) -> NDArray[np.int64]:
        with self._lock:
            if epoch not in self._lists:
                self._lists[epoch] = self._make(epoch)
                # The one that was made first goes: epochs pass in order.
                if len(self._lists) > LISTS_KEPT:
                    del self._lists[next(iter(self._lists))]
            return self._lists[epoch]

    def _make(self, epoch: int) -> NDArray[np.int64]:
        # A list that is at hand is a shorter way than the sorted one.
        known = max((e for e in self._lists if e < epoch), default=-1) if self._compound else -1
        first = known + 1 if self._compound else epoch
        order = self._lists[known] if known >= 0 else np.arange(self.sharding.num_records)
        return shuffle_again(order, [self._seed + (e + 1 << 32) for e in range(first, epoch + 1)])


def shuffled_list(num_records: int) -> NDArray[np.int64]:
    """The list that DALI's readers of files begin from with `random_shuffle`: shuffled once,
    alike for all shards and seeds."""
    return shuffle(num_records, draw_mt19937(DALI_LIST_SEED), 32)
