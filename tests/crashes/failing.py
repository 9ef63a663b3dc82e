"""A file system of which one call fails, or all from one on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from feeder.durable import Fs

KINDS = {
    "open": ("open", "open_folder"),
    "write": ("write",),
    "fsync": ("fsync",),
    "rename": ("link", "rename"),
    "unlink": ("unlink",),
    "list": ("list",),
    "read": ("read_into", "size"),
    "lock": ("lock",),
}
"""Kinds of calls, and the methods of an `Fs` that make them."""


class FailingFs(Fs):
    """The operating system's, but for the `number`-th call of a kind, counted from 1, which fails
    with `error`; with `lasting` so do all after it."""

    def __init__(self, kind: str, number: int, error: int, *, lasting: bool = False) -> None:
        self.calls: Counter[str] = Counter()
        self.num_failed = 0
        """Calls that were made to fail."""
        self._kind, self._number, self._error, self._lasting = kind, number, error, lasting
        for method in KINDS[kind]:
            setattr(self, method, self._failing(getattr(self, method)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls[self._kind] += 1
            number = self.calls[self._kind]
            if number == self._number or (self._lasting and number > self._number):
                self.num_failed += 1
                raise OSError(self._error, os.strerror(self._error))
            return call(*args, **kwargs)

        return called


class ShortFs(Fs):
    """The operating system's, but each write takes only a few bytes, and each read gives few."""

    def write(self, file: int, data: memoryview) -> int:
        return super().write(file, data[:7])

    def read_into(self, file: int, buffer: memoryview, at: int) -> int:
        return super().read_into(file, buffer[:5], at)
