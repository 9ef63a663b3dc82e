"""Where the consumers of one feed are served: who holds which queue, and what each is sent.

Everything here is done by the server's I/O thread, and nothing waits.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from feeder.errors import ConfigError, FeedError, LeaseLost, ProtocolError
from feeder.protocol import messages as say
from feeder.protocol.checks import checksum, pieces
from feeder.protocol.credit import credit_for
from feeder.protocol.seats import Seats
from feeder.snapshot import Snapshot
from feeder.statedict import unpack_position
from feeder.transport.faults import point
from feeder.transport.feeds import Run, ServedFeed
from feeder.transport.lease import Lease, Peer, Sent
from feeder.transport.memfd import Arena
from feeder.transport.outbox import Outbox
from workers.batch import Batch
from workers.position import Place
from workers.resuming import Resume

logger = logging.getLogger("feeder")

_BUNDLE = 64
"""Batches at most whose headers go in one message."""

_SPARE_SLOTS = 2
"""Slots beside those that the consumer may have: one is being written, one waits."""

Send = Callable[[Peer, say.Message, Sequence[Any]], bool]
"""Sends a message with frames after it; False where the peer is gone."""


class Desk:
    """The consumers of one feed."""

    def __init__(self, feed: ServedFeed, run_id: bytes, lease_s: float, send: Send) -> None:
        self.feed = feed
        self._run_id = run_id
        self.lease_s = lease_s
        """Seconds for which a consumer need not be heard of."""
        self._send = send
        self.num_queues = num = len(feed.recipe.config.devices)
        """The feed's queues."""
        self.seats = Seats(num)
        self.leases: list[Lease | None] = [None] * num
        self._resumes: list[Resume | None] = [None] * num
        self._opened = 0
        self._last_run: Run | None = None

    # ---- coming and going

    def open(self, peer: Peer, message: say.Open) -> Lease:
        """Seat a consumer. Raises `LeaseLost`, `ResumeError`, `ConfigError`."""
        queue, positions = message.queue, self.feed.recipe.positions
        if queue >= self.num_queues:
            raise ConfigError(
                f"queue is {queue}, but feed {self.feed.name!r} has {self.num_queues}; expected a "
                f"number from 0 to {self.num_queues - 1}"
            )
        resume = None
        if message.token is not None:
            resume = positions.find_in(unpack_position(message.token))
        step = 0 if resume is None else resume.cut.step
        rejoins = message.intent == "rejoin"
        old = self.leases[queue]
        if old is not None and old.consumer == message.consumer and old.attempt > message.attempt:
            raise ProtocolError("a consumer's question came after a later one of its own")
        is_same = old is not None and old.consumer == message.consumer
        takes_over = message.takeover or is_same
        for lease in self.leases:
            if lease is not None and lease.place is not None:
                self.seats.move(lease.queue, lease.place.step)
        undecided = resume is None
        self.seats.check(
            queue, step, message.who, rejoins=rejoins, takes_over=takes_over, undecided=undecided
        )
        if old is not None:
            self._evict(old, message.who)
        self.seats.take(queue, step, message.who, rejoins=rejoins, undecided=undecided)
        if rejoins:
            self.seats.end(message.ended)
        self._opened += 1
        lease = Lease(
            peer=peer,
            queue=queue,
            generation=self._run_id + self._opened.to_bytes(8, "big"),
            who=message.who,
            consumer=message.consumer,
            attempt=message.attempt,
            credit=message.credit,
            hold=message.hold,
            checksum=message.checksum,
            boot_id=message.boot_id,
            expires=time.monotonic() + self.lease_s,
        )
        self.leases[queue] = lease
        self._resumes[queue] = resume
        lease.session.on("Open")
        return lease

    def _evict(self, old: Lease, who: str) -> None:
        """Make room for a newcomer whose right has been checked."""
        error = LeaseLost(f"queue {old.queue} was taken over by {who}")
        self._send(old.peer, make_fault(old.generation, error, None), ())
        self.end(old)

    def end(self, lease: Lease) -> None:
        """A lease is over: its memory is never written again."""
        if self.leases[lease.queue] is not lease:
            return
        self.leases[lease.queue] = None
        self.feed.slots.retire(lease.queue)
        if lease.connection is not None:
            lease.connection.close()
        self._settle(lease, lease.use(lease.sequence))

    def lose(self, lease: Lease) -> None:
        """A lease's connection is dead."""
        if self.leases[lease.queue] is not lease:
            return
        logger.info("feed %r: %s, queue %d, is gone", self.feed.name, lease.who, lease.queue)
        if lease.has_all:
            self.leave(lease)
        else:
            self.end(lease)
            self.seats.lose(lease.queue)

    def attach(self, lease: Lease, message: say.Attached) -> None:
        """A consumer can take batches."""
        lease.session.on("Attached")
        lease.shared = message.plane == "shared"
        if lease.shared and lease.connection is None:
            raise ProtocolError("plane is 'shared', but no connection to the unix socket was made")
        if message.reason:
            logger.info("feed %r, queue %d: frames, because %s", self.feed.name, lease.queue,
                        message.reason)  # fmt: skip
        resume = self._resumes[lease.queue]
        if resume is not None and resume.cut.finished:
            # It had everything before: it need not wait until the others have.
            lease.ended = True
            lease.session.on("End")
            token = self.start_token(lease.queue)
            self._send(
                lease.peer, say.End(generation=lease.generation, sequence=0, token=token), ()
            )
        self._begin()

    def leave(self, lease: Lease) -> None:
        """A consumer says goodbye."""
        has_all = lease.has_all
        self.end(lease)
        self.seats.leave(lease.queue, ended=has_all)
        self.tell_waiting()

    @property
    def acknowledged(self) -> bool:
        """Whether every queue's consumer has used everything."""
        return all(
            seat.ended or (lease is not None and lease.has_all)
            for seat, lease in zip(self.seats.seats, self.leases, strict=True)
        )

    def num_slots(self, queue: int, slot_bytes: int) -> int:
        """How many slots a queue's arena of such slots needs; the enqueuer asks."""
        lease = self.leases[queue]
        if lease is None:
            return credit_for(slot_bytes)
        lease.credit = lease.credit or credit_for(slot_bytes)
        return lease.credit + lease.hold + _SPARE_SLOTS

    def expire(self, now: float) -> float:
        """End the rights of those who were not heard of; returns when to look again."""
        nearest = math.inf
        for lease in self.leases:
            if lease is None:
                continue
            if lease.expires > now:
                nearest = min(nearest, lease.expires)
            elif self.seats.seats[lease.queue].alive:
                logger.warning(
                    "feed %r: %s, queue %d, was not heard of for %.0f s; its connection is alive, "
                    "so it hangs", self.feed.name, lease.who, lease.queue, self.lease_s,
                )  # fmt: skip
                self.seats.lose(lease.queue)
        return nearest

    # ---- where the feed stands

    def _begin(self) -> None:
        """Begin the feed's run, once every queue is there."""
        ready = [
            seat.ended or (lease is not None and lease.session.state in ("streaming", "ended"))
            for seat, lease in zip(self.seats.seats, self.leases, strict=True)
        ]
        if self.seats.missing() or not all(ready):
            self.feed.halt()
            return
        steps, resumes = [], []
        for queue, seat in enumerate(self.seats.seats):
            lease = self.leases[queue]
            if seat.ended or (lease is not None and lease.ended):
                steps.append(math.inf)
                continue
            resume = self._position(queue)
            step = 0 if resume is None else resume.cut.step
            steps.append(self.seats.first_step(step, queue))
            resumes.append((step, resume))
        oldest = min(resumes, key=lambda found: found[0])[1] if resumes else None
        self.feed.begin(oldest, steps)

    def first_step(self, queue: int) -> int:
        """The number of the next batch of a queue."""
        resume = self._resumes[queue]
        return self.seats.first_step(0 if resume is None else resume.cut.step, queue)

    def start_token(self, queue: int) -> bytes:
        """Where a queue that has just been opened stands."""
        resume, recipe = self._resumes[queue], self.feed.recipe
        if resume is None:
            resume = Resume(cut=recipe.start_cut(), rows=(), columns=None)
        cut, rows, columns = resume.cut, resume.rows, resume.columns
        state = recipe.positions.state(cut, rows, columns, with_rows=False)
        return state.token if state.rows is None else bytes(Snapshot((state,)))

    def _position(self, queue: int) -> Resume | None:
        """Where a queue stands: after the last batch that it was sent."""
        lease, positions = self.leases[queue], self.feed.recipe.positions
        if lease is None or lease.place is None:
            return self._resumes[queue]
        columns = self._columns
        return positions.find(positions.state_at(lease.place, columns, with_rows=True))

    @property
    def _columns(self) -> Any:
        return None if self._last_run is None else self._last_run.pipeline.schema.columns

    # ---- what consumers say

    def use(self, lease: Lease, message: say.Used) -> None:
        """A consumer has handed out batches and let go of slots, or says that it is there."""
        sequence = message.sequence
        if not lease.used <= sequence <= lease.sequence:
            raise ProtocolError(
                f"used {sequence} batches, expected from {lease.used} to {lease.sequence}"
            )
        lease.expires = time.monotonic() + self.lease_s
        seat = self.seats.seats[lease.queue]
        seat.alive = True
        if sequence:
            seat.undecided = False
        if message.slots:
            if not lease.shared:
                raise ProtocolError("slots are released that were never given")
            self.feed.slots.release(lease.queue, message.slots)
            point("server.released")
        self._settle(lease, lease.use(sequence))

    def _settle(self, lease: Lease, news: list[Sent]) -> None:
        """Batches count as buffered no longer."""
        for run, group in groupby(news, key=attrgetter("run")):
            sents = list(group)
            run.pipeline.channel.hand_out(
                lease.queue,
                len(sents),
                sum([sent.rows for sent in sents]),
                sum([sent.held_bytes for sent in sents]),
                sum([sent.kept_rows for sent in sents]),
            )
        if news and not lease.shared:
            self.feed.slots.release(lease.queue, [sent.slot for sent in news])

    def snapshot(self, lease: Lease, message: say.Snapshot) -> None:
        """A consumer asks where it stands, leftover rows and all."""
        place = lease.place_after(message.sequence)
        data = None if place is None else self._state(place, with_rows=True)
        answer = say.State(generation=lease.generation, request=message.request, data=data)
        self._send(lease.peer, answer, ())

    def _state(self, place: Place, *, with_rows: bool) -> bytes:
        positions = self.feed.recipe.positions
        return bytes(Snapshot((positions.state_at(place, self._columns, with_rows=with_rows),)))

    # ---- what consumers are sent

    def pump(self) -> None:
        """Send what there is, to everybody who has credit."""
        run, failure = self.feed.run, self.feed.failure
        for lease in self.leases:
            if lease is None or lease.ended or lease.session.state != "streaming":
                continue
            if run is not None:
                self._last_run = run
                if not self._pump(lease, run, run.outboxes[lease.queue]):
                    self.lose(lease)
            elif failure is not None:
                lease.ended = True
                self._send(lease.peer, make_fault(lease.generation, failure, lease.sequence), ())

    def _pump(self, lease: Lease, run: Run, outbox: Outbox) -> bool:
        while (lease.room > 0 or not lease.credit) and len(outbox):
            if not lease.credit:
                lease.credit = credit_for(outbox.first_bytes)
            most = min(lease.room, _BUNDLE if lease.shared else 1)
            batches = outbox.take(most)
            if not batches:
                break
            if not (self._show_columns(lease, run) and self._send_batches(lease, run, batches)):
                return False
        ending = outbox.ending
        if ending is not None:
            lease.ended = True
            lease.session.on("End")
            point("server.before_end")
            is_sent = self._send(lease.peer, self._ending(lease, ending), ())
            point("server.ended")
            return is_sent
        if lease.used == lease.sequence:
            outbox.starve()
        return True

    def _send_batches(self, lease: Lease, run: Run, batches: list[Batch]) -> bool:
        headers, slots = [], []
        for batch in batches:
            slot = batch.arrays.slot  # type: ignore[attr-defined]
            new = lease.shared and slot.arena.number not in lease.arenas
            if new and not self._hand_over(lease, slot.arena):
                return False
            headers.append(self._header(lease, batch, slot))
            slots.append(slot.number)
            lease.note(batch, slot.number, run)
        self.feed.slots.mark_sent(lease.queue, slots)
        point("server.before_send")
        message = say.Batches(generation=lease.generation, headers=tuple(headers))
        frames = () if lease.shared else pieces(slot.memory)
        is_sent = self._send(lease.peer, message, frames)
        point("server.sent")
        return is_sent

    def _header(self, lease: Lease, batch: Batch, slot: Any) -> say.Header:
        axis = slot.columns[0].axis
        stream, shapes = self.feed.recipe.config.stream, None
        if stream.dont_rebatch or slot.rows != stream.batch_size:
            # Not laid out as the spec has it, but for just these rows.
            shapes = tuple([column.shape for column in slot.columns])
        return say.Header(
            lease.sequence,
            batch.epoch,
            batch.index,
            batch.step,
            batch.rows,
            batch.arrays[0].shape[axis],
            self._token(batch.place),
            checksum(slot.memory, lease.mode),
            slot.number if lease.shared else -1,
            shapes,
        )

    def _token(self, place: Place) -> bytes:
        if self.feed.recipe.config.stream.repeatable:
            return place.cut().token()
        return self._state(place, with_rows=True)

    def _hand_over(self, lease: Lease, arena: Arena) -> bool:
        """Give a consumer the descriptor of an arena."""
        assert lease.connection is not None
        lease.arenas.add(arena.number)
        point("server.arena")
        try:
            lease.connection.send_descriptor(
                arena.descriptor, arena.number, arena.slot_bytes, arena.num_slots
            )
        except OSError:
            return False
        message = say.Arena(
            generation=lease.generation, number=arena.number, slot_bytes=arena.slot_bytes,
            num_slots=arena.num_slots,
        )  # fmt: skip
        return self._send(lease.peer, message, ())

    def _show_columns(self, lease: Lease, run: Run) -> bool:
        """Tell a consumer the columns, before its first batch."""
        if lease.sequence:
            return True
        columns = run.pipeline.schema.columns
        assert columns is not None
        spec = say.Spec(
            generation=lease.generation,
            batch_size=self.feed.recipe.config.stream.batch_size,
            columns=tuple(
                say.ColumnSpec(
                    name=column.name, dtype=column.dtype.str, axis=column.axis, shape=column.shape
                )
                for column in columns
            ),
        )  # fmt: skip
        return self._send(lease.peer, spec, ())

    def _ending(self, lease: Lease, ending: Place | FeedError) -> say.Message:
        if isinstance(ending, FeedError):
            return make_fault(lease.generation, ending, lease.sequence)
        lease.place = ending
        return say.End(
            generation=lease.generation, sequence=lease.sequence, token=self._token(ending)
        )

    def _fault(self, generation: bytes, error: FeedError, sequence: int | None) -> say.Fault:
        return make_fault(generation, error, sequence)

    def tell_waiting(self) -> None:
        """Tell consumers whom the feed waits for, and for whom it need not, where that is news."""
        seats = self.seats
        ended = tuple([i for i, seat in enumerate(seats.seats) if seat.ended])
        news = tuple(seats.missing()), ended
        for lease in self.leases:
            if lease is not None and lease.told != news:
                lease.told = news
                message = say.Waiting(generation=lease.generation, queues=news[0], ended=ended)
                self._send(lease.peer, message, ())


def make_fault(generation: bytes, error: FeedError, sequence: int | None) -> say.Fault:
    """An error as a message: its class by name, its fields, and the traceback as text."""
    fields = {
        name: value
        for name, value in vars(error).items()
        if not name.startswith("_") and isinstance(value, (str, int, type(None)))
    }
    cause = error.__cause__
    note = "".join(traceback.format_exception(cause)) if cause is not None else ""
    notes = "\n".join(getattr(error, "__notes__", ()))
    return say.Fault(
        generation=generation, sequence=sequence, kind=type(error).__name__,
        text=str(error)[: say.MAX_TEXT], fields=fields,
        note=(note + notes)[-say.MAX_TEXT :],
    )  # fmt: skip
