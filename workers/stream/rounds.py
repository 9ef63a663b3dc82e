"""Rounds: which queue each batch goes to, and how dealing goes on with another number of queues.

The batches of a stream have one order and one number each (`Batch.step`). N queues are dealt one
batch each, again and again: N batches are a *round*. Only between two rounds have all queues been
dealt equally many batches, so only there may the number of queues change.

A run numbers what it deals out by *turns*: turn t is of round t // N and goes to queue t % N. The
first round of a run has turn 0. Batches of negative turns are made and dropped: the rest of a round
that another run began, and the rounds that `skip` leaves out.

Pure functions and values: what deals in one process and what deals to many use the same.
"""

from __future__ import annotations

from typing import NamedTuple


class Dealing(NamedTuple):
    """How the batches around a position are dealt out; a token holds it."""

    start: int
    """The smallest number of a batch at which a round begins if rounds are counted on from there:
    batch `step` goes to queue `(step - start) % num`."""
    num: int
    """Queues."""
    batch_size: int
    """Rows of each batch."""
    skipped: int = 0
    """Rounds that `skip` has left out since the start of the stream."""
    epochs: int | None = None
    """Epochs after which the stream ended, and with it a round that was not complete; None without
    end, and where all rounds are complete, as those of one queue."""

    @classmethod
    def from_start(cls, num: int, batch_size: int, epochs: int | None) -> Dealing:
        """How batches are dealt out from the start of the stream on."""
        return cls(0, num, batch_size, 0, epochs if num > 1 else None)

    def rest(self, epoch: int, step: int) -> int:
        """Batches from number `step`, of the epoch, to the end of its round; 0 where a round begins
        there. The round may end before, with its stream."""
        is_over = self.epochs is not None and epoch >= self.epochs
        return 0 if is_over else (self.start - step) % self.num

    def begun_at(self, step: int) -> Dealing:
        """The same where a round begins at batch `step`."""
        # The smallest such number and not `step`: one place has one token, whichever run wrote it.
        return self._replace(start=step % self.num)


class Turns(NamedTuple):
    """How a run begins to deal."""

    first: int
    """The turn of its first batch."""
    first_round: int = 0
    """The turn of the first batch of its first round, skipped ones included."""
    dealing: Dealing | None = None
    """What its positions say of it; None where they say that it is from the start of the stream."""
    ends_after: int | None = None
    """Epochs after which the round that another run began has ended, complete or not."""


def begin(
    epoch: int,
    step: int,
    then: Dealing | None,
    *,
    num: int,
    batch_size: int,
    epochs: int | None,
    skip: int = 0,
) -> Turns:
    """How a run deals that goes on before batch `step`, of an epoch, where batches were dealt out
    as `then` says (None where a round ended there)."""
    # Rounded up and not down: the queues that were dealt a batch of the round have used it.
    rest = 0 if then is None else then.rest(epoch, step)
    skipped = skip if then is None else then.skipped + skip
    dealing = Dealing.from_start(num, batch_size, epochs)._replace(skipped=skipped)
    first = -rest - skip * num
    ends_after = None if then is None else then.epochs
    return Turns(first, -skip * num, dealing.begun_at(step - first), ends_after)


def next_round(turn: int, num: int, *, drops: bool, first: int) -> int:
    """The turn with which the next round begins, where the next batch would have turn `turn` and
    the round at hand ends before it. `drops` says whether a round that is not complete is left out,
    and so counts for nothing. `first` is the turn of the run's first round, skipped ones included.
    """
    began = turn - turn % num
    # What another run began ends with the epoch, however many of its batches are missing.
    return max(first, began if drops or began == turn else began + num)


def ends_round(turn: int, num: int) -> bool:
    """Whether the batch of this turn is the last of a complete round."""
    return (turn + 1) % num == 0
