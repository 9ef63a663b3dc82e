"""Parts: which calls make the batches of some of the queues, where others are made elsewhere.

Several servers share one stream, and each makes the batches of its own queues alone. All batches
keep the numbers that they have in the one order. That takes no agreement between servers: if each
batch is made by whole calls, and it is known how many rows an epoch has, numbers say which calls a
batch is made of and which queue gets it. So a run makes the calls of its part, and passes by all
others as if they had been made: what comes of them is known but for the rows.

Pure functions and values, but for `PartCalls`, which goes through the epochs.
"""

from __future__ import annotations

from operator import index
from typing import NamedTuple

from feeder.workers.errors import FeedError, FetchError, in_words
from feeder.workers.stream.rounds import Turns
from feeder.workers.stream.skipping import turn_at_epoch
from feeder.workers.stream.spec import RunSpec, StreamSpec


def rows_per_call(spec: StreamSpec, run: RunSpec) -> int | None:
    """Rows that each call of an epoch gives, its last one excepted; None if that is not known."""
    if run.rows_per_call is not None:
        return run.rows_per_call
    return spec.rows_asked if getattr(spec.fetch, "gives_all_rows", False) else None


def rows_of_epoch(spec: StreamSpec, epoch: int) -> int:
    """Rows of an epoch, as its fetch function says it. Raises whatever that raises."""
    return index(spec.fetch.rows(epoch, spec.rows_asked))  # type: ignore[attr-defined]


class Passed(NamedTuple):
    """Batches of other parts come next; they are not made here."""

    num: int


class PartCalls:
    """The calls of one part, epoch by epoch. Each owner has one of its own: the tickets, the merge,
    which is behind them, and a source that looks ahead."""

    def __init__(
        self, spec: StreamSpec, run: RunSpec, turns: Turns, epoch: int, batch: int
    ) -> None:
        """The stream begins with this batch of an epoch, which has the first turn of `turns`."""
        part, rows = run.part, rows_per_call(spec, run)
        assert part is not None
        assert rows is not None
        self._spec, self._part, self._rows, self._turns = spec, part, rows, turns
        self._per_batch = spec.batch_size // rows
        self.error: FeedError | None = None
        """Why nobody knows how many calls the epoch has."""
        self._first = epoch, turns.first - batch
        self._begin(*self._first)

    def _begin(self, epoch: int, turn: int) -> None:
        """Go to an epoch whose first batch has this turn."""
        size, epochs = self._spec.batch_size, self._spec.epochs
        self._epoch, self._turn = epoch, turn
        num, self.error = 0, None
        if epochs is None or epoch < epochs:
            try:
                num = rows_of_epoch(self._spec, epoch)
            except Exception as error:
                self.error = FetchError(
                    f"the number of rows of epoch {epoch} is not known: rows({epoch}, "
                    f"{self._spec.rows_asked}) of the fetch function raised {in_words(error)}"
                )
        self._num_rows = num
        self.num_calls = -(-num // self._rows)
        """The calls of the epoch."""
        self._num_batches = num // size if self._spec.last_batch == "drop" else -(-num // size)

    def go_to(self, epoch: int) -> None:
        """The calls that are asked for from now on are those of this epoch."""
        if epoch < self._epoch:
            self._begin(*self._first)
        while self._epoch < epoch:
            turn, num = self._turn + self._num_batches, self._part.num
            turn = turn_at_epoch(self._spec, self._turns, self._epoch + 1, turn, num)
            self._begin(self._epoch + 1, turn)

    def block(self, call: int) -> tuple[int, int]:
        """The next calls that are made here, from this one on: the first, and the first after them
        that is not. The call after an epoch's last belongs to every part: it ends the epoch."""
        if call < self.num_calls:
            part, batch = self._part, call // self._per_batch
            queue = (self._turn + batch) % part.num
            if not part.has(queue):
                batch += (part.first - queue) % part.num
                call, queue = batch * self._per_batch, part.first
            if batch < self._num_batches:
                stop = min(batch + part.stop - queue, self._num_batches)
                return call, min(stop * self._per_batch, self.num_calls)
            call = self.num_calls
        return call, self.num_calls + 1

    def batch(self, call: int) -> int:
        """The batches of the epoch before a call that begins one, or ends the epoch."""
        is_end = call >= self.num_calls
        return self._num_batches if is_end else min(call // self._per_batch, self._num_batches)

    def rows(self, call: int) -> int:
        """The rows that a call has to give."""
        return max(0, min(self._rows, self._num_rows - call * self._rows))
