"""What was made last, by key, for threads that want the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any


class _Entry:
    """A value; its own lock guards it while it is made, the lock of `Kept` its size."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.made: list[Any] = []
        self.size = 0


class Kept:
    """At most `most` values, and at most `most_bytes` in the values before the last that was asked
    for; of several threads that want the same one, one makes it. Guarded by a lock, and each entry
    by one of its own while it is made."""

    def __init__(
        self, most: int, most_bytes: int | None = None, size_of: Callable[[Any], int] | None = None
    ) -> None:
        self._most, self._most_bytes, self._size_of = most, most_bytes, size_of
        self._lock = Lock()
        self._kept: OrderedDict[Any, _Entry] = OrderedDict()

    def __reduce__(self) -> tuple[type[Kept], tuple[Any, ...]]:
        # In another process they are made anew.
        return Kept, (self._most, self._most_bytes, self._size_of)

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returned for this key."""
        with self._lock:
            entry = self._kept.setdefault(key, _Entry())
            self._kept.move_to_end(key)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        with entry.lock:
            if not entry.made:
                entry.made.append(make())
                self._weigh(entry)
            return entry.made[0]

    def _weigh(self, entry: _Entry) -> None:
        """Note the size of a value that was made, and drop the oldest ones for it."""
        if self._most_bytes is None or self._size_of is None:
            return
        size = self._size_of(entry.made[0])
        with self._lock:
            entry.size = size
            total = sum(other.size for other in self._kept.values())
            while total > self._most_bytes and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                total -= oldest.size
