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

from typing import NamedTuple, Protocol


class Dealing(NamedTuple):
    """How the batches around a position are dealt out; a token holds it."""

    start: int
    """The smallest number of a batch at which a round begins if rounds are counted on from there:
    batch `step` goes to queue `(step - start) % num`. A larger one where the batches before it are
    nobody's: they are made and dropped."""
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
        if is_over:
            return 0
        return self.start - step if step < self.start else (self.start - step) % self.num

    def within(self, step: int) -> tuple[int, int]:
        """How many batches from number `step` on are nobody's, and how many of the round of the
        first other one are before it."""
        nobodys = max(0, self.start - step)
        return nobodys, (step + nobodys - self.start) % self.num

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
    older: int = 0
    """How many batches at first have the size of another run: those that are left of its round,
    where the size of a batch follows from the number of queues."""
    older_size: int = 0
    """Rows of each of these."""


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
    if then is None:
        return Turns(first, -skip * num, dealing.begun_at(step - first))
    older = rest if then.batch_size != batch_size else 0
    dealing = dealing.begun_at(step - first)
    return Turns(first, -skip * num, dealing, then.epochs, older, then.batch_size)


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


class Place(Protocol):
    """A position in the stream, or a batch, by its numbers."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""

    @property
    def index(self) -> int:
        """Its number in the epoch."""

    @property
    def step(self) -> int:
        """Its number in the stream."""


_EPOCH = 1 << 64
"""More rounds than an epoch has."""


class Counting(NamedTuple):
    """Counts the rounds of a served feed, whose runs and consumers stand at many places at once.

    A place has a *number*, larger for each later place: `step`, or, where rounds end with epochs,
    one that tells epoch and index, since how many batches an epoch has is not known before its end.
    """

    num: int
    """Queues."""
    per_epoch: bool = False
    """Whether a round begins in each epoch."""
    begins: int = 0
    """The number of a place where a round begins. With rounds of an epoch it is of that epoch
    alone: each later one begins with a round."""

    def number(self, place: Place) -> int:
        """The number of a place, or of a batch."""
        if self.per_epoch:
            return place.epoch * self.num * _EPOCH + place.index
        return place.step

    def _epoch(self, number: int) -> int:
        return number // (self.num * _EPOCH) if self.per_epoch else 0

    def turn(self, number: int) -> int:
        """The turn of the batch there: it goes to queue `turn % num`."""
        is_shifted = self._epoch(number) == self._epoch(self.begins)
        return number - self.begins % self.num if is_shifted else number

    def round(self, number: int) -> int:
        """The round of the batch there."""
        return self.turn(number) // self.num

    def queue(self, number: int) -> int:
        """The queue that the batch there goes to."""
        return self.turn(number) % self.num

    def first(self, number: int, queue: int) -> int:
        """The number of a queue's first batch at a place or after it."""
        return number + (queue - self.turn(number)) % self.num

    def after_epoch(self, number: int) -> int | None:
        """The round that the next epoch begins with; None where rounds do not end with epochs."""
        return (self._epoch(number) + 1) * _EPOCH if self.per_epoch else None

    def knows(self, number: int) -> bool:
        """Whether it says where the rounds of the batch there begin: of the epochs before the one
        that it begins in it does not."""
        return self._epoch(number) >= self._epoch(self.begins)

    def agrees(self, other: Counting, number: int) -> bool:
        """Whether another counting gives the batch there to the same queue, as far as both know."""
        if not (self.knows(number) and other.knows(number)):
            return True
        return (self.turn(number) - other.turn(number)) % self.num == 0

    def round_name(self, number: int) -> str:
        """The round of a place in words: where it begins, and which it is."""
        first = self.round(number) * self.num + number - self.turn(number)
        if not self.per_epoch:
            return f"step {first} (round {self.round(number)})"
        return f"batch {first % (self.num * _EPOCH)} of epoch {self._epoch(number)}"
