"""A trainer's process: the real consumer and its real I/O loop, and a user who checks all."""

from __future__ import annotations

import math
from collections import deque
from math import floor
from typing import TYPE_CHECKING, Any, cast

from feeder.errors import (
    ClosedError,
    ConfigError,
    FeedError,
    LeaseLost,
    ProtocolError,
    RemoteError,
    ResumeError,
)
from feeder.service.client.consumer import Consumer
from feeder.service.client.inbox import Loading, SnapshotRequest
from feeder.service.client.io_loop import ClientLoop
from feeder.service.client.machine import ANSWERED, ConsumerOptions, Instructions, Moment
from feeder.service.client.remote import Identity, RemotePosition
from feeder.service.protocol.coding import decode
from feeder.state.snapshot import Snapshot
from feeder.state.state_dict import STATE_KEY
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import Cut
from simulation.disk import KilledError
from simulation.editing import Edits, cut_in
from simulation.network import Link
from simulation.process import Process
from simulation.server import told
from simulation.sources import NAME, content, left_out
from simulation.stream import rows_of
from simulation.world import Violation, WouldWaitError

if TYPE_CHECKING:
    from simulation.job import Job, Rank

DEFECTS = ProtocolError, RemoteError
"""Errors that no trainer may get: both sides are ours, and nothing here damages a message."""


def cut_of(job: Job, position: bytes) -> Cut:
    """The place that a saved position means."""
    return cut_in(job.deal.feed, position)


def step_of(job: Job, position: bytes) -> int:
    """The step that a saved position names; the number of batches at the end."""
    return cut_of(job, position).step


class TrainerProcess(Process):
    """One process of a trainer. It lives, may be stopped and continued, and ends once."""

    def __init__(
        self, job: Job, rank: Rank, *, position: bytes | None = None, skip: int = 0,
        rejoins: bool = False, takes_over: bool = False, loads: bool = False,
        is_stray: bool = False, is_foreign: bool = False,
    ) -> None:  # fmt: skip
        rank.num += 1
        super().__init__(f"trainer {rank.name}.{rank.num}")
        self.job, self.rank, self.deal = job, rank, job.deal
        plan, seat = job.plan, rank.seat
        self.position, self.rejoins = position, rejoins
        """Where it begins."""
        self.skip = skip
        self.step = job.first_batch(rank, position, skip=skip, rejoins=rejoins)
        """The number of its next batch."""
        self.edits = job.editor.edits_at(position)
        """Those of the run that it goes on in, as it knows it."""
        self._identity: Identity | None = None
        self.served_by: object = None
        """The server whose batches it is handed."""
        self._given_by: dict[int, tuple[Identity, object]] = {}
        """Of each lease what its server has said, and the server."""
        self.begins_after = 0 if position is None else job.place(position)
        """The number of the batch after those that its position says it has had."""
        self.begins_at = self.step
        self.after = self.step
        """The number of the batch after the last one that it was handed."""
        self.is_stray, self.is_foreign = is_stray, is_foreign
        """Whether it is a second process for its queue, which nobody wants; whether its position is
        one of another run."""
        self.was_connected = False
        feed = job.deal.feed._replace(edits=self.edits)
        self.deal, self._rows = job.deal._replace(feed=feed), rows_of(feed)
        self._think_s = plan.think_s * plan.of_seat(plan.paces, seat)
        self._store = None if rank.host is None else rank.host.open()
        self.is_cut_off = False
        self.breaks_early = False
        """Whether its next connection breaks as soon as it stands."""
        self.breaks_late = False
        """Whether its connection breaks after the last batch, about when it says goodbye."""
        self.lacks_start_s = rank.lacks_start_s
        """Where it is not 0, its connection breaks when the server sends it the first batch. So
        many seconds later both sides know."""
        rank.lacks_start_s = 0.0
        self.error: FeedError | None = None
        self.has_all = False
        self._user_waits = self._user_is_due = False
        self.links: list[Link] = []
        self._loads = loads and position is not None
        self._has_loaded = False
        self._held: deque[tuple[Batch, bytes]] = deque()
        self._request: SnapshotRequest | None = None
        self._asked_step = self._asked_at = 0.0
        self._asked_handed = self._asked_after = 0
        self.has_no_memory = False
        """Whether it cannot map shared memory."""
        addresses = [job.addresses[i] for i in range(plan.addresses)]
        options = ConsumerOptions(
            addresses=tuple(addresses), feed=NAME, queue=rank.queue, replica=rank.replica,
            credit=plan.of_seat(plan.credits, seat), hold=plan.hold, skip=skip, rejoins=rejoins,
            takes_over=takes_over,
            plane=plan.of_seat(plan.planes, seat),  # type: ignore[arg-type]
            checksum="auto", writable=False, timeout_s=10.0, reconnect_s=600.0, who=self.name,
        )  # fmt: skip
        connect: Any = self._connect
        self.loop = loop = ClientLoop(
            options, connect, None if self._loads else position, lambda: None
        )
        waker: Any = loop.waker
        waker.notify = self.notify
        self._cannot_take = loop.machine.cannot_take
        loop.machine.cannot_take = self._see_error  # type: ignore[method-assign]
        self.consumer: Consumer | None = None
        self.is_ending = False
        job.add(self)
        self.notify()

    def note(self, what: str) -> None:
        if self.world.history is not None:
            self.world.note(self.name, what)

    def _connect(self, address: str) -> Link:
        link = Link(self, address, len(self.links))
        if self.world.history is not None:
            self.note(f"connects as {link.name} to {address}")
        self.links.append(link)
        return link

    @property
    def link(self) -> Link | None:
        """The connection that it uses now."""
        return self.links[-1] if self.links and not self.links[-1].is_closed else None

    @property
    def is_dealt(self) -> bool:
        """Whether a server has given it the queue where it begins."""
        return self.loop.inbox.has_opened and (self._has_loaded or not self._loads)

    # ---- the I/O thread

    def _step(self) -> None:
        loop = self.loop
        if self.world.history is not None:
            self._note_messages()
        try:
            loop._step()
        except ConfigError as error:
            self._finish(error)
        except Exception as error:
            raise Violation(f"errors: {self.name} failed: {error!r}") from error
        else:
            if loop.machine.state == "over":
                self._finish(ClosedError("the consumer is closed"))
        if not self.is_dead:
            self._look()
            nearest = loop.machine.next_deadline
            if nearest < math.inf and loop.machine.state != "over":
                self._turn_by(max(nearest, self.world.now + 0.0005))

    def _see_error(self, error: FeedError, at: Moment) -> Instructions:
        """A message of the server cannot be taken."""
        if isinstance(error, ProtocolError):
            raise Violation(f"errors: {self.name} cannot take what it hears: {error}")
        return self._cannot_take(error, at)

    def _note_messages(self) -> None:
        link = self.link
        for data, _ in () if link is None else link.inbox:
            self.note(f"hears {told(decode(data, from_consumer=False))}")

    def _finish(self, failure: FeedError) -> None:
        """The end of `ClientLoop.run`."""
        self.loop._end(failure)
        if self.is_ending:
            self._end(is_closed=True)

    def _look(self) -> None:
        """Whether the user's thread can go on."""
        inbox, identity = self.loop.inbox, self.loop.machine._identity
        if identity is not None and id(identity) not in self._given_by and self.link is not None:
            self._given_by[id(identity)] = identity, self.link._server
        if self.consumer is None:
            if inbox.has_opened or inbox.failure is not None:
                self._connected()
        elif self._user_waits:
            batches = inbox.batches
            if len(batches) or batches.ending is not None or self._is_loading:
                self._user_by(0.0)
        machine, request = self.loop.machine, self._request
        if machine._questions and machine.state not in ANSWERED:
            raise Violation(f"waits: {self.name} waits for a snapshot, which nobody can answer")
        if request is not None:
            if request._answer is not None:
                self._take_snapshot(request._answer)
            elif self.world.now > self._asked_at + 60.0 and not self.is_paused:
                raise Violation(f"waits: {self.name} has had no answer for a snapshot in 60 s")

    @property
    def _is_loading(self) -> bool:
        """Whether a state was being loaded, and that is done."""
        inbox, ready = self.loop.inbox, self.consumer and self.consumer._ready
        if not isinstance(ready, Loading) or inbox.num_restarts < ready.number:
            return False
        return inbox.has_opened or inbox.failure is not None

    # ---- the user's thread

    def _connected(self) -> None:
        try:
            self.consumer = Consumer(self.loop)
        except FeedError as error:
            return self._fail(error)
        self.note("is connected")
        self.was_connected = True
        first_s = self._think_s * self._draws.random()
        late = 0.5 if self._loads else 0.1
        self._user_by(first_s * 20 if self._draws.random() < late else first_s)

    def _load(self) -> None:
        """Load the state, after batches of another place may have come already."""
        assert self.consumer is not None
        self._has_loaded = True
        try:
            self.consumer.load_state_dict({STATE_KEY: self.position})
        except WouldWaitError:
            self._user_waits = True
        except FeedError as error:
            self._fail(error)
        else:
            self._user_by(0.0)

    def _user_by(self, seconds: float) -> None:
        if not self._user_is_due:
            self._user_is_due, self._user_waits = True, False
            self.world.after(seconds, self._user_turn)

    def _user_turn(self) -> None:
        self._user_is_due = False
        if self.is_dead or self.is_ending or self.has_all:
            return
        if self.is_paused:
            self._user_waits = True
            return
        consumer = self.consumer
        assert consumer is not None
        if self._loads and not self._has_loaded:
            return self._load()
        self._check_start()
        try:
            batch = next(consumer)
        except WouldWaitError:
            self._user_waits = True
            return
        except StopIteration:
            return self._take_end()
        except FeedError as error:
            return self._fail(error)
        saving_s = self._take(batch)
        if not self.is_dead:
            think_s = self._think_s * self._draws.random()
            self._user_by(saving_s + (think_s * 20 if self._draws.random() < 0.02 else think_s))

    def _take(self, batch: Batch) -> float:
        """Use a batch; returns how many seconds it takes to save a position."""
        plan, place = self.job.plan, cast("RemotePosition", batch.place)
        self._follow(place.identity)
        step = self.step
        if self.world.history is not None:
            self.note(f"is handed batch {batch.step}")
        if self.is_foreign:
            raise Violation(f"positions: {self.name} came with one of another run, and is served")
        if batch.step != self.deal.says(step):
            raise Violation(f"rows: {self.name} was handed batch {batch.step}, expected {step}")
        rows = self._rows[step] if step in range(len(self._rows)) else b""
        if content(batch) != rows:
            raise Violation(f"rows: batch {step} of {self.name} holds other rows")
        held = self._held
        held.append((batch, rows))
        self._check_held()
        while len(held) > plan.hold + 2 or (held and not plan.keeps and self._draws.random() < 0.6):
            held.popleft()
        self.job.editor.handed(self, step)
        self.after = floor(step) + 1
        self.step = self.deal.first(self.after, self.rank.queue)
        self.job.handed(self)
        if self.breaks_late and self.link is not None and self.step >= self.deal.end:
            late_s = 10 * self._think_s * self._draws.random()
            # The server may learn of it after the consumer has asked once more.
            up_s = self._draws.choice((0.0, 0.1))
            self.world.after(late_s, self.link.break_off, up_s)
        saving_s = 0.0
        if self._draws.random() < 0.1 or self.deal.round_of(self.step) % plan.save_every == 0:
            saving_s = self._save()
        if self._draws.random() < self.job.asks and not self.is_dead:
            self.ask()
        return saving_s

    def _follow(self, identity: Identity) -> None:
        """What it has from now on is of this run: that of before, with more edits."""
        if identity is self._identity:
            return
        self._identity, before = identity, self.edits
        _, self.served_by = self._given_by.get(id(identity), (None, self.served_by))
        found = self.job.editor.edits_in(identity.fingerprint)
        if found == before:
            return
        had = self.begins_after if self.step == self.begins_at else self.after
        num = len(before)
        if found[:num] != before or found[num].step < had:
            raise Violation(
                f"edits: {self.name} was in a run with the edits {before}, up to batch "
                f"{had}, and is now in one with {found}"
            )
        self.edits, feed = found, self.deal.feed._replace(edits=found)
        self.deal, self._rows = self.deal._replace(feed=feed), rows_of(feed)
        self.step = self.deal.first(self.after, self.rank.queue)

    def _check_held(self) -> None:
        """What it still looks at has not changed: nobody else acts on its slots."""
        for batch, rows in self._held:
            if content(batch) != rows:
                raise Violation(f"slots: batch {batch.step} changed under {self.name}")

    def _save(self) -> float:
        """Save the position; returns how many seconds that takes."""
        assert self.consumer is not None
        position = self.consumer.state_dict()[STATE_KEY]
        step = step_of(self.job, position)
        if step not in (self.after, self._edited_at(position, self.after)):
            raise Violation(
                f"positions: after batch {self.after - 1} the position of {self.name} is {step}"
            )
        edits = self.job.editor.edits_in(self.consumer._lease.identity.fingerprint)
        if edits:
            self.job.editor.check_position(position, edits, self.name)
            last = self.loop.machine._last
            if last is not None:
                self.job.editor.check_position(last.asked, self.known, self.name)
        return self._store_position(position)

    @property
    def known(self) -> Edits:
        """The edits that it would bring to a server."""
        identity = self.loop.machine._identity
        return self.edits if identity is None else self.job.editor.edits_in(identity.fingerprint)

    def _edited_at(self, position: bytes, after: int) -> int | None:
        """Where an edit lies at the end of the round that a place is in, a position that has the
        edit is that end."""
        ends = self.deal.next_round(after)
        edits = self.job.editor.edits_at(position)
        return ends if any(one.step == ends for one in edits) else None

    def _store_position(self, position: bytes) -> float:
        """Store a position; returns how many seconds that takes."""
        host, opened = self.rank.host, self._store
        if host is None or opened is None:
            self.job.save(self, self.step, position)
        elif self.rank.process is self:
            try:
                is_saved = host.save(opened, position)
            except KilledError:
                if self._draws.random() < 0.5:
                    host.lose_power()
                self.kill()
                return 0.0
            if is_saved:
                # Whoever dies before then cannot know that it is there.
                seconds = host.slow_s * self._draws.random()
                self.world.after(seconds, self._has_saved, self.step, position)
                return seconds
            self.note("cannot save its position: the disk is full")
        return 0.0

    def _has_saved(self, step: int, position: bytes) -> None:
        if not self.is_dead:
            self.job.save(self, step, position)

    def die_in_save(self, num_calls: int) -> None:
        """It is killed in its next save, after so many calls to the system, perhaps as the power of
        its host goes."""
        if self._store is not None:
            self._store[1].calls_left = num_calls

    def _check_start(self) -> None:
        """Before the first batch its position is the one that it came with."""
        if self.step != self.begins_at or self.consumer is None or self._loads:
            return
        if self.rank.process is not self and not (self.position or self.rejoins):
            return  # Another one has its place: the servers may have begun elsewhere meanwhile.
        job, position = self.job, self.consumer.state_dict()[STATE_KEY]
        if self.skip:
            # What is left out belongs to it.
            found = self.deal.first(job.place(position), self.rank.queue)
            expected = self.step
        else:
            found, came_with = step_of(job, position), self.position
            expected = 0
            if came_with is not None:
                expected = step_of(job, came_with)
            elif not self.rejoins:
                expected = job.origin_at
        if found not in (expected, self._edited_at(position, expected)):
            raise Violation(
                f"positions: {self.name} came with {expected}, and before its first batch its "
                f"position is {found}"
            )

    def ask(self) -> None:
        """Ask for a snapshot."""
        if self.consumer is not None and self._request is None and not self.is_ending:
            self._asked_step, self._asked_at = self.step, self.world.now
            self._asked_after = self.after
            self._asked_handed = self.loop.inbox.handed
            self._request = self.loop.request_snapshot()

    def _take_snapshot(self, answer: bytes | RemoteError) -> None:
        self._request = None
        if isinstance(answer, RemoteError):
            return
        (state,), feed = Snapshot.from_bytes(answer).states, self.deal.feed
        found = cut_in(feed, state)
        edited_at = self._edited_at(bytes(Snapshot((state,))), self.after) or self.after
        steps = {self._asked_after, self.after, edited_at}
        if feed.skips:
            # Not all of them: a position that a trainer has saved, from which a server goes on, has
            # none, and of a server's runs the first one's source tells them.
            at = found.position
            done = {one for one in left_out(feed) if one[:2] < (at.epoch, at.calls[0])}
            if more := {*state.left_out} - done:
                raise Violation(f"rows: {self.name} is told that {more} were passed over")
        # Where no batch is left of its queue, the end is the same place for it.
        if found.finished and self._asked_step >= self.deal.end:
            return
        if self._asked_handed and found.step not in range(min(steps), max(steps) + 1):
            raise Violation(
                f"positions: a snapshot of {self.name} is of {found.step}, expected {steps}"
            )

    def _take_end(self) -> None:
        assert self.consumer is not None
        self._follow(self.consumer._lease.identity)
        if self.step < self.deal.end:
            raise Violation(f"rows: {self.name} was told the end before batch {self.step}")
        self.note("has had everything")
        self.has_all = True
        self._store_position(self.consumer.state_dict()[STATE_KEY])
        # Some have work to do before they close it.
        late_s = 20 * self._think_s * self._draws.random() if self._draws.random() < 0.5 else 0.0
        self.world.after(late_s, self._leave_at_end)

    def _leave_at_end(self) -> None:
        if self.is_paused:
            self.world.after(0.1, self._leave_at_end)
        else:
            self.leave()

    def leave(self) -> None:
        """Close the consumer; the process ends when its I/O thread has."""
        if not self.is_ending and not self.is_dead:
            self.is_ending = True
            self._check_held()
            self._held.clear()
            if self.consumer is None:
                return self.kill()
            self.consumer.close()
            self.notify()

    def _fail(self, error: FeedError) -> None:
        """The user gets an error, and the process ends."""
        self.note(f"gets {type(error).__name__}: {error}")
        self.error = error
        self._check_error(error)
        if isinstance(error, DEFECTS):
            raise Violation(f"errors: {self.name} got {type(error).__name__}: {error}")
        self.is_ending = True
        self._held.clear()
        if self.consumer is None:
            # `connect` has closed what it had made.
            self.loop.call_soon(self.loop.stop)
        else:
            self.consumer.close()
        self.notify()

    def _check_error(self, error: FeedError) -> None:
        """An error has a reason that the trainer's owner can see."""
        if not self.was_connected or self.is_stray or self.is_foreign:
            return
        if self.job.is_resizing and "deals the feed otherwise" in str(error):
            return
        if isinstance(error, LeaseLost) and not self.rank.may_be_fenced:
            raise Violation(f"holders: {self.name} lost its queue, which nobody took: {error}")
        # A state that is loaded after connecting may be refused as one that was connected with.
        is_known = self.position is not None and not self._loads
        if isinstance(error, ResumeError) and is_known and not self.job.has_foreign:
            raise Violation(f"errors: {self.name} was given the queue, and is refused: {error}")

    # ---- what happens to it

    def pause(self) -> None:
        self.is_paused = True

    def go_on(self) -> None:
        if not self.is_dead:
            self.is_paused = False
            self.notify()
            if self._user_waits:
                self._user_by(0.0)

    def kill(self) -> None:
        """SIGKILL."""
        self._check_held()
        self._held.clear()
        for link in self.links:
            link.close()
        lease = self.loop.inbox.lease
        if lease is not None:
            lease.close()
        self._end()

    def _end(self, *, is_closed: bool = False) -> None:
        if self.is_dead:
            return
        self.is_dead = True
        self.note("is gone")
        if is_closed and self._request is not None and self._request._answer is None:
            raise Violation(f"waits: {self.name} has no answer for a snapshot, and is closed")
        if self.consumer is not None:
            self.consumer._forgotten.detach()
        self.job.ended(self)
