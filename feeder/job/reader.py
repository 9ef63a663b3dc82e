"""Readers: rows in order, with a position that is saved."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from feeder.errors import ConfigError, ResumeError
from feeder.workers.public import public


@public("feeder.job")
class Reader:
    """Hands out the rows of a sequence once, in order. Used by one thread at a time."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows
        self.position = 0
        """The number of rows that have been read."""

    @property
    def finished(self) -> bool:
        """Whether all rows have been read."""
        return self.position >= len(self._rows)

    def read(self, num_rows: int) -> list[Any]:
        """The next rows: so many, or what is left."""
        if num_rows < 0:
            raise ConfigError(f"num_rows is {num_rows!r}, expected 0 or more")
        start = self.position
        self.position = min(start + num_rows, len(self._rows))
        return [self._rows[i] for i in range(start, self.position)]

    def state_dict(self) -> dict[str, int]:
        """The position, and how many rows there are."""
        return {"position": self.position, "rows": len(self._rows)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position. Raises `ResumeError` where it is one of other rows, or none."""
        rows: Any = None
        position: Any = None
        with contextlib.suppress(KeyError, TypeError):
            rows, position = state["rows"], state["position"]
        if type(rows) is not int or type(position) is not int or not 0 <= position <= rows:
            raise ResumeError(f"{state!r} is no position of a reader; resume from another one")
        # A position in other rows would silently read other ones.
        if rows != len(self._rows):
            raise ResumeError(
                f"the reader stood in {rows} rows and has {len(self._rows)} now; give it the same "
                "rows"
            )
        self.position = position
