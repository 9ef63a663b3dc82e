"""Checkpoints of anybody's making, under a digest that is right."""

from __future__ import annotations

import struct

import xxhash


def reseal(header: bytes, data: bytes = b"", *, version: int = 1) -> bytes:
    """Return a checkpoint with a header of anybody's making, under a digest that is right."""
    numbers = struct.pack("<IQQ", version, len(header), len(data))
    return b"FEEDCKPT" + numbers + xxhash.xxh3_128_digest(numbers + header) + header + data
