"""What a feed's reader and a consumer share: one thread reads, epoch by epoch.

Batches come some at a time, and wait in `_ready` until each is handed out. Each reader hands out in
a `__next__` of its own, by assignments: Python raises an interrupt at calls, and a batch that the
user never saw must not count.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from feeder.errors import ClosedError, read_by_two
from feeder.feeds.records import Rows
from feeder.workers.public import public
from feeder.workers.stream.batch import Batch


class EpochReader:
    """What reads the batches of one queue in order, as a feed or a consumer does. All fields belong
    to the thread that is inside `next`."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Batches that came together and were not handed out yet.
        self._ready: deque[Batch] = deque()
        # Whether a thread is inside `next`. A try-lock without a lock: no call lies between reading
        # the flag and setting it, so no other thread comes in between. An interrupt between two
        # lines could leave a lock held; `finally` takes this flag back.
        self._is_read = False
        # Only after a `StopIteration` is a second loop a mistake: a loop that was left by `break`
        # may be taken up again.
        self._end_is_told = False
        # The epoch of the batch that was handed out last.
        self._epoch = Epoch(self, -1)

    def __iter__(self) -> Iterator[Batch]:
        raise NotImplementedError

    def __next__(self) -> Batch:
        raise NotImplementedError

    def next_epoch(self) -> int | None:
        """The epoch of the next batch, which is waited for and not handed out; None after the
        last. The position stays where it is."""
        if self._is_read:
            self._refuse_second()
        try:
            self._is_read = True
            ready = self._wait_for_some(is_end=False)
            return None if ready is None else ready[0].epoch
        finally:
            self._is_read = False

    def __bool__(self) -> bool:
        return True  # Otherwise `if reader` would ask for its length, which may not be known.

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
        if self._epoch.number != number:
            self._epoch = Epoch(self, number)
        return self._epoch

    def _wait_for_some(self, *, is_end: bool = True) -> deque[Batch] | None:
        """The batches that are handed out next, waited for; None after the last. With `is_end` the
        user has had all that came before."""
        # A function of its own: CPython 3.13 and 3.14 do not run `finally` where a signal's handler
        # raises as a loop goes round that stands in its `try` itself (python/cpython#130279).
        while not (ready := self._ready):
            if (end := self._refill()) is not None:
                if is_end:
                    self._end(end)
                return None
        return ready

    def _refuse_second(self) -> None:
        """Another thread is inside `next`."""
        self._check_usable()
        raise read_by_two(self._name)

    def _check_usable(self) -> None:
        """Raise if no batch can be had."""
        raise NotImplementedError

    def records_of(self, batch: Batch) -> Rows:
        """The records that the rows of a batch were made of."""
        raise NotImplementedError

    def _refill(self) -> Any:
        """Wait for batches, which are `_ready` then; returns the end of the stream if it has come,
        and raises an error that has taken the place of the next batch."""
        raise NotImplementedError

    def _end(self, place: Any) -> None:
        """The user has had all batches: the stream has ended at `place`."""
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

    def records_of(self, batch: Batch) -> Rows:
        """The records that the rows of one of its batches were made of."""
        return self._found().records_of(batch)

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
