"""Every interleaving of one served feed's events, breadth first, until no new state is found.

The server's membership is the real one. Around it stand models, as small as they can be: a stream
of a few batches, made as far as there are slots; connections, each with messages on their way in
both directions; and one trainer for each queue. Trainers, the server and connections may die, one
consumer may hang, and the whole job may be put back to an older checkpoint, each so many times as
`Limits` says. There is no clock: what time brings is an event that may come at any moment.

Checked in each state:

- holders: a queue has one holder, and the desk and the membership agree on who has one
- rows: a trainer is handed its own batches in order, each once
- positions: the server's idea of a consumer's next batch is the consumer's
- stored: the position that a server would store is not ahead of a trainer
- slots: each slot is free, holds a batch to be sent, or is under way under a lease
- waits: once faults stop, every trainer can still come to its end
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from feeder.service.protocol import membership as ms

LEASE_S = 30.0
CREDIT = 1
SLOTS = 2


class Limits(NamedTuple):
    """How large the service is, and how many faults it may suffer."""

    queues: int = 2
    batches: int = 3
    deaths: int = 2
    servers: int = 1
    rollbacks: int = 1
    hangs: int = 0
    breaks: int = 0


class At(NamedTuple):
    """A position: the number of the next batch."""

    step: int


class Violation(Exception):
    """An invariant does not hold."""


@dataclass(slots=True)
class Trainer:
    """A trainer's process, and its consumer."""

    queue: int
    state: str = "down"  # down, opening, streaming, idle (looks for a server), failed, done
    number: int = 0
    """Number of the process: each is another consumer."""
    connection: int = 0
    rejoins: bool = False
    start: int = 0
    """The batch of its queue at which its process began."""
    used: int = 0
    """Batches of its queue that its user has been handed, in all."""
    received: int = 0
    base: int = 0
    """Batches that had been received when its lease began."""
    lease: int = -1
    begun: bool = False
    has_run: bool = False
    has_opened: bool = False
    has_end: bool = False
    ended: tuple[int, ...] = ()
    """The queues that have had everything, as the server has said."""
    comes_back: bool = False
    """Whether its process was begun with rejoin=True."""

    def key(self) -> tuple[Any, ...]:
        """What tells two trainers of a queue apart."""
        if self.state in ("down", "failed", "done"):
            return self.state, self.used, self.comes_back, self.has_end
        return (
            self.state, self.rejoins, self.start, self.used, self.received, self.base, self.lease,
            self.begun, self.has_run, self.has_opened, self.has_end, self.ended, self.comes_back,
        )  # fmt: skip


@dataclass(slots=True)
class Lease:
    """A lease as the desk knows it."""

    connection: tuple[int, int]
    number: int
    under_way: tuple[int, ...] = ()


@dataclass(slots=True)
class World:
    """All of the service at one moment."""

    limits: Limits
    left: Limits
    """The faults that may still come."""
    server: ms.Membership | None
    trainers: list[Trainer]
    leases: list[Lease | None]
    # The run: the next batch to be made, the first one that each queue wants, those not sent yet.
    head: int = -1
    firsts: tuple[float, ...] = ()
    boxes: list[tuple[int, ...]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    """Slots of each queue that are not free."""
    up: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)
    """Messages to the server, by connection."""
    down: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)

    def copy(self) -> World:
        """A world of its own."""
        new = copy.copy(self)
        new.trainers = [copy.copy(one) for one in self.trainers]
        new.leases = [copy.copy(one) for one in self.leases]
        new.boxes, new.taken = self.boxes.copy(), self.taken.copy()
        new.up, new.down = self.up.copy(), self.down.copy()
        if self.server is not None:
            new.server = copy_membership(self.server)
        return new

    def key(self) -> tuple[Any, ...]:
        """What tells two worlds apart."""
        # How old a process or connection is tells more than its number: worlds that differ in
        # numbers alone are one.
        trainers = self.trainers
        leases = [
            one and (trainers[queue].connection - one.connection[1], one.number, one.under_way)
            for queue, one in enumerate(self.leases)
        ]
        ways = [
            (queue, trainers[queue].connection - number, is_up, said)
            for is_up, way in ((True, self.up), (False, self.down))
            for (queue, number), said in way.items()
            if said
        ]
        return (
            self.left,
            None if self.server is None else membership_key(self.server, trainers),
            tuple([one.key() for one in trainers]),
            tuple(leases),
            (self.head, self.firsts, tuple(self.boxes), tuple(self.taken)),
            frozenset(ways),
        )

    @property
    def is_over(self) -> bool:
        """Whether every trainer has had everything."""
        return all(one.state == "done" for one in self.trainers)


def copy_membership(server: ms.Membership) -> ms.Membership:
    """A membership of its own, in the same state."""
    new = copy.copy(server)
    known = {id(one): copy.copy(one) for one in server.members}
    stands = server._stands
    if stands is not None:
        for one in stands.members:
            if id(one) not in known:
                known[id(one)] = copy.copy(one)
        members = [known[id(one)] for one in stands.members]
        new._stands = replace(stands, members=members)
    new.members = [known[id(one)] for one in server.members]
    return new


def membership_key(server: ms.Membership, trainers: list[Trainer]) -> tuple[Any, ...]:
    """What tells two memberships apart, but for times."""
    members = []
    for one, trainer in zip(server.members, trainers, strict=True):
        key: tuple[Any, ...] = (one.state, one.hangs, one.had_ended, one.is_hearsay)
        if one.has_lease:
            key += (
                trainer.number - one.consumer[1], trainer.connection - one.attempt, one.rejoins,
                one.undecided, one.start, one.step, one.out_of_step_since, one.sent, one.sent_to,
                one.used, one.used_to, one.pending, one.ending,
            )  # fmt: skip
        members.append(key)
    return tuple(members), server._is_halted, server._goes_on_at == math.inf


# ---- What may happen: each event is a name, whether it is a fault, and what it does to a world.

Event = tuple[str, bool, Callable[[World], None]]
Step = Callable[[World, Trainer], None]


class Rules:
    """The events of a world. `membership` makes the server's membership."""

    def __init__(
        self, limits: Limits, membership: Callable[..., ms.Membership] = ms.Membership
    ) -> None:
        self.limits = limits
        self._membership = membership

    def first(self) -> World:
        """The world before anything has happened."""
        num = self.limits.queues
        return World(
            limits=self.limits, left=self.limits, server=self._membership(num, LEASE_S),
            trainers=[Trainer(queue) for queue in range(num)], leases=[None] * num,
            boxes=[()] * num, taken=[0] * num,
        )  # fmt: skip

    def share(self, queue: int) -> int:
        """How many batches a queue has in all."""
        limits = self.limits
        return len(range(queue, limits.batches, limits.queues))

    def events(self, world: World) -> Iterator[Event]:
        """All that may happen next."""
        left = world.left
        for one in world.trainers:
            yield from self._trainer_events(world, one)
        for at, said in world.up.items():
            if said and world.server is not None:
                yield (
                    f"server hears {said[0][0]} of {at}",
                    False,
                    lambda w, at=at: self._hear(w, at),
                )
        for at, said in world.down.items():
            if said:
                name = f"trainer {at[0]} hears {said[0][0]}"
                yield name, False, lambda w, at=at: self._take(w, at)
        if world.server is None:
            yield "a server comes", False, self._come
            return
        for queue in range(self.limits.queues):
            yield from self._server_events(world, queue)
        if world.server._goes_on_at < math.inf:
            yield "the wait is over", False, self._wait_over
        if left.servers:
            yield "the server dies", True, self._kill_server

    def _trainer_events(self, world: World, one: Trainer) -> Iterator[Event]:
        queue, left = one.queue, world.left
        at = (queue, one.connection)

        def on(do: Step) -> Callable[[World], None]:
            return lambda w: do(w, w.trainers[queue])

        if one.state == "idle" and world.server is not None:
            yield f"trainer {queue} asks", False, on(self._ask)
        ended = one.state == "down" or (one.state == "failed" and not world.down.get(at))
        if ended and world.server is not None:
            yield f"trainer {queue} is launched", False, on(self._launch)
        if one.state == "streaming" and not one.begun:
            yield f"user {queue} begins", False, on(self._begin)
        if self._waits_in_vain(world, one):
            yield f"trainer {queue} is begun again, to come back", False, on(self._begin_again)
        yield from self._batch_events(world, one, on)
        if one.state in ("opening", "streaming"):
            if left.deaths:
                yield f"trainer {queue} dies", True, on(self._kill)
            if left.breaks and one.state == "streaming":
                yield f"connection {queue} breaks", True, on(self._break)
        if left.rollbacks and queue == 0 and any(t.used for t in world.trainers):
            rounds = min(t.used for t in world.trainers)
            for at_round in {0, rounds}:
                yield (
                    f"all go back to round {at_round}", True,
                    lambda w, at_round=at_round: self._roll_back(w, at_round),
                )  # fmt: skip

    def _batch_events(
        self, world: World, one: Trainer, on: Callable[[Step], Callable[[World], None]]
    ) -> Iterator[Event]:
        queue = one.queue
        if one.begun and one.used < one.received and one.state not in ("down", "failed", "done"):
            yield f"user {queue} is handed a batch", False, on(self._use)
        if one.has_end and one.begun and one.used == one.received and one.state == "streaming":
            yield f"trainer {queue} says goodbye", False, on(self._say_bye)
        if one.state == "streaming" and self._would_be_news(world, one):
            yield f"trainer {queue} renews", False, on(self._tell)

    def _would_be_news(self, world: World, one: Trainer) -> bool:
        # Consumers renew their leases all the time; only where something waits for it matters.
        lease = world.leases[one.queue]
        if world.server is None or lease is None or lease.number != one.lease:
            return False
        if lease.connection != (one.queue, one.connection) or world.up.get(lease.connection):
            return False
        member = world.server.members[one.queue]
        return not member.lives or (member.undecided and one.begun)

    def _waits_in_vain(self, world: World, one: Trainer) -> bool:
        # Who starts waits for all others, however long, and its user is told for whom. Where one of
        # those has had everything and will not come, that ends the wait which can know it: whoever
        # began the trainers.
        if world.server is None or one.state != "streaming" or one.rejoins:
            return False
        missing = world.server.missing()
        return any(world.trainers[queue].state == "done" for queue in missing)

    def _begin_again(self, world: World, one: Trainer) -> None:
        self._end_process(world, one)
        one.state, one.comes_back = "down", True

    def _server_events(self, world: World, queue: int) -> Iterator[Event]:
        server, lease = world.server, world.leases[queue]
        if server is None or lease is None:
            return
        member = server.members[queue]
        takes = member.has_attached and not member.ending and member.sent - member.used < CREDIT
        if takes and world.boxes[queue]:
            yield f"server sends to {queue}", False, lambda w: self._send(w, queue)
        if member.lives and world.left.hangs:
            yield f"lease {queue} runs out", True, lambda w: self._expire(w, queue)
        since = member.out_of_step_since
        if since is not None and since >= 0.0:
            yield f"{queue} has waited for a lease", False, lambda w: self._pass_lease(w, queue)

    # ---- trainers

    def _ask(self, world: World, one: Trainer) -> None:
        one.state = "opening"
        one.rejoins = one.rejoins or one.has_run or one.has_end or bool(one.ended)
        at, num = (one.queue, one.connection), self.limits.queues
        if one.has_end:
            start = ms.Start(self.limits.batches, True)
        elif one.received:
            start = ms.Start(one.queue + num * (one.received - 1) + 1)
        else:
            start = None
        has_position = one.comes_back or one.start > 0
        undecided = not (has_position or one.begun or one.received > one.start)
        said = ("open", start, one.rejoins, undecided, one.ended)
        world.up[at] = (*world.up.get(at, ()), said)

    def _launch(self, world: World, one: Trainer) -> None:
        """A new process, where the old one stood when it died."""
        new = Trainer(
            one.queue, number=one.number, connection=one.connection, start=one.used, used=one.used,
            received=one.used, rejoins=one.comes_back, comes_back=one.comes_back,
            has_end=one.has_end and one.used == self.share(one.queue),
        )  # fmt: skip
        world.trainers[one.queue] = new
        self._ask(world, new)

    def _begin(self, world: World, one: Trainer) -> None:
        one.begun = True
        self._tell(world, one)

    def _tell(self, world: World, one: Trainer) -> None:
        at = (one.queue, one.connection)
        used = one.used - one.base
        said = ("used", one.lease, max(0, used), max(0, -used), one.begun)
        world.up[at] = (*world.up.get(at, ()), said)

    def _use(self, world: World, one: Trainer) -> None:
        one.used += 1
        if one.state == "streaming":
            self._tell(world, one)

    def _say_bye(self, world: World, one: Trainer) -> None:
        at = (one.queue, one.connection)
        if one.used != self.share(one.queue):
            raise Violation(f"rows: queue {one.queue} ended after {one.used} batches")
        world.up[at] = (*world.up.get(at, ()), ("bye", one.lease), ("gone",))
        world.down.pop(at, None)
        one.state = "done"

    def _kill(self, world: World, one: Trainer) -> None:
        world.left = world.left._replace(deaths=world.left.deaths - 1)
        self._end_process(world, one)
        one.state, one.comes_back = "down", True

    def _end_process(self, world: World, one: Trainer) -> None:
        self._cut(world, one)
        one.number += 1

    def _cut(self, world: World, one: Trainer) -> None:
        """The connection is gone; what was said over it before is still heard."""
        at = (one.queue, one.connection)
        if world.server is not None:
            world.up[at] = (*world.up.get(at, ()), ("gone",))
        world.down.pop(at, None)
        one.connection += 1

    def _break(self, world: World, one: Trainer) -> None:
        world.left = world.left._replace(breaks=world.left.breaks - 1)
        self._cut(world, one)
        one.state, one.lease = "idle", -1

    def _roll_back(self, world: World, at_round: int) -> None:
        world.left = world.left._replace(rollbacks=0)
        for one in world.trainers:
            self._end_process(world, one)
            one.state, one.comes_back, one.used, one.has_end = "down", False, at_round, False

    def _take(self, world: World, at: tuple[int, int]) -> None:
        """A trainer hears a message."""
        one = world.trainers[at[0]]
        (kind, *rest), *left = world.down[at]
        world.down[at] = tuple(left)
        if at[1] != one.connection:
            return
        num = self.limits.queues
        if kind == "lost":
            one.connection += 1
            one.lease = -1
            if one.state in ("opening", "streaming"):
                one.state = "idle"
        elif kind == "opened" and one.state == "opening":
            self._take_lease(world, one, rest[0])
        elif kind == "fault":
            self._take_fault(world, one, *rest)
        elif rest[0] != one.lease:
            return
        elif kind == "batch":
            if rest[1] != one.queue + num * one.received:
                raise Violation(
                    f"rows: queue {one.queue} was sent batch {rest[1]} after {one.received} of its "
                    "own"
                )
            one.received += 1
            one.has_run = True
        elif kind == "end":
            if one.received != self.share(one.queue):
                raise Violation(f"rows: queue {one.queue} was ended after {one.received} batches")
            one.has_end = True

    def _take_lease(self, world: World, one: Trainer, lease: int) -> None:
        at = (one.queue, one.connection)
        one.state, one.lease, one.base, one.has_opened = "streaming", lease, one.received, True
        world.up[at] = (*world.up.get(at, ()), ("attached", lease))
        # Who brought a position has nothing more to load.
        one.begun = one.begun or one.comes_back or one.start > 0
        self._tell(world, one)

    def _take_fault(self, world: World, one: Trainer, lease: int, is_resume: bool) -> None:
        if one.state == "opening" and lease < 0:
            if is_resume and one.has_opened and not one.rejoins:
                one.rejoins = True
                self._ask(world, one)
            else:
                self._fail(one, is_resume)
        elif lease == one.lease:
            self._fail(one, is_resume)

    def _fail(self, one: Trainer, is_resume: bool) -> None:
        """A named error ends the process; the next one does as the error says."""
        one.state, one.lease = "failed", -1
        one.comes_back = one.comes_back or is_resume

    # ---- the server

    def _come(self, world: World) -> None:
        world.server = self._membership(self.limits.queues, LEASE_S)

    def _kill_server(self, world: World) -> None:
        world.left = world.left._replace(servers=world.left.servers - 1)
        world.server, world.head, world.firsts = None, -1, ()
        num = self.limits.queues
        world.leases, world.boxes, world.taken = [None] * num, [()] * num, [0] * num
        world.up.clear()
        for one in world.trainers:
            at = (one.queue, one.connection)
            if one.state in ("opening", "streaming"):
                world.down[at] = (*world.down.get(at, ()), ("lost",))

    def _tell_server(self, world: World, event: Any, now: float = 0.0) -> list[Any]:
        assert world.server is not None
        done = world.server.handle(event, now)
        for one in done:
            self._perform(world, one)
        return done

    def _perform(self, world: World, one: Any) -> None:
        match one:
            case ms.SendAway(queue, error, _):
                lease = world.leases[queue]
                if lease is None:
                    raise Violation(f"holders: nobody holds queue {queue} who could be sent away")
                is_resume = isinstance(error, ms.ResumeError)
                self._say(world, lease.connection, ("fault", lease.number, is_resume))
                self._end_lease(world, queue)
            case ms.EndLease(queue):
                self._end_lease(world, queue)
            case ms.SendEnd(queue):
                lease = world.leases[queue]
                assert lease is not None
                self._say(world, lease.connection, ("end", lease.number))
            case ms.StartRun():
                self._stop(world)
                self._start(world, one)
            case ms.StopRun():
                self._stop(world)
            case ms.TellWaiting():
                assert world.server is not None
                _, ended = world.server.news()
                for trainer in world.trainers:
                    if trainer.state == "streaming" and world.leases[trainer.queue] is not None:
                        trainer.ended = ended

    def _say(self, world: World, at: tuple[int, int], said: tuple[Any, ...]) -> None:
        # A connection that is gone takes nothing any more.
        if at[1] == world.trainers[at[0]].connection and world.trainers[at[0]].state != "done":
            world.down[at] = (*world.down.get(at, ()), said)

    def _end_lease(self, world: World, queue: int) -> None:
        lease = world.leases[queue]
        if lease is None:
            raise Violation(f"holders: the lease of queue {queue} ended twice")
        world.taken[queue] -= len(lease.under_way)
        world.leases[queue] = None

    def _stop(self, world: World) -> None:
        for queue, box in enumerate(world.boxes):
            world.taken[queue] -= len(box)
            world.boxes[queue] = ()
        world.head, world.firsts = -1, ()

    def _start(self, world: World, run: ms.StartRun) -> None:
        assert world.server is not None
        num = self.limits.queues
        for queue, step in enumerate(run.used_steps):
            one = world.trainers[queue]
            # Trainers that were put back stand behind what they had used once.
            is_back = world.left.rollbacks < self.limits.rollbacks
            if step < math.inf and (step - queue) // num > one.used and not is_back:
                raise Violation(f"stored: queue {queue} counts as used up to {step}")
        if not run.stands:
            return
        members = world.server.members
        world.head = world.server._sent_step(members[run.stands[0]])
        world.firsts = tuple(run.first_steps)

    def settle(self, world: World) -> None:
        """Let happen at once what differs from the same a little later in nothing that is seen."""
        self._make(world)
        # Batches on their way can be lost with a server or a connection, and with nothing else.
        if world.left.servers or world.left.breaks:
            return
        for at in [at for at, said in world.down.items() if said]:
            while world.down[at] and world.down[at][0][0] in ("batch", "end"):
                self._take(world, at)

    def _make(self, world: World) -> None:
        """Make batches as far as there are slots for them, and end queues that have had all."""
        while 0 <= world.head < self.limits.batches:
            queue = world.head % self.limits.queues
            if world.head >= world.firsts[queue]:
                if world.taken[queue] >= SLOTS:
                    return
                world.taken[queue] += 1
                world.boxes[queue] = (*world.boxes[queue], world.head)
            world.head += 1
        for queue, lease in enumerate(world.leases if world.head >= 0 else ()):
            member = world.server.members[queue] if world.server else None
            if lease is None or member is None or world.boxes[queue]:
                continue
            if member.has_attached and not member.ending:
                self._send_end(world, queue)

    def _send(self, world: World, queue: int) -> None:
        step, *left = world.boxes[queue]
        world.boxes[queue] = tuple(left)
        lease = world.leases[queue]
        assert lease is not None
        lease.under_way = (*lease.under_way, step)
        assert world.server is not None
        world.server.note_sent(queue, 1, At(step + 1))
        self._say(world, lease.connection, ("batch", lease.number, step))

    def _send_end(self, world: World, queue: int) -> None:
        lease = world.leases[queue]
        assert lease is not None and world.server is not None
        world.server.note_ending(queue, "end")
        self._say(world, lease.connection, ("end", lease.number))

    def _wait_over(self, world: World) -> None:
        self._tell_server(world, ms.Ticked(), ms.RETURN_S)

    def _expire(self, world: World, queue: int) -> None:
        assert world.server is not None
        world.left = world.left._replace(hangs=world.left.hangs - 1)
        world.server.members[queue].expires = -1.0
        self._tell_server(world, ms.Ticked())

    def _pass_lease(self, world: World, queue: int) -> None:
        assert world.server is not None
        world.server.members[queue].out_of_step_since = -LEASE_S

    def _hear(self, world: World, at: tuple[int, int]) -> None:
        """The server hears a message."""
        (kind, *rest), *left = world.up[at]
        world.up[at] = tuple(left)
        queue = at[0]
        lease = world.leases[queue]
        mine = lease if lease is not None and lease.connection == at else None
        if kind == "open":
            return self._open(world, at, *rest)
        if kind == "gone":
            if mine is not None:
                self._tell_server(world, ms.Died(queue))
            return
        # What belongs to an earlier lease is dropped.
        if mine is None or rest[0] != mine.number:
            return
        if kind == "attached":
            self._tell_server(world, ms.Attaches(queue))
        elif kind == "bye":
            self._tell_server(world, ms.Left(queue))
        elif kind == "used":
            self._use_at_server(world, mine, *rest[1:])

    def _open(
        self, world: World, at: tuple[int, int], start: ms.Start | None, rejoins: bool,
        undecided: bool, ended: tuple[int, ...],
    ) -> None:  # fmt: skip
        queue, one = at[0], world.trainers[at[0]]
        mine = world.leases[queue]
        if mine is not None and mine.connection == at:
            raise Violation(f"holders: who holds queue {queue} asks for it")
        # Who asked over a connection that is gone was another process, or this one before.
        number = one.number if at[1] == one.connection or one.state != "down" else one.number - 1
        done = self._tell_server(world, ms.Asks(
            queue, f"trainer {queue}", bytes([queue, number]), at[1], start, rejoins, undecided,
            False, ended, start is None,
        ))  # fmt: skip
        refused = [one.error for one in done if isinstance(one, ms.Refuse)]
        if refused:
            is_resume = isinstance(refused[0], ms.ResumeError)
            return self._say(world, at, ("fault", -1, is_resume))
        if world.leases[queue] is not None:
            raise Violation(f"holders: queue {queue} has two")
        last = 0 if mine is None else mine.number
        world.leases[queue] = Lease(at, (last + 1) % 4)
        self._say(world, at, ("opened", (last + 1) % 4))
        self._perform(world, ms.TellWaiting())

    def _use_at_server(
        self, world: World, lease: Lease, sequence: int, pending: int, begun: bool
    ) -> None:
        assert world.server is not None
        queue = lease.connection[0]
        member = world.server.members[queue]
        num = sequence - member.used
        place = At(lease.under_way[num - 1] + 1) if num else member.used_to
        self._tell_server(world, ms.Used(queue, sequence, pending, place, begun))
        if world.leases[queue] is lease:
            world.taken[queue] -= num
            lease.under_way = lease.under_way[num:]

    # ---- what holds in each state

    def check(self, world: World) -> None:
        """Raises `Violation`."""
        server, num = world.server, self.limits.queues
        for queue, lease in enumerate(world.leases):
            under_way = () if lease is None else lease.under_way
            if world.taken[queue] != len(world.boxes[queue]) + len(under_way):
                raise Violation(
                    f"slots: {world.taken[queue]} of queue {queue} are taken, and there are "
                    f"{len(world.boxes[queue])} batches to be sent and {len(under_way)} under way"
                )
            if server is None:
                continue
            member = server.members[queue]
            if member.has_lease != (lease is not None):
                raise Violation(
                    f"holders: queue {queue} has a lease and no member, or none and one"
                )
            one = world.trainers[queue]
            if lease is None or lease.connection != (queue, one.connection):
                continue
            if lease.number != one.lease or one.state != "streaming" or one.has_end:
                continue
            coming = sum(
                said[:2] == ("batch", lease.number) for said in world.down.get(lease.connection, ())
            )
            expected = queue + num * (one.received + coming)
            stands = server.counting.first(server._sent_step(member), queue)
            if not member.ending and stands != expected:
                raise Violation(
                    f"positions: queue {queue} expects batch {expected}, and the server stands at "
                    f"{stands}"
                )


# ---- the search


class Found(NamedTuple):
    """What a search has found."""

    states: int
    events: int
    closed: bool
    """Whether no state is left that was not looked at."""
    violation: str
    trace: list[str]
    """What led to it."""


def explore(
    limits: Limits,
    membership: Callable[..., ms.Membership] = ms.Membership,
    most: float = math.inf,
    report: Callable[[int, int], None] | None = None,
) -> Found:
    """Look at all states, breadth first, `most` of them at the most."""
    rules = Rules(limits, membership)
    first = rules.first()
    # A state is known by the hash of its key: the keys of millions would not fit into memory.
    numbers: dict[int, int] = {hash(first.key()): 0}
    came_from: list[tuple[int, str]] = [(-1, "")]
    # For each state those that lead to it without a fault.
    before: list[list[int]] = [[]]
    ends: list[int] = []
    waiting = deque([(0, first)])
    num_events = 0
    while waiting:
        if len(numbers) >= most:
            return Found(len(numbers), num_events, False, "", [])
        here, world = waiting.popleft()
        if world.is_over:
            ends.append(here)
        for name, is_fault, do in rules.events(world):
            num_events += 1
            new = world.copy()
            try:
                do(new)
                rules.settle(new)
                rules.check(new)
            except Violation as error:
                trace = [*trace_to(here, came_from), name]
                return Found(len(numbers), num_events, False, str(error), trace)
            key = hash(new.key())
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(came_from)
                came_from.append((here, name))
                before.append([])
                waiting.append((number, new))
                if report is not None and number % 10_000 == 0:
                    report(number, len(waiting))
            if not is_fault:
                before[number].append(here)
    stuck = without_end(before, ends)
    if stuck is not None:
        trace = trace_to(stuck, came_from)
        why = "waits: somebody waits for ever, whatever happens but faults"
        return Found(len(numbers), num_events, True, why, trace)
    return Found(len(numbers), num_events, True, "", [])


def without_end(before: list[list[int]], ends: list[int]) -> int | None:
    """The first state from which no end is reached without faults; None where there is none."""
    reaches = bytearray(len(before))
    open_ = deque(ends)
    for end in ends:
        reaches[end] = 1
    while open_:
        for earlier in before[open_.popleft()]:
            if not reaches[earlier]:
                reaches[earlier] = 1
                open_.append(earlier)
    stuck = reaches.find(0)
    return None if stuck < 0 else stuck


def trace_to(number: int, came_from: list[tuple[int, str]]) -> list[str]:
    """The events that lead to a state."""
    names = []
    while number > 0:
        number, name = came_from[number]
        names.append(name)
    return names[::-1]


def main() -> int:
    """Explore as the arguments say; 1 where a violation was found."""
    parser = argparse.ArgumentParser(prog="scripts/simulate explore", description=__doc__)
    for name, value in Limits()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--most", type=float, default=math.inf, help="states at the most")
    wish = vars(parser.parse_args())
    most = wish.pop("most")
    began = time.monotonic()

    def report(number: int, waiting: int) -> None:
        took = time.monotonic() - began
        print(f"{number} states, {waiting} to be looked at, {took:.0f} s", file=sys.stderr)

    found = explore(Limits(**wish), most=most, report=report)
    for name in found.trace:
        print(f"  {name}")
    print(
        f"{found.states} states, {found.events} events, "
        f"{'closed' if found.closed else 'not closed'}, "
        f"{'1 violation: ' + found.violation if found.violation else '0 violations'}, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if found.violation else 0


if __name__ == "__main__":
    sys.exit(main())
