"""What was made last, by key, for threads that want the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any


class Kept:
    """At most `most` values; of several threads that want the same one, one makes it. Guarded by a
    lock, and each entry by one of its own while it is made."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._kept: OrderedDict[Any, tuple[Lock, list[Any]]] = OrderedDict()

    def __reduce__(self) -> tuple[type[Kept], tuple[int]]:
        # In another process they are made anew.
        return Kept, (self._most,)

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returned for this key."""
        with self._lock:
            lock, made = self._kept.setdefault(key, (Lock(), []))
            self._kept.move_to_end(key)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        with lock:
            if not made:
                made.append(make())
            return made[0]
