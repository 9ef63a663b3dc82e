"""Where the nodes of a job are: threads, processes, or actors on a Ray cluster of three."""

from __future__ import annotations

import os
import select
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from feeder.job import LocalHostSession, LocalSession, RaySession, Session
from jobs import FOLDER, NODES
from needs import needs

END_S = 10.0


class Threads:
    """Sessions in this process."""

    def session(self, factory: str, folder: Path) -> Session:
        """A session for the job that `factory`, of the module `jobs`, makes."""
        return LocalSession()


class Processes:
    """Sessions of a process for each node."""

    def session(self, factory: str, folder: Path) -> Session:
        return LocalHostSession(f"jobs:{factory}", folder / "nodes")


class Actors:
    """Sessions of an actor for each node, each on a node of the cluster."""

    def session(self, factory: str, folder: Path) -> Session:
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), FOLDER: str(folder)}
        environment = {"env_vars": variables}
        options = {node: {"resources": {node: 1}, "runtime_env": environment} for node in NODES}
        return RaySession(f"jobs:{factory}", options=options)


@contextmanager
def cluster() -> Iterator[None]:
    """A Ray cluster of three logical nodes, of which no process is left."""
    needs("ray")
    import ray
    from ray.cluster_utils import Cluster

    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        made = Cluster()
        try:
            for node in NODES:
                made.add_node(num_cpus=1, resources={node: 1}, include_dashboard=False)
            ray.init(address=made.address, log_to_driver=False, configure_logging=False)
            yield
        finally:
            ray.shutdown()
            made.shutdown()
        assert processes_of(folder) == []


def processes_of(folder: str) -> list[str]:
    """The command lines of processes that have to do with a folder, once they have had time to
    end."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if folder in command and not has_ended(int(process.name)):
                found.append(command)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def has_ended(pid: int) -> bool:
    """Wait for the end of a process that need not be ours."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], END_S)[0])
    finally:
        os.close(descriptor)


PLACES = {"threads": Threads, "processes": Processes, "ray": Actors}


@pytest.fixture(
    # A cluster goes before others want one. A "package" without __init__.py is the whole session.
    scope="module",
    params=[
        "threads",
        pytest.param("processes", marks=pytest.mark.process),
        pytest.param("ray", marks=[pytest.mark.process, pytest.mark.foreign_sockets]),
    ],
)
def place(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Where nodes are."""
    with ExitStack() as stack:
        if request.param == "ray":
            stack.enter_context(cluster())
        yield PLACES[request.param]()
