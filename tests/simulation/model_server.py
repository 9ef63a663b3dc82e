"""The servers of the model of one served feed: the real membership, leases, and a run of batches
that are made as far as there are slots. `model` has the trainers, and what goes between the two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import reduce
from operator import attrgetter, or_
from typing import Any, NamedTuple

from feeder.errors import ProtocolError
from feeder.service.protocol import membership as ms
from simulation.model import (
    NEWEST,
    At,
    Call,
    Deed,
    Lease,
    Limits,
    Message,
    Standing,
    View,
    Violation,
)

LEASE_S = 30.0
CREDIT = 1
SLOTS = 2

_MEMBER = [one.name for one in fields(ms.Member)]
_OF_MEMBER = attrgetter(*_MEMBER)


@dataclass(slots=True)
class Server:
    """A server: its membership, its leases and its run."""

    num_batches: int
    membership: ms.Membership
    leases: list[Lease | None]
    # The run: the next batch to be made, the first one that each queue wants, those not sent yet.
    head: int
    firsts: tuple[float, ...]
    boxes: list[tuple[int, ...]]
    taken: list[int]
    """Slots whose batch each trainer has or is to have."""

    @property
    def members(self) -> list[ms.Member]:
        """Its members, one for each trainer."""
        return self.membership.members

    @property
    def waits(self) -> bool:
        """Whether its feed waits for queues that may have ended, and for so long only."""
        return self.membership._goes_on_at < math.inf

    def copy(self) -> Server:
        """The same, to be changed."""
        # `copy.copy` and `dataclasses.replace` would take most of an exploration's time.
        old = self.membership
        membership = type(old).__new__(type(old))
        membership.__dict__.update(old.__dict__)
        membership.members = [
            ms.Member(**dict(zip(_MEMBER, _OF_MEMBER(one), strict=True))) for one in old.members
        ]
        # Positions always agree here: what a run began with is asked for by nobody.
        membership._run_members = None
        return Server(
            self.num_batches, membership, self.leases.copy(), self.head, self.firsts,
            self.boxes.copy(), self.taken.copy(),
        )  # fmt: skip

    def key(self) -> tuple[Any, ...]:
        """What tells two servers apart."""
        # Only where batches are still to be made does it matter who wants them.
        is_making = 0 <= self.head < self.num_batches
        firsts = tuple(max(first, self.head) for first in self.firsts) if is_making else ()
        run = self.head, firsts, tuple(self.boxes), tuple(self.taken)
        members = tuple([_member_key(one) for one in self.members])
        return members, self.membership._is_halted, self.waits, tuple(self.leases), run

    def view(self, seat: int) -> View:
        """What the trainer of a queue can see of it."""
        missing, member = self.membership.missing(), self.members[seat]
        if not member.has_lease:
            return View(missing=tuple(missing))
        return View(not member.lives, member.undecided, tuple(missing))

    def standing(self, seat: int) -> Standing:
        """Where it thinks that the consumer of a queue stands. Raises `Violation`."""
        lease, member, box = self.leases[seat], self.members[seat], self.boxes[seat]
        under_way = () if lease is None else lease.under_way
        if self.taken[seat] != len(box) + len(under_way):
            raise Violation(
                f"slots: {self.taken[seat]} of queue {seat} are taken, and there are {len(box)} "
                f"batches to be sent and {len(under_way)} under way"
            )
        if member.has_lease != (lease is not None):
            raise Violation(f"holders: queue {seat} has a lease and no member, or none and one")
        if lease is None or member.ending:
            return Standing(lease and lease._replace(under_way=()), math.inf)
        membership = self.membership
        step = membership.counting.first(membership._sent_step(member), member.queue)
        return Standing(lease._replace(under_way=()), step)

    def grow_old(self, seat: int, connections: int, processes: int) -> None:
        """Newer connections and processes of a queue's trainer have come."""
        member, lease = self.members[seat], self.leases[seat]
        if member.has_lease:
            member.attempt -= connections
            member.consumer = bytes([seat, member.consumer[1] - processes])
        if lease is not None:
            self.leases[seat] = lease._replace(age=lease.age + connections)


def _member_key(one: ms.Member) -> tuple[Any, ...]:
    # No time is in it, nor what only tells whose position is the stream's.
    # From whom an end is known is read by no event here, nor how the last holder went then.
    has_ended = one.ended is not ms.Ended.NO
    if not one.has_lease:
        return (has_ended or one.state,)
    return (
        one.state, has_ended, one.undecided,
        one.consumer, one.attempt, one.rejoins, one.start, one.step, one.out_of_step_since,
        one.sent, one.sent_to, one.used, one.used_to, one.pending, one.ending,
    )  # fmt: skip


class Choice(NamedTuple):
    """Something that the server may do next, or that may be done to all."""

    name: str
    call: Call
    fault: str = ""
    at_round: int = -1
    """It happens only where this is a round that all trainers have a checkpoint of; -1: always."""


class Servers:
    """What the servers of a feed do. `membership` makes the membership of each."""

    def __init__(
        self, limits: Limits, membership: Callable[..., ms.Membership] = ms.Membership
    ) -> None:
        self.limits = limits
        self._membership = membership

    def choices(self, server: Server | None) -> Iterator[Choice]:
        """All that may happen next, apart from what the trainers do."""
        for at_round in range(self.limits.batches // self.limits.queues + 1):
            call = "put_back", at_round
            yield Choice(f"all go back to round {at_round}", call, "rollbacks", at_round)
        if server is None:
            yield Choice("a server comes", ("come",))
            return
        for seat, lease in enumerate(server.leases):
            if lease is not None:
                yield from self._choices_of(server, seat)
        if server.waits:
            yield Choice("the wait is over", ("wait_over",))
        yield Choice("the server dies", ("die",), "servers")

    def _choices_of(self, server: Server, seat: int) -> Iterator[Choice]:
        member = server.members[seat]
        takes = member.has_attached and not member.ending
        if takes and server.boxes[seat] and member.sent - member.used < CREDIT:
            yield Choice(f"server sends to {seat}", ("send", seat))
        if takes and not server.boxes[seat] and server.head == self.limits.batches:
            yield Choice(f"server sends the end to {seat}", ("end", seat))
        if member.lives:
            yield Choice(f"lease {seat} runs out", ("expire", seat), "hangs")
        since = member.out_of_step_since
        if since is not None and since >= 0.0:
            yield Choice(f"{seat} has waited for a lease", ("pass_lease", seat))

    def after(self, server: Server | None, call: Call) -> tuple[Server | None, list[list[Deed]]]:
        """The server after a call, and what it does to each trainer."""
        answer = _Answer(self.limits, server and server.copy())
        name, *rest = call
        try:
            if name == "come":
                answer.server = self.first()
                answer.come()
            elif name != "nothing":
                getattr(answer, name)(*rest)
            answer.settle()
        except ProtocolError as error:
            raise Violation(f"table: {error}") from error
        return answer.server, answer.deeds

    def first(self) -> Server:
        """A server before anything has happened."""
        limits, num = self.limits, self.limits.num_seats
        membership = self._membership(limits.queues, LEASE_S, replicas=limits.replicas)
        return Server(limits.batches, membership, [None] * num, -1, (), [()] * num, [0] * num)


class _Answer:
    """A server while it answers one call, and what it does to the trainers meanwhile."""

    def __init__(self, limits: Limits, server: Server | None) -> None:
        self.limits = limits
        self.server = server
        self.deeds: list[list[Deed]] = [[] for _ in range(limits.num_seats)]

    @property
    def _up(self) -> Server:
        assert self.server is not None
        return self.server

    # ---- calls

    def grow_old(self, seat: int, connections: int, processes: int) -> None:
        if self.server is not None:
            self.server.grow_old(seat, connections, processes)

    def put_back(self, at_round: int) -> None:
        for seat, deeds in enumerate(self.deeds):
            self.grow_old(seat, 1, 1)
            deeds.append(("put_back", at_round))

    def come(self) -> None:
        for deeds in self.deeds:
            deeds.append(("note_server",))

    def die(self) -> None:
        self.server = None
        for deeds in self.deeds:
            deeds.append(("lose_server",))

    def send(self, seat: int) -> None:
        up, lease = self._up, self._up.leases[seat]
        assert lease is not None
        step, *left = up.boxes[seat]
        up.boxes[seat] = tuple(left)
        up.leases[seat] = lease._replace(under_way=(*lease.under_way, step))
        up.members[seat].note_sent(1, At(step + 1))
        self._say(seat, lease.age, ("batch", lease.number, step))

    def end(self, seat: int) -> None:
        self._up.members[seat].ending = "end"
        self._say_end(seat)

    def wait_over(self) -> None:
        self._tell(ms.Ticked(), ms.RETURN_S)

    def expire(self, seat: int) -> None:
        self._up.members[seat].expires = -1.0
        self._tell(ms.Ticked())

    def pass_lease(self, seat: int) -> None:
        self._up.members[seat].out_of_step_since = -LEASE_S

    def hear(self, seat: int, age: int, message: Message) -> None:
        self._hear(seat, age, *message)
        self.deeds[seat].append(("note_answer",))

    def _hear(self, seat: int, age: int, kind: str, *rest: Any) -> None:
        lease = self._up.leases[seat]
        is_mine = lease is not None and lease.age == age
        if kind == "open":
            self._open(seat, age, *rest)
        elif kind == "gone":
            if is_mine:
                self._tell(ms.Died(seat))
        # What belongs to an earlier lease is dropped.
        elif not is_mine or lease is None or rest[0] != lease.number:
            return
        elif kind == "attached":
            self._tell(ms.Attaches(seat))
        elif kind == "bye":
            self._tell(ms.Left(seat))
        elif kind == "used":
            self._use(seat, lease, *rest[1:])

    def _open(
        self, seat: int, age: int, process: int, start: ms.Start | None, rejoins: bool,
        undecided: bool, ended: tuple[int, ...],
    ) -> None:  # fmt: skip
        mine = self._up.leases[seat]
        if mine is not None and mine.age == age:
            raise Violation(f"holders: who holds queue {seat} asks for it")
        done = self._tell(ms.Asks(
            seat, f"trainer {seat}", bytes([seat, NEWEST - process]), -age, start, rejoins,
            undecided, False, ended, start is None,
        ))  # fmt: skip
        refused = [one.error for one in done if isinstance(one, ms.Refuse)]
        if refused:
            is_resume = isinstance(refused[0], ms.ResumeError)
            return self._say(seat, age, ("fault", -1, is_resume))
        if self._up.leases[seat] is not None:
            raise Violation(f"holders: queue {seat} has two")
        number = (1 if mine is None else mine.number + 1) % 4
        self._up.leases[seat] = Lease(age, number)
        self.deeds[seat].append(("note_lease", age, number))
        self._say(seat, age, ("opened", number))
        self._perform(ms.TellWaiting())

    def _use(self, seat: int, lease: Lease, sequence: int, pending: int, begun: bool) -> None:
        up = self._up
        member = up.members[seat]
        num = sequence - member.used
        place = At(lease.under_way[num - 1] + 1) if num else member.used_to
        self._tell(ms.Used(seat, sequence, pending, place, begun))
        if up.leases[seat] is lease:
            up.leases[seat] = lease._replace(under_way=lease.under_way[num:])
            up.taken[seat] -= num

    # ---- what the server does as the membership says

    def _tell(self, event: Any, now: float = 0.0) -> list[Any]:
        done = self._up.membership.handle(event, now)
        for one in done:
            self._perform(one)
        return done

    def _perform(self, one: Any) -> None:
        match one:
            case ms.SendAway(member, error, _):
                seat = member.seat
                lease = self._up.leases[seat]
                if lease is None:
                    raise Violation(f"holders: nobody holds queue {seat} who could be sent away")
                is_resume = isinstance(error, ms.ResumeError)
                self._say(seat, lease.age, ("fault", lease.number, is_resume))
                self._end_lease(seat)
            case ms.EndLease(member):
                self._end_lease(member.seat)
            case ms.SendEnd(member):
                self._say_end(member.seat)
            case ms.StartRun():
                self._stop()
                self._start(one)
            case ms.StopRun():
                self._stop()
            case ms.TellWaiting():
                _, ended = self._up.membership.news()
                for seat, lease in enumerate(self._up.leases):
                    if lease is not None:
                        self.deeds[seat].append(("tell_ended", ended))

    def _say(self, seat: int, age: int, message: Message) -> None:
        self.deeds[seat].append(("say", age, message))

    def _say_end(self, seat: int) -> None:
        lease = self._up.leases[seat]
        assert lease is not None
        self._say(seat, lease.age, ("end", lease.number))

    def _end_lease(self, seat: int) -> None:
        lease = self._up.leases[seat]
        if lease is None:
            raise Violation(f"holders: the lease of queue {seat} ended twice")
        self._up.taken[seat] -= len(lease.under_way)
        self._up.leases[seat] = None
        self.deeds[seat].append(("note_lease", 0, -1))

    def _stop(self) -> None:
        up = self._up
        for seat, box in enumerate(up.boxes):
            up.taken[seat] -= len(box)
            up.boxes[seat] = ()
        up.head, up.firsts = -1, ()

    def _start(self, run: ms.StartRun) -> None:
        for seat, step in enumerate(run.used_steps):
            if step < math.inf:
                num = (int(step) - self.limits.queue(seat)) // self.limits.queues
                self.deeds[seat].append(("count_used", num))
        if run.stands:
            self._up.head = self._up.membership._sent_step(self._up.members[run.stands[0]])
            self._up.firsts = tuple(run.first_steps)

    def settle(self) -> None:
        """Make batches as far as there are slots: nobody sees them before they are sent."""
        up = self.server
        if up is None:
            return
        while 0 <= up.head < self.limits.batches:
            seats = self._seats_of(up.head % self.limits.queues)
            wanting = [seat for seat in seats if up.head >= up.firsts[seat]]
            if wanting and self._num_slots(seats) >= SLOTS:
                return
            for seat in wanting:
                up.taken[seat] += 1
                up.boxes[seat] = (*up.boxes[seat], up.head)
            up.head += 1

    def _seats_of(self, queue: int) -> range:
        replicas = self.limits.replicas
        return range(queue * replicas, (queue + 1) * replicas)

    def _num_slots(self, seats: range) -> int:
        """Slots of a queue that are not free. A batch lies in one, for all replicas together; where
        it was made again, the older one may still be under way."""
        nums = [Counter(self._held(seat)) for seat in seats]
        return sum(reduce(or_, nums).values())

    def _held(self, seat: int) -> tuple[int, ...]:
        lease = self._up.leases[seat]
        return self._up.boxes[seat] + (() if lease is None else lease.under_way)
