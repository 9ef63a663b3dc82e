"""Shares: which batches of one stream a rank makes, where each rank makes its own alone.

The batches of an epoch have one order, whoever makes them. N ranks are dealt one batch each, again
and again: N batches are a *round*, and rank r makes batch r of each. A round begins with each
epoch, and where a run begins within one. Nothing else depends on N, so a run may go on with any
number of ranks.

Pure functions of numbers.
"""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where a run of such a stream stands: after a round, which is the same place for all ranks."""

    epoch: int = 0
    """The epoch of the next round."""
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    """The batches of the epoch that rounds before it have had."""
    step: int = 0
    """The rounds before it, since the start of the stream."""

    def after_epoch(self) -> Place:
        """The start of the next epoch; rounds that are left of this one are left out."""
        return Place(self.epoch + 1, 0, self.step)


class Share(NamedTuple):
    """The batches of one rank."""

    rank: int = 0
    """The rank, from 0 on."""
    num: int = 1
    """Ranks."""
    drops: bool = False
    """Whether a round that is not complete at an epoch's end is left out; else the ranks that have
    no batch in it make the epoch's last batch once more."""

    def rounds(self, num_batches: int, index: int = 0) -> int:
        """The rounds of an epoch of so many batches, from one of its batches on."""
        left = max(0, num_batches - index)
        return left // self.num if self.drops else -(-left // self.num)

    def batch(self, number: int, num_batches: int, index: int = 0) -> int | None:
        """The batch of this rank in a round, where rounds are counted from one of the batches on;
        None where the epoch has no such round."""
        if number >= self.rounds(num_batches, index):
            return None
        return min(index + number * self.num + self.rank, num_batches - 1)

    def after(self, place: Place, rounds: int) -> Place:
        """The place so many rounds later in the same epoch."""
        return Place(place.epoch, place.index + rounds * self.num, place.step + rounds)
