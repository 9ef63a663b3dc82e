"""The record of a consumer: what the server knows of it, and the states that it goes through.

There is one for each seat. Its `State` says alone whether the seat is held, whether its holder
lives, and whether batches may be sent to it: flags for these would have many combinations, of which
few can be. What is known of the end of the seat's batches outlives its holders, so it stands apart
(`Ended`), and so do the words with which a consumer came.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from feeder.workers.stream.rounds import Counting, Place


@dataclass(frozen=True, slots=True)
class Start:
    """The position that a consumer comes with."""

    step: int
    finished: bool = False
    """Whether no batch follows: `step` is then the stream's number of batches."""
    epoch: int = 0
    index: int = 0
    """Where its next batch is in the stream, as `Place` has it."""
    nobodys: int = 0
    """How many batches from there on are nobody's: those of a round of other queues."""
    into_round: int | None = None
    """How many batches of its round are before the first one after these; None if the position
    does not say it, and rounds count from the start of the stream."""

    def first(self, counting: Counting) -> int:
        """The number of the first batch that is dealt to somebody."""
        return counting.number(self) + self.nobodys


class State(Enum):
    """What the consumer of a seat is to the feed."""

    ABSENT = "absent"  # Nobody holds the seat.
    JOINING = "joining"  # A consumer was given the seat, and cannot take batches yet.
    READY = "ready"  # It can.
    STREAMING = "streaming"  # The feed has run with it among its consumers.
    # The same three if its lease has run out. Its connection stands, so it may be heard of again;
    # until then it is waited for as if nobody held the seat, and anybody may have that.
    HUNG_JOINING = "hung_joining"
    HUNG_READY = "hung_ready"
    HUNG_STREAMING = "hung_streaming"
    LOST = "lost"  # Its connection is dead.


class Move(Enum):
    """What happens to a member."""

    ASKS = "asks"
    ATTACHES = "attaches"
    BEGINS = "begins"  # The feed begins with it.
    EXPIRES = "expires"  # It was silent for a lease's time.
    HEARD = "heard"  # And then not.
    DIES = "dies"
    LEAVES = "leaves"


_GOES = {Move.DIES: State.LOST, Move.LEAVES: State.ABSENT}

TABLE: dict[State, dict[Move, State]] = {
    State.ABSENT: {Move.ASKS: State.JOINING},
    State.JOINING: {Move.ATTACHES: State.READY, Move.EXPIRES: State.HUNG_JOINING, **_GOES},
    State.READY: {Move.BEGINS: State.STREAMING, Move.EXPIRES: State.HUNG_READY, **_GOES},
    State.STREAMING: {Move.BEGINS: State.STREAMING, Move.EXPIRES: State.HUNG_STREAMING, **_GOES},
    State.HUNG_JOINING: {Move.HEARD: State.JOINING, **_GOES},
    State.HUNG_READY: {Move.BEGINS: State.HUNG_STREAMING, Move.HEARD: State.READY, **_GOES},
    State.HUNG_STREAMING: {
        Move.BEGINS: State.HUNG_STREAMING, Move.HEARD: State.STREAMING, **_GOES
    },
    State.LOST: {Move.ASKS: State.JOINING},
}  # fmt: skip
"""The states of a member and where each move leads. The README of this folder draws it."""

_LIVE = (State.JOINING, State.READY, State.STREAMING)
_HUNG = (State.HUNG_JOINING, State.HUNG_READY, State.HUNG_STREAMING)


class Ended(Enum):
    """Whether the batches of a seat are known to have ended, whoever holds the seat now."""

    NO = "no"  # Somebody is to come for them.
    HEARSAY = "hearsay"  # Nobody need come, by what may be out of date.
    YES = "yes"  # Nobody need come: the user of a former holder was handed all.


Ending = Literal["", "end", "fault"]


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """What is known of one seat and of the consumer that holds it. When that is gone a new record
    takes the place of this one, which stays as it is for whoever still has it.

    `Membership` writes it. Besides, the server notes what it sends (`sent`, `sent_to`, `ending`),
    and that it knows the position as one that it gave (`agrees`).
    """

    seat: int
    queue: int
    """The queue whose batches it is given."""
    replica: int = 0
    """Which of the queue's replicas it is."""
    name: str
    """The seat, in words for messages."""
    state: State = State.ABSENT
    ended: Ended = Ended.NO
    """Whether its batches had ended before its consumer came. That counts again if the consumer
    goes before the feed has run with it, and is forgotten when the feed runs, unless the consumer
    came with the end of the stream."""
    who: str = ""
    """The consumer, in words for messages."""
    consumer: bytes = b""
    """Its random identity, by which it may take its own place again: connections prove nothing."""
    attempt: int = 0
    """How often this consumer had asked before."""
    rejoins: bool = False
    """Whether it comes back within a run of training, wherever the others stand."""
    undecided: bool = False
    """Whether it came without a position and has used nothing: its user may yet load one."""
    start: Start | None = None
    """The position that it came with; None for the start of the feed."""
    step: int = 0
    """The number of its next batch (`Counting`), as far as was noted when members were last
    compared."""
    agrees: bool = False
    """Whether its position is known to lie in this feed's stream, and not in another run's."""
    expires: float = 0.0
    """When its lease ends unless it is heard of before."""
    out_of_step_since: float | None = None
    """Since when its user waits for a batch in vain, because the other queues have gone on."""
    sent: int = 0
    """Batches that it was sent."""
    sent_to: Place | None = None
    """The position after them."""
    used: int = 0
    """Batches that its user was handed."""
    used_to: Place | None = None
    """The position after them: a snapshot may still be asked for there."""
    pending: int = 0
    """Batches of its earlier leases that its user has not been handed yet, as it last said: batches
    that a consumer has received are not used yet."""
    ending: Ending = ""
    """What was sent after its last batch, if anything was."""

    @property
    def has_lease(self) -> bool:
        """Whether a consumer holds the seat, alive or hung."""
        return self.state in _LIVE or self.state in _HUNG

    @property
    def lives(self) -> bool:
        """Whether its connection stands and its lease has not run out."""
        return self.state in _LIVE

    @property
    def hangs(self) -> bool:
        """Whether its connection stands and its lease has run out."""
        return self.state in _HUNG

    @property
    def has_run(self) -> bool:
        """Whether the feed has run with it."""
        return self.state in (State.STREAMING, State.HUNG_STREAMING)

    @property
    def has_attached(self) -> bool:
        """Whether it can take batches."""
        return self.has_run or self.state in (State.READY, State.HUNG_READY)

    @property
    def is_settled(self) -> bool:
        """Whether it was sent the end, or an error in its place, and its user has been handed
        everything before that."""
        return bool(self.ending) and self.used == self.sent and not self.pending

    @property
    def has_all(self) -> bool:
        """Whether its user has been handed everything, up to the end of the stream."""
        return self.ending == "end" and self.is_settled

    @property
    def has_ended(self) -> bool:
        """Whether nobody need come for the seat. It may have a hung consumer then."""
        return not self.lives and (self.ended is not Ended.NO or self.has_all)

    @property
    def starts(self) -> bool:
        """Whether it starts training and the feed has not run for it: all others must come."""
        return self.lives and not self.rejoins and not self.has_run

    @property
    def finished(self) -> bool:
        """Whether it came with the end of the stream."""
        return self.start is not None and self.start.finished

    def note_sent(self, num: int, place: Place) -> None:
        """Batches go out to it, the last one up to `place`."""
        self.sent += num
        self.sent_to = place
