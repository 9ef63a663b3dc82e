"""What tests of the service share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import served


@pytest.fixture
def world() -> Iterator[None]:
    """All that is served is in one thread, on virtual time."""
    with served.one_thread():
        yield
