"""Epochs of one reader: loops over one epoch at a time, and which batch is an epoch's last."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from feeder.errors import ClosedError
from feeder.workers.public import public
from feeder.workers.stream.batch import Batch


class EpochReader:
    """What reads the batches of one queue in order, as a feed or a consumer does. The user's
    thread owns it."""

    def __iter__(self) -> Iterator[Batch]:
        raise NotImplementedError

    def __next__(self) -> Batch:
        raise NotImplementedError

    def next_epoch(self) -> int | None:
        """The epoch of the next batch, which is waited for and not handed out; None after the
        last. The position stays where it is."""
        raise NotImplementedError

    def epochs(self) -> Iterator[Epoch]:
        """The epochs that are left, each an iterator over its batches.

        The first begins where the position is, which may be in the middle of an epoch. What a loop
        leaves of its epoch, as by `break`, is taken and dropped before the next epoch begins. An
        epoch of which this reader gets no batch does not come.
        """
        # Raises where all batches have been handed out already.
        iter(self)
        return self._epochs()

    def _epochs(self) -> Iterator[Epoch]:
        while (number := self.next_epoch()) is not None:
            epoch = self._enter(number)
            yield epoch
            for _ in epoch:
                pass
        # From now on another loop is a mistake.
        next(self, None)

    def _enter(self, number: int) -> Epoch:
        """The epoch that the next batch is of."""
        raise NotImplementedError


@public("feeder")
class Epoch:
    """The batches of one epoch that a feed or a consumer has not handed out yet: an iterator.

    Its feed makes it and notes in it what is handed out; it belongs to the thread that reads.
    """

    def __init__(self, reader: EpochReader, number: int) -> None:
        # Weak, since each batch refers to its epoch: a consumer whose batches are kept must still
        # be able to go, and give its queue back.
        self._reader = weakref.ref(reader)
        self.number = number
        """The number of the epoch, from 0."""
        self.newest = -1
        """The index of its newest batch that was handed out; -1 before the first."""

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Batch:
        reader = self._found()
        if reader.next_epoch() != self.number:
            raise StopIteration
        return next(reader)

    def ends_with(self, batch: Batch) -> bool:
        """Whether no batch of the epoch comes after this one; where that is not known yet, the next
        batch is waited for."""
        return batch.index == self.newest and self._found().next_epoch() != self.number

    def _found(self) -> EpochReader:
        reader = self._reader()
        if reader is None:
            raise ClosedError(
                f"the reader of epoch {self.number} is gone: keep the feed or the consumer for as "
                "long as its batches are asked for more than their arrays"
            )
        return reader

    def __repr__(self) -> str:
        return f"<Epoch {self.number}>"
