"""What tests see to: an error that says one thing, when a function is called, and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from small import WAIT_S


@contextmanager
def says(kind: type[BaseException], told: str) -> Iterator[pytest.ExceptionInfo[Any]]:
    """See that an error is raised which says this and no more."""
    with pytest.raises(kind) as caught:
        yield caught
    assert str(caught.value) == told


def around(
    patch: pytest.MonkeyPatch, owner: Any, name: str, *,
    before: Callable[..., object] | None = None, after: Callable[..., object] | None = None,
) -> None:  # fmt: skip
    """Have a function of a class or a module do something, told its arguments, before it begins, or
    after it is done."""
    function = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        if before is not None:
            before(*args, **named)
        result = function(*args, **named)
        if after is not None:
            after(*args, **named)
        return result

    patch.setattr(owner, name, call)


class CallsOf:
    """Waits for what calls of some functions bring about, in whatever thread: it is looked for as
    each call begins, which may be a wait itself, and once the call is done."""

    def __init__(self, patch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> None:
        """Each is a function of a class, a module or an object, by its owner and its name."""
        # `put` takes no lock: a call may be one of a finaliser, in the midst of another call.
        self._told: SimpleQueue[None] = SimpleQueue()
        for owner, name in functions:
            around(patch, owner, name, before=self._tell, after=self._tell)

    def _tell(self, *_: Any, **__: Any) -> None:
        self._told.put(None)

    def wait_until(self, is_so: Callable[[], Any]) -> Any:
        """Return what is so, once it is, which may be before a call. It must call none of the
        functions. Fails after `WAIT_S` without a call."""
        while not (found := is_so()):
            try:
                self._told.get(timeout=WAIT_S)
            except Empty:
                raise AssertionError("it has not come to be") from None
        return found


class Clock:
    """The clock of the process, which a test sets ahead: nobody has to wait for time to pass.

    Waits with a time limit take no notice; what they look at when they wake does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._ahead_s, monotonic = 0.0, time.monotonic
        patch.setattr(time, "monotonic", lambda: monotonic() + self._ahead_s)

    def set_ahead(self, seconds: float) -> None:
        """Let so many seconds more have passed."""
        self._ahead_s += seconds
