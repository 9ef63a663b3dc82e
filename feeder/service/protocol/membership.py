"""Membership of one served feed: who holds which queue, from where a run begins, and for whom it
waits. A pure state machine: no socket, thread, clock or log.

`handle(event, now)` moves the members and returns what the server is to do. What can change neither
who holds a queue nor who is waited for is a plain call.

A consumer opens its queue with one of two intents. *start*: it comes from a trainer's checkpoint,
so all queues must stand at the same round. *rejoin*: it goes on within the same run of training, so
positions may differ. Whoever comes, the feed begins again at the oldest position of all queues, and
batches that a queue has had are made again and discarded: a start, a failover and a lost trainer
are one way.

If a queue is shared, each of its replicas is a member of its own, in a seat of its own: all that
is said of a queue here holds for each of its seats. Only which batches a seat is dealt, its queue
says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from feeder.errors import FeedError, LeaseLost, ProtocolError, ResumeError
from feeder.service.protocol.events import (
    Asks,
    Attaches,
    Died,
    Dismissed,
    EndLease,
    Failed,
    Left,
    NoteEnded,
    NoteHung,
    NoteLacking,
    Refuse,
    SendAway,
    SendEnd,
    StartRun,
    StopRun,
    TellWaiting,
    Ticked,
    Used,
    Void,
)
from feeder.service.protocol.member import TABLE, Ended, Member, Move, Start, State
from feeder.service.protocol.seats import seat_name
from feeder.workers.stream.rounds import Counting

# After a failover trainers find the new server within a second or so of each other. One that does
# not may have had everything while no server was there, so the others must not wait for long.
RETURN_S = 5.0
"""How long a feed whose consumers all come back waits for those that do not."""


@dataclass(slots=True)
class RunMembers:
    """The members that a run began with, by their positions. Owned by the I/O thread."""

    members: list[Member]
    num_oldest: int
    """How many of them stand at the oldest step."""
    passed: tuple[int, ...] = ()
    """The seats whose positions the stream has passed, and which equal its own there."""

    def settle(self, passed: tuple[int, ...]) -> None:
        """Note who is now known to stand in the feed's stream: everybody who agrees with a member
        that is known to, and everybody at all if all were passed and nobody disagrees."""
        self.passed = passed
        first, *others = self.members
        agreed = [first, *(member for member in others if member.seat in passed)]
        if len(agreed) == len(self.members) or any(member.agrees for member in agreed):
            for member in agreed:
                member.agrees = True

    def doubted(self, failure: Failed) -> list[Member]:
        """The members whose positions may be why the run has failed."""
        suspects: list[Member] = []
        if failure.differs is not None:
            # Two positions differ, and either may be the wrong one. If somebody agrees with the
            # first, only the other is in doubt.
            both = {failure.differs} if self.passed else {failure.differs, self.members[0].seat}
            suspects = [member for member in self.members if member.seat in both]
        elif failure.at_start and any(member.agrees for member in self.members):
            # Others are known to stand elsewhere, so the run need not begin here.
            suspects = self.members[: self.num_oldest]
        return [member for member in suspects if not member.agrees]


class Membership:
    """The members of one feed, one for each seat: each queue has so many `replicas`. Owned by the
    server's I/O thread; any thread may read a member's fields.

    `goes_back`: whether the feed can be made again at an earlier position. `compares`: whether
    positions can be compared. `counting` says which rounds there are before anybody comes. `own`:
    the queues whose batches are made here, None for all.
    """

    def __init__(
        self, num_queues: int, lease_s: float, *, replicas: int = 1, goes_back: bool = True,
        compares: bool = True, counting: Counting | None = None, own: range | None = None,
    ) -> None:  # fmt: skip
        queues = range(num_queues) if own is None else own
        self._own = slice(queues.start * replicas, queues.stop * replicas)
        self.replicas = replicas
        """How many consumers are given the batches of each queue."""
        self.members = [self._member(seat) for seat in range(num_queues * replicas)]
        self.counting = counting or Counting(num_queues)
        """Which rounds there are, and which queue each batch goes to: as those say who are here."""
        self.lease_s = lease_s
        """Seconds for which a consumer may be silent."""
        self._goes_back = goes_back
        self._compares = compares
        self._is_halted = False
        self._run_members: RunMembers | None = None
        # When it goes on without queues that may have had everything.
        self._goes_on_at = math.inf
        # Until then somebody may come for a queue that has ended by hearsay.
        self._trusts_at = -math.inf
        # No later than the first deadline. Members live on with every message, which moves theirs:
        # a tick that finds nothing due, once in a lease's time, is cheaper than to look each time.
        self.look_at = math.inf
        """When time is to be told by `Ticked` again."""

    @property
    def own(self) -> list[Member]:
        """The members whose batches are made here. Nobody comes for the seats of other servers."""
        return self.members[self._own]

    def handle(self, event: Any, now: float) -> list[Any]:
        """Note what has happened; returns what is to be done, in order."""
        done: list[Any] = _HANDLERS[type(event)](self, event, now)
        return done

    def _member(self, seat: int, record: Callable[..., Any] = Member, **known: Any) -> Member:
        queue, replica = divmod(seat, self.replicas)
        name = seat_name(seat, self.replicas)
        made: Member = record(seat=seat, queue=queue, replica=replica, name=name, **known)
        return made

    def _move(self, member: Member, move: Move) -> None:
        moves = TABLE[member.state]
        if move not in moves:
            raise ProtocolError(
                f"{member.name} {move.value} while {member.state.value}, expected one of "
                f"{', '.join(sorted(one.value for one in moves))}"
            )
        member.state = moves[move]

    # ---- coming

    def _ask(self, event: Asks, now: float) -> list[Any]:
        self._note_steps()
        old = self.members[event.seat]
        is_same = old.has_lease and old.consumer == event.consumer
        if is_same and old.attempt > event.attempt:
            # ZeroMQ may deliver a question of a former connection after one of a later connection.
            return [
                Refuse(ProtocolError("a consumer's question came after a later one of its own"))
            ]
        if old.lives and not (event.takes_over or is_same):
            return [Refuse(LeaseLost(
                f"{old.name} is held by {old.who}; {event.who} may have it when that one "
                "ends, or with takeover=True"
            ))]  # fmt: skip
        number = 0 if event.start is None else event.start.first(self.counting)
        counting = self._counting_at(number, event.start)
        stale, error = self._agree_on(counting, number, event)
        if error is not None:
            return [Refuse(error)]
        new = self._member(
            event.seat, event.record, who=event.who, consumer=event.consumer,
            attempt=event.attempt, rejoins=event.rejoins, undecided=event.undecided,
            start=event.start, agrees=event.is_known, expires=now + self.lease_s,
            # A member that takes no part leaves nothing behind: what was known before it stays,
            # also of one that has had everything and was cut off before its goodbye.
            ended=Ended.YES if old.has_all or old.ended is not Ended.NO else Ended.NO,
            # Until it says otherwise, a consumer that comes back has batches that its user lacks.
            pending=int(event.rejoins),
        )  # fmt: skip
        new.step = number if new.finished else self.counting.first(number, new.queue)
        # A member that rejoins may stand anywhere; an undecided one has no position to compare yet.
        if not (event.rejoins or event.undecided):
            error = self._out_of_step(new)
        if error is not None:
            return [Refuse(error)]
        done: list[Any] = []
        if old.has_lease:
            self._move(old, Move.DIES)
            taken = LeaseLost(f"{old.name} was taken over by {event.who}")
            done.append(SendAway(old, taken, fences=not is_same))
        new.state = old.state
        self._move(new, Move.ASKS)
        self.members[event.seat] = new
        self._look_by(new.expires)
        if event.rejoins and (news := self._hear_of_ended(event.ended)):
            self._trusts_at = now + self.lease_s
            self._look_by(self._trusts_at)
            done.append(NoteEnded(news, event.who))
        for one in stale:
            why = LeaseLost(f"{one.name} was dealt otherwise than the trainers that start now")
            done += self._lose(SendAway(one, why), now)
        return done

    def _counting_at(self, number: int, start: Start | None) -> Counting:
        """How rounds are counted as a position says, which has that number."""
        into = None if start is None else start.into_round
        return self.counting._replace(begins=0 if into is None else number - into)

    def _agree_on(
        self, counting: Counting, number: int, event: Asks
    ) -> tuple[list[Member], ResumeError | None]:
        """Take over how somebody who comes counts rounds, if nobody is here who says otherwise;
        otherwise the error. Returns also those that hang and were dealt otherwise."""
        old = self.counting
        is_over = event.start is not None and event.start.finished
        if is_over or (old.knows(number) and old.agrees(counting, number)):
            return [], None
        others = [one for one in self.own if one.seat != event.seat and one.has_lease]
        decided = [one for one in others if one.lives and not one.undecided]
        if decided and event.undecided:
            return [], None  # Where it may begin is looked at when it wants to.

        def differs(one: Member) -> bool:
            # A member does not say where rounds begin in the epochs before its own. Who comes back
            # first may be epochs ahead of the others, and in theirs rounds may begin elsewhere.
            since = 0 if one.start is None else one.start.first(old)
            return not old.agrees(counting, max(number, since))

        if any(map(differs, decided)):
            mine = self.members[event.seat].name
            mine += f"'s checkpoint is of {counting.round_name(number)}"
            return [], self._differ(mine, decided)
        self.counting = counting
        stale = [one for one in others if not one.lives and differs(one)]
        for one in others:
            one.step = counting.first(one.step, one.queue)
        return stale, None

    def _hear_of_ended(self, seats: Iterable[int]) -> list[int]:
        """Take over what a consumer that comes back knows from a server before this one.

        It is believed of queues that nobody holds, so that nobody waits for trainers that left
        while no server was there. A holder knows better itself.
        """
        told = set(seats)
        known = [one for one in self.own if one.seat in told]
        news = [one for one in known if one.state is State.ABSENT and one.ended is Ended.NO]
        for member in news:
            member.ended = Ended.HEARSAY
        return [member.seat for member in news]

    def _attach(self, event: Attaches, now: float) -> list[Any]:
        member = self.members[event.seat]
        self._renew(member, now)
        self._move(member, Move.ATTACHES)
        done: list[Any] = []
        if member.finished:
            # It has received everything before: it need not wait until the others have.
            member.ending = "end"
            done.append(SendEnd(member))
        return done + self._begin(now)

    # ---- going

    def _die(self, event: Died, now: float) -> list[Any]:
        # A trainer that ends without a goodbye after its last batch has not failed anybody.
        if self.members[event.seat].has_all:
            return self._leave(event, now)
        return self._lose(EndLease(self.members[event.seat]), now)

    def _dismiss(self, event: Dismissed, now: float) -> list[Any]:
        return self._lose(SendAway(self.members[event.seat], event.error), now)

    def _leave(self, event: Left | Died, now: float) -> list[Any]:
        one = EndLease(self.members[event.seat])
        return [*self._lose(one, now, Move.LEAVES), TellWaiting()]

    def _lose(self, one: EndLease | SendAway, now: float, move: Move = Move.DIES) -> list[Any]:
        member = one.member
        self._move(member, move)
        is_over = member.ended is not Ended.NO or (member.has_all and move is Move.LEAVES)
        gone = self.members[member.seat] = self._member(member.seat, state=member.state)
        if is_over and move is Move.DIES:
            # It had come for a queue that had ended, and its process may live and come again: the
            # end is the last word once it has had the time.
            gone.ended, self._trusts_at = Ended.HEARSAY, now + self.lease_s
            self._look_by(self._trusts_at)
        elif is_over:
            gone.ended = Ended.YES
        return [one, *self._look_again(now)]

    # ---- what members are sent and say

    def _use(self, event: Used, now: float) -> list[Any]:
        member = self.members[event.seat]
        may_start = event.begun and self._may_start(member)
        if event.begun and not may_start:
            error = self._refusal(member, now, has_used=event.num > 0)
            if error is not None:
                return self._lose(SendAway(member, error), now)
        member.used, member.used_to, member.pending = event.num, event.place, event.pending
        is_news = self._renew(member, now)
        if member.undecided and (may_start or event.num > 0):
            member.undecided, is_news = False, True
        done = self._look_again(now) if is_news else []
        return [*done, TellWaiting()] if member.has_all else done

    def _renew(self, member: Member, now: float) -> bool:
        """A member is heard of: its lease begins anew. Returns whether it hung."""
        member.expires = now + self.lease_s
        self._look_by(member.expires)
        did_hang = member.hangs
        if did_hang:
            self._move(member, Move.HEARD)
        return did_hang

    # ---- what time brings

    def _look_by(self, at: float) -> None:
        """A deadline has come to be: every one has to come here."""
        if at < self.look_at:
            self.look_at = at

    def _tick(self, event: Ticked, now: float) -> list[Any]:
        done: list[Any] = []
        for member in self.own:
            if member.lives and member.expires <= now:
                self._move(member, Move.EXPIRES)
                done += [NoteHung(member), *self._look_again(now)]
        if now >= self._goes_on_at:
            done.append(NoteLacking(self.missing(), self._wait_s))
            done += self._begin(now, without_missing=True)
        times = [member.expires for member in self.own if member.lives]
        times += [self._goes_on_at, self._trusts_at]
        self.look_at = min([time for time in times if time > now], default=math.inf)
        return done

    # ---- where a run begins

    @property
    def _wait_s(self) -> float:
        # A feed that cannot go back has one run: it would be used up without those who are late. So
        # it waits as long as for a consumer that hangs.
        return min(self.lease_s, RETURN_S if self._goes_back else math.inf)

    def _look_again(self, now: float) -> list[Any]:
        """Begin if the feed has waited: a member is gone, was heard of again, or is undecided no
        more, so perhaps nobody is missing now. Every such news has to come here: one that does not
        leaves all trainers waiting for ever."""
        return self._begin(now) if self._is_halted else []

    def _begin(self, now: float, *, without_missing: bool = False) -> list[Any]:
        """Begin the run if every queue is there, or without those that are missing; else stop
        it."""
        missing = self.missing()
        # A member that hangs before it can take batches is not counted on, unless the feed could
        # not go back for it later.
        here = [
            member for member in self.own if member.has_lease
            and (member.has_attached or member.lives or not self._goes_back)
        ]  # fmt: skip
        ready = all(member.has_attached for member in here)
        self._is_halted = not ready or bool(missing and not without_missing)
        if self._is_halted:
            # If all who are here come back, somebody who does not may have had everything. A
            # trainer that starts anew wants all others, however long they take.
            may_lack = ready and missing and all(member.rejoins for member in here)
            at = min(self._goes_on_at, now + self._wait_s) if may_lack else math.inf
            self._goes_on_at = at
            self._look_by(at)
            return [StopRun()]
        self._goes_on_at = math.inf
        void = self._void(here)
        for member in here:
            self._move(member, Move.BEGINS)
            # Who came with the end takes nothing of the run.
            if not member.finished:
                member.ended = Ended.NO
        # Not what was sent: that is not used yet, and a position that is stored must not be ahead
        # of a trainer that dies now.
        used = {member.seat: self._used_step(member) for member in here if not member.has_all}
        # A member that was sent the end wants no more; all others go on after what they were sent.
        steps = {member.seat: self._sent_step(member) for member in here if not member.ending}
        wanted = {seat: self._wanted_step(self.members[seat]) for seat in steps}
        stands = sorted(steps, key=lambda seat: steps[seat])
        if stands:
            oldest = [seat for seat in stands if steps[seat] == steps[stands[0]]]
            self._run_members = RunMembers([self.members[seat] for seat in stands], len(oldest))
            # A stream that does not repeat itself passes other positions than before: there nothing
            # can be compared.
            self._run_members.settle(() if self._compares else tuple(stands[1:]))
        return [StartRun(
            tuple(stands), self.first_steps(wanted), self.first_steps(used), bool(missing), void
        )]  # fmt: skip

    def _void(self, here: list[Member]) -> Void | None:
        """The range in which no batch may come, now that these begin (`StartRun.void`)."""
        # If rounds end with epochs, the last positions of an epoch and the start of the next may
        # be of one round. Whether they are is known when the stream comes there. Those that start
        # are meant, also if the feed has run with them, as long as they were sent nothing: who
        # comes back may stand anywhere.
        starts = [
            one for one in here
            if one.lives and not (one.rejoins or one.ending) and one.sent_to is None
        ]  # fmt: skip
        if not (starts and self.counting.per_epoch):
            return None
        begins = [math.inf] * self.counting.num
        for one in starts:
            begins[one.queue] = min(begins[one.queue], one.step)
        rounds = [one.step - self.counting.queue(one.step) for one in starts]
        first, stop = min(rounds), max(rounds)
        return Void(first, stop, tuple(begins)) if first < stop else None

    def first_steps(self, steps: dict[int, int]) -> list[float]:
        """The number of the first batch that each seat wants.

        Seats in `steps` go on there. The others have had everything, or will come with a position
        of their own, so all their batches are discarded: infinity.
        """
        return [
            self.counting.first(steps[one.seat], one.queue) if one.seat in steps else math.inf
            for one in self.members
        ]

    # ---- whose position is the stream's

    def note_passed(self, seats: tuple[int, ...]) -> None:
        """The run has passed the positions of these seats, and each equals the stream's there."""
        if self._run_members is not None:
            self._run_members.settle(seats)

    def _fail(self, event: Failed, now: float) -> list[Any]:
        """Send away those whose positions are why the run has failed, if others can go on
        without them. Nothing is to be done if the failure is the feed's: all are sent it."""
        if self._run_members is None:
            return []
        doubted = [
            one for one in self._run_members.doubted(event)
            if one.has_lease
        ]  # fmt: skip
        if not any(one.has_lease and not one.ending and one not in doubted for one in self.own):
            return []
        self._run_members = None
        done: list[Any] = []
        for one in doubted:
            done += self._lose(SendAway(one, _unfit(one, event.error)), now)
        return done + (self._begin(now) if doubted else [])

    # ---- who is waited for

    def missing(self) -> list[int]:
        """The seats that the feed waits for: nobody holds them, or their holder is undecided while
        another has loaded a state."""
        # A position a round after that of an undecided consumer was loaded from a checkpoint: the
        # undecided one is about to load the same, or would hold all others at the start.
        # If the feed has run with it, others may also have gone on from there and come back:
        # they were given batches without its asking for any, and are so again.
        ended = self._ended()
        decided = [one for one in self.own if one.lives and not one.undecided]
        newest, newest_start = (
            max([self.counting.round(one.step) for one in some], default=-math.inf)
            for some in (decided, [one for one in decided if one.starts])
        )

        def lags(member: Member) -> bool:
            than = newest_start if member.has_run else newest
            # By where it stands, and not by what it was sent: of that it has used nothing.
            return member.undecided and self.counting.round(member.step) < than

        return [
            member.seat for member in self.own
            if (lags(member) if member.lives else member.seat not in ended)
        ]  # fmt: skip

    def news(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The seats that the feed waits for, and the seats that have ended."""
        have_all = {member.seat for member in self.own if member.has_all}
        return tuple(self.missing()), tuple(sorted(self._ended() | have_all))

    def _ended(self) -> set[int]:
        """The seats that have ended; none if somebody wants the feed to run again."""
        # A trainer that starts anew trains with all queues: a past end says nothing about that run.
        if any(member.starts for member in self.own):
            return set()
        return {member.seat for member in self.own if member.has_ended}

    def are_all_done(self, now: float) -> bool:
        """Whether the users of all queues have been handed everything. An end that is known by
        hearsay counts once nobody has come for the queue in a lease's time."""
        trusts = now >= self._trusts_at
        return all(
            one.has_all or (one.has_ended and (trusts or one.ended is not Ended.HEARSAY))
            for one in self.own
        )

    # ---- who may start where

    def _note_steps(self) -> None:
        """Note how far users have been handed their queues: done before members are compared, since
        each used batch would be too often."""
        for member in self.own:
            if member.used_to is not None:
                number = self.counting.number(member.used_to)
                member.step = self.counting.first(number, member.queue)

    def _may_start(self, member: Member) -> bool:
        """Whether a consumer may start where it stands, now that its user asks for a batch. It may
        not if it came without a position and the others have gone on."""
        if not member.undecided or member.rejoins:
            return True
        if not member.has_run:
            self._note_steps()  # Who starts has used nothing.
        return self._out_of_step(member, self._gone_on_from(member)) is None

    def _gone_on_from(self, member: Member) -> list[int]:
        """The seats that may be at another round than a member with which the feed has run: all
        began together, and these have gone on from there. Who starts since then has not."""
        if not member.has_run:
            return []
        return [one.seat for one in self.own if not one.starts]

    def _refusal(self, member: Member, now: float, *, has_used: bool) -> ResumeError | None:
        """The error for a consumer that could not start for a lease's time; None before that, while
        its user may still load a state.

        It is a trainer that died before its first checkpoint and was started again without a
        position: without the error all would wait for ever. It is not sent at once, since the
        others may be about to be replaced, too.
        """
        # A member that was sent the end leaves by itself: then another pass over the stream begins.
        leaving = [one.seat for one in self.own if one.has_lease and one.ending]
        error = self._out_of_step(member, leaving + self._gone_on_from(member))
        since = now if member.out_of_step_since is None else member.out_of_step_since
        member.out_of_step_since = None if error is None else since
        return error if has_used or now >= since + self.lease_s else None

    def _out_of_step(self, member: Member, apart_from: Collection[int] = ()) -> ResumeError | None:
        """Why a member may not start where it stands, whatever those in `apart_from` stand at."""
        # Trainers that start from checkpoints of different steps would compute with different
        # weights: that is told at once, since no row can show it later.
        others = [
            one for one in self.own
            if one.seat != member.seat and one.seat not in apart_from
            and one.lives and not one.undecided
        ]  # fmt: skip
        if all(self._fit(one, member) for one in others):
            return None
        if self._has_position_of_one_queue(member, others):
            assert member.start is not None
            step = member.start.step
            return ResumeError(
                f"{member.name} comes with the position before batch {step}, as others do, and it "
                "does not say how batches were dealt, as those of older versions: so it is of one "
                "queue; start each trainer from its own position, or with a number of queues that "
                f"divides {step}"
            )
        return self._differ(self._describe(member), others)

    def _has_position_of_one_queue(self, member: Member, others: Iterable[Member]) -> bool:
        """Whether a member and others come with one position that is of one queue: it lies within a
        round, and does not say how batches were dealt."""
        start = member.start
        return start is not None and start.into_round is None and any(
            one.start == start and not self._fit(one, member) for one in others
        )  # fmt: skip

    def _describe(self, member: Member) -> str:
        """Where a member stands, in words."""
        where = self.counting.round_name(member.step)
        if member.start is not None and member.used_to is None:
            return f"{member.name}'s checkpoint is of {where}"
        return f"{member.name} is at {where}"

    def _differ(self, mine: str, others: Iterable[Member]) -> ResumeError:
        """The error for a queue whose position is not of the round of the others."""
        return ResumeError(
            f"{mine}, and {', '.join(map(self._describe, others))}; start all trainers from one "
            "checkpoint and with one skip, or rejoin=True for one that goes on alone"
        )

    def _fit(self, one: Member, other: Member) -> bool:
        """Whether two members may be of one round."""
        rounds, others = self._rounds(one), self._rounds(other)
        # The last round of an epoch may be of fewer batches, and then the next epoch begins where
        # it would go on.
        return bool(
            rounds & others
            or self.counting.after_epoch(one.step) in others
            or self.counting.after_epoch(other.step) in rounds
        )

    def _rounds(self, member: Member) -> set[int]:
        """The round of a member's step; both rounds beside it if it has had everything.

        The last round may be uneven: some queues had a batch in it, and for the others there was
        none. Who has had everything then fits on either side of that round.
        """
        num, turn = self.counting.num, self.counting.turn(member.step)
        return {turn // num, -(-turn // num)} if member.finished else {turn // num}

    def _sent_step(self, member: Member) -> int:
        """Where a queue goes on: after the last batch that it was sent."""
        at = member.sent_to or member.start
        return 0 if at is None else self.counting.number(at)

    def _wanted_step(self, member: Member) -> int:
        """The number of the first batch there that is dealt to somebody."""
        if member.sent_to is not None or member.start is None:
            return self._sent_step(member)
        return member.start.first(self.counting)

    def _used_step(self, member: Member) -> int:
        """The number up to which the user of a queue was handed batches, as far as is known."""
        if member.used_to is not None:
            return self.counting.number(member.used_to)
        # A position with which a consumer comes back is where its next batch comes from. Batches
        # before it may still wait in the consumer, so nothing of the queue counts as used.
        return 0 if member.rejoins or member.start is None else member.start.first(self.counting)


def _unfit(member: Member, failure: FeedError) -> FeedError:
    """The error for a consumer with whose position the feed cannot go on."""
    if isinstance(failure, ResumeError):
        return failure
    return ResumeError(f"the feed cannot go on at the position of {member.name}: {failure}")


_HANDLERS: dict[type, Any] = {
    Asks: Membership._ask,
    Attaches: Membership._attach,
    Used: Membership._use,
    Died: Membership._die,
    Left: Membership._leave,
    Dismissed: Membership._dismiss,
    Failed: Membership._fail,
    Ticked: Membership._tick,
}
