"""A model of one served feed around the real membership, in pieces that know little of each other:
here the trainers and what goes between the pieces, in `model_server` the servers.

The pieces are the server and, for each queue, a trainer with the messages on their way from and to
it. They are as small as can be: a stream of a few batches, made as far as there are slots, and one
trainer for each queue. Nothing but these goes from one piece to another:

- a `Call`: what a trainer does to the server, or what the server does by itself
- deeds: what an answer to a call does to the trainers
- a `View`: what a trainer's moves depend on at the server

So what a piece does next is found once for each state of that piece, however many states of the
others there are beside it. Nothing here changes a piece that it was given.

There is no clock: what time brings is a move that may come at any moment. Connections and processes
are known by their age, that is, by how many came after them: two states that differ in how often
something has happened, and in nothing else, are one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from feeder.service.protocol import membership as ms

# Members are known by a byte that says which process they are. The newest has this one.
NEWEST = 100


class Limits(NamedTuple):
    """How large the service is, and how many faults it may suffer."""

    queues: int = 2
    batches: int = 3
    replicas: int = 1
    deaths: int = 2
    servers: int = 1
    rollbacks: int = 1
    hangs: int = 0
    breaks: int = 0

    @property
    def num_seats(self) -> int:
        """Trainers in all."""
        return self.queues * self.replicas

    def queue(self, seat: int) -> int:
        """The queue whose batches a trainer is given."""
        return seat // self.replicas

    def step(self, seat: int, num: int) -> int:
        """The number of a batch, of which a trainer is given so many before it."""
        return self.queue(seat) + self.queues * num

    def share(self, seat: int) -> int:
        """How many batches a trainer is given in all."""
        return len(range(self.queue(seat), self.batches, self.queues))


FAULTS = ("deaths", "servers", "rollbacks", "hangs", "breaks")


class At(NamedTuple):
    """A position: the number of the next batch."""

    step: int


class Violation(Exception):
    """An invariant does not hold."""


Message = tuple[Any, ...]
Way = tuple[Message, ...]
"""Messages on their way in one direction of a connection, the first first."""
Deed = tuple[Any, ...]
"""What is done to a trainer: a name and what belongs to it."""
Call = tuple[Any, ...]
"""What happens to a server: a name and what belongs to it."""
NO_CALL: Call = ("nothing",)


@dataclass(slots=True)
class Trainer:
    """A trainer's process, its consumer, and the messages on their way from and to it."""

    seat: int
    """Its number: with replicas several are given the batches of one queue."""
    state: str = "down"  # down, opening, streaming, idle (looks for a server), failed, done
    comes_back: bool = False
    """Whether its process was begun with rejoin=True."""
    was_put_back: bool = False
    """Whether the whole job was put back to an older checkpoint."""
    used: int = 0
    """Batches of its queue that its user has been handed, in all."""
    has_end: bool = False
    rejoins: bool = False
    start: int = 0
    """The batch of its queue at which its process began."""
    received: int = 0
    base: int = 0
    """Batches that had been received when its lease began."""
    lease: int = -1
    begun: bool = False
    has_run: bool = False
    has_opened: bool = False
    ended: tuple[int, ...] = ()
    """The queues that have had everything, as the server has said."""
    up: dict[int, Way] = field(default_factory=dict)
    """Messages to the server, by the age of their connection."""
    down: Way = ()
    """Messages to the trainer. What a connection that is gone still holds is read by nobody."""
    group: tuple[int, int] | None = None
    """The lease that the server holds for its queue: age of the connection, number. The trainer
    does not know it, nor these two."""
    is_up: bool = True
    """Whether there is a server."""
    is_safe: bool = False
    """Whether no fault can come any more."""

    def copy(self) -> Trainer:
        """The same, to be changed."""
        new = Trainer(*_OF_TRAINER(self))
        new.up = self.up.copy()
        return new

    def key(self) -> tuple[Any, ...]:
        """What tells two trainers of a queue apart. Left out is what nothing depends on until it is
        written again."""
        lasting = (
            self.state, self.comes_back, self.was_put_back, self.used, self.has_end, self.group,
            self.is_up, self.is_safe,
            tuple(sorted((age, said) for age, said in self.up.items() if said)), self.down,
        )  # fmt: skip
        # The next process begins with what lasts.
        if self.state in ("down", "failed", "done"):
            return lasting
        # Who comes back, or has begun, is decided, wherever it started.
        start = 0 if self.comes_back or self.begun else self.start
        # Each is a reason to come back, and is read for nothing else.
        reasons = None if self.rejoins else (self.has_run, self.has_opened)
        # The next lease has a base of its own.
        base = self.base if self.state == "streaming" else 0
        return (
            *lasting, self.rejoins, start, self.received, base, self.lease, self.begun, reasons,
            self.ended,
        )  # fmt: skip

    def says(self, message: Message, age: int = 0) -> None:
        """Send a message to the server."""
        self.up[age] = (*self.up.get(age, ()), message)

    def hears(self, message: Message) -> None:
        """A message to it is on its way."""
        self.down = (*self.down, message)


_OF_TRAINER = attrgetter(*Trainer.__slots__)


class Lease(NamedTuple):
    """A lease as the server's group knows it."""

    age: int
    """Age of its connection."""
    number: int
    under_way: tuple[int, ...] = ()


class View(NamedTuple):
    """What a trainer's moves depend on at the server."""

    is_lost: bool = False
    is_undecided: bool = False
    missing: tuple[int, ...] = ()


class Standing(NamedTuple):
    """Where a server thinks that the consumer of a queue stands."""

    lease: Lease | None
    """The lease, without what is under way."""
    step: float
    """The next batch that it would send; infinity after the last."""


class Move(NamedTuple):
    """Something that a trainer may do next."""

    name: str
    trainer: Trainer | Violation
    """The trainer after it."""
    call: Call = NO_CALL
    fault: str = ""
    """The field of `Limits` that bounds how often it happens."""
    after: tuple[int, ...] = ()
    """It happens only once the trainer of one of these queues is done; nothing: at any time."""


Do = Callable[[Trainer], Call | None]


class Trainers:
    """What the trainers of a feed do."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def first(self, seat: int, *, is_safe: bool) -> Trainer:
        """A trainer before anything has happened."""
        one = Trainer(seat, is_safe=is_safe)
        self.settle(one)
        return one

    def moves(self, one: Trainer, view: View) -> Iterator[Move]:
        """All that a trainer may do next."""
        found = [*self._comings(one, view), *self._goings(one, view), *self._hearings(one)]
        for name, do, *rest in found:
            new = one.copy()
            try:
                call = do(new) or NO_CALL
            except Violation as error:
                yield Move(name, error, NO_CALL, *rest)
            else:
                # What is heard may give a lease or end one: all is settled after that.
                if call[0] != "hear":
                    self.settle(new)
                yield Move(name, new, call, *rest)

    def settle(self, one: Trainer) -> None:
        """Let happen at once what differs in nothing, whenever it happens.

        Each step that is taken here is silent: nobody but this trainer sees it. And it is
        confluent: whatever else may happen before it may also happen after it, with one outcome, in
        which such steps may at the most have become void. So the state before it and the state
        after it are branching bisimilar, and need not be told apart, neither for what holds in each
        state nor for what can still be reached (Groote and van de Pol, "State space reduction
        using partial tau-confluence", MFCS 2000).
        """
        # The server drops what belongs to no lease that it holds over that connection. Such a lease
        # comes only from a question over the same connection, which is heard later.
        for age, said in list(one.up.items()):
            while said and _is_void(said[0], age, one.group):
                said = said[1:]
            one.up[age] = said
        while self._takes_at_once(one):
            call = self._take(one)
            # A server that is lost has no lease any more whose connection could grow older.
            assert call is None or one.group is None
        # A trainer without a queue asks for it in any case, and what it says does not change while
        # it waits. If it may die first, it may also not ask.
        if one.is_safe and one.is_up:
            if one.state == "idle":
                self._ask(one)
            elif one.state == "down" or (one.state == "failed" and not one.down):
                self._launch(one)

    def _takes_at_once(self, one: Trainer) -> bool:
        """Whether the next message may be heard at once. Whatever the server says meanwhile comes
        after that message."""
        if not one.down:
            return False
        kind, *rest = one.down[0]
        is_mine = bool(rest) and rest[0] == one.lease
        if kind in ("batch", "end") and not is_mine:
            # It is dropped; the lease becomes another only with a later message.
            return True
        if kind == "batch":
            # Only its user sees that it is there. Whoever dies or is put back loses it all the
            # same; only a connection that breaks loses it and spares its consumer.
            return self.limits.breaks == 0
        # A trainer that may die first may also never hear it.
        if not one.is_safe:
            return False
        # What its user is handed meanwhile is told, or lost with the process.
        is_unhanded = one.begun and one.used < one.received
        if one.state == "streaming" and kind in ("fault", "lost"):
            # The user may still begin, be handed what is there, or be done.
            return one.begun and not is_unhanded and not one.has_end
        return kind in ("end", "lost") or one.state == "failed" or not is_unhanded

    def _comings(self, one: Trainer, view: View) -> Iterator[tuple[Any, ...]]:
        who = f"trainer {one.seat}"
        if one.state == "idle" and one.is_up:
            yield f"{who} asks", self._ask
        ended = one.state == "down" or (one.state == "failed" and not one.down)
        if ended and one.is_up:
            yield f"{who} is launched", self._launch
        if one.state == "streaming" and not one.begun:
            yield f"user {one.seat} begins", self._begin
        if one.state == "streaming" and self._would_be_news(one, view):
            yield f"{who} renews", self._tell
        unhanded = one.begun and one.used < one.received
        if unhanded and one.state not in ("down", "failed", "done"):
            yield f"user {one.seat} is handed a batch", self._use

    def _would_be_news(self, one: Trainer, view: View) -> bool:
        # Consumers renew their leases all the time; only where something waits for it matters.
        if one.group != (0, one.lease) or one.up.get(0):
            return False
        return view.is_lost or (view.is_undecided and one.begun)

    def _goings(self, one: Trainer, view: View) -> Iterator[tuple[Any, ...]]:
        who, streams = f"trainer {one.seat}", one.state == "streaming"
        if one.has_end and one.begun and one.used == one.received and streams:
            yield f"{who} says goodbye", self._say_bye
        waits = streams and not one.rejoins and not one.down and not any(one.up.values())
        if waits and view.missing:
            # Who starts waits for all others, however long, and its user is told for whom. Where
            # one of those has had everything and will not come, that ends the wait which can know
            # it: whoever began the trainers. Who does so too early lets a trainer die.
            yield (
                f"{who} is begun again, to come back", self._end_process,
                "", view.missing,
            )  # fmt: skip
        if streams or one.state == "opening":
            yield f"{who} dies", self._end_process, "deaths"
        if streams:
            yield f"connection {one.seat} breaks", self._break, "breaks"

    def _hearings(self, one: Trainer) -> Iterator[tuple[Any, ...]]:
        for age, said in one.up.items():
            if said and one.is_up:
                old = f" over connection -{age}" if age else ""
                name = f"server hears {said[0][0]} of {one.seat}{old}"
                yield name, lambda t, age=age: self._is_heard(t, age)
        if one.down:
            yield f"trainer {one.seat} hears {one.down[0][0]}", self._take

    def check(self, one: Trainer, standing: Standing) -> None:
        """Raises `Violation` where a server thinks that a trainer stands elsewhere."""
        seat, lease = one.seat, standing.lease
        if lease is None or lease.age or lease.number != one.lease or one.state != "streaming":
            return
        if one.has_end or standing.step == math.inf:
            return
        coming = sum(said[:2] == ("batch", lease.number) for said in one.down)
        expected = self.limits.step(seat, one.received + coming)
        if standing.step != expected:
            raise Violation(
                f"positions: queue {seat} expects batch {expected}, and the server stands at "
                f"{standing.step}"
            )

    def _ask(self, one: Trainer) -> None:
        one.state = "opening"
        one.rejoins = one.rejoins or one.has_run or one.has_end or bool(one.ended)
        if one.has_end:
            start = ms.Start(self.limits.batches, True)
        elif one.received:
            start = ms.Start(self.limits.step(one.seat, one.received - 1) + 1)
        else:
            start = None
        has_position = one.comes_back or one.start > 0
        undecided = not (has_position or one.begun or one.received > one.start)
        one.says(("open", 0, start, one.rejoins, undecided, one.ended))

    def _launch(self, one: Trainer) -> None:
        """A new process, where the old one stood when it died."""
        new = Trainer(
            one.seat, comes_back=one.comes_back, was_put_back=one.was_put_back, used=one.used,
            has_end=one.has_end and one.used == self.limits.share(one.seat), rejoins=one.comes_back,
            start=one.used, received=one.used, up=one.up, down=one.down, group=one.group,
            is_up=one.is_up, is_safe=one.is_safe,
        )  # fmt: skip
        for name in Trainer.__slots__:
            setattr(one, name, getattr(new, name))
        self._ask(one)

    def _begin(self, one: Trainer) -> None:
        one.begun = True
        self._tell(one)

    def _tell(self, one: Trainer) -> None:
        used = one.used - one.base
        one.says(("used", one.lease, max(0, used), max(0, -used), one.begun))

    def _use(self, one: Trainer) -> None:
        one.used += 1
        if one.state == "streaming":
            self._tell(one)

    def _say_bye(self, one: Trainer) -> None:
        if one.used != self.limits.share(one.seat):
            raise Violation(f"rows: queue {one.seat} ended after {one.used} batches")
        one.says(("bye", one.lease))
        one.says(("gone",))
        one.down = ()
        one.state = "done"

    def _end_process(self, one: Trainer) -> Call:
        call = self._cut(one, 1)
        one.state, one.comes_back = "down", True
        return call

    def _break(self, one: Trainer) -> Call:
        one.state, one.lease = "idle", -1
        return self._cut(one, 0)

    def _cut(self, one: Trainer, processes: int) -> Call:
        """The connection is gone; what was said over it before is still heard."""
        # Also where no server is there: another may still hear what was asked meanwhile.
        if one.state != "done":
            one.says(("gone",))
        return self._grow_old(one, processes)

    def _grow_old(self, one: Trainer, processes: int) -> Call:
        one.up = {
            age + 1: tuple([_of_older(message, processes) for message in said])
            for age, said in one.up.items()
        }
        one.down = ()
        if one.group is not None:
            one.group = one.group[0] + 1, one.group[1]
        return "grow_old", one.seat, 1, processes

    def _is_heard(self, one: Trainer, age: int) -> Call:
        message, *left = one.up[age]
        one.up[age] = tuple(left)
        return "hear", one.seat, age, message

    def _take(self, one: Trainer) -> Call | None:
        """A trainer hears a message."""
        (kind, *rest), *left = one.down
        one.down = tuple(left)
        if kind == "lost":
            one.lease = -1
            if one.state in ("opening", "streaming"):
                one.state = "idle"
            return self._cut(one, 0)
        if kind == "opened" and one.state == "opening":
            self._take_lease(one, rest[0])
        elif kind == "fault":
            self._take_fault(one, *rest)
        elif rest[0] == one.lease:
            self._take_batch(one, kind, *rest[1:])
        return None

    def _take_batch(self, one: Trainer, kind: str, step: int = -1) -> None:
        if kind == "batch":
            if step != self.limits.step(one.seat, one.received):
                raise Violation(
                    f"rows: queue {one.seat} was sent batch {step} after {one.received} of its own"
                )
            one.received += 1
            one.has_run = True
        elif kind == "end":
            if one.received != self.limits.share(one.seat):
                raise Violation(f"rows: queue {one.seat} was ended after {one.received} batches")
            one.has_end = True

    def _take_lease(self, one: Trainer, lease: int) -> None:
        one.state, one.lease, one.base, one.has_opened = "streaming", lease, one.received, True
        one.says(("attached", lease))
        # Who brought a position has nothing more to load.
        one.begun = one.begun or one.comes_back or one.start > 0
        self._tell(one)

    def _take_fault(self, one: Trainer, lease: int, is_resume: bool) -> None:
        if one.state == "opening" and lease < 0:
            if is_resume and one.has_opened and not one.rejoins:
                one.rejoins = True
                self._ask(one)
            else:
                self._fail(one, is_resume)
        elif lease == one.lease:
            self._fail(one, is_resume)

    def _fail(self, one: Trainer, is_resume: bool) -> None:
        """A named error ends the process; the next one does as the error says."""
        one.state, one.lease = "failed", -1
        one.comes_back = one.comes_back or is_resume

    # ---- what is done to trainers

    def after(self, one: Trainer, deeds: tuple[Deed, ...]) -> Trainer:
        """The trainer after what was done to it."""
        new = one.copy()
        for name, *rest in deeds:
            getattr(self, f"_{name}")(new, *rest)
        self.settle(new)
        return new

    def _say(self, one: Trainer, age: int, message: Message) -> None:
        # A connection that is gone takes nothing any more.
        if age == 0 and one.state != "done":
            one.hears(message)

    def _note_lease(self, one: Trainer, age: int, number: int) -> None:
        one.group = None if number < 0 else (age, number)

    def _note_answer(self, one: Trainer) -> None:
        """What was heard has been answered."""

    def _tell_ended(self, one: Trainer, ended: tuple[int, ...]) -> None:
        # This news follows on what opened its lease.
        is_opening = one.state == "opening" and one.group is not None and one.group[0] == 0
        if one.state == "streaming" or is_opening:
            one.ended = ended

    def _count_used(self, one: Trainer, num: int) -> None:
        # Trainers that were put back stand behind what they had used once.
        if num > one.used and not one.was_put_back:
            raise Violation(
                f"stored: queue {one.seat} counts as having used {num} batches, and its user was "
                f"handed {one.used}"
            )

    def _note_server(self, one: Trainer) -> None:
        one.is_up = True

    def _lose_server(self, one: Trainer) -> None:
        one.up.clear()
        one.group, one.is_up = None, False
        if one.state in ("opening", "streaming"):
            one.hears(("lost",))

    def _put_back(self, one: Trainer, at_round: int) -> None:
        self._end_process(one)
        one.comes_back, one.used, one.has_end, one.was_put_back = False, at_round, False, True

    def _note_safety(self, one: Trainer) -> None:
        one.is_safe = True


def _of_older(message: Message, processes: int) -> Message:
    """The message, where so many newer processes have come."""
    return ("open", message[1] + processes, *message[2:]) if message[0] == "open" else message


def _is_void(message: Message, age: int, group: tuple[int, int] | None) -> bool:
    """Whether a server that holds this lease drops the message."""
    if message[0] == "open":
        return False
    is_mine = group is not None and group[0] == age
    return not is_mine or (message[0] != "gone" and group != (age, message[1]))
