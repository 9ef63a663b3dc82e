"""From batches that are to be sent to groups, which say of them what their consumer needs.

Rules without sockets and threads; the server's I/O thread uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from feeder.service.protocol.batches import MAX_CHUNKS, MAX_LANES, MAX_MARK_BYTES, MAX_MARKS, Group
from feeder.service.protocol.batches import Span as ToldSpan
from feeder.workers.stream.batch import Batch, Cut
from feeder.workers.stream.position import Place, Span
from feeder.workers.spec import StreamSpec


class Grouping:
    """Makes the groups of one feed. `encode` is the codec of its cuts, where nothing is added to
    them, and `token` makes the bytes of a place."""

    def __init__(
        self,
        stream: StreamSpec,
        num_queues: int,
        encode: Callable[[Cut], bytes],
        token: Callable[[Place], bytes],
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
        slots: list[Any] = [batch.arrays.slot for batch in batches]  # type: ignore[attr-defined]
        stream, columns, shapes = self._stream, slots[0].columns, None
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

    def _told(self, places: list[Place]) -> tuple[Any, ...]:
        """Where batches ended: tokens, span, chunks, taken, digests."""
        span = self._tell(places[0])
        chunks = [place.num_chunks for place in places]
        if span is not None and chunks[-1] <= MAX_CHUNKS and places[-1].after is None:
            ended_in = [place.straddler for place in places]
            if ended_in.count(None) == len(ended_in):
                return (), span, tuple(chunks), (), ()
            if {span.chunk_rows if s is None else s.rows for s in ended_in} == {span.chunk_rows}:
                taken = tuple([place.taken for place in places])
                digests = tuple([0 if s is None else s.digest for s in ended_in])
                return (), span, tuple(chunks), taken, digests
        return tuple(map(self._token, places)), None, (), (), ()

    def _tell(self, place: Place) -> ToldSpan | None:
        """The span that a batch ended in as it is told; None where it is not regular."""
        if place.span is not self._known[0]:
            lanes, encode, _ = place.frame
            is_plain = encode == self._encode and self._stream.repeatable and not lanes.arrival
            told = tell_span(place.span, pure=lanes.pure) if is_plain else None
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
    """A span as it is told; None where it has many lanes, or its chunks are not all alike."""
    start, rows = span.start, span.rows
    if not rows or len(start.live) > MAX_LANES or rows.count(rows[0]) < len(rows) or start.done:
        return None
    marks = [None if of_lane is None else _runs(of_lane) for of_lane in span.marks]
    runs = [of_lane for of_lane in marks if of_lane is not None]
    lengths = [len(mark) for mark in start.marks if mark is not None]
    lengths += [len(mark) for of_lane in runs for _, mark in of_lane]
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
