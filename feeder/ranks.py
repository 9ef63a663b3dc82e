"""The rank of this process, as launchers tell it in the environment.

The names are those of torchrun, of Slurm's srun, and of Kubernetes (indexed jobs, and pods of a
StatefulSet, whose names end in their number). What `FEEDER_...` says comes before all of them;
where that is no number a `ConfigError` is raised.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from feeder.errors import ConfigError


class LauncherNumber(NamedTuple):
    """A number, and the variable of the environment that told it."""

    number: int
    """From 0 on."""
    variable: str
    """The variable's name; "no launcher" where there is none, which messages show as it is."""


# torchrun's name first: under Slurm it sets its own for the processes that it starts.
_ON_NODE = ("LOCAL_RANK", "SLURM_LOCALID")
_IN_ALL = ("RANK", "SLURM_PROCID")
_POD = ("JOB_COMPLETION_INDEX",)
_NODE = ("GROUP_RANK", "SLURM_NODEID", *_POD)
_NUM_NODES = ("GROUP_WORLD_SIZE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")

# srun's name for the steps that it starts: the name for the whole job is there in its script, too,
# which runs once.
_RANKS = ("RANK", "SLURM_PROCID")
_WORLD_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

NO_LAUNCHER = "no launcher"


def queue_of(environment: Mapping[str, str], *, is_near: bool) -> LauncherNumber:
    """The queue that a trainer reads: its number among those of the node where the server is near
    (on this host, or in this pod), else among all."""
    # A server on this host serves this host's trainers; two nodes' first trainers would else ask
    # one server for one queue. A server elsewhere serves all trainers of the job.
    if is_near:
        found = _first(environment, ("FEEDER_QUEUE", *_ON_NODE, *_IN_ALL))
    else:
        found = _first(environment, ("FEEDER_QUEUE", *_IN_ALL, *_POD, *_ON_NODE))
        found = found or _ordinal(environment)
    return found or _nobody(0)


def node_of(environment: Mapping[str, str]) -> LauncherNumber:
    """The number of this node, or of this pod."""
    return _first(environment, ("FEEDER_NODE", *_NODE)) or _ordinal(environment) or _nobody(0)


def num_nodes(environment: Mapping[str, str]) -> LauncherNumber:
    """How many nodes, or pods, there are; Kubernetes does not tell."""
    return _first(environment, ("FEEDER_NUM_NODES", *_NUM_NODES)) or _nobody(1)


def rank_of(environment: Mapping[str, str]) -> tuple[int, int]:
    """The rank of this process among all trainers of its job, and their number; 0 of 1 where no
    launcher tells both."""
    for rank, size in zip(_RANKS, _WORLD_SIZES, strict=True):
        found = _first(environment, (rank,)), _first(environment, (size,))
        if found[0] is not None and found[1] is not None and found[0].number < found[1].number:
            return found[0].number, found[1].number
    return 0, 1


def is_this_host(host: str) -> bool:
    """Whether a host's name is this one's."""
    return host in ("localhost", os.uname().nodename.lower())


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> LauncherNumber | None:
    """The first that is a number. Raises `ConfigError` where feeder's own is none."""
    for name in names:
        text = environment.get(name, "")
        if text.isascii() and text.isdigit():
            return LauncherNumber(int(text), name)
        if text and name.startswith("FEEDER_"):
            raise ConfigError(f"{name} is {text!r}, expected a whole number >= 0")
    return None


def _ordinal(environment: Mapping[str, str]) -> LauncherNumber | None:
    """The number that the name of a StatefulSet's pod ends in. A Deployment's ends in five random
    letters and digits."""
    # Outside of Kubernetes a host's name may end in a number that means something else.
    number = re.search(r"-(\d{1,4})$", environment.get("HOSTNAME", ""))
    if number is None or "KUBERNETES_SERVICE_HOST" not in environment:
        return None
    return LauncherNumber(int(number[1]), "HOSTNAME")


def _nobody(number: int) -> LauncherNumber:
    return LauncherNumber(number, NO_LAUNCHER)
