"""What is told to the membership of a feed, and what it has the server do: values, no rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from feeder.errors import FeedError
from feeder.service.protocol.member import Member, Start
from feeder.workers.stream.rounds import Place

# ---- What happens.


class Asks(NamedTuple):
    """A consumer asks for a seat."""

    seat: int
    who: str
    consumer: bytes = b""
    attempt: int = 0
    start: Start | None = None
    rejoins: bool = False
    undecided: bool = False
    takes_over: bool = False
    ended: tuple[int, ...] = ()
    """The seats that have had everything, as it was told by a server before this one."""
    is_known: bool = False
    """Whether it had its position, or that it has none, from this server."""
    record: Callable[..., Any] = Member
    """Makes the record of it, with what else the server knows of it."""


class Attaches(NamedTuple):
    """A member can take batches."""

    seat: int


class Used(NamedTuple):
    """A member says that it lives, and how far its user is."""

    seat: int
    num: int = 0
    """How many of its batches its user was handed."""
    pending: int = 0
    place: Place | None = None
    """The position after these."""
    begun: bool = False
    """Whether its user has asked for a batch."""


class Died(NamedTuple):
    """The connection of a member is dead."""

    seat: int


class Left(NamedTuple):
    """A member says goodbye."""

    seat: int


class Dismissed(NamedTuple):
    """A member has done, or wants, what ends its lease; without an error it is to come again."""

    seat: int
    error: FeedError | None


class Failed(NamedTuple):
    """The run has failed."""

    error: FeedError
    differs: int | None = None
    """The seat whose position differs from the first one's, if that is why."""
    at_start: bool = False
    """Whether it failed at once, perhaps because of the position that it began at."""


class Ticked(NamedTuple):
    """Time has passed."""


# ---- What the server is to do.


class Refuse(NamedTuple):
    """Refuse who asks."""

    error: FeedError


class SendAway(NamedTuple):
    """Send a consumer an error, or that it is to come again, and end its lease."""

    member: Member
    error: FeedError | None
    fences: bool = False
    """Whether another consumer takes its place."""


class EndLease(NamedTuple):
    """End the lease of a consumer that is gone."""

    member: Member


class SendEnd(NamedTuple):
    """Send a consumer the end: it came with it."""

    member: Member


class Void(NamedTuple):
    """A range of numbers. If all positions are of one round, the last one of its epoch, no batch
    has a number in the range."""

    first: int
    """Where the earliest round begins."""
    stop: int
    """Where the latest round begins: the number after the range."""
    begins: tuple[float, ...]
    """The number from which on each queue wants batches; infinity if nobody starts with it."""


class StartRun(NamedTuple):
    """Begin the run at the position of the first of `stands`; if nobody stands, end it."""

    stands: tuple[int, ...]
    """The seats that go on, by their position, the oldest first."""
    first_steps: list[float]
    """The first batch that each seat wants; all before it are discarded."""
    used_steps: list[float]
    """The first batch of each seat that its user may not have been handed."""
    lacks_some: bool
    """Whether it begins without seats that are missing."""
    void: Void | None = None
    """The range in which no batch may come, if there is one."""


class StopRun(NamedTuple):
    """Stop the run."""


class TellWaiting(NamedTuple):
    """Tell all consumers which seats are waited for and which have ended."""


class NoteHung(NamedTuple):
    """A consumer was silent for too long."""

    member: Member


class NoteEnded(NamedTuple):
    """Seats are known to have ended, by hearsay."""

    seats: list[int]
    who: str


class NoteLacking(NamedTuple):
    """The run begins without these seats."""

    seats: list[int]
    waited_s: float
