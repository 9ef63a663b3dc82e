"""What tests of the service share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from zmq.utils import garbage

import served


@pytest.fixture
def world() -> Iterator[None]:
    """All that is served is in one thread, on virtual time."""
    with served.one_thread():
        yield


@pytest.fixture
def large_frames() -> Iterator[None]:
    """ZeroMQ sends these without a copy, and starts a thread that lets go of them."""
    yield
    garbage.gc.stop()
