"""Checksums of batches, and the frames that they are sent in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import xxhash

MAX_FRAME_BYTES = 31 * 2**20
"""A frame is at most so large: malloc keeps no more than 32 MiB that it was given back."""

_PIECE_BYTES = 2**20

# One KiB of each 64: any 64 KiB in a row hold a byte that is looked at.
_BLOCK_BYTES = 1024
_STRIDE_BYTES = 64 * 1024
_BLOCKS_AT_ONCE = 64
# Up to here one call over all costs less than picking blocks.
_WHOLE_BYTES = 32 * 1024


def checksum(memory: memoryview, mode: Literal["off", "sampled", "full"]) -> int:
    """A checksum of contiguous memory, from 0 to 2**64 - 1.

    `"full"` is xxh3_64 of all bytes. `"sampled"` looks at the first KiB of every 64 KiB and at the
    last KiB; up to 32 KiB at all. It notices 64 KiB in a row that changed, perhaps not less.
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
    # Copies that malloc keeps: it gives larger ones back, and new pages cost ten times the rest.
    for first in range(0, num_blocks, _BLOCKS_AT_ONCE):
        hasher.update(blocks[first : first + _BLOCKS_AT_ONCE].tobytes())
    hasher.update(memory.cast("B")[-_BLOCK_BYTES:])
    return int(hasher.intdigest())


def pieces(memories: Sequence[memoryview], max_bytes: int = MAX_FRAME_BYTES) -> list[memoryview]:
    """The memory of a batch, in order, as frames: as it lies, so that its consumer need not copy
    it, or where it has more than `max_bytes` in parts of 1 MiB; views, not copies."""
    flats = [memory.cast("B") for memory in memories]
    if sum(map(len, flats)) <= max_bytes:
        return flats
    size = min(max_bytes, _PIECE_BYTES)
    return [flat[at : at + size] for flat in flats for at in range(0, len(flat), size)]
