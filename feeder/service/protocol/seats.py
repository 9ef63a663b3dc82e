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
    finished: bool = False
    """Whether it came with everything: then `step` is how many batches the stream has."""
    undecided: bool = False
    """Whether it was opened at the very start and has used nothing: it may still load a state."""
    starts: bool = False
    """Whether the holder starts a run of training, and does not come back within one."""
    takes_part: bool = False
    """Whether the feed has run for the holder."""
    ended: bool = False
    """Whether its last consumer has had everything: it need not be there again."""
    is_hearsay: bool = False
    """Whether that is known from another queue's consumer alone, who had it from a server before
    this one."""
    had_ended: bool = False
    """Whether that was so of the last holder for whom the feed had run."""

    @property
    def taken(self) -> bool:
        """Whether a living consumer holds it."""
        return self.holder is not None and self.alive

    @property
    def begins_anew(self) -> bool:
        """Whether a holder wants the feed to run who had no part in it yet: all are to come."""
        return self.taken and self.starts and not self.takes_part


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
        self, queue: int, step: int, who: str, *, rejoins: bool = False, takes_over: bool = False,
        undecided: bool = False, finished: bool = False, apart_from: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Whether somebody may open a queue at a position, apart from where the holders of some
        queues stand; changes nothing.

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
        others = {i: self._rounds(s.step, finished=s.finished) for i, s in enumerate(self.seats)
                  if i != queue and i not in apart_from and s.taken
                  and not s.undecided}  # fmt: skip
        first = step if finished else self.first_step(step, queue)
        mine = self._rounds(first, finished=finished)
        if any(not other & mine for other in others.values()):
            told = ", ".join(f"queue {i} at round {max(rounds)}" for i, rounds in others.items())
            raise ResumeError(
                f"queue {queue} would start at round {max(mine)}, but {told}; start all trainers "
                "from one checkpoint, or rejoin=True for one that goes on alone"
            )

    def _rounds(self, step: float, *, finished: bool) -> set[int]:
        """The round of a step. Of the last one some queues may have had a batch, and for the others
        there was none: who has had everything stands before it and after it."""
        num = len(self.seats)
        return {int(step // num), int(-(-step // num))} if finished else {int(step // num)}

    def take(
        self, queue: int, step: int, who: str, *, rejoins: bool, undecided: bool,
        finished: bool = False,
    ) -> None:  # fmt: skip
        """Seat a consumer whose right has been checked."""
        before = self.seats[queue]
        self.seats[queue] = Seat(
            holder=who, alive=True, step=step if finished else self.first_step(step, queue),
            finished=finished, undecided=undecided, starts=not rejoins,
            had_ended=before.ended or (before.had_ended and not before.takes_part),
        )  # fmt: skip

    def hear(self, queue: int, *, uses: bool) -> bool:
        """The holder lives; and whether it has used a batch. Whether that is news."""
        seat = self.seats[queue]
        before = seat.alive, seat.undecided
        seat.alive, seat.ended = True, False
        seat.undecided = seat.undecided and not uses
        return before != (seat.alive, seat.undecided)

    def move(self, queue: int, step: int) -> None:
        """The holder has used the batches before `step`."""
        self.seats[queue].step = self.first_step(step, queue)

    def leave(self, queue: int, *, ended: bool) -> None:
        """The holder has gone of its own will."""
        seat = self.seats[queue]
        ended = ended or (seat.had_ended and not seat.takes_part)
        self.seats[queue] = Seat(step=math.inf if ended else seat.step, ended=ended)

    def end(self, queues: Iterable[int]) -> list[int]:
        """A consumer says that these queues have had everything. Of those that nobody holds it is
        believed, so that nobody waits for them; returns those of which this is news."""
        news = [
            queue
            for queue in queues
            if queue < len(self.seats)
            and self.seats[queue].holder is None
            and not self.seats[queue].ended
        ]
        for queue in news:
            self.seats[queue] = Seat(step=math.inf, ended=True, is_hearsay=True)
        return news

    def lose(self, queue: int) -> None:
        """The holder's connection is dead, or its lease has run out."""
        seat = self.seats[queue]
        seat.alive, seat.ended = False, seat.had_ended and not seat.takes_part

    def missing(self) -> list[int]:
        """The queues that the feed waits for: nobody holds them, or their consumer stands at the
        very start, unused, while another has loaded a state."""
        begun = self._origin + len(self.seats)
        loaded = any(s.taken and not s.undecided and s.step >= begun for s in self.seats)
        ended = self._ended()
        return [
            i
            for i, seat in enumerate(self.seats)
            if not (seat.taken or i in ended) or (seat.undecided and loaded)
        ]

    def news(self, have_all: Collection[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The queues that the feed waits for, and those that have ended, among them those whose
        consumers are still there and have had everything."""
        return tuple(self.missing()), tuple(sorted(self._ended() | {*have_all}))

    def _ended(self) -> set[int]:
        """The queues that have ended, as long as nobody wants the feed to run again."""
        if any(seat.begins_anew for seat in self.seats):
            return set()
        return {i for i, seat in enumerate(self.seats) if seat.ended}
