"""`executor=`: the kinds of executors as users name them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feeder.errors import ConfigError
from feeder.workers.public import public


@public("feeder")
@dataclass(frozen=True)
class Threads:
    """Fetch functions run on `num` threads of this process. Frozen."""

    num: int
    """How many."""

    def __post_init__(self) -> None:
        _check_count("Threads", self.num)


@public("feeder")
@dataclass(frozen=True)
class Processes:
    """Fetch functions run in `num` processes of their own, which never import the script.

    Not one byte of the stream depends on their number, or on how often one of them dies. Frozen.
    """

    num: int
    """How many; streams that are called worker by worker use no more than they have workers."""
    preload: Sequence[str] = ()
    """Modules that are imported once, before the processes are forked: these begin with them."""
    max_calls: int | None = None
    """A process is replaced after so many calls, for libraries that leak; None is never."""
    env: Mapping[str, str] | None = None
    """Environment variables of the processes, beside those of this one. Libraries of linear algebra
    get one thread each (`OMP_NUM_THREADS=1` and the like) where nothing else is said."""
    seed_globals: bool = True
    """Whether `random`, `numpy.random` and `torch` are seeded before each call, from the feed's
    seed and the call: functions that draw from them then repeat, and resume."""

    def __post_init__(self) -> None:
        _check_count("Processes", self.num)
        if isinstance(self.preload, str) or not all(isinstance(name, str) for name in self.preload):
            raise ConfigError(f"preload is {self.preload!r}, expected a list of names of modules")
        object.__setattr__(self, "preload", tuple(self.preload))
        if self.max_calls is not None:
            _check_count("max_calls", self.max_calls, None)
        if not isinstance(self.seed_globals, bool):
            raise ConfigError(f"seed_globals is {self.seed_globals!r}, expected True or False")
        if not isinstance(self.variables, Mapping) or not all(
            isinstance(text, str) for pair in self.variables.items() for text in pair
        ):
            raise ConfigError(f"env is {self.env!r}, expected a dict of strings")

    @property
    def variables(self) -> Mapping[str, str]:
        """`env`, empty where none is given."""
        return {} if self.env is None else self.env


@public("feeder")
@dataclass(frozen=True)
class RayActors:
    """Fetch functions run in actors on a Ray cluster, to which this process is connected.

    Not one byte of the stream depends on how many there are, where they are, or how often one of
    them dies. Frozen.
    """

    num: int | tuple[int, int]
    """How many; or the fewest and the most, and the feed takes as many as its trainer needs."""
    num_cpus: float = 1
    """What each process takes of the cluster's CPUs."""
    resources: Mapping[str, float] | None = None
    """What else each actor takes of the cluster, such as ``{"disk": 1}``."""
    placement: str = "spread"
    """How they are placed: "spread" over the hosts of the cluster, or "pack", few hosts first."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's `runtime_env` of the actors: packages, files, environment variables."""
    seed_globals: bool = True
    """As `Processes` has it."""
    per_actor: int = 1
    """Processes of each actor: they take less memory than actors, and are replaced sooner."""

    def __post_init__(self) -> None:
        given = self.num
        ends = given if isinstance(given, tuple) else (given, given)
        if isinstance(given, list):  # A file has no tuples.
            ends = tuple(given)
        if len(ends) != 2 or not _are_counts(*ends):
            raise ConfigError(
                f"RayActors is {given!r}, expected a whole number from 1 to 4096, or two of them: "
                "the fewest and the most"
            )
        object.__setattr__(self, "num", given if isinstance(given, int) else ends)
        if type(self.num_cpus) not in (int, float) or not 0 <= self.num_cpus <= 4096:
            raise ConfigError(f"num_cpus is {self.num_cpus!r}, expected a number >= 0")
        asked = {} if self.resources is None else self.resources
        if not isinstance(asked, Mapping) or not all(
            isinstance(name, str) and type(num) in (int, float) and num >= 0
            for name, num in asked.items()
        ):
            raise ConfigError(f"resources is {self.resources!r}, expected a dict of numbers")
        if self.placement not in ("spread", "pack"):
            raise ConfigError(f"placement is {self.placement!r}, expected 'spread' or 'pack'")
        if self.runtime_env is not None and not isinstance(self.runtime_env, Mapping):
            raise ConfigError(f"runtime_env is {self.runtime_env!r}, expected a dict")
        if not isinstance(self.seed_globals, bool):
            raise ConfigError(f"seed_globals is {self.seed_globals!r}, expected True or False")
        _check_count("per_actor", self.per_actor, 256)

    @property
    def fewest(self) -> int:
        """How many there are at least."""
        return self.num if isinstance(self.num, int) else self.num[0]

    @property
    def most(self) -> int:
        """How many there are at most."""
        return self.num if isinstance(self.num, int) else self.num[1]


def _are_counts(*ends: Any) -> bool:
    return all(type(end) is int and 1 <= end <= 4096 for end in ends) and ends[0] <= ends[-1]


def _check_count(name: str, value: Any, most: int | None = 4096) -> None:
    if type(value) is not int or value < 1 or (most is not None and value > most):
        expected = "above 0" if most is None else f"from 1 to {most}"
        raise ConfigError(f"{name} is {value!r}, expected a whole number {expected}")


Executor = Threads | Processes | RayActors
"""What a user may ask for."""

Given = Executor | Mapping[str, Any] | str | None
"""What `executor=` may be: a text is "threads:N", "processes", "processes:N", "ray:N" or
"ray:MIN-MAX"; a mapping, as a table of a file is one, is ``{"processes": N, "preload": [...]}``,
with the fields of the class."""


def executor_of(given: Any) -> Executor | None:
    """The executor that a user names; None where nothing is said. Raises `ConfigError`."""
    if given is None or isinstance(given, Executor):
        return given
    table = _read(given) if isinstance(given, str) else given
    if isinstance(table, Mapping):
        kind = next((name for name in _KINDS if name in table), "")
        options = {name: value for name, value in table.items() if name != kind}
        if kind:
            known = [name for name in _KINDS[kind].__dataclass_fields__ if name != "num"]
            for name in options.keys() - set(known):
                raise ConfigError(
                    f"executor has the key {name!r}, expected one of {', '.join([kind, *known])}"
                )
            executor: Executor = _KINDS[kind](table[kind], **options)
            return executor
    raise ConfigError(
        f"executor is {given!r}, expected feeder.Threads(n), feeder.Processes(n), "
        "feeder.RayActors(n), 'processes', 'processes:4', 'ray:4', or 'ray:1-8'"
    )


def _read(text: str) -> dict[str, Any]:
    """What "processes:4" stands for; empty where it stands for nothing."""
    kind, colon, num = text.partition(":")
    ends = num.split("-") if kind == "ray" else [num]
    if kind not in _KINDS or not all(bool(colon) == end.isdecimal() for end in ends):
        return {}
    numbers = [int(end) for end in ends] if colon else [default_processes()]
    return {kind: numbers[0] if len(numbers) == 1 else tuple(numbers)}


_KINDS: dict[str, Any] = {"threads": Threads, "processes": Processes, "ray": RayActors}


def default_processes() -> int:
    """The cores that this process may use, shared out among the ranks of its host."""
    try:
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        ranks = 1
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def resolve(path: str) -> Any:
    """What ``"MODULE:ATTR"`` names. Raises `ConfigError`."""
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"fetch_fun is {path!r}, which cannot be had: {error}") from error
    return found
