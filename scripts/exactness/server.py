"""Starts the runs of one loader: a fork for each, of a process that has imported it and no more.

It reads a line of JSON for each run and answers with one: how the run ended, and what was left.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exactness import left
from exactness.child import Task, run
from exactness.loader import found

_BECOME_REAPER = 36
"""PR_SET_CHILD_SUBREAPER: processes whose parents are gone become children of this one."""


def _end(trainer: int, limit_s: float) -> dict[str, Any]:
    """Wait for the end of a run, clear away what is left of it, and say what that was."""
    handle = os.pidfd_open(trainer)
    is_hung = not select.select([handle], [], [], limit_s)[0]
    os.close(handle)
    if is_hung:
        os.kill(trainer, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1])
    orphans = set() if is_hung else left.settled(_below)
    for number in left.settled(_killed) and _below():
        raise RuntimeError(f"process {number} cannot be killed")
    return {"code": None if is_hung else code, "orphans": len(orphans)}


def _below() -> set[int]:
    """Processes of the run that are left."""
    _reap()
    return left.processes(os.getpid())


def _killed() -> set[int]:
    for number in (there := _below()):
        os.kill(number, signal.SIGKILL)
    return there


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _forked(asked: dict[str, Any], work: Callable[[dict[str, Any]], None]) -> int:
    """Do the work in a fork, with variables and a log of its own; returns its number."""
    if trainer := os.fork():
        return trainer
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(asked["env"])
    try:
        work(asked)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def main(name: str) -> None:
    """Answer until nobody asks."""
    try:
        loader = found(name)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": error.name}), flush=True)
        return
    ctypes.CDLL(None).prctl(_BECOME_REAPER, 1, 0, 0, 0)
    version = importlib.metadata.version(loader.package)
    print(json.dumps({
        "name": loader.name, "version": f"{loader.package} {version}", "state": loader.state,
        "offers": sorted(loader.offers),
    }), flush=True)  # fmt: skip

    def work(asked: dict[str, Any]) -> None:
        if "prepare" in asked:
            loader.prepare(Path(asked["prepare"]), range(asked["records"]))
        else:
            run(Task(**asked["task"]))

    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(_end(_forked(asked, work), asked["limit_s"])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
