"""The bound on what is buffered between a call's return and the user's hands.

It is a count and no queue with so many places, since what it bounds changes its form on the way:
chunks, rows that a batch has copied while their chunk is still needed, batches in several device
queues. What a call will give is not known before it returns, so a call under way counts as the
largest of late: a bound on what came alone would be exceeded by one chunk of each thread.
"""

from __future__ import annotations

from feeder.workers.stream.spec import Part

_REMEMBERED = 16
"""A large chunk is forgotten over so many chunks of each partition."""


class Held:
    """What is buffered until a device's user has it. The queue's lock guards it."""

    __slots__ = ("batches", "is_out", "kept_rows", "num_bytes", "rows")

    def __init__(self, batches: int, rows: int, num_bytes: int, kept_rows: int) -> None:
        self.batches = batches
        self.rows = rows
        self.num_bytes = num_bytes
        self.kept_rows = kept_rows
        self.is_out = False
        """Whether it is counted as handed out."""


class Bound:
    """Counts rows and bytes from a call's return until they are handed to the user.

    A row that was copied into a batch is kept a second time for as long as its chunk is: a snapshot
    may need the rest of the chunk. Such rows are counted apart, and count in the bound as well,
    since what is bounded is memory. Without them 33-row chunks and 32-row batches took twice the
    bound.

    Owner: the queue's lock. Statistics read single numbers without it.
    """

    def __init__(
        self, max_rows: int, max_bytes: int, num_devices: int, call_bytes: int,
        num_partitions: int, part: Part | None = None,
    ) -> None:  # fmt: skip
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.call_bytes = call_bytes
        """What each call is taken to add. Before the first chunk that is a guess."""
        self._kept_share = 1 - 1 / (_REMEMBERED * num_partitions)
        self.call_rows = 0
        """Rows that a call gave, the most of late."""
        self._has_seen = False
        self.rows = 0
        """Rows buffered now, each counted once."""
        self.bytes = 0
        """Their bytes."""
        self.kept_rows = 0
        """Rows that have been copied and whose chunk is kept all the same."""
        self.row_bytes: int | None = None
        """Bytes of a row, once they are known and if all rows have as many."""
        self.peak_rows = 0
        """The most rows that were ever buffered."""
        self.peak_bytes = 0
        """The most bytes that were ever buffered."""
        own = range(num_devices) if part is None else range(part.first, part.stop)
        self.waiting = dict.fromkeys(own, 0)
        """Batches in each device queue that gets some."""

    def has_room(self, num_threads: int = 0, num_calls: int = 0) -> bool:
        """Whether the bound is not reached, while so many threads make so many calls. If nothing is
        buffered and nobody calls it never is, however large the chunk to come."""
        rows, num_bytes = self.left(num_threads, num_calls)
        return rows > 0 and num_bytes > 0

    def left(self, num_threads: int, num_calls: int) -> tuple[int, int]:
        """The rows and bytes that are left of the bound, while so many threads make so many calls:
        what these are going to add is taken off. Rows come on top if each makes one call."""
        held = self.bytes + self.kept_rows * (self.row_bytes or 0)
        more_rows = num_calls * self.call_rows if num_calls > num_threads else 0
        rows = self.max_rows - self.rows - self.kept_rows - more_rows
        return rows, self.max_bytes - held - num_calls * self.call_bytes

    @property
    def starving(self) -> bool:
        """Whether a device has no batch: then the call whose turn it is may be made above the
        bound, or nothing would ever move. Any device, since the user may be waiting at that one
        and not at the one whose batch is next."""
        return 0 in self.waiting.values()

    def calls_in(self, rows: int, num_bytes: int) -> int:
        """How many calls give about so much."""
        return min(rows // max(1, self.call_rows), num_bytes // max(1, self.call_bytes))

    def rows_in(self, rows: int, num_bytes: int) -> int:
        """How many of these rows have no more than so many bytes, as far as is known."""
        return min(rows, num_bytes // self.row_bytes) if self.row_bytes else rows

    def add_chunks(self, num: int, rows: int, num_bytes: int) -> None:
        """So many calls gave chunks."""
        # Chunks of one feed may differ much, and some large ones may be under way when a small one
        # comes: a large one is forgotten slowly. Of 64 workers whose chunks had 10 MB and 8 kB in
        # turns, 140 to 270 MB were held under a bound of 20 MB if the last chunk alone counted, and
        # 41 to 51 so (2026-11-24). What no count foresees is a first large chunk of each call that
        # is under way.
        if num:
            before = self.call_bytes if self._has_seen else 0
            self._has_seen = True
            self.call_bytes = max(num_bytes // num, int(before * self._kept_share))
            self.call_rows = max(rows // num, int(self.call_rows * self._kept_share))
        self.add(rows, num_bytes)

    def add(self, rows: int, num_bytes: int, kept_rows: int = 0) -> None:
        """Count rows and bytes in (or, if negative, out)."""
        self.rows += rows
        self.bytes += num_bytes
        self.kept_rows += kept_rows
        if self.rows > self.peak_rows:
            self.peak_rows = self.rows
        if self.bytes > self.peak_bytes:
            self.peak_bytes = self.bytes

    def hand_out(self, device: int, held: Held) -> None:
        """Count out what a device's user has, once however often it is said."""
        # The user's thread runs this, and Python raises an interrupt after a call: there is none
        # in between, so all of it is done or nothing.
        if not held.is_out:
            self.rows -= held.rows
            self.bytes -= held.num_bytes
            self.kept_rows -= held.kept_rows
            self.waiting[device] -= held.batches
            held.is_out = True
