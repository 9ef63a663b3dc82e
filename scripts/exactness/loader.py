"""What a loader is asked to do, and the records that it reads.

A file of `exactness/loaders`, or any module, has a class `Loader` derived from `Base`. Records are
numbers; whoever reads one calls `read` in its workers, which is where faults are planted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FAULT = "EXACTNESS_FAULT"
"""The variable that tells workers of a fault, whatever starts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """How a loader reads: all of it is the same after a resume, but what a question changes."""

    folder: Path
    """What `prepare` wrote."""
    records: int = 96
    batch_size: int = 8
    workers: int = 2
    seed: int = 7
    rank: int = 0
    ranks: int = 1
    skip: bool = False
    """Leave out what cannot be read; asked of loaders that offer it."""


class Base:
    """One loader. A run makes one, loads a state if there is one, and reads some epochs."""

    name: str
    package: str
    """The distribution whose version is told."""
    state = False
    """Whether its documents offer a state in the middle of an epoch: `save` and `load`."""
    offers: frozenset[str] = frozenset()
    """What its documents offer, too: "skip" leaves out records that fail, with "ranks" another
    number of ranks can load a state."""

    def __init__(self, given: Given) -> None:
        raise NotImplementedError

    @staticmethod
    def prepare(folder: Path, numbers: range) -> None:
        """Write these records, if it reads files of its own."""

    def epoch(self, number: int) -> Iterator[Iterable[int]]:
        """The batches of an epoch, or after `load` its rest."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write the state after the batch that was given last."""
        raise NotImplementedError

    def load(self, path: Path) -> None:
        """Go on from there."""
        raise NotImplementedError

    def close(self) -> None:
        """End what its documents say is to be ended."""


class Records:
    """The records as a map-style data set."""

    def __init__(self, given: Given) -> None:
        self.count = given.records

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        return read(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one record."""

    kind: str
    """"corrupt": cannot be read. "once": cannot be read the first time. "slow": takes `SLOW_S`.
    "kill": the process that reads it is killed, the first time, unless it is the trainer."""
    at: int
    once: str
    """A file that is made when it happens."""
    trainer: int = 0

    def tell(self) -> dict[str, str]:
        """Variables for the processes that are to know it."""
        return {FAULT: json.dumps({name: getattr(self, name) for name in self.__slots__})}


SLOW_S = 2.0


def read(number: int) -> int:
    """Read a record."""
    number = int(number)
    if FAULT in os.environ:
        fault = Fault(**json.loads(os.environ[FAULT]))
        if fault.at == number:
            _happen(fault)
    return number


def _happen(fault: Fault) -> None:
    if fault.kind == "slow":
        threading.Event().wait(SLOW_S)
    elif fault.kind == "corrupt" or (fault.kind == "once" and _is_first(fault)):
        raise ValueError(f"record {fault.at} is corrupt")
    elif fault.kind == "kill" and os.getpid() != fault.trainer and _is_first(fault):
        os.kill(os.getpid(), signal.SIGKILL)


def _is_first(fault: Fault) -> bool:
    try:
        Path(fault.once).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def found(name: str) -> type[Base]:
    """The loader of a file of `exactness/loaders`, or of a module of that name."""
    inner = f"exactness.loaders.{name}"
    is_inner = "." not in name and importlib.util.find_spec(inner) is not None
    made: type[Base] = importlib.import_module(inner if is_inner else name).Loader
    return made
