"""A run of one loader, in a process of its own, which may kill itself.

It is told its `Task` as JSON, and writes a line of JSON for all that happens: a batch, an error,
what is left after the end.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from exactness import left
from exactness.loader import FAULT, Base, Given, found

IDLE_S = 1.0
"""Workers have filled all their queues by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a run does. Batches are counted from the beginning of the run."""

    loader: str
    out: str
    given: dict[str, Any]
    other: str = ""
    """The folder of a second loader, which is read in turns with the first; "" for none."""
    load: str = ""
    save: str = ""
    start: int = 0
    """The epoch to begin with, which a trainer has kept beside the state."""
    epochs: int = 2
    save_after: int = -1
    idle: bool = False
    """Let workers read as far ahead as they can before the state is taken."""
    save_behind: bool = False
    """Save after the first epoch's loop, and not in it."""
    kill_after: int = -1
    leave_after: int = -1
    """Leave the first epoch behind that batch."""


class Run:
    """The trainer."""

    def __init__(self, task: Task, out: IO[str]) -> None:
        self._task, self._out = task, out
        self._batches = 0
        self._loader = self._make(task.given)
        self._second = self._make({**task.given, "folder": task.other}) if task.other else None

    def _make(self, given: dict[str, Any]) -> Base:
        return found(self._task.loader)(Given(**{**given, "folder": Path(given["folder"])}))

    def go(self) -> None:
        """Read the epochs, and close."""
        task = self._task
        if task.load:
            self._loader.load(Path(task.load))
        self._may_save_and_die()
        for epoch in range(task.start, task.epochs):
            self._read(epoch)
            if task.save_behind and epoch == task.start:
                self._loader.save(Path(task.save))
                self._die()
        self._tell_memory()
        for loader in filter(None, (self._loader, self._second)):
            loader.close()

    def _read(self, epoch: int) -> None:
        others = iter(self._second.epoch(epoch) if self._second else ())
        for batch in self._loader.epoch(epoch):
            self._tell(batch=[int(number) for number in batch], epoch=epoch)
            for other in others:
                self._tell(other=[int(number) for number in other], epoch=epoch)
                break
            self._batches += 1
            self._may_save_and_die()
            if self._batches == self._task.leave_after:
                break

    def _may_save_and_die(self) -> None:
        if self._batches == self._task.save_after:
            if self._task.idle:
                threading.Event().wait(IDLE_S)
            self._loader.save(Path(self._task.save))
        if self._batches == self._task.kill_after:
            self._die()

    def _die(self) -> None:
        self._tell_memory()
        os.kill(os.getpid(), signal.SIGKILL)

    def _tell_memory(self) -> None:
        """Names in shared memory that are to be gone when the run has ended."""
        run = {os.getpid(), *left.processes(os.getpid())}
        self._tell(memory=sorted(left.held(run)))

    def _tell(self, **what: Any) -> None:
        print(json.dumps(what), file=self._out, flush=True)


def run(task: Task) -> None:
    """Do it. Whatever is raised is told, and no more than that."""
    if FAULT in os.environ:
        os.environ[FAULT] = json.dumps({**json.loads(os.environ[FAULT]), "trainer": os.getpid()})
    with Path(task.out).open("a") as out:
        try:
            before = threading.enumerate()
            made = Run(task, out)
            made.go()
            del made
            gc.collect()
            there = left.settled(lambda: left.processes(os.getpid()))
            told = {"processes": len(there), "threads": left.threads(before)}
            print(json.dumps(told), file=out, flush=True)
        except BaseException as error:
            failed = {"error": type(error).__name__, "text": str(error)}
            print(json.dumps(failed), file=out, flush=True)
            raise
