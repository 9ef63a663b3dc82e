"""How batches are told: in groups, each with what its batches have in common said once.

Where a batch ended is a token, or, where the stream is regular, a few numbers from which the
consumer makes the same token when it is asked for one: making and sending a token for each 8 KB
batch cost more than all else that is done for it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from feeder.service.protocol.fields import (
    MAX_ITEMS,
    Count,
    Counts,
    Generation,
    Message,
    Positive,
    Rows,
    Shape,
)

MAX_LANES = 64
"""A span of more partitions is not told; its batches have tokens."""
MAX_CHUNKS = 2**20
"""A span of more chunks is not told."""
MAX_MARKS = 8
"""A span in which a partition's mark changes more often is not told."""
MAX_MARK_BYTES = 256
"""A span with a longer mark is not told."""

_Partition = Annotated[int, Meta(ge=0, lt=MAX_LANES)]
_Checksum = Annotated[int, Meta(ge=0)]
_NumChunks = Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]
_Mark = Annotated[bytes, Meta(max_length=MAX_MARK_BYTES)]
_Marks = Annotated[tuple[tuple[_NumChunks, _Mark], ...], Meta(max_length=MAX_MARKS)]


class Span(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Merged chunks that all have as many rows, as in `feeder.workers.stream.position.Span`."""

    pure: bool
    """Whether they are those of a pure function, striped over the partitions by index."""
    epoch: Count
    """The position before the first chunk, from here on: its epoch,"""
    turn: _Partition
    """the partition whose chunk comes next,"""
    live: Annotated[tuple[bool, ...], Meta(min_length=1, max_length=MAX_LANES)]
    """and of each partition whether it has not ended,"""
    calls: Annotated[tuple[Count, ...], Meta(max_length=MAX_LANES)]
    """the number of its next call,"""
    rows: Annotated[tuple[Count, ...], Meta(max_length=MAX_LANES)]
    """the rows it has given,"""
    marks: Annotated[tuple[_Mark | None, ...], Meta(max_length=MAX_LANES)]
    """and its mark."""
    ring: Annotated[tuple[_Partition, ...], Meta(min_length=1, max_length=MAX_LANES)]
    """The partitions that the chunks came from, in turn."""
    firsts: Annotated[tuple[Count, ...], Meta(max_length=MAX_LANES)]
    """Number of the first call of each of these."""
    new_marks: Annotated[tuple[_Marks | None, ...], Meta(max_length=MAX_LANES)]
    """Their marks: up to how many of its chunks, and the mark after those."""
    chunk_rows: Count
    """Rows of each chunk."""

    def __post_init__(self) -> None:
        num = len(self.live)
        if {len(self.calls), len(self.rows), len(self.marks)} != {num}:
            raise ValueError(f"a span tells not as much of each of its {num} partitions")
        if max(self.ring) >= num or self.turn >= num:
            raise ValueError(f"a span names a partition that is none of its {num}")
        if {len(self.firsts), len(self.new_marks)} != {len(self.ring)}:
            raise ValueError("a span tells not as much of each partition of its ring")


class Group(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Consecutive batches of one queue and epoch, without their memory.

    Where they ended is told by `tokens`, or by `span`, `chunks`, `taken` and `digests`.
    """

    sequence: Count
    """Number of the first in the lease; the others count on."""
    epoch: Count
    index: Count
    """Number of the first in the epoch."""
    step: Count
    """Number of the first in the stream."""
    stride: Positive
    """What both grow by from one to the next: the number of queues."""
    rows: Count
    """Real rows of each."""
    length: Count
    """Rows of the arrays of each, padding included."""
    slots: Annotated[tuple[Annotated[int, Meta(ge=-1, le=2**63 - 1)], ...],
                     Meta(min_length=1, max_length=MAX_ITEMS)]  # fmt: skip
    """Arena number * 2**16 + slot of each; -1 where frames with the memory follow the message."""
    checksums: Annotated[tuple[_Checksum, ...], Meta(max_length=MAX_ITEMS)]
    """Up to 2**64 - 1; 0 where they are off."""
    shapes: Annotated[tuple[Shape, ...], Meta(max_length=MAX_ITEMS)] | None
    """As in `ColumnSpec`, for each column; None where they do not differ from the spec's."""
    tokens: Annotated[tuple[Rows, ...], Meta(max_length=MAX_ITEMS)]
    """The place after each: a token, or a snapshot where leftover rows go with it."""
    span: Span | None
    """The chunks that they ended in; None where there are tokens."""
    chunks: Annotated[tuple[_NumChunks, ...], Meta(max_length=MAX_ITEMS)]
    """After how many chunks of the span each ended,"""
    taken: Counts
    """how many rows of the last of them it took, 0 for all; empty where each took all,"""
    digests: Annotated[tuple[_Checksum, ...], Meta(max_length=MAX_ITEMS)]
    """and that chunk's digest, where it did not take all."""

    def __post_init__(self) -> None:
        num = len(self.slots)
        parts = num if self.taken else 0
        expected = (num, 0, 0, 0) if self.span is None else (0, num, parts, parts)
        places = len(self.tokens), len(self.chunks), len(self.taken), len(self.digests)
        if places != expected or len(self.checksums) != num:
            raise ValueError(f"a group tells not as much of each of its {num} batches")


class Batches(Message, frozen=True, kw_only=True):
    """Batches in order; one alone where its memory follows in frames."""

    generation: Generation
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=MAX_ITEMS)]

    def __post_init__(self) -> None:
        num = sum([len(group.slots) for group in self.groups])
        if num > 1 and any(-1 in group.slots for group in self.groups):
            raise ValueError("a batch in frames comes with others, expected it alone")
