"""How batches travel: the message in which groups of them go, the frames of their memory, and the
checksums over it.

A group says once what its batches have in common. A batch's position is a token, or, where the
stream is regular, a few numbers of a span, from which the consumer makes the same token when its
user asks for one. To make and send a token for each 8 KB batch cost more than everything else that
is done for such a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import numpy as np
import xxhash
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

# Beyond these limits batches have tokens. The limits keep the span small beside the batches, since
# it goes with every message, and they bound what a hostile server makes a consumer compute.
MAX_PARTITIONS = 64
"""Most partitions of a span."""
MAX_CHUNKS = 2**20
"""Most chunks of a span."""
MAX_MARKS = 8
"""Most changes of one partition's cursor in a span."""
MAX_MARK_BYTES = 256
"""Longest cursor in a span."""

_Partition = Annotated[int, Meta(ge=0, lt=MAX_PARTITIONS)]
_Checksum = Annotated[int, Meta(ge=0)]
_NumChunks = Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]
_Mark = Annotated[bytes, Meta(max_length=MAX_MARK_BYTES)]
_Marks = Annotated[tuple[tuple[_NumChunks, _Mark], ...], Meta(max_length=MAX_MARKS)]


class Span(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Merged chunks that all have the same number of rows: `feeder.workers.stream.position.Span`
    as it is sent. Immutable."""

    pure: bool
    """Whether the chunks are those of a pure function, striped over the partitions by index."""
    epoch: Count
    """The position before the first chunk, from here on: its epoch,"""
    turn: _Partition
    """the partition whose chunk comes next,"""
    live: Annotated[tuple[bool, ...], Meta(min_length=1, max_length=MAX_PARTITIONS)]
    """and of each partition whether it has not ended,"""
    calls: Annotated[tuple[Count, ...], Meta(max_length=MAX_PARTITIONS)]
    """the number of its next call,"""
    rows: Annotated[tuple[Count, ...], Meta(max_length=MAX_PARTITIONS)]
    """the rows it has given,"""
    marks: Annotated[tuple[_Mark | None, ...], Meta(max_length=MAX_PARTITIONS)]
    """and its mark."""
    ring: Annotated[tuple[_Partition, ...], Meta(min_length=1, max_length=MAX_PARTITIONS)]
    """The partitions that the chunks came from, in turn."""
    firsts: Annotated[tuple[Count, ...], Meta(max_length=MAX_PARTITIONS)]
    """Number of the first call of each of these."""
    new_marks: Annotated[tuple[_Marks | None, ...], Meta(max_length=MAX_PARTITIONS)]
    """Their marks: for each run of equal ones, how many chunks it reaches to, and the mark."""
    chunk_rows: Count
    """Rows of each chunk."""

    def __post_init__(self) -> None:
        # msgspec checks each field alone. That the lengths fit each other is checked here, so that
        # nobody who reads a span has to.
        num = len(self.live)
        if {len(self.calls), len(self.rows), len(self.marks)} != {num}:
            raise ValueError(f"a span tells not as much of each of its {num} partitions")
        if max(self.ring) >= num or self.turn >= num:
            raise ValueError(f"a span names a partition that is none of its {num}")
        if {len(self.firsts), len(self.new_marks)} != {len(self.ring)}:
            raise ValueError("a span tells not as much of each partition of its ring")


class Group(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Consecutive batches of one queue and epoch, without their memory. Immutable.

    Their positions are in `tokens`, or in `span`, `chunks`, `taken` and `digests`.
    """

    sequence: Count
    """Number of the first batch in the lease; the others count on."""
    epoch: Count
    index: Count
    """Number of the first batch in the epoch."""
    step: Count
    """Number of the first batch in the stream."""
    stride: Positive
    """By how much both grow from batch to batch: the number of queues."""
    rows: Count
    """Real rows of each batch."""
    length: Count
    """Rows of the arrays of each batch, padding included."""
    slots: Annotated[tuple[Annotated[int, Meta(ge=-1, le=2**63 - 1)], ...],
                     Meta(min_length=1, max_length=MAX_ITEMS)]  # fmt: skip
    """Arena number * 2**16 + slot of each; -1 where frames with the memory follow the message."""
    checksums: Annotated[tuple[_Checksum, ...], Meta(max_length=MAX_ITEMS)]
    """Up to 2**64 - 1; 0 where they are off."""
    shapes: Annotated[tuple[Shape, ...], Meta(max_length=MAX_ITEMS)] | None
    """As in `ColumnSpec`, for each column; None where they do not differ from the spec's."""
    tokens: Annotated[tuple[Rows, ...], Meta(max_length=MAX_ITEMS)]
    """The position after each batch: a token, or a snapshot where leftover rows go with it."""
    span: Span | None
    """The chunks that the batches ended in; None where there are tokens."""
    chunks: Annotated[tuple[_NumChunks, ...], Meta(max_length=MAX_ITEMS)]
    """After how many chunks of the span each ended,"""
    taken: Counts
    """how many rows of the last of them it took, 0 for all; empty where each took all,"""
    digests: Annotated[tuple[_Checksum, ...], Meta(max_length=MAX_ITEMS)]
    """and that chunk's digest, where it did not take all."""

    def __post_init__(self) -> None:
        # Either tokens or numbers of a span, never a mixture: there is one way to read a group.
        num = len(self.slots)
        parts = num if self.taken else 0
        expected = (num, 0, 0, 0) if self.span is None else (0, num, parts, parts)
        places = len(self.tokens), len(self.chunks), len(self.taken), len(self.digests)
        if places != expected or len(self.checksums) != num:
            raise ValueError(f"a group tells not as much of each of its {num} batches")


class Batches(Message, frozen=True, kw_only=True):
    """Batches in order; exactly one where its memory follows in frames."""

    generation: Generation
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=MAX_ITEMS)]

    def __post_init__(self) -> None:
        # Frames follow the message without a word of whose they are, so they are of one batch.
        num = sum([len(group.slots) for group in self.groups])
        if num > 1 and any(-1 in group.slots for group in self.groups):
            raise ValueError("a batch in frames comes with others, expected it alone")


# ---- the memory of a batch: frames and checksums; pure functions for any thread

# glibc's malloc keeps freed memory of up to 32 MiB for the next frame and maps anything larger
# anew: 1,500 page faults and half the speed for each batch.
MAX_FRAME_BYTES = 31 * 2**20
"""Largest batch that is sent with a frame for each piece of memory."""

# Frames of 4 to 32 MiB were a tenth slower: what ZeroMQ receives into is then in no cache.
_PIECE_BYTES = 2**20

# One KiB of each 64: any 64 KiB in a row hold a byte that is looked at.
_BLOCK_BYTES = 1024
_STRIDE_BYTES = 64 * 1024
_BLOCKS_AT_ONCE = 64
# Up to here one call over all bytes costs less than picking blocks.
_WHOLE_BYTES = 32 * 1024


def checksum(memory: memoryview, mode: Literal["off", "sampled", "full"]) -> int:
    """A checksum of contiguous memory, from 0 to 2**64 - 1.

    `"full"` is xxh3_64 of all bytes. `"sampled"` looks at the first KiB of every 64 KiB and at the
    last KiB; up to 32 KiB it looks at all bytes. It notices 64 KiB in a row that changed, and may
    miss less.
    `"off"` is 0.
    """
    if mode == "off":
        return 0
    if mode == "sampled" and memory.nbytes > _WHOLE_BYTES:
        return _sampled(memory)
    return xxhash.xxh3_64_intdigest(memory)


def full_checksum(memories: Iterable[memoryview]) -> int:
    """The full checksum of memory that lies in several places."""
    hasher = xxhash.xxh3_64()
    for memory in memories:
        hasher.update(memory)
    return int(hasher.intdigest())


def _sampled(memory: memoryview) -> int:
    num_blocks = -(-(memory.nbytes - _BLOCK_BYTES) // _STRIDE_BYTES)
    shape, strides = (num_blocks, _BLOCK_BYTES), (_STRIDE_BYTES, 1)
    blocks = np.ndarray(shape, np.uint8, memory, 0, strides)
    hasher = xxhash.xxh3_64()
    # In portions of 64 KiB, whose copy malloc keeps for the next one. It would give larger copies
    # back to the system, and new pages cost ten times the rest.
    for first in range(0, num_blocks, _BLOCKS_AT_ONCE):
        hasher.update(blocks[first : first + _BLOCKS_AT_ONCE].tobytes())
    hasher.update(memory.cast("B")[-_BLOCK_BYTES:])
    return int(hasher.intdigest())


def pieces(memories: Sequence[memoryview], max_bytes: int = MAX_FRAME_BYTES) -> list[memoryview]:
    """Views of the memory of a batch, in order, to be sent as frames.

    One view for each piece of memory, so that the consumer's arrays are views of what it received;
    or parts of 1 MiB where the batch has more than `max_bytes`, which the consumer copies.
    """
    flats = [memory.cast("B") for memory in memories]
    if sum(map(len, flats)) <= max_bytes:
        return flats
    size = min(max_bytes, _PIECE_BYTES)
    return [flat[at : at + size] for flat in flats for at in range(0, len(flat), size)]
