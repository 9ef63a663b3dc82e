"""A Ray cluster of two nodes on this host, for as long as tests of actors run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from executors.actors.cluster import small_cluster

pytestmark = [pytest.mark.process, pytest.mark.foreign_sockets]

TEST_S = 240
"""How long a test may take, the cluster's start with the first one."""


# A "package" without __init__.py is the whole session, and a process has one cluster at a time.
@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with room for eight actors together."""
    # Logical CPUs: they bound how many actors there may be, and not what these take.
    with small_cluster({"num_cpus": 4, "resources": {"first": 8}},
                       {"num_cpus": 4, "resources": {"second": 8}}) as made:  # fmt: skip
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "executors/actors" in str(item.path) and "cluster" in getattr(item, "fixturenames", ()):
            for mark in (*pytestmark, pytest.mark.timeout(TEST_S)):
                item.add_marker(mark)
