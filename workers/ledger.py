"""How much is buffered between the fetch function and the user, and how much may be."""

from __future__ import annotations


class Ledger:
    """Counts rows and bytes from a call's return until they are handed to the user.

    A row that has been copied into a batch counts twice for as long as its chunk is kept as well,
    which it is while a snapshot may need the rest of it: what is counted is memory. Not
    thread-safe; the channel's lock guards it.
    """

    def __init__(self, max_rows: int, max_bytes: int | None, num_devices: int) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.rows = 0
        """Rows buffered now."""
        self.bytes = 0
        """Bytes buffered now."""
        self.ahead_bytes = 0
        """Bytes handed over since the merge last collected."""
        self.peak_rows = 0
        """The most rows that were ever buffered."""
        self.peak_bytes = 0
        """The most bytes that were ever buffered."""
        self.waiting = [0] * num_devices
        """Batches in each device queue."""
        self.target = 0
        """The device that the batch now being assembled goes to."""

    @property
    def below_bound(self) -> bool:
        """Whether calls may be started for the sake of batches to come."""
        return self.rows < self.max_rows and (
            self.max_bytes is None or self.bytes < self.max_bytes
        )  # fmt: skip

    @property
    def starving(self) -> bool:
        """Whether the device that the next batch goes to has none: then the call whose turn it
        is may be started above the bound, or nothing would ever move."""
        return self.waiting[self.target] == 0

    def add(self, rows: int, num_bytes: int) -> None:
        """Count rows and bytes in (or, if negative, out)."""
        self.rows += rows
        self.bytes += num_bytes
        self.peak_rows = max(self.peak_rows, self.rows)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
