"""What tests of executors have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executors.loopback import loopback


@pytest.fixture
def in_threads() -> Iterator[None]:
    """Processes of executors are threads of this one."""
    with loopback():
        yield
