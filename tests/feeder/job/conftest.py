"""Where the nodes of a job are: threads, processes, or actors on a Ray cluster of three."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import jobs
from executors.actors.cluster import small_cluster
from feeder.job import LocalHostSession, LocalSession, RaySession, Session
from jobs import FOLDER, NODES


class Threads:
    """Sessions in this process."""

    has_pids = False

    def session(self, factory: str, folder: Path) -> Session:
        """A session for the job that `factory`, of the module `jobs`, makes."""
        return LocalSession()


class Messages(Threads):
    """Sessions in this process, whose nodes are told by messages and make the job themselves."""

    def session(self, factory: str, folder: Path) -> Session:
        return jobs.Actors(f"jobs:{factory}")


class Processes:
    """Sessions of a process for each node."""

    has_pids = True

    def session(self, factory: str, folder: Path) -> Session:
        return LocalHostSession(f"jobs:{factory}", folder / "nodes")


class Actors:
    """Sessions of an actor for each node, each on a node of the cluster."""

    has_pids = True

    def session(self, factory: str, folder: Path) -> Session:
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), FOLDER: str(folder)}
        environment = {"env_vars": variables}
        options = {node: {"resources": {node: 1}, "runtime_env": environment} for node in NODES}
        return RaySession(f"jobs:{factory}", options=options)


PLACES = {"threads": Threads, "messages": Messages, "processes": Processes, "ray": Actors}


# A cluster goes before others want one. A "package" without __init__.py is the whole session.
@pytest.fixture(scope="module", params=["threads", "messages"])
def place(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Where nodes are: in this process, unless a test says that it needs others (`everywhere`)."""
    with ExitStack() as stack:
        if request.param == "ray":
            nodes = [{"num_cpus": 1, "resources": {node: 1}} for node in NODES]
            stack.enter_context(small_cluster(*nodes))
        yield PLACES[request.param]()
