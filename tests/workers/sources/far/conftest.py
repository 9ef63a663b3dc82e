"""A store of objects for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from far_server import FarServer, far_server
from feeder.workers.sources.far.objects import Objects


@pytest.fixture(scope="session")
def warm() -> None:
    """Have obstore start the threads that it keeps, with their descriptors."""
    with far_server() as far:
        far.objects["warm/up"] = b"1"
        Objects().known(f"{far.address}/warm/up")


@pytest.fixture
def far(warm: None) -> Iterator[FarServer]:
    with far_server() as made:
        yield made
