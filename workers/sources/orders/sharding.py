"""Shards: which part of the records an epoch reads, and how many rows it gives.

The rules are those of DALI 2.x readers. With N records and S shards, shard v holds the records
from N*v // S up to N*(v+1) // S. Epoch e of shard s reads shard (s + e) % S, or always shard s
with `stick_to_shard`. Everything here is arithmetic: the number of records costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """One shard's share of `num_records` records, over all epochs."""

    num_records: int
    """Records of the whole source."""
    shard_id: int = 0
    """The shard that epoch 0 reads."""
    num_shards: int = 1
    """Number of shards."""
    stick_to_shard: bool = False
    """Whether every epoch reads the same shard."""
    pad_last_batch: bool = False
    """Whether every epoch is made as long as the longest shard's, in whole batches."""

    def __post_init__(self) -> None:
        if self.num_records < 1:
            raise ConfigError("the source holds no records, expected at least 1")
        if self.num_shards < 1:
            raise ConfigError(f"num_shards is {self.num_shards!r}, expected at least 1")
        if not 0 <= self.shard_id < self.num_shards:
            raise ConfigError(
                f"shard_id is {self.shard_id!r}, expected 0 to {self.num_shards - 1} "
                f"(num_shards is {self.num_shards!r})"
            )
        if self.num_shards > self.num_records:
            raise ConfigError(
                f"num_shards is {self.num_shards!r}, more than the {self.num_records} records "
                "of the source: some shards would be empty"
            )

    @property
    def epoch_size(self) -> int:
        """Records of all shards together."""
        return self.num_records

    @property
    def epoch_size_padded(self) -> int:
        """`epoch_size`, or with padding the rows of all shards when each is as long as the
        longest (not rounded up to whole batches)."""
        return self._longest() * self.num_shards if self.pad_last_batch else self.num_records

    def _longest(self) -> int:
        return -(-self.num_records // self.num_shards)

    def shard(self, epoch: int) -> int:
        """The shard that an epoch reads."""
        return self.shard_id if self.stick_to_shard else (self.shard_id + epoch) % self.num_shards

    def bound(self, shard: int) -> int:
        """The first record of a shard; of shard `num_shards` the number of records."""
        return self.num_records * shard // self.num_shards

    def first(self, epoch: int) -> int:
        """The first record of the shard that an epoch reads."""
        return self.bound(self.shard(epoch))

    def length(self, epoch: int) -> int:
        """Records that an epoch reads."""
        shard = self.shard(epoch)
        return self.bound(shard + 1) - self.bound(shard)

    def rows(self, epoch: int, batch_size: int) -> int:
        """Rows that an epoch gives: its records and, with padding, the repeats of the last."""
        if not self.pad_last_batch:
            return self.length(epoch)
        return -(-self._longest() // batch_size) * batch_size

    def residue(self, shard: int) -> int:
        """A number below `num_shards` for each shard: where records are dealt out in turn, so many
        numbers leave this rest as the shard has records."""
        least, more = divmod(self.num_records, self.num_shards)
        longer = self.bound(shard) - shard * least
        is_longer = self.bound(shard + 1) - self.bound(shard) > least
        return longer if is_longer else more + shard - longer

    def shards_of(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """The shard that each record belongs to."""
        shards: NDArray[np.int64] = ((records + 1) * self.num_shards - 1) // self.num_records
        return shards

    def offset(self, epoch: int) -> int:
        """Records read in all epochs before this one."""
        if self.stick_to_shard:
            return epoch * self.length(0)
        rounds, rest = divmod(self.shard_id + epoch, self.num_shards)
        return rounds * self.num_records + self.bound(rest) - self.bound(self.shard_id)

    @property
    def is_even(self) -> bool:
        """Whether all epochs read as many records."""
        return self.stick_to_shard or self.num_records % self.num_shards == 0

    def epoch_at(self, count: int) -> int:
        """The epoch that reads the next record when `count` records have been read."""
        if self.stick_to_shard:
            return count // self.length(0)
        # A round of the shards reads every record once; the quotient is at most one epoch off.
        start = count + self.bound(self.shard_id)
        rounds, rest = divmod(start, self.num_records)
        shard = rest * self.num_shards // self.num_records
        while self.bound(shard + 1) <= rest:
            shard += 1
        return rounds * self.num_shards + shard - self.shard_id


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochsInTurn(Sharding):
    """Epochs of different sizes in turn, each of which reads all its records: `num_shards` is the
    number of sizes, and `num_records` the largest one."""

    sizes: tuple[int, ...]
    """Records of each epoch."""

    def first(self, epoch: int) -> int:
        """The first record of an epoch."""
        return 0

    def length(self, epoch: int) -> int:
        """Records that an epoch reads."""
        return self.sizes[epoch % len(self.sizes)]

    def offset(self, epoch: int) -> int:
        """Records read in all epochs before this one."""
        rounds, rest = divmod(epoch, len(self.sizes))
        return rounds * sum(self.sizes) + sum(self.sizes[:rest])

    def epoch_at(self, count: int) -> int:
        """The epoch that reads the next record when `count` records have been read."""
        rounds, rest = divmod(count, sum(self.sizes))
        ends = np.cumsum(self.sizes)
        return rounds * len(self.sizes) + int(np.searchsorted(ends, rest, side="right"))
