"""What tests see to: an error that says one thing, and when a function is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


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
