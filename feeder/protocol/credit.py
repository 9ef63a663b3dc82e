"""How many batches may be under way where nobody has said so, by bytes, and the slots for them."""

from __future__ import annotations

_CREDIT_BYTES = 16 * 1024 * 1024
_MIN_CREDIT, _MAX_CREDIT = 4, 64
_SPARE_SLOTS, _SPARE_BYTES = 2, 4 * 1024 * 1024


def credit_for(batch_bytes: int) -> int:
    """The credit for batches of so many bytes. Small ones cost a message, so many go in one; of
    large ones more would only take memory out of the caches."""
    return max(_MIN_CREDIT, min(_MAX_CREDIT, _CREDIT_BYTES // max(1, batch_bytes)))


def slots_for(credit: int, hold: int, slot_bytes: int) -> int:
    """The slots for a consumer that may have `credit` batches, 0 going by their size, and keep
    `hold`. Beside those one is written and one waits; more of small ones, so that batches are
    there when the consumer has used others."""
    credit = credit or credit_for(slot_bytes)
    return credit + hold + max(_SPARE_SLOTS, min(credit, _SPARE_BYTES // slot_bytes))
