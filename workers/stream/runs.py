"""The nouns of the merge: a run of merged chunks, the end of an epoch, the head of a lane."""

from __future__ import annotations

from typing import Any

from feeder.workers.errors import FeedError
from feeder.workers.stream.position import Position, Span
from feeder.workers.fetch.scheduler import End

Columns = list[list[Any]]


class Run:
    """Chunks in merged order, as columns of arrays, and where they came from."""

    __slots__ = ("columns", "digest", "rows", "skip", "span")

    def __init__(
        self,
        span: Span,
        columns: Columns,
        rows: list[int],
        skip: int = 0,
        digest: int | None = None,
    ) -> None:
        self.span = span
        self.columns = columns
        self.rows = rows
        self.skip = skip
        """Rows missing at the head of the first chunk (the leftover of a snapshot)."""
        self.digest = digest
        """The digest of that chunk."""


class EpochEnd:
    """All rows of an epoch have been merged."""

    __slots__ = ("position",)

    def __init__(self, position: Position) -> None:
        self.position = position
        """The start of the next epoch."""


class Head:
    """What is left of a lane's oldest bundle, checked and in columns."""

    __slots__ = ("columns", "ending", "first", "marks", "rows")

    def __init__(self) -> None:
        self.columns: Columns = []
        self.rows: list[int] = []
        self.first = 0
        self.marks: list[bytes] | None = None
        self.ending: End | FeedError | None = None

    def take(self, num: int) -> tuple[Columns, list[int], list[bytes] | None]:
        """Its first `num` chunks. Nothing is left behind that refers to them, so that the
        assembler can tell whether anybody else does."""
        columns, rows, marks = self.columns, self.rows, self.marks
        self.first += num
        if num == len(rows):
            self.columns, self.rows = [[] for _ in columns], []
            return columns, rows, marks
        taken = [column[:num] for column in columns]
        for column in columns:
            del column[:num]
        self.rows = rows[num:]
        if marks is not None:
            self.marks = marks[num:]
        return taken, rows[:num], marks[:num] if marks is not None else None
