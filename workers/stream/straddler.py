"""A chunk that a batch ended in the middle of."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from feeder.workers.stream.batch import Leftover
from feeder.workers.stream.chunks import slice_rows
from feeder.workers.stream.digests import digest_chunk


class Straddler:
    """A chunk that a batch ended in the middle of, kept for the sake of snapshots."""

    __slots__ = ("_digest", "arrays", "axes", "rows", "skip")

    def __init__(
        self,
        arrays: tuple[NDArray[Any], ...],
        axes: tuple[int, ...],
        rows: int,
        skip: int = 0,
        digest: int | None = None,
    ) -> None:
        self.arrays = arrays
        self.axes = axes
        self.rows = rows
        """Rows of the whole chunk."""
        self.skip = skip
        """Rows missing at the head of `arrays`: taken before the feed was resumed."""
        self._digest = digest

    @property
    def digest(self) -> int:
        """The chunk's digest, computed once."""
        if self._digest is None:
            self._digest = digest_chunk(self.arrays)
        return self._digest

    def differs_from(self, then: Leftover) -> str:
        """In what the chunk differs from what it was; empty where it does not."""
        if then.rows != self.rows:
            return f"{then.rows} rows then, {self.rows} now"
        return "" if then.digest == self.digest else "other rows than before"

    def rest(self, taken: int) -> tuple[NDArray[Any], ...]:
        """The rows after the first `taken`, as views."""
        start, stop = taken - self.skip, self.rows - self.skip
        return slice_rows(self.arrays, self.axes, start, stop)
