"""What a consumer of a feed is sent: columns, arenas, batches, and what comes after them.

Done by the server's I/O thread, and nothing waits.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from feeder.devices.layout import credit_for
from feeder.errors import ConfigError, FeedError, RemoteError
from feeder.service.faults import point
from feeder.service.memory.arena import slot_of
from feeder.service.memory.memfd import Arena, ArenaSlot
from feeder.service.net.sockets import Peer
from feeder.service.protocol import messages as say
from feeder.service.protocol.batches import MAX_CHUNKS, MAX_LANES, MAX_MARK_BYTES, MAX_MARKS, Group
from feeder.service.protocol.batches import Span as ToldSpan
from feeder.service.protocol.checksums import checksum, pieces
from feeder.service.protocol.fields import MAX_AXES
from feeder.service.server.lease import Lease, News
from feeder.service.server.run import ServedFeed, StreamIncarnation
from feeder.state.snapshot import Snapshot
from feeder.workers.errors import in_words
from feeder.workers.fetch.scheduler import Held
from feeder.workers.spec import StreamSpec
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.dtypes import write_dtype
from feeder.workers.stream.position import Cut, LazyPosition, Span
from feeder.workers.stream.resuming import Resume

# ---- From batches that are to be sent to groups, which say of them what their consumer needs.
#
# Rules without sockets and threads; the server's I/O thread uses them.


class Grouping:
    """Makes the groups of one feed. `encode` is the codec of its cuts, where nothing is added to
    them, and `token` makes the bytes of a place."""

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
        self._known: tuple[Span | None, ToldSpan | None] = (None, None)

    def groups(
        self, sequence: int, batches: Sequence[Batch], checksums: Sequence[int], *, shared: bool
    ) -> Iterator[Group]:
        """The groups of batches of one queue in order, the first number `sequence` of its lease."""
        at, alone = 0, not shared or self._stream.dont_rebatch
        for part in [[batch] for batch in batches] if alone else _alike(batches):
            end = at + len(part)
            yield self._group(sequence + at, part, checksums[at:end], shared=shared)
            at = end

    def _group(
        self, sequence: int, batches: list[Batch], checksums: Sequence[int], *, shared: bool
    ) -> Group:
        first, places = batches[0], [batch.place for batch in batches]
        slots = [slot_of(batch) for batch in batches]
        stream, columns, shapes = self._stream, slots[0].columns, None
        assert columns is not None
        if stream.dont_rebatch or slots[0].rows != stream.batch_size:
            # Not laid out as the spec has it, but for just these rows.
            shapes = tuple([column.shape for column in columns])
        return Group(
            sequence,
            first.epoch,
            first.index,
            first.step,
            self._num_queues,
            first.rows,
            first.arrays[0].shape[columns[0].axis],
            tuple([slot.number for slot in slots]) if shared else (-1,),
            tuple(checksums),
            shapes,
            *self._told(places),
        )

    def _told(self, places: list[LazyPosition]) -> tuple[Any, ...]:
        """Where batches ended: tokens, span, chunks, taken, digests."""
        span = self._tell(places[0])
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

    def _tell(self, place: LazyPosition) -> ToldSpan | None:
        """The span that a batch ended in as it is told; None where it is not regular."""
        if place.span is not self._known[0]:
            partitions, encode, _ = place.frame
            is_plain = encode == self._encode and self._stream.repeatable and not partitions.arrival
            told = tell_span(place.span, pure=partitions.pure) if is_plain else None
            self._known = (place.span, told)
        return self._known[1]


def _alike(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """Batches that may be told together: those of one span, but for one that is known to end its
    epoch. Within a span all are full, since the rest of an epoch has a span of its own."""
    for _, of_span in groupby(batches, lambda batch: batch.place.span):
        part = list(of_span)
        if len(part) > 1 and part[-1].place.after is not None:
            yield part[:-1]
            part = part[-1:]
        yield part


def tell_span(span: Span, *, pure: bool) -> ToldSpan | None:
    """A span as it is told; None where it has many partitions, or its chunks are not all alike."""
    start, rows = span.start, span.rows
    if not rows or len(start.live) > MAX_LANES or rows.count(rows[0]) < len(rows) or start.done:
        return None
    marks = [None if of_partition is None else _runs(of_partition) for of_partition in span.marks]
    runs = [of_partition for of_partition in marks if of_partition is not None]
    lengths = [len(mark) for mark in start.marks if mark is not None]
    lengths += [len(mark) for of_partition in runs for _, mark in of_partition]
    if max(map(len, runs), default=0) > MAX_MARKS or max(lengths, default=0) > MAX_MARK_BYTES:
        return None
    return ToldSpan(
        pure, start.epoch, start.turn, start.live, start.calls, start.rows, start.marks,
        tuple(span.ring), tuple(span.firsts), tuple(marks), rows[0],
    )  # fmt: skip


def _runs(marks: Sequence[bytes]) -> tuple[tuple[int, bytes], ...]:
    """Marks as runs of equal ones: up to which place, and the mark. Where they are more than can
    be told, only so many that this shows."""
    runs: list[tuple[int, bytes]] = []
    count = 0
    for mark, same in groupby(marks):
        count += len(list(same))
        runs.append((count, mark))
        if len(runs) > MAX_MARKS:
            break
    return tuple(runs)


logger = logging.getLogger("feeder")

_BUNDLE = 64
"""Batches at most that go in one message."""

Send = Callable[[Peer, say.Message, Sequence[Any]], bool]
"""Sends a message with frames after it; False where the peer is gone."""


class Delivery:
    """Sends the batches of one feed."""

    def __init__(self, feed: ServedFeed, send: Send) -> None:
        self._feed = feed
        self._send = send
        recipe = feed.recipe
        self._stream = recipe.config.stream
        self._grouping = Grouping(
            self._stream, len(recipe.config.devices), recipe.positions.id.encode, self._token
        )
        self._sent: list[tuple[StreamIncarnation, int, list[Batch]]] = []
        self.columns: Columns | None = None
        """The columns, once a batch has been there."""
        self.judged: FeedError | None = None
        """Why the feed has failed, where it is known that no single consumer's position is the
        reason: what comes later is told later."""
        self.ending: LazyPosition | None = None
        """Where the stream ended, once it has."""

    def pump(self, lease: Lease, run: StreamIncarnation) -> bool:
        """Send a consumer what there is and what it has credit for; False where it is gone."""
        outbox = run.outboxes[lease.queue]
        self.columns = run.pipeline.schema.columns
        while (lease.room > 0 or not lease.credit) and len(outbox):
            if not lease.credit:
                lease.credit = credit_for(outbox.first_bytes)
            batches = outbox.take(min(lease.room, self._most(lease)))
            if not batches:
                break
            if not (self._show_columns(lease) and self._send_batches(lease, run, batches)):
                return False
        ending = outbox.ending
        if ending is not None:
            return self._finish(lease, ending)
        # Said before looking once more: what is put now wakes, what was put before is seen.
        outbox.is_urgent = 2 * (lease.sequence - lease.used) < lease.credit or not lease.credit
        if lease.used == lease.sequence:
            outbox.starve()
        if outbox.is_urgent and lease.room > 0 and len(outbox):
            return self.pump(lease, run)
        return True

    def _most(self, lease: Lease) -> int:
        """Batches that may go in one message: leftover rows may be as large as batches."""
        return _BUNDLE if lease.shared and self._stream.repeatable else 1

    def _finish(self, lease: Lease, ending: LazyPosition | FeedError) -> bool:
        """Send the end of the stream, or the error in its place."""
        if isinstance(ending, FeedError):
            return ending is not self.judged or self.fail(lease, ending)
        lease.place = self.ending = ending
        # Also to whom no batch came: its position is the one that the feed gives in process.
        is_shown = self.columns is None or self._show_columns(lease)
        return is_shown and self.finish(lease, self._token(ending))

    def finish(self, lease: Lease, token: bytes) -> bool:
        """Send the end of the stream."""
        lease.ended = True
        lease.session.on("End")
        point("server.before_end")
        message = say.End(generation=lease.generation, sequence=lease.sequence, token=token)
        is_sent = self._send(lease.peer, message, ())
        point("server.ended")
        return is_sent

    def fail(self, lease: Lease, error: Exception) -> bool:
        """Send an error that takes the place of the next batch; it is logged once, however many
        consumers are sent it."""
        lease.ended = lease.failed = True
        if not isinstance(error, FeedError):
            cause, error = error, RemoteError(in_words(error))
            error.__cause__ = cause
        if error is not self._feed.told:
            self._feed.told = error
            # As text: a record would keep what the frames of a traceback hold.
            text = "\n".join(filter(None, (str(error), origin(error))))
            logger.error("feed %r has failed: %s", self._feed.name, text)
        lease.session.on("Fault")
        return self._send(lease.peer, make_fault(lease.generation, error, lease.sequence), ())

    def _send_batches(self, lease: Lease, run: StreamIncarnation, batches: list[Batch]) -> bool:
        slots = [slot_of(batch) for batch in batches]
        if lease.shared:
            arenas = {slot.arena.number: slot.arena for slot in slots}
            for number in sorted(arenas.keys() - lease.arenas):
                if not self._hand_over(lease, arenas[number]):
                    return False
        checksums = self._checksums(lease, slots)
        groups = self._grouping.groups(lease.sequence, batches, checksums, shared=lease.shared)
        message = say.Batches(generation=lease.generation, groups=tuple(groups))
        for slot in slots:
            slot.sent = True
        lease.note(batches, run)
        point("server.before_send")
        frames = () if lease.shared else pieces(slots[0].memories(batches[0].arrays))
        is_sent = self._send(lease.peer, message, frames)
        point("server.sent")
        self._sent.append((run, lease.queue, batches))
        return is_sent

    def _checksums(self, lease: Lease, slots: list[ArenaSlot]) -> list[int]:
        mode, began = lease.mode, time.monotonic()
        if mode == "off":
            return [0] * len(slots)
        known = [slot.checksum if mode == "full" else None for slot in slots]
        before_s = sum([slot.checked_s for slot in slots if slot.checksum is not None])
        found = [
            checksum(slot.memory, mode) if made is None else made
            for slot, made in zip(slots, known, strict=True)
        ]
        account = self._feed.account.queues[lease.queue]
        account.checked_s += before_s + time.monotonic() - began
        return found

    def _token(self, place: LazyPosition) -> bytes:
        if self._stream.repeatable:
            return place.cut().token()
        return self.state(place)

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

    def _show_columns(self, lease: Lease) -> bool:
        """Tell a consumer the columns, before its first batch."""
        if lease.sequence:
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
        return self._send(lease.peer, spec, ())

    def find(self, place: LazyPosition) -> Resume:
        """What a place that batches were sent up to means."""
        positions = self._feed.recipe.positions
        return positions.find(positions.state_at(place, self.columns, with_rows=True))

    def state(self, place: LazyPosition) -> bytes:
        """A place with its leftover rows, as a snapshot's bytes."""
        positions = self._feed.recipe.positions
        return bytes(Snapshot((positions.state_at(place, self.columns, with_rows=True),)))

    def show(self, lease: Lease, sequence: int, start: Resume | None) -> bool:
        """Send a consumer the state after so many of its batches, where it is known; it began at
        `start`. False where it is gone."""
        place, data = lease.place_after(sequence), None
        if place is not None:
            data = self.state(place)
        elif sequence == 0:
            data = bytes(Snapshot((self._feed.recipe.state(start),)))
        if data is not None and len(data) > say.ROWS_BYTES:
            logger.warning(
                "feed %r, queue %d: a snapshot of %d bytes is not sent, expected at most %d",
                self._feed.name, lease.queue, len(data), say.ROWS_BYTES,
            )  # fmt: skip
            data = None
        message = say.State(generation=lease.generation, data=data, receipt=lease.answers.make())
        return self._send(lease.peer, message, ())

    def settle(self) -> None:
        """What has been sent is bounded by its consumer's credit, and counts as buffered no
        longer. Apart from the sending, since this wakes threads."""
        sent, self._sent = self._sent, []
        for run, queue, batches in sent:
            rows = sum([batch.rows for batch in batches])
            num_bytes = sum([batch.held_bytes for batch in batches])
            run.pipeline.channel.hand_out(queue, Held(len(batches), rows, num_bytes, 0))

    def let_go(self, lease: Lease, news: News) -> None:
        """A consumer has used batches: chunks that were kept for snapshots there are not needed
        any more, nor are slots that were sent as frames."""
        batches = news.batches
        if not lease.shared and batches:
            numbers = [slot_of(batch).number for batch in batches]
            self._feed.slots.release(lease.queue, numbers)
        kept_rows = sum([batch.kept_rows for batch in batches[news.num_stale :]])
        if kept_rows and news.run is not None:
            news.run.pipeline.channel.hand_out(lease.queue, Held(0, 0, 0, kept_rows))


def make_fault(generation: bytes, error: FeedError, sequence: int | None) -> say.Fault:
    """An error as a message: its class by name, its fields, and the traceback as text."""
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
        note=_sayable(origin(error)[-say.MAX_TEXT // 8 :]),
    )


def origin(error: FeedError) -> str:
    """The traceback of what an error comes from, where there is one, and its notes, as the stack
    of a call that has not returned."""
    cause = error.__cause__
    text = "" if cause is None else "".join(traceback.format_exception(cause))
    return text + "\n".join(getattr(error, "__notes__", ()))


def _sayable(text: str) -> str:
    """A text as it can be sent: names of files may hold what UTF-8 cannot."""
    return text.encode(errors="backslashreplace").decode()[: say.MAX_TEXT]
