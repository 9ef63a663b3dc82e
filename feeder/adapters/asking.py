"""Which records the batches of a loader are made of, and when a record comes: numbers alone.

Where each batch lies follows from the rounds of the epochs, counted on from a place that the loader
is known to have stood at. A loop that is left by `break` leaves the rest of its epoch out, so each
such end is a place of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from feeder.errors import ConfigError
from feeder.workers.stream.shares import Place, Share

if TYPE_CHECKING:
    from feeder.feeds.records import Rows
    from feeder.workers.sources.stores.reading import Seen

_MOST_EPOCHS = 1000
"""A record that does not come in so many epochs is looked for no longer."""


class Numbers(NamedTuple):
    """What a loader reads, by numbers."""

    share: Share
    size: int
    """Rows of a batch."""
    epochs: int | None
    period: int
    """After so many epochs their lengths come again."""
    num_batches: Callable[[int], int]
    """Batches of all ranks in an epoch."""
    records_of: Callable[[int, int], Rows]
    """The records of a batch, by its epoch and its number there."""
    rows_of: Callable[[str, int, int], Iterator[int]]
    """The rows of an epoch that are made of a source's record. Raises `ConfigError` if there is no
    such record."""

    def rounds(self, epoch: int, index: int = 0) -> int:
        """The batches of each rank in an epoch, from one of its batches on."""
        return self.share.rounds(self.num_batches(epoch), index)

    def has(self, epoch: int) -> bool:
        """Whether there is such an epoch."""
        return self.epochs is None or epoch < self.epochs


def records_at(numbers: Numbers, known: Sequence[Place], step: int) -> Rows:
    """The records of this rank's batch of a step. `known` are the places from which on steps are
    counted, the last one without an end. Raises `ConfigError`."""
    if isinstance(step, bool) or not isinstance(step, int) or step < known[0].step:
        raise ConfigError(
            f"step is {step!r}, expected a whole number of at least {known[0].step}, with which "
            "the loader has begun or gone on from a state"
        )
    epoch, index, first = next(place for place in reversed(known) if place.step <= step)
    left = step - first
    rounds = numbers.rounds(epoch, index) if numbers.has(epoch) else 0
    if left >= rounds:
        left, epoch, index = left - rounds, epoch + 1, 0
        lap = sum(numbers.rounds(epoch + i) for i in range(numbers.period))
        epoch += left // max(1, lap) * numbers.period
        left %= max(1, lap)
        while lap and left >= (rounds := numbers.rounds(epoch)):
            left, epoch = left - rounds, epoch + 1
        if not lap or not numbers.has(epoch):
            raise ConfigError(f"step is {step}, and the loader has ended before it")
    batch = numbers.share.batch(left, numbers.num_batches(epoch), index)
    assert batch is not None
    return numbers.records_of(epoch, batch)


def when_comes(
    numbers: Numbers, known: Sequence[Place], source: str, record: int
) -> Iterator[Seen]:
    """Where a record comes on any rank, in the order of steps. Raises `ConfigError`."""
    numbers.rows_of(source, record, 0)
    return _comes(numbers, known, source, record)


def _comes(numbers: Numbers, known: Sequence[Place], source: str, record: int) -> Iterator[Seen]:
    ends = [*(place.step for place in known[1:]), math.inf]
    found, quiet = False, 0
    for (epoch, index, step), end in zip(known, ends, strict=True):
        while step < end and numbers.has(epoch) and quiet < _MOST_EPOCHS:
            rounds, quiet = numbers.rounds(epoch, index), quiet + 1
            seen = sorted(_seen(numbers, Place(epoch, index, step), source, record))
            for one in seen:
                if one.step < end:
                    found, quiet = True, 0
                    yield one
            epoch, index, step = epoch + 1, 0, step + rounds
    if not found:
        raise ConfigError(
            f"record {record} of source {source!r} is in no batch of the next {_MOST_EPOCHS} "
            "epochs: it is excluded, or dropped at their ends"
        )


def _seen(numbers: Numbers, at: Place, source: str, record: int) -> Iterator[Seen]:
    """Where a record comes in the rest of an epoch."""
    from feeder.workers.sources.stores.reading import Seen

    share, num, rounds = numbers.share, numbers.num_batches(at.epoch), numbers.rounds(*at[:2])
    for position in numbers.rows_of(source, record, at.epoch):
        batch, row = divmod(position, numbers.size)
        number, rank = divmod(batch - at.index, share.num)
        if not 0 <= number < rounds or batch >= num:
            continue
        # At an epoch's end ranks without a batch of their own have the last one again.
        ranks = range(rank, share.num) if batch == num - 1 else [rank]
        for one in ranks:
            yield Seen(at.step + number, row, at.epoch, one)
