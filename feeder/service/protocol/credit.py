"""How many batches may be under way where nobody has said so, and how many bytes at most."""

from __future__ import annotations

MAX_ARENA_BYTES = 16 * 1024**3
"""Shared memory for the slots of one queue."""

_CREDIT_BYTES = 32 * 1024 * 1024
_MIN_CREDIT, _MAX_CREDIT = 4, 64


def credit_for(batch_bytes: int) -> int:
    """The credit for batches of so many bytes. Small ones cost a message, so many go in one; of
    large ones more would only take memory out of the caches."""
    return max(_MIN_CREDIT, min(_MAX_CREDIT, _CREDIT_BYTES // max(1, batch_bytes)))
