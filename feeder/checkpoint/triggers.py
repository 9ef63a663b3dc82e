"""Batches at which something is to be done, as soon as they have been handed out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from feeder.workers.stream.batch import Batch


class CheckpointTriggers:
    """Every so many batches of a stream, in whole rounds of its devices, and its end.

    A device feed asks only when it takes batches from its queue, and hands out what it took up to
    a marked one alone: nothing is done per batch.
    """

    def __init__(self, every: int | None, num_devices: int, fire: Callable[[], None]) -> None:
        self._every = every
        self._num = num_devices
        self.fire = fire
        """Called in the thread that has been handed a marked batch, or the end."""

    def first_in(self, batches: Sequence[Batch]) -> tuple[int, int]:
        """How many of the batches come up to the first that is marked, with it, and at which
        number of batches its round ends; 0 and 0 where none is."""
        if self._every is not None:
            for i, batch in enumerate(batches):
                end = (batch.step // self._num + 1) * self._num
                if end // self._every > (end - self._num) // self._every:
                    return i + 1, end
        return 0, 0
