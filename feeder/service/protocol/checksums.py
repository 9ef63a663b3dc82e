"""Checksums over the memory of batches, and how that memory is cut into frames.

Pure functions; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import xxhash

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
