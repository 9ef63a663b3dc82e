"""A lock whose holder is interrupted is free again, wherever that was."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import FrameType
from typing import Any

import pytest

from feeder.workers.fetch.threads import under_lock


class Interrupt(Exception):
    """What a signal's handler raises."""


class Guarded:
    def __init__(self) -> None:
        self._lock = threading.RLock()

    @under_lock
    def work(self, error: Exception | None = None) -> int:
        if error is not None:
            raise error
        return len("body")

    def is_free(self) -> bool:
        """Whether another thread can have the lock."""
        with ThreadPoolExecutor(1) as pool:
            is_free = pool.submit(self._lock.acquire, blocking=False).result()
            if is_free:
                pool.submit(self._lock.release)
        return is_free


def test_an_interrupt_at_any_call_leaves_the_lock_free() -> None:
    for number in count(1):
        guarded, left = Guarded(), number

        def profile(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal left
            left -= event in ("call", "c_return")
            if not left:
                raise Interrupt

        try:
            sys.setprofile(profile)
            guarded.work()
            break
        except Interrupt:
            pass
        finally:
            sys.setprofile(None)
        assert guarded.is_free(), number
    assert number > 4


def test_an_error_is_passed_on_and_the_lock_is_free() -> None:
    guarded = Guarded()
    with pytest.raises(ValueError):
        guarded.work(ValueError())
    assert guarded.is_free()
    assert guarded.work() == 4
