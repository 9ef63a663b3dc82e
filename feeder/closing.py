"""Objects that a `with` block closes at its end."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Gives `close` the form of a context manager. Owners and threads are those of `close`."""

    def close(self) -> None:
        """End it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
