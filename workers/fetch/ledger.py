"""How much is buffered between the fetch function and the user, and how much may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Held:
    """What is buffered until a device's user has it."""

    batches: int
    rows: int
    num_bytes: int
    kept_rows: int
    is_out: bool = False
    """Whether it is counted as handed out."""


class Ledger:
    """Counts rows and bytes from a call's return until they are handed to the user.

    A row that has been copied into a batch is kept a second time for as long as its chunk is,
    which may have to give a snapshot its rest. Such rows are counted apart, and count in the bound
    as well: what is bounded is memory. Not thread-safe; the channel's lock guards it.
    """

    def __init__(
        self, max_rows: int, max_bytes: int, num_devices: int, bundle_bytes: int = 0
    ) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.bundle_bytes = bundle_bytes
        """Bytes of the bundle that came last: what each fetcher that is calling will add."""
        self.num_calling = 0
        """Fetchers that are calling."""
        self.rows = 0
        """Rows buffered now, each counted once."""
        self.bytes = 0
        """Their bytes."""
        self.kept_rows = 0
        """Rows that have been copied and whose chunk is kept all the same."""
        self.row_bytes = 0
        """Bytes of a row, once they are known and where all rows have as many."""
        self.ahead_bytes = 0
        """Bytes handed over since the merge last collected."""
        self.peak_rows = 0
        """The most rows that were ever buffered."""
        self.peak_bytes = 0
        """The most bytes that were ever buffered."""
        self.waiting = [0] * num_devices
        """Batches in each device queue."""

    @property
    def below_bound(self) -> bool:
        """Whether batches may be assembled for the sake of batches to come."""
        return self._has_rows() and self.has_bytes_for(0)

    def may_call(self, coming: int) -> bool:
        """Whether a fetcher may begin to call for the sake of batches to come, beside those that do
        and `coming` more, each of which is going to add a bundle. Where nothing is buffered and
        nobody calls one may, however large its chunk."""
        return self._has_rows() and self.has_bytes_for(self.num_calling + coming)

    def has_bytes_for(self, num_calling: int) -> bool:
        """Whether the bound on bytes is not reached with what so many fetchers are going to add."""
        held = self.bytes + self.kept_rows * self.row_bytes
        return held + num_calling * self.bundle_bytes < self.max_bytes

    def _has_rows(self) -> bool:
        return self.rows + self.kept_rows < self.max_rows

    @property
    def starving(self) -> bool:
        """Whether a device has no batch: then the call whose turn it is may be started above the
        bound, or nothing would ever move. Any device, since the user may be waiting at that one
        and not at the one whose batch is next."""
        return 0 in self.waiting

    def add(self, rows: int, num_bytes: int, kept_rows: int = 0) -> None:
        """Count rows and bytes in (or, if negative, out)."""
        self.rows += rows
        self.bytes += num_bytes
        self.kept_rows += kept_rows
        self.peak_rows = max(self.peak_rows, self.rows)
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def hand_out(self, device: int, held: Held) -> None:
        """Count out what a device's user has, once however often it is said. There is no call in
        between, where an interrupt could come."""
        if not held.is_out:
            self.rows -= held.rows
            self.bytes -= held.num_bytes
            self.kept_rows -= held.kept_rows
            self.waiting[device] -= held.batches
            held.is_out = True
