"""A small Ray cluster of logical nodes on this host, of which nothing is left."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from _pytest.monkeypatch import MonkeyPatch

from lineage import ends_of
from needs import needs

STORE_BYTES = 100 * 1024 * 1024

CALM = {
    # Nobody asks it from elsewhere, and it takes half a second of each start.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@contextmanager
def small_cluster(*nodes: dict[str, Any], connects: bool = True) -> Iterator[Any]:
    """A Ray cluster of logical nodes, to which this process connects; no process is left."""
    needs("ray")
    import ray
    from ray.cluster_utils import Cluster

    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        for name, value in CALM.items():
            patch.setenv(name, value)
        cluster = Cluster()
        try:
            for node in nodes:
                cluster.add_node(include_dashboard=False, object_store_memory=STORE_BYTES, **node)
            if connects:
                ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
        with ends_of(processes_of(folder)) as ends:
            ends.wait()


def processes_of(folder: str) -> list[int]:
    """The processes that have to do with a folder."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if folder.encode() in file.read():
                    found.append(int(name))
        except OSError:
            continue
    return found
