"""Membership: who holds which queue of a served feed, and for whom the feed has to wait.

A consumer opens its queue with one of two intents. *start*: it comes from a trainer's checkpoint,
so all queues must stand at the same round. *rejoin*: it goes on within the same run of training,
so positions may differ; the feed begins at the oldest one, and batches that a queue has had already
are made again and discarded. Rules without sockets, threads or clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from feeder.errors import LeaseLost, ResumeError


@dataclass(slots=True, kw_only=True)
class Seat:
    """What is known of one queue and its holder. Written by `Seats` alone."""

    holder: str | None = None
    """Who holds it, in words for messages; None where nobody does."""
    alive: bool = False
    """Whether the holder is taken to live: its connection stands and its lease has not run out."""
    step: float = 0
    """Number in the stream of the next batch that its consumer expects."""
    finished: bool = False
    """Whether the holder came with the stream's end: `step` is then the stream's number of
    batches."""
    undecided: bool = False
    """Whether the holder came without a position and has used nothing: its user may yet load
    one."""
    starts: bool = False
    """Whether the holder starts a run of training; False where it comes back within one."""
    takes_part: bool = False
    """Whether the feed has run with the holder among its consumers."""
    ended: bool = False
    """Whether the queue's last consumer has had everything: nobody need come for it again."""
    is_hearsay: bool = False
    """Whether `ended` is known only from another queue's consumer, which a server before this one
    told it."""
    had_ended: bool = False
    """Whether the queue had ended before this holder came: that counts again where the holder
    leaves without having taken part."""

    @property
    def taken(self) -> bool:
        """Whether a living consumer holds the queue."""
        return self.holder is not None and self.alive

    @property
    def begins_anew(self) -> bool:
        """Whether the holder starts training and the feed has not run for it: all others must
        come."""
        return self.taken and self.starts and not self.takes_part


class Seats:
    """The seats of one feed, one for each queue. Owned by the server's I/O thread."""

    def __init__(self, num_queues: int, origin: int = 0) -> None:
        self.seats = [Seat() for _ in range(num_queues)]
        self._origin = origin
        """The step at which consumers without a position begin."""

    def first_step(self, step: int, queue: int) -> int:
        """The number of the queue's first batch at or after batch `step` of the stream: batches are
        dealt to the queues in turn."""
        num = len(self.seats)
        return step + (queue - step) % num

    def first_steps(self, steps: dict[int, int]) -> list[float]:
        """The number of the first batch that each queue wants.

        Queues in `steps` go on there. The others have had everything, or will come with a position
        of their own, so all their batches are discarded: infinity.
        """
        return [
            self.first_step(steps[queue], queue) if queue in steps else math.inf
            for queue in range(len(self.seats))
        ]

    def check(
        self, queue: int, step: int, who: str, *, rejoins: bool = False, takes_over: bool = False,
        undecided: bool = False, finished: bool = False, apart_from: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Check that `who` may open a queue at a position, whatever the holders of the queues in
        `apart_from` stand at. Changes nothing.

        Raises `LeaseLost` where a living consumer holds the queue, and `ResumeError` where other
        queues stand at other rounds.
        """
        seat = self.seats[queue]
        if seat.taken and not takes_over:
            raise LeaseLost(
                f"queue {queue} is held by {seat.holder}; {who} may have it when that one ends, "
                "or with takeover=True"
            )
        # Who rejoins may stand anywhere. Who is undecided has no position to compare yet.
        if rejoins or undecided:
            return
        # Trainers that start from checkpoints of different steps would compute with different
        # weights: that is told at once, since no row can show it later.
        others = {i: self._rounds(s.step, finished=s.finished) for i, s in enumerate(self.seats)
                  if i != queue and i not in apart_from and s.taken
                  and not s.undecided}  # fmt: skip
        first = step if finished else self.first_step(step, queue)
        mine = self._rounds(first, finished=finished)
        if any(not other & mine for other in others.values()):
            stand = ", ".join(f"queue {i} at round {max(rounds)}" for i, rounds in others.items())
            raise ResumeError(
                f"queue {queue} would start at round {max(mine)}, but {stand}; start all trainers "
                "from one checkpoint, or rejoin=True for one that goes on alone"
            )

    def _rounds(self, step: float, *, finished: bool) -> set[int]:
        """The round of a step; both rounds beside it for a queue that has had everything.

        The last round may be uneven: some queues had a batch in it, and for the others there was
        none. Who has had everything then fits on either side of that round.
        """
        num = len(self.seats)
        return {int(step // num), int(-(-step // num))} if finished else {int(step // num)}

    def take_seat(
        self, queue: int, step: int, who: str, *, rejoins: bool, undecided: bool,
        finished: bool = False,
    ) -> None:  # fmt: skip
        """Give the queue to a consumer that `check` has passed."""
        before = self.seats[queue]
        self.seats[queue] = Seat(
            holder=who, alive=True, step=step if finished else self.first_step(step, queue),
            finished=finished, undecided=undecided, starts=not rejoins,
            # A holder that takes no part leaves nothing behind: what was known before it stays.
            had_ended=before.ended or (before.had_ended and not before.takes_part),
        )  # fmt: skip

    def join_run(self, queue: int) -> None:
        """Note that the feed runs with the holder among its consumers."""
        self.seats[queue].takes_part = True

    def hear(self, queue: int, *, uses: bool) -> bool:
        """Note that the holder lives, and perhaps that it uses batches. Returns whether that is
        news: then somebody may not be missing any more."""
        seat = self.seats[queue]
        before = seat.alive, seat.undecided
        # It lives after all: an end that was noted when it was taken for lost counts no more.
        seat.alive, seat.ended = True, False
        seat.undecided = seat.undecided and not uses
        return before != (seat.alive, seat.undecided)

    def move(self, queue: int, step: int) -> None:
        """Note that the holder has used the batches before `step`."""
        self.seats[queue].step = self.first_step(step, queue)

    def leave(self, queue: int, *, ended: bool) -> None:
        """Empty the seat of a holder that has said goodbye."""
        seat = self.seats[queue]
        ended = ended or (seat.had_ended and not seat.takes_part)
        self.seats[queue] = Seat(step=math.inf if ended else seat.step, ended=ended)

    def mark_ended(self, queues: Iterable[int]) -> list[int]:
        """Note what a consumer says: that these queues have had everything. Returns those of which
        that is news.

        It is believed of queues that nobody holds, so that nobody waits for trainers that left
        while no server was there. A holder knows better itself.
        """
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
        """Note that the holder's connection is dead, or that its lease has run out. It stays the
        holder: it may have been stopped, and may be heard of again."""
        seat = self.seats[queue]
        seat.alive, seat.ended = False, seat.had_ended and not seat.takes_part

    def missing(self) -> list[int]:
        """The queues that the feed waits for: nobody holds them, or their holder is undecided while
        another has loaded a state."""
        # Whose position lies a round behind the start has loaded it. Who is undecided beside such
        # a one is about to load the same checkpoint, or else would hold all others at the start.
        begun = self._origin + len(self.seats)
        loaded = any(s.taken and not s.undecided and s.step >= begun for s in self.seats)
        ended = self._ended()
        return [
            i
            for i, seat in enumerate(self.seats)
            if not (seat.taken or i in ended) or (seat.undecided and loaded)
        ]

    def news(self, have_all: Collection[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The queues that the feed waits for, and the queues that have ended: also those in
        `have_all`, whose consumers are still there."""
        return tuple(self.missing()), tuple(sorted(self._ended() | {*have_all}))

    def _ended(self) -> set[int]:
        """The queues that have ended; none where somebody wants the feed to run again."""
        # A trainer that starts anew trains with all queues: a past end says nothing about that run.
        if any(seat.begins_anew for seat in self.seats):
            return set()
        return {i for i, seat in enumerate(self.seats) if seat.ended}
