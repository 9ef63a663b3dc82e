"""Who holds which queue of a served feed, and where the feed may start. Rules without a clock.

A consumer opens its queue with one of two intents. *start*: it comes from a trainer's checkpoint,
so all queues must stand at the same round. *rejoin*: it goes on within the same run of training,
so positions may differ; the feed begins at the oldest, and what a queue has had is made again and
discarded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from feeder.errors import LeaseLost, ResumeError


@dataclass(slots=True, kw_only=True)
class Seat:
    """One queue."""

    holder: str | None = None
    """Who holds it, in words for messages; None where nobody does."""
    alive: bool = False
    """Whether the holder's connection is, as far as is known, alive and its lease in force."""
    step: float = 0
    """Number in the stream of the next batch that its consumer expects."""
    undecided: bool = False
    """Whether it was opened at the very start and has used nothing: it may still load a state."""
    ended: bool = False
    """Whether its last consumer has had everything: it need not be there again."""

    @property
    def taken(self) -> bool:
        """Whether a living consumer holds it."""
        return self.holder is not None and self.alive


class Seats:
    """The queues of one feed."""

    def __init__(self, num_queues: int, origin: int = 0) -> None:
        self.seats = [Seat() for _ in range(num_queues)]
        self._origin = origin
        """The step at which consumers begin that come without a position."""

    def first_step(self, step: int, queue: int) -> int:
        """The number of the first batch of a queue from batch `step` of the stream on."""
        num = len(self.seats)
        return step + (queue - step) % num

    def first_steps(self, steps: dict[int, int]) -> list[float]:
        """The numbers of all queues' first batches: those in `steps` go on there. The others have
        had everything, or will come with a position of their own: theirs are discarded."""
        return [
            self.first_step(steps[queue], queue) if queue in steps else math.inf
            for queue in range(len(self.seats))
        ]

    def check(
        self, queue: int, step: int, who: str, *, rejoins: bool, takes_over: bool, undecided: bool
    ) -> None:
        """Whether somebody may open a queue at a position; changes nothing.

        Raises `LeaseLost` where a living consumer holds the queue, and `ResumeError` where other
        queues stand at other rounds.
        """
        seat = self.seats[queue]
        if seat.taken and not takes_over:
            raise LeaseLost(
                f"queue {queue} is held by {seat.holder}; {who} may have it when that one ends, "
                "or with takeover=True"
            )
        if rejoins or undecided:
            return
        rounds = {i: s.step // len(self.seats) for i, s in enumerate(self.seats)
                  if i != queue and s.taken and not s.undecided}  # fmt: skip
        mine = self.first_step(step, queue) // len(self.seats)
        if any(other != mine for other in rounds.values()):
            told = ", ".join(f"queue {i} at round {int(r)}" for i, r in rounds.items())
            raise ResumeError(
                f"queue {queue} would start at round {mine}, but {told}; start all trainers from "
                "one checkpoint, or rejoin=True for one that goes on alone"
            )

    def take(self, queue: int, step: int, who: str, *, rejoins: bool, undecided: bool) -> None:
        """Seat a consumer whose right has been checked."""
        if not rejoins:
            for seat in self._others(queue):
                seat.ended = False
        self.seats[queue] = Seat(
            holder=who, alive=True, step=self.first_step(step, queue), undecided=undecided
        )

    def hear(self, queue: int, *, uses: bool) -> bool:
        """The holder lives; and whether it has used a batch. Whether that is news."""
        seat = self.seats[queue]
        before = seat.alive, seat.undecided
        seat.alive = True
        seat.undecided = seat.undecided and not uses
        return before != (seat.alive, seat.undecided)

    def move(self, queue: int, step: int) -> None:
        """The holder has used the batches before `step`."""
        self.seats[queue].step = self.first_step(step, queue)

    def leave(self, queue: int, *, ended: bool) -> None:
        """The holder has gone of its own will."""
        seat = self.seats[queue]
        self.seats[queue] = Seat(step=math.inf if ended else seat.step, ended=ended)

    def end(self, queues: Iterable[int]) -> None:
        """Queues that nobody holds are known to have had everything."""
        for queue in queues:
            if queue < len(self.seats) and self.seats[queue].holder is None:
                self.seats[queue] = Seat(step=math.inf, ended=True)

    def lose(self, queue: int) -> None:
        """The holder's connection is dead, or its lease has run out."""
        self.seats[queue].alive = False

    def missing(self) -> list[int]:
        """The queues that the feed waits for: nobody holds them, or their consumer stands at the
        very start, unused, while another has loaded a state."""
        begun = self._origin + len(self.seats)
        loaded = any(s.taken and not s.undecided and s.step >= begun for s in self.seats)
        return [
            i
            for i, seat in enumerate(self.seats)
            if not (seat.taken or seat.ended) or (seat.undecided and loaded)
        ]

    def news(self, have_all: Collection[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The queues that the feed waits for, and those that have ended, among them those whose
        consumers are still there and have had everything."""
        ended = [i for i, seat in enumerate(self.seats) if seat.ended or i in have_all]
        return tuple(self.missing()), tuple(ended)

    def _others(self, queue: int) -> list[Seat]:
        return [seat for i, seat in enumerate(self.seats) if i != queue]
