"""Batches after which a checkpoint is due, and which must be the last ones handed out before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from feeder.workers.stream.batch import Batch


class CheckpointTriggers:
    """Every so many batches of a stream, in whole rounds of its devices, and its end.

    A device feed asks only when it takes batches from its queue, and then hands out those up to the
    one that is due: nothing is done per batch. It never changes; any thread reads it.
    """

    def __init__(self, every: int | None, num_devices: int, fire: Callable[[], None]) -> None:
        self._every = every
        self._num = num_devices
        self.fire = fire
        """Takes the checkpoint. Called in the thread that has been handed the batch, or the end."""

    def first_in(self, batches: Sequence[Batch]) -> tuple[int, int]:
        """How many of the batches come up to and with the first at which a checkpoint is due, and
        the number of its round, from 1; 0 and 0 where none is due."""
        if self._every is not None:
            for i, batch in enumerate(batches):
                # Whole rounds: only there do all devices stand at the same batch.
                end = batch.step - batch.turn % self._num + self._num
                if end // self._every > (end - self._num) // self._every:
                    return i + 1, batch.turn // self._num + 1
        return 0, 0
