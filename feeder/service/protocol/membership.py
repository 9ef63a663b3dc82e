"""Membership of one served feed: who holds which queue, from where a run begins, and for whom it
waits. A pure state machine: no socket, thread, clock or log.

`handle(event, now)` moves the members and returns what the server is to do. A consumer opens its
queue with one of two intents. *start*: it comes from a trainer's checkpoint, so all queues must
stand at the same round. *rejoin*: it goes on within the same run of training, so positions may
differ. Whoever comes, the feed begins again at the oldest position of all queues, and batches that
a queue has had are made again and discarded: a start, a failover and a lost trainer are one way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from feeder.errors import FeedError, LeaseLost, ProtocolError, ResumeError

# After a failover trainers find the new server within a second or so of each other. One that does
# not may have had everything while no server was there, so the others must not wait for long.
RETURN_S = 5.0
"""How long a feed whose consumers all come back waits for those that do not."""


class State(Enum):
    """What a queue's consumer is to the feed."""

    ABSENT = "absent"  # Nobody holds the queue.
    JOINING = "joining"  # A consumer was given the queue, and cannot take batches yet.
    READY = "ready"  # It can.
    STREAMING = "streaming"  # The feed has run with it among its consumers.
    LOST = "lost"  # Its connection is dead, or its lease has run out.
    ENDED = "ended"  # The queue's last consumer has had everything: nobody need come again.


class Move(Enum):
    """What happens to a member."""

    ASKS = "asks"
    ATTACHES = "attaches"
    BEGINS = "begins"  # The feed begins with it.
    HANGS = "hangs"  # Its lease has run out and its connection stands: it may be heard of again.
    RETURNS = "returns"  # It is heard of again.
    DIES = "dies"
    LEAVES = "leaves"
    ENDS = "ends"  # It dies or leaves, and nothing of the queue is left to be had.
    TOLD = "told"  # The consumer of another queue says that this one has ended.


_GOES = {Move.DIES: State.LOST, Move.LEAVES: State.ABSENT, Move.ENDS: State.ENDED}
_HOLDS = {Move.ASKS: State.JOINING, Move.HANGS: State.LOST, **_GOES}

TABLE: dict[State, dict[Move, State | None]] = {
    State.ABSENT: {Move.ASKS: State.JOINING, Move.TOLD: State.ENDED},
    State.JOINING: {Move.ATTACHES: State.READY, **_HOLDS},
    State.READY: {Move.BEGINS: State.STREAMING, **_HOLDS},
    State.STREAMING: {Move.BEGINS: State.STREAMING, **_HOLDS},
    # None: back to where it was when its lease ran out. That place moves where a run begins.
    State.LOST: {Move.ASKS: State.JOINING, Move.RETURNS: None, Move.BEGINS: State.LOST, **_GOES},
    State.ENDED: {Move.ASKS: State.JOINING},
}
"""The states of a member and where each move leads. The README of this folder draws it."""

_LIVES = (State.JOINING, State.READY, State.STREAMING)


class Place(Protocol):
    """A position in the stream. All else about it is opaque here."""

    @property
    def step(self) -> int:
        """The number in the stream of the next batch."""


class Start(NamedTuple):
    """The position that a consumer comes with."""

    step: int
    finished: bool = False
    """Whether no batch follows: `step` is then the stream's number of batches."""


@dataclass(slots=True, kw_only=True)
class Member:
    """What is known of one queue and its consumer. Written by `Membership` alone."""

    queue: int
    state: State = State.ABSENT
    was: State = State.ABSENT
    """For one that is lost, the state when its lease ran out; absent once its lease is over."""
    had_ended: bool = False
    """Whether the queue had ended before its consumer came. That counts again where the consumer
    goes before the feed has run with it, and is forgotten where the feed runs."""
    is_hearsay: bool = False
    """Whether that it has ended is known only from another queue's consumer."""
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
    """Its next batch, as far as was noted when members were last compared."""
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
    """Batches of its earlier leases that its user has not been handed yet, as it last said. Who has
    received everything has not used it."""
    ending: str = ""
    """What was sent after its last batch: "end", "fault", or nothing yet."""

    @property
    def stage(self) -> State:
        """How far its lease has come, also where it hangs; absent or ended without a lease."""
        return self.was if self.state is State.LOST else self.state

    @property
    def has_lease(self) -> bool:
        """Whether a consumer holds the queue, alive or hung."""
        return self.stage in _LIVES

    @property
    def lives(self) -> bool:
        """Whether its connection stands and its lease has not run out."""
        return self.state in _LIVES

    @property
    def has_attached(self) -> bool:
        """Whether it can take batches."""
        return self.stage in (State.READY, State.STREAMING)

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
        """Whether nobody need come for the queue. It may have a hung consumer then."""
        return self.state is State.ENDED or (self.state is State.LOST and self.had_ended)

    @property
    def starts(self) -> bool:
        """Whether it starts training and the feed has not run for it: all others must come."""
        return self.lives and not self.rejoins and self.state is not State.STREAMING

    @property
    def finished(self) -> bool:
        """Whether it came with the end of the stream."""
        return self.start is not None and self.start.finished


# ---- What happens.


class Asks(NamedTuple):
    """A consumer asks for a queue."""

    queue: int
    who: str
    consumer: bytes = b""
    attempt: int = 0
    start: Start | None = None
    rejoins: bool = False
    undecided: bool = False
    takes_over: bool = False
    ended: tuple[int, ...] = ()
    """The queues that have had everything, as it was told by a server before this one."""
    is_known: bool = False
    """Whether it had its position, or that it has none, from this server."""


class Vouched(NamedTuple):
    """A member's position is one that it was given here."""

    queue: int


class Attaches(NamedTuple):
    """A member can take batches."""

    queue: int


class Heard(NamedTuple):
    """A member says that it lives."""

    queue: int
    begun: bool = False
    """Whether its user has asked for a batch."""
    uses: bool = False
    """Whether its user was handed one."""


class Sent(NamedTuple):
    """Batches went out to a member."""

    queue: int
    num: int
    place: Place


class Used(NamedTuple):
    """A member's user was handed its first `num` batches."""

    queue: int
    num: int
    pending: int
    place: Place | None


class Finished(NamedTuple):
    """A member was sent the end of the stream, or an error in its place."""

    queue: int
    ending: str


class Died(NamedTuple):
    """The connection of a member is dead."""

    queue: int


class Left(NamedTuple):
    """A member says goodbye."""

    queue: int


class Dismissed(NamedTuple):
    """A member has done, or wants, what ends its lease."""

    queue: int
    error: FeedError


class Agreed(NamedTuple):
    """The run has passed the positions of these queues, and each equals the stream's there."""

    queues: tuple[int, ...]


class Failed(NamedTuple):
    """The run has failed."""

    error: FeedError
    differs: int | None = None
    """The queue whose position differs from the first one's, where that is why."""
    at_start: bool = False
    """Whether it failed at once, perhaps because of the position that it began at."""


class Ticked(NamedTuple):
    """Time has passed."""


# ---- What the server is to do.


class Refuse(NamedTuple):
    """Refuse who asks."""

    error: FeedError


class SendAway(NamedTuple):
    """Send a consumer an error and end its lease."""

    queue: int
    error: FeedError
    fences: bool = False
    """Whether another consumer takes its place."""


class EndLease(NamedTuple):
    """End the lease of a consumer that is gone."""

    queue: int


class SendEnd(NamedTuple):
    """Send a consumer the end: it came with it."""

    queue: int


class StartRun(NamedTuple):
    """Begin the run at the position of the first of `stands`; where nobody stands, end it."""

    stands: tuple[int, ...]
    """The queues that go on, by their position, the oldest first."""
    first_steps: list[float]
    """The first batch that each queue wants; all before it are discarded."""
    used_steps: list[float]
    """The first batch of each queue that its user may not have been handed."""
    lacks_some: bool
    """Whether it begins without queues that are missing."""


class StopRun(NamedTuple):
    """Stop the run."""


class TellWaiting(NamedTuple):
    """Tell all consumers who is waited for and which queues have ended."""


class NoteHung(NamedTuple):
    """A consumer was silent for too long."""

    queue: int


class NoteEnded(NamedTuple):
    """Queues are known to have ended, by hearsay."""

    queues: list[int]
    who: str


class NoteLacking(NamedTuple):
    """The run begins without these queues."""

    queues: list[int]
    waited_s: float


@dataclass(slots=True)
class Stands:
    """The members that a run began with, by their positions."""

    members: list[Member]
    num_oldest: int
    """How many of them stand at the oldest step."""
    passed: tuple[int, ...] = ()
    """The queues whose positions the stream has passed, and which equal its own there."""

    def settle(self, passed: tuple[int, ...]) -> None:
        """Note who is now known to stand in the feed's stream: everybody who agrees with a member
        that is known to, and everybody at all where all were passed and nobody disagrees."""
        self.passed = passed
        first, *others = self.members
        agreed = [first, *(member for member in others if member.queue in passed)]
        if len(agreed) == len(self.members) or any(member.agrees for member in agreed):
            for member in agreed:
                member.agrees = True

    def doubted(self, failure: Failed) -> list[Member]:
        """The members whose positions may be why the run has failed."""
        suspects: list[Member] = []
        if failure.differs is not None:
            # Two positions differ, and either may be the wrong one. Where somebody agrees with the
            # first, only the other is in doubt.
            both = {failure.differs} if self.passed else {failure.differs, self.members[0].queue}
            suspects = [member for member in self.members if member.queue in both]
        elif failure.at_start and any(member.agrees for member in self.members):
            # Others are known to stand elsewhere, so the run need not begin here.
            suspects = self.members[: self.num_oldest]
        return [member for member in suspects if not member.agrees]


class Membership:
    """The members of one feed, one for each queue. Owned by the server's I/O thread; any thread may
    read a member's fields.

    `origin` is the step at which consumers without a position begin. `goes_back`: whether the feed
    can be made again at an earlier position. `compares`: whether positions can be compared.
    """

    def __init__(
        self, num_queues: int, lease_s: float, *, origin: int = 0, goes_back: bool = True,
        compares: bool = True,
    ) -> None:  # fmt: skip
        self.members = [Member(queue=queue) for queue in range(num_queues)]
        self.lease_s = lease_s
        """Seconds for which a consumer may be silent."""
        self._origin = origin
        self._goes_back = goes_back
        self._compares = compares
        self._is_halted = False
        self._stands: Stands | None = None
        # Since when the feed has been waiting for queues that may have had everything.
        self._waits_since: float | None = None
        # Until then somebody may come for a queue that has ended by hearsay.
        self._trusts_at = -math.inf

    def handle(self, event: Any, now: float) -> list[Any]:
        """Note what has happened; returns what is to be done, in order."""
        done: list[Any] = _HANDLERS[type(event)](self, event, now)
        return done

    def _move(self, member: Member, move: Move) -> None:
        moves = TABLE[member.state]
        if move not in moves:
            raise ProtocolError(
                f"queue {member.queue} {move.value} while {member.state.value}, expected one of "
                f"{', '.join(sorted(one.value for one in moves))}"
            )
        to = moves[move]
        if move is Move.BEGINS:
            member.had_ended = False
        if move is Move.BEGINS and member.state is State.LOST:
            member.was = State.STREAMING
        elif move is Move.HANGS:
            member.was = member.state
        elif move is Move.DIES:
            member.was = State.ABSENT
        member.state = member.was if to is None else to

    # ---- coming

    def _ask(self, event: Asks, now: float) -> list[Any]:
        self._note_steps()
        old = self.members[event.queue]
        is_same = old.has_lease and old.consumer == event.consumer
        if is_same and old.attempt > event.attempt:
            # ZeroMQ may deliver a question of a former connection after one of a later connection.
            return [
                Refuse(ProtocolError("a consumer's question came after a later one of its own"))
            ]
        if old.lives and not (event.takes_over or is_same):
            return [Refuse(LeaseLost(
                f"queue {event.queue} is held by {old.who}; {event.who} may have it when that one "
                "ends, or with takeover=True"
            ))]  # fmt: skip
        step = 0 if event.start is None else event.start.step
        new = Member(
            queue=event.queue, state=old.state, was=old.was, who=event.who,
            consumer=event.consumer, attempt=event.attempt, rejoins=event.rejoins,
            undecided=event.undecided, start=event.start, agrees=event.is_known,
            expires=now + self.lease_s,
            # A member that takes no part leaves nothing behind: what was known before it stays.
            had_ended=old.had_ended or old.state is State.ENDED,
            # Until it says otherwise, a consumer that comes back has batches that its user lacks.
            pending=int(event.rejoins),
        )  # fmt: skip
        new.step = step if new.finished else self.first_step(step, event.queue)
        # Who rejoins may stand anywhere. Who is undecided has no position to compare yet.
        error = None if event.rejoins or event.undecided else self._out_of_step(new)
        if error is not None:
            return [Refuse(error)]
        self._move(new, Move.ASKS)
        self.members[event.queue] = new
        done: list[Any] = []
        if old.has_lease:
            taken = LeaseLost(f"queue {old.queue} was taken over by {event.who}")
            done.append(SendAway(old.queue, taken, fences=not is_same))
        if event.rejoins and (news := self._hear_of_ended(event.ended)):
            self._trusts_at = now + self.lease_s
            done.append(NoteEnded(news, event.who))
        return done

    def _hear_of_ended(self, queues: Iterable[int]) -> list[int]:
        """Take over what a consumer that comes back knows from a server before this one.

        It is believed of queues that nobody holds, so that nobody waits for trainers that left
        while no server was there. A holder knows better itself.
        """
        known = [self.members[queue] for queue in queues if queue < len(self.members)]
        news = [member for member in known if Move.TOLD in TABLE[member.state]]
        for member in news:
            self._move(member, Move.TOLD)
            member.is_hearsay = True
        return [member.queue for member in news]

    def _vouch(self, event: Vouched, now: float) -> list[Any]:
        self.members[event.queue].agrees = True
        return []

    def _attach(self, event: Attaches, now: float) -> list[Any]:
        member = self.members[event.queue]
        self._hear_from(member, now)
        self._move(member, Move.ATTACHES)
        done: list[Any] = []
        if member.finished:
            # It has received everything before: it need not wait until the others have.
            member.ending = "end"
            done.append(SendEnd(member.queue))
        return done + self._begin(now)

    # ---- going

    def _die(self, event: Died, now: float) -> list[Any]:
        member = self.members[event.queue]
        # A trainer that ends without a goodbye after its last batch has not failed anybody.
        return self._leave(event, now) if member.has_all else self._lose(member, now)

    def _lose(self, member: Member, now: float) -> list[Any]:
        self._move(member, Move.ENDS if member.had_ended else Move.DIES)
        return [EndLease(member.queue), *self._look_again(now)]

    def _leave(self, event: Left | Died, now: float) -> list[Any]:
        member = self.members[event.queue]
        self._move(member, Move.ENDS if member.has_all or member.had_ended else Move.LEAVES)
        self.members[event.queue] = Member(queue=event.queue, state=member.state)
        return [EndLease(event.queue), *self._look_again(now), TellWaiting()]

    def _dismiss(self, event: Dismissed, now: float) -> list[Any]:
        _, *rest = self._lose(self.members[event.queue], now)
        return [SendAway(event.queue, event.error), *rest]

    # ---- what members say and are sent

    def _hear(self, event: Heard, now: float) -> list[Any]:
        member = self.members[event.queue]
        member.expires = now + self.lease_s
        may_start = event.begun and self._may_start(member)
        if event.begun and not may_start:
            error = self._refusal(member, now)
            if error is not None:
                return self._dismiss(Dismissed(event.queue, error), now)
        is_news = self._hear_from(member, now, uses=may_start or event.uses)
        return self._look_again(now) if is_news else []

    def _hear_from(self, member: Member, now: float, *, uses: bool = False) -> bool:
        """Note that a member lives, and perhaps that it uses batches. Returns whether that is
        news: then somebody may not be missing any more."""
        before = member.state, member.undecided
        member.expires = now + self.lease_s
        if not member.lives:
            self._move(member, Move.RETURNS)
        member.undecided = member.undecided and not uses
        return before != (member.state, member.undecided)

    def _send(self, event: Sent, now: float) -> list[Any]:
        member = self.members[event.queue]
        member.sent += event.num
        member.sent_to = event.place
        return []

    def _use(self, event: Used, now: float) -> list[Any]:
        member = self.members[event.queue]
        member.used, member.pending = event.num, event.pending
        member.used_to = event.place or member.used_to
        return [TellWaiting()] if member.has_all else []

    def _finish(self, event: Finished, now: float) -> list[Any]:
        self.members[event.queue].ending = event.ending
        return []

    # ---- where a run begins

    def _tick(self, event: Ticked, now: float) -> list[Any]:
        done: list[Any] = []
        for member in self.members:
            if member.lives and member.expires <= now:
                self._move(member, Move.HANGS)
                done += [NoteHung(member.queue), *self._look_again(now)]
        if self._waits_since is not None and now >= self._waits_since + self._wait_s:
            done.append(NoteLacking(self.missing(), now - self._waits_since))
            done += self._begin(now, without_missing=True)
        return done

    def look_at(self, now: float) -> float:
        """When to tick again."""
        times = [member.expires for member in self.members if member.has_lease]
        times.append(self._trusts_at)
        nearest = min((time for time in times if time > now), default=math.inf)
        waits = self._waits_since
        return nearest if waits is None else min(nearest, waits + self._wait_s)

    @property
    def _wait_s(self) -> float:
        # A feed that cannot go back has one run: it would be used up without those who are late. So
        # it waits as long as for a consumer that hangs.
        return min(self.lease_s, RETURN_S if self._goes_back else math.inf)

    def _look_again(self, now: float) -> list[Any]:
        """Begin where the feed has waited: a member is gone, was heard of again, or is undecided no
        more, so perhaps nobody is missing now. Every such news has to come here: one that does not
        leaves all trainers waiting for ever."""
        return self._begin(now) if self._is_halted else []

    def _begin(self, now: float, *, without_missing: bool = False) -> list[Any]:
        """Begin the run where every queue is there, or without those that are missing; else stop
        it."""
        missing = self.missing()
        # Who hangs before it can take batches is not counted on, unless the feed could not go back
        # for it later.
        here = [
            member for member in self.members if member.has_lease
            and (member.has_attached or member.lives or not self._goes_back)
        ]  # fmt: skip
        ready = all(member.has_attached for member in here)
        self._is_halted = not ready or bool(missing and not without_missing)
        if self._is_halted:
            # Where all who are here come back, somebody who does not may have had everything. A
            # trainer that starts anew wants all others, however long they take.
            may_lack = ready and missing and all(member.rejoins for member in here)
            since = now if self._waits_since is None else self._waits_since
            self._waits_since = since if may_lack else None
            return [StopRun()]
        self._waits_since = None
        for member in here:
            self._move(member, Move.BEGINS)
        # Not what was sent: that is not used yet, and a position that is stored must not be ahead
        # of a trainer that dies now.
        used = {member.queue: _used_step(member) for member in here if not member.has_all}
        # Who has been sent the end wants nothing more; all others go on after what they were sent.
        steps = {member.queue: _sent_step(member) for member in here if not member.ending}
        stands = sorted(steps, key=lambda queue: steps[queue])
        if stands:
            oldest = [queue for queue in stands if steps[queue] == steps[stands[0]]]
            self._stands = Stands([self.members[queue] for queue in stands], len(oldest))
            # A stream that does not repeat itself passes other positions than before: there nothing
            # can be compared.
            self._stands.settle(() if self._compares else tuple(stands[1:]))
        return [StartRun(
            tuple(stands), self.first_steps(steps), self.first_steps(used), bool(missing)
        )]  # fmt: skip

    def first_step(self, step: int, queue: int) -> int:
        """The number of the queue's first batch at or after batch `step` of the stream: batches are
        dealt to the queues in turn."""
        return step + (queue - step) % len(self.members)

    def first_steps(self, steps: dict[int, int]) -> list[float]:
        """The number of the first batch that each queue wants.

        Queues in `steps` go on there. The others have had everything, or will come with a position
        of their own, so all their batches are discarded: infinity.
        """
        return [
            self.first_step(steps[queue], queue) if queue in steps else math.inf
            for queue in range(len(self.members))
        ]

    # ---- whose position is the stream's

    def _agree(self, event: Agreed, now: float) -> list[Any]:
        if self._stands is not None:
            self._stands.settle(event.queues)
        return []

    def _fail(self, event: Failed, now: float) -> list[Any]:
        """Send away those whose positions are why the run has failed, where others can go on
        without them. Nothing is to be done where the failure is the feed's: all are sent it."""
        if self._stands is None:
            return []
        doubted = [
            one for one in self._stands.doubted(event)
            if self.members[one.queue] is one and one.has_lease
        ]  # fmt: skip
        if not any(one.has_lease and not one.ending and one not in doubted for one in self.members):
            return []
        self._stands = None
        done: list[Any] = []
        for one in doubted:
            done += self._dismiss(Dismissed(one.queue, _unfit(one, event.error)), now)
        return done + (self._begin(now) if doubted else [])

    # ---- who is waited for

    def missing(self) -> list[int]:
        """The queues that the feed waits for: nobody holds them, or their holder is undecided while
        another has loaded a state."""
        # Whose position lies a round behind the start has loaded it. Who is undecided beside such
        # a one is about to load the same checkpoint, or else would hold all others at the start.
        begun = self._origin + len(self.members)
        loaded = any(m.lives and not m.undecided and m.step >= begun for m in self.members)
        ended = self._ended()
        return [
            member.queue for member in self.members
            if (member.undecided and loaded if member.lives else member.queue not in ended)
        ]  # fmt: skip

    def news(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The queues that the feed waits for, and the queues that have ended."""
        have_all = {member.queue for member in self.members if member.has_lease and member.has_all}
        return tuple(self.missing()), tuple(sorted(self._ended() | have_all))

    def _ended(self) -> set[int]:
        """The queues that have ended; none where somebody wants the feed to run again."""
        # A trainer that starts anew trains with all queues: a past end says nothing about that run.
        if any(member.starts for member in self.members):
            return set()
        return {member.queue for member in self.members if member.has_ended}

    def are_all_done(self, now: float) -> bool:
        """Whether the users of all queues have been handed everything. An end that is known by
        hearsay counts once nobody has come for the queue in a lease's time."""
        trusts = now >= self._trusts_at
        return all(
            (member.has_ended and (trusts or not member.is_hearsay))
            or (member.has_lease and member.has_all)
            for member in self.members
        )

    # ---- who may start where

    def _note_steps(self) -> None:
        """Note how far users have been handed their queues: done before members are compared, since
        each used batch would be too often."""
        for member in self.members:
            if member.used_to is not None:
                member.step = self.first_step(member.used_to.step, member.queue)

    def _may_start(self, member: Member) -> bool:
        """Whether a consumer may start where it stands, now that its user asks for a batch. It may
        not where it came without a position and the others have gone on."""
        if member.stage is State.STREAMING or member.rejoins or not member.undecided:
            return True
        self._note_steps()
        return self._out_of_step(member) is None

    def _refusal(self, member: Member, now: float) -> ResumeError | None:
        """The error for a consumer that could not start for a lease's time; None before that.

        It is a trainer that died before its first checkpoint and was started again without a
        position: without the error all would wait for ever. It is not sent at once, since the
        others may be about to be replaced, too.
        """
        # Who has been sent the end leaves by itself: then another pass over the stream begins.
        leaving = [one.queue for one in self.members if one.has_lease and one.ending]
        error = self._out_of_step(member, leaving)
        since = now if member.out_of_step_since is None else member.out_of_step_since
        member.out_of_step_since = None if error is None else since
        return error if now >= since + self.lease_s else None

    def _out_of_step(self, member: Member, apart_from: Collection[int] = ()) -> ResumeError | None:
        """Why a member may not start where it stands, whatever those in `apart_from` stand at."""
        # Trainers that start from checkpoints of different steps would compute with different
        # weights: that is told at once, since no row can show it later.
        others = {
            one.queue: self._rounds(one) for one in self.members
            if one.queue != member.queue and one.queue not in apart_from
            and one.lives and not one.undecided
        }  # fmt: skip
        mine = self._rounds(member)
        if all(other & mine for other in others.values()):
            return None
        stand = ", ".join(f"queue {i} at round {max(rounds)}" for i, rounds in others.items())
        return ResumeError(
            f"queue {member.queue} would start at round {max(mine)}, but {stand}; start all "
            "trainers from one checkpoint, or rejoin=True for one that goes on alone"
        )

    def _rounds(self, member: Member) -> set[int]:
        """The round of a member's step; both rounds beside it where it has had everything.

        The last round may be uneven: some queues had a batch in it, and for the others there was
        none. Who has had everything then fits on either side of that round.
        """
        num, step = len(self.members), member.step
        return {step // num, -(-step // num)} if member.finished else {step // num}


def _sent_step(member: Member) -> int:
    """Where a queue goes on: after the last batch that it was sent."""
    at = member.sent_to or member.start
    return 0 if at is None else at.step


def _used_step(member: Member) -> int:
    """The step up to which the user of a queue has been handed batches, as far as is known."""
    if member.used_to is not None:
        return member.used_to.step
    # A position with which a consumer comes back is where its next batch comes from. Batches
    # before it may still wait in the consumer, so nothing of the queue counts as used.
    return 0 if member.rejoins or member.start is None else member.start.step


def _unfit(member: Member, failure: FeedError) -> FeedError:
    """The error for a consumer with whose position the feed cannot go on."""
    if isinstance(failure, ResumeError):
        return failure
    return ResumeError(f"the feed cannot go on at the position of queue {member.queue}: {failure}")


_HANDLERS: dict[type, Any] = {
    Asks: Membership._ask,
    Vouched: Membership._vouch,
    Attaches: Membership._attach,
    Heard: Membership._hear,
    Sent: Membership._send,
    Used: Membership._use,
    Finished: Membership._finish,
    Died: Membership._die,
    Left: Membership._leave,
    Dismissed: Membership._dismiss,
    Agreed: Membership._agree,
    Failed: Membership._fail,
    Ticked: Membership._tick,
}
