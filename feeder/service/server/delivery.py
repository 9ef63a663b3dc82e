"""The record of one consumer as the server has it, and what it is sent: columns, arenas, batches,
states, errors and the end.

All of it runs in the server's I/O thread, and nothing waits.
"""

from __future__ import annotations

import logging
import math
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple, cast

from feeder.devices.layout import MAX_ARENA_BYTES, credit_for
from feeder.errors import ConfigError, FeedError, RemoteError
from feeder.service.faults import point
from feeder.service.memory.arena import slot_of
from feeder.service.memory.fdpass import DescriptorConnection
from feeder.service.memory.memfd import NOTHING, Arena, ArenaSlot, Wanted
from feeder.service.net.listener import Peer
from feeder.service.protocol import messages as say
from feeder.service.protocol.batches import (
    MAX_CHUNKS,
    MAX_MARK_BYTES,
    MAX_MARKS,
    MAX_PARTITIONS,
    Group,
    checksum,
    pieces,
)
from feeder.service.protocol.batches import Span as WireSpan
from feeder.service.protocol.fields import MAX_AXES, RECEIPT_BYTES
from feeder.service.protocol.member import Member
from feeder.service.protocol.session import SERVER, Receipts, Session
from feeder.service.server.run import ServedFeed, StreamIncarnation
from feeder.state.snapshot import Snapshot
from feeder.workers.errors import in_words
from feeder.workers.fetch.resuming import Resume
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.dtypes import write_dtype
from feeder.workers.stream.position import Cut, LazyPosition, Span
from feeder.workers.stream.spec import StreamSpec

# One slot is being written while one waits to be sent. Of small batches more, up to 4 MiB, so that
# the next ones are there when the consumer's `Used` for a quarter of its credit arrives.
_SPARE_SLOTS, _SPARE_BYTES = 2, 4 * 1024 * 1024
"""Slots of an arena beside those that the consumer may hold."""


class News(NamedTuple):
    """The batches that one `Used` has reported as used. Immutable."""

    batches: list[Batch]
    """These batches, in order."""
    num_stale: int
    """How many of them, the first ones, were made by earlier runs, whose buffers are gone."""
    run: StreamIncarnation | None
    """The run that made the others."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease(Member):
    """A consumer's right to the batches of one seat: its record as the membership has it, and what
    has gone back and forth under it. It is over once the membership has moved it on (`has_lease`).

    Owned by the server's I/O thread, which alone writes it. One exception: the enqueuer's thread
    asks `num_slots` when an arena is made, which fills in `credit` or `excess`; both are single
    assignments, and the I/O thread looks at them at its next turn.
    """

    peer: Peer
    generation: bytes
    """The fencing token: 16 random bytes of the server's run and a counter. A message that carries
    another one is from a lease that is over."""
    credit: int
    """Batches that may be sent beyond those that are used; 0 until their size is known."""
    hold: int
    """Batches that its user may keep beside these."""
    checksum: str
    """How batches are to be checked: "off", "sampled", "full", or "auto" (by the data path)."""
    resume: Resume | None = None
    """The position that it came with; None for the start of the feed."""
    session: Session = field(default_factory=lambda: Session(SERVER))
    plane: Literal["", "shared", "frames"] = ""
    """The way of its batches; empty until it is chosen."""
    connection: DescriptorConnection | None = None
    """The unix connection over which it gets descriptors of arenas."""
    arenas: set[int] = field(default_factory=set)
    """The arenas whose descriptors it has been given."""
    excess: ConfigError | None = None
    """Why it cannot be given what it asks for: an error of this consumer, not of the feed."""
    run: StreamIncarnation | None = None
    """The run whose batches it was last sent."""
    under_way: deque[Batch] = field(default_factory=deque)
    """The batches sent and not used yet."""
    num_stale: int = 0
    """How many of these, the first ones, are of earlier runs."""
    answers: Receipts = field(default_factory=Receipts)
    """Allows one unread snapshot."""
    last_waiting: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """What the last `Waiting` said: the queues waited for, and the queues that have ended."""
    answers_at: float = -math.inf
    """When the next renewal is answered."""

    @property
    def known_generation(self) -> bytes:
        """The generation that its consumer knows; empty before `Opened` was sent."""
        return b"" if self.session.state == "opening" else self.generation

    @property
    def shared(self) -> bool:
        """Whether its batches go through shared memory."""
        return self.plane == "shared"

    @property
    def room(self) -> int:
        """Batches that it may be sent now."""
        return self.credit - (self.sent - self.used)

    @property
    def mode(self) -> Literal["off", "sampled", "full"]:
        """How batches are checked."""
        # Memory that both sides map is damaged by a stray write, of which a sample sees most. What
        # crosses a network is read in full.
        if self.checksum == "auto":
            return "sampled" if self.shared else "full"
        return self.checksum  # type: ignore[return-value]

    @property
    def wanted(self) -> Wanted:
        """How the assembler is to make batches for this lease."""
        # Frames are sent from the chunks themselves, and full sums are made of the chunks while
        # they are copied. A sample is taken of a batch that lies in one piece, so it needs a slot.
        if not (self.shared or self.mode == "sampled"):
            return Wanted(sums=self.mode == "full", keeps=True)
        return Wanted(sums=True) if self.mode == "full" else NOTHING

    def num_slots(self, slot_bytes: int) -> int:
        """How many slots an arena for this lease needs; if it wants too many, as many as an
        arena for nobody has, and `excess` is set. The enqueuer's thread asks."""
        self.credit = self.credit or credit_for(slot_bytes)
        spare = max(_SPARE_SLOTS, min(self.credit, _SPARE_BYTES // slot_bytes))
        num = self.credit + self.hold + spare
        usual = credit_for(slot_bytes)
        # Batches so large that even the usual number of slots is beyond the bound are allowed: the
        # consumer asked for nothing special.
        if num * slot_bytes <= MAX_ARENA_BYTES or num <= usual + 1 + spare:
            return num
        self.excess = ConfigError(
            f"credit is {self.credit} and hold {self.hold}: for batches of {slot_bytes} bytes that "
            f"is shared memory of {num * slot_bytes} bytes, expected at most {MAX_ARENA_BYTES}"
        )
        return usual

    def note(self, batches: list[Batch], run: StreamIncarnation) -> None:
        """Note that batches go out."""
        if run is not self.run:
            self.run, self.num_stale = run, len(self.under_way)
        if self.last_waiting[0]:
            self.last_waiting = (), self.last_waiting[1]  # Batches say that nobody is waited for.
        self.under_way.extend(batches)
        self.note_sent(len(batches), batches[-1].place)

    def take_used(self, num: int) -> News:
        """Take out the first `num` batches under way: the user has been handed them, or never will
        be."""
        take = self.under_way.popleft
        news = News([take() for _ in range(num)], self.num_stale, self.run)
        self.num_stale = max(0, self.num_stale - num)
        return news

    def place_after(self, sequence: int) -> LazyPosition | None:
        """The position after the first `sequence` batches of this lease; None if it is not
        known."""
        # Positions are kept of batches under way and of the last used one. A user stands at the
        # latter, or further on, where its `Used` is still to come.
        i = sequence - self.used
        if i == 0:
            return cast("LazyPosition | None", self.used_to)
        return self.under_way[i - 1].place if 0 < i <= len(self.under_way) else None


# ---- How batches become groups of a message: pure rules. What batches have in common is said once,
# and positions of regular streams are a few numbers: to make and send a token for each batch of 8
# KB cost more than everything else that is done for it.


class Grouping:
    """Makes the groups of one feed's messages. Owned by the I/O thread.

    `encode` is the codec of the feed's plain cuts, `token` makes the bytes of any position.
    """

    def __init__(
        self,
        stream: StreamSpec,
        num_queues: int,
        encode: Callable[[Cut], bytes],
        token: Callable[[LazyPosition], bytes],
    ) -> None:
        self._stream = stream
        self._num_queues = num_queues
        self._encode = encode
        self._token = token
        # The span last seen, and how it is sent: a span lasts for many batches.
        self._known: tuple[Span | None, WireSpan | None] = (None, None)

    def groups(
        self, sequence: int, batches: Sequence[Batch], slots: Sequence[ArenaSlot],
        checksums: Sequence[int], *, shared: bool,
    ) -> Iterator[Group]:  # fmt: skip
        """The groups for batches of one queue in order, in these slots; the first is number
        `sequence` of its lease."""
        # Frames carry no word of whose they are, and repeated batches may differ in layout: one
        # each.
        at, alone = 0, not shared or self._stream.dont_rebatch
        for part in [[batch] for batch in batches] if alone else _alike(batches):
            end = at + len(part)
            yield self._group(sequence + at, part, slots[at:end], checksums[at:end], shared=shared)
            at = end

    def _group(
        self, sequence: int, batches: list[Batch], slots: Sequence[ArenaSlot],
        checksums: Sequence[int], *, shared: bool,
    ) -> Group:  # fmt: skip
        first, places = batches[0], [batch.place for batch in batches]
        stream, columns, shapes = self._stream, slots[0].columns, None
        assert columns is not None
        if stream.dont_rebatch or slots[0].rows != stream.batch_size:
            # Copied in as it was, so its columns lie otherwise than in the slots of full batches,
            # which `Spec` describes once.
            shapes = tuple([column.shape for column in columns])
        return Group(
            sequence,
            first.epoch,
            first.index,
            first.step,
            self._num_queues,
            first.rows,
            first.columns[0].shape[columns[0].axis],
            tuple([slot.number for slot in slots]) if shared else (-1,),
            tuple(checksums),
            shapes,
            *self._positions(places),
        )

    def _positions(self, places: list[LazyPosition]) -> tuple[Any, ...]:
        """The positions of batches: tokens, span, chunks, taken and digests of a group."""
        # By numbers only if the consumer can work out every token from them: one span, chunks of
        # one size, and no end of an epoch behind the last batch.
        span = self._wire_span(places[0])
        chunks = [place.num_chunks for place in places]
        if span is not None and chunks[-1] <= MAX_CHUNKS and places[-1].after is None:
            ended_in = [place.partial for place in places]
            if ended_in.count(None) == len(ended_in):
                return (), span, tuple(chunks), (), ()
            if {span.chunk_rows if s is None else s.rows for s in ended_in} == {span.chunk_rows}:
                taken = tuple([place.taken for place in places])
                digests = tuple([0 if s is None else s.digest for s in ended_in])
                return (), span, tuple(chunks), taken, digests
        return tuple(map(self._token, places)), None, (), (), ()

    def _wire_span(self, place: LazyPosition) -> WireSpan | None:
        """The span that a batch ended in as it is sent; None if it is not regular."""
        if place.span is not self._known[0]:
            # A codec that adds something to cuts is not known to the consumer.
            partitions = place.frame.partitions
            is_plain = (
                place.frame.encode == self._encode
                and self._stream.repeatable
                and not partitions.arrival
            )
            sent = encode_span(place.span, pure=partitions.pure) if is_plain else None
            self._known = (place.span, sent)
        return self._known[1]


def _alike(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Batches that fit into one group: those of one span, without one that is known to end its
    epoch, whose position has another name."""
    # Within a group all batches are full: the rest of an epoch is known to end it.
    for _, of_span in groupby(batches, lambda batch: batch.place.span):
        part = list(of_span)
        if len(part) > 1 and part[-1].place.after is not None:
            yield part[:-1]
            part = part[-1:]
        yield part


def encode_span(span: Span, *, pure: bool) -> WireSpan | None:
    """A span as it is sent; None if it is beyond a limit, or its chunks are not all alike."""
    start, rows = span.start, span.rows
    is_regular = bool(rows) and rows.count(rows[0]) == len(rows) and not start.done
    if not is_regular or len(start.live) > MAX_PARTITIONS:
        return None
    marks = [None if of_partition is None else _runs(of_partition) for of_partition in span.marks]
    runs = [of_partition for of_partition in marks if of_partition is not None]
    lengths = [len(mark) for mark in start.marks if mark is not None]
    lengths += [len(mark) for of_partition in runs for _, mark in of_partition]
    if max(map(len, runs), default=0) > MAX_MARKS or max(lengths, default=0) > MAX_MARK_BYTES:
        return None
    return WireSpan(
        pure, start.epoch, start.turn, start.live, start.calls, start.rows, start.marks,
        tuple(span.ring), tuple(span.firsts), tuple(marks), rows[0],
    )  # fmt: skip


def _runs(marks: Sequence[bytes]) -> tuple[tuple[int, bytes], ...]:
    """Marks as runs of equal ones: up to which chunk, and the mark. If there are too many to be
    sent, it stops at one too many."""
    runs: list[tuple[int, bytes]] = []
    count = 0
    for mark, same in groupby(marks):
        count += len(list(same))
        runs.append((count, mark))
        if len(runs) > MAX_MARKS:
            break
    return tuple(runs)


logger = logging.getLogger("feeder")

# As many as one hand-over of the enqueuer brings: more would delay the first of them.
_MOST_BATCHES = 64
"""Most batches of one message."""

Send = Callable[[Peer, say.Message, Sequence[Any]], bool]
"""Sends a message with frames after it (`ServerLoop.send`); False if the peer is gone."""


class Delivery:
    """Sends the consumers of one feed what they have credit for. Owned by the I/O thread."""

    def __init__(self, feed: ServedFeed) -> None:
        self._feed = feed
        self.send: Send
        """Sends a message. The I/O loop sets it, which is made for the groups that there are."""
        # Sent since the last `settle`.
        self._sent: list[tuple[StreamIncarnation, Lease, list[Batch]]] = []
        self.begin()

    def begin(self) -> None:
        """Nothing is known of the run: there was none, or the feed goes on as another one."""
        factory = self._feed.factory
        self._stream = factory.config.stream
        self._grouping = Grouping(
            self._stream, len(factory.config.devices), factory.positions.id.encode, self._token
        )
        self.columns: Columns | None = None
        """The feed's columns; None before the first batch."""
        self.judged: FeedError | None = None
        """Why the feed has failed, once it is known that no single consumer's position is the
        reason. A failure that comes after that was found out waits for the next turn."""
        self.ending: LazyPosition | None = None
        """The position of the stream's end, once it is known."""

    def pump(self, lease: Lease, run: StreamIncarnation) -> bool:
        """Send a consumer the batches that it has credit for, and then what comes after them; False
        if the consumer is gone."""
        outbox = run.outboxes[lease.seat]
        self.columns = run.pipeline.schema.columns
        while (lease.room > 0 or not lease.credit) and len(outbox):
            # Left to the server, credit goes by the size of batches, which is known only now.
            if not lease.credit:
                lease.credit = credit_for(outbox.first_bytes)
            batches = outbox.pop_batches(min(lease.room, self._most(lease)))
            if not batches:
                break
            # Once more: they are known when the first batch comes, which may have been just now.
            self.columns = run.pipeline.schema.columns
            if not (self._show_columns(lease) and self._send_batches(lease, run, batches)):
                return False
        ending = outbox.ending
        if ending is not None:
            self.columns = run.pipeline.schema.columns
            return self._finish(lease, ending)
        # Set before looking once more: a batch that comes from now on wakes this thread, and one
        # that came before is seen below.
        outbox.is_urgent = 2 * len(lease.under_way) < lease.credit or not lease.credit
        if not lease.under_way:
            outbox.starve()
        if outbox.is_urgent and lease.room > 0 and len(outbox):
            return self.pump(lease, run)
        return True

    def _most(self, lease: Lease) -> int:
        """How many batches may go in one message."""
        # One in frames, which say nothing of whose they are; and one if positions are snapshots,
        # whose leftover rows may be as large as a batch.
        return _MOST_BATCHES if lease.shared and self._stream.repeatable else 1

    def _finish(self, lease: Lease, ending: LazyPosition | FeedError) -> bool:
        """Send the end of the stream, or the error in its place, once it is `judged`."""
        if isinstance(ending, FeedError):
            return ending is not self.judged or self.send_failure(lease, ending)
        self.ending = ending
        # Also to a consumer without a batch: its position and columns are those that a feed in
        # process has at its end.
        is_shown = self.columns is None or self._show_columns(lease)
        return is_shown and self.send_end(lease, self._token(ending))

    def send_end(self, lease: Lease, token: bytes) -> bool:
        """Send the end of the stream."""
        lease.ending = "end"
        lease.session.on("End")
        point("server.before_end")
        message = say.End(generation=lease.generation, sequence=lease.sent, token=token)
        is_sent = self.send(lease.peer, message, ())
        point("server.ended")
        return is_sent

    def send_failure(self, lease: Lease, error: Exception) -> bool:
        """Send an error that takes the place of the next batch. It is logged once, however many
        consumers get it."""
        lease.ending = "fault"
        if not isinstance(error, FeedError):
            cause, error = error, RemoteError(in_words(error))
            error.__cause__ = cause
        if error is not self._feed.reported:
            self._feed.reported = error
            # As text: a record with the exception would keep all that its frames hold, slots among
            # it.
            text = "\n".join(filter(None, (str(error), origin(error))))
            logger.error("feed %r has failed: %s", self._feed.name, text)
        lease.session.on("Fault")
        return self.send(lease.peer, make_fault(lease.generation, error, lease.sent), ())

    def _send_batches(self, lease: Lease, run: StreamIncarnation, batches: list[Batch]) -> bool:
        slots = [slot_of(batch) for batch in batches]
        # A descriptor has to be there before the first batch that lies in its arena.
        for slot in slots if lease.shared else ():
            arena = slot.arena
            if arena.number not in lease.arenas and not self._hand_over(lease, arena):
                return False
        checksums = self._checksums(lease, slots)
        groups = self._grouping.groups(lease.sent, batches, slots, checksums, shared=lease.shared)
        message = say.Batches(generation=lease.generation, groups=tuple(groups))
        # Noted before the message leaves: what may be on its way belongs to the consumer, also
        # if the process dies or the send fails.
        bit = 1 << lease.replica
        for slot in slots:
            slot.sent |= bit
        lease.note(batches, run)
        point("server.before_send")
        frames = () if lease.shared else pieces(slots[0].memories(batches[0].columns))
        is_sent = self.send(lease.peer, message, frames)
        point("server.sent")
        self._sent.append((run, lease, batches))
        return is_sent

    def _checksums(self, lease: Lease, slots: list[ArenaSlot]) -> list[int]:
        mode, began = lease.mode, time.monotonic()
        if mode == "off":
            return [0] * len(slots)
        # A full sum was made of the chunks while they were copied, when they were in a cache. To
        # read a batch of 20 MB here takes the I/O thread as long as the copy took.
        known = [slot.checksum if mode == "full" else None for slot in slots]
        before_s = sum([slot.checked_s for slot in slots if slot.checksum is not None])
        found = [
            checksum(slot.memory, mode) if made is None else made
            for slot, made in zip(slots, known, strict=True)
        ]
        stats = self._feed.stats.queues[lease.seat]
        stats.checked_s += before_s + time.monotonic() - began
        return found

    def _token(self, place: LazyPosition) -> bytes:
        # A feed that cannot repeat its rows needs the leftover ones with the position.
        if self._stream.repeatable:
            return place.cut().token()
        return self.snapshot_at(place)

    def _hand_over(self, lease: Lease, arena: Arena) -> bool:
        """Give a consumer the descriptor of an arena; False if it is gone."""
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
        return self.send(lease.peer, message, ())

    def _show_columns(self, lease: Lease) -> bool:
        """Send a consumer the columns before its first batch; False if it is gone. Raises
        `ConfigError` if the protocol has no word for one."""
        if lease.sent:
            return True
        assert self.columns is not None
        columns = []
        for column in self.columns:
            dtype = write_dtype(column.dtype)
            if not isinstance(dtype, str) or dtype.startswith("|V"):
                raise ConfigError(
                    f"column {column.name!r} has dtype {column.dtype}, which cannot be served; "
                    "give each field a column of its own"
                )
            if len(column.shape) > MAX_AXES:
                raise ConfigError(
                    f"column {column.name!r} has {len(column.shape)} axes beside the rows, "
                    f"expected at most {MAX_AXES}; flatten it"
                )
            columns.append(
                say.ColumnSpec(name=column.name, dtype=dtype, axis=column.axis, shape=column.shape)
            )
        spec = say.Spec(
            generation=lease.generation,
            batch_size=self._stream.batch_size,
            columns=tuple(columns),
        )  # fmt: skip
        return self.send(lease.peer, spec, ())

    def resume_after(self, place: LazyPosition) -> Resume:
        """Where to go on after a batch that was sent."""
        positions = self._feed.factory.positions
        return positions.find(positions.state_at(place, self.columns, with_rows=True))

    def snapshot_at(self, place: LazyPosition) -> bytes:
        """A position with its leftover rows, as the bytes of a snapshot."""
        positions = self._feed.factory.positions
        return bytes(Snapshot((positions.state_at(place, self.columns, with_rows=True),)))

    def send_state(self, lease: Lease, sequence: int, start: Resume | None) -> bool:
        """Send a consumer the state after `sequence` of its batches, or that it is not known. The
        lease began at `start`. False if the consumer is gone."""
        place, data = lease.place_after(sequence), None
        if place is not None:
            data = self.snapshot_at(place)
        elif sequence == 0:
            data = bytes(Snapshot((self._feed.factory.state(start),)))
        # A consumer refuses a larger message, and its connection would be lost with it.
        if data is not None and len(data) > say.ROWS_BYTES:
            logger.warning(
                "feed %r, %s: a snapshot of %d bytes is not sent, expected at most %d",
                self._feed.name, lease.name, len(data), say.ROWS_BYTES,
            )  # fmt: skip
            data = None
        receipt = lease.answers.make(os.urandom(RECEIPT_BYTES))
        message = say.State(generation=lease.generation, data=data, receipt=receipt)
        return self.send(lease.peer, message, ())

    def settle(self) -> None:
        """Count what has been sent, to all replicas of a queue, as buffered no longer: from here on
        credit bounds it. Apart from the sending, since this wakes fetchers, which then take the
        interpreter."""
        sent, self._sent = self._sent, []
        for run, lease, batches in sent:
            run.queues[lease.queue].note_sent(lease.replica, batches)

    def let_go(self, lease: Lease, news: News) -> None:
        """Let go of what used batches kept: chunks for snapshots at their positions, and the slots
        of batches that went as frames."""
        batches = news.batches
        # A consumer in shared memory releases slots itself. One of frames knows none, and has
        # copies.
        if not lease.shared and batches:
            numbers = [slot_of(batch).number for batch in batches]
            self._feed.slots.release(lease.queue, numbers, lease.replica)
        if news.run is not None:
            # Stale batches were counted by a run that is gone.
            news.run.queues[lease.queue].note_used(lease.replica, batches[news.num_stale :])


def make_fault(generation: bytes, error: FeedError, sequence: int | None) -> say.Fault:
    """An error as a message: its class by name, its fields, and the traceback as text."""
    # Only plain fields travel. The consumer makes the error from its class's name and these, and
    # never unpickles anything.
    fields = {
        name: _sayable(value) if isinstance(value, str) else value
        for name, value in vars(error).items()
        if not name.startswith("_") and isinstance(value, (str, int, type(None)))
    }
    return say.Fault(
        generation=generation,
        sequence=sequence,
        kind=type(error).__name__,
        text=_sayable(str(error)),
        fields=fields,
        # The end of a traceback says most; an eighth of the limit, since escapes may grow it.
        note=_sayable(origin(error)[-say.MAX_TEXT // 8 :]),
    )


def origin(error: FeedError) -> str:
    """The traceback of the error's cause, if it has one, and the error's notes, such as the stack
    of a call that has not returned."""
    cause = error.__cause__
    text = "" if cause is None else "".join(traceback.format_exception(cause))
    return text + "\n".join(getattr(error, "__notes__", ()))


def _sayable(text: str) -> str:
    """A text that a message can hold: names of files may have characters that UTF-8 has not."""
    return text.encode(errors="backslashreplace").decode()[: say.MAX_TEXT]
