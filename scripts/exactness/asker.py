"""Runs of one loader in processes of their own, each within a time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from exactness import left
from exactness.child import Task
from exactness.judge import Batch, Ran
from exactness.loader import Fault

RECORDS, BATCH_SIZE, WORKERS, SEED = 96, 8, 2, 7
BATCHES = RECORDS // BATCH_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a loader says of itself."""

    name: str
    version: str
    state: bool
    offers: list[str]


class Missing(Exception):
    """A package that is not installed."""


class Asker:
    """One loader, with its files in a folder of its own."""

    def __init__(self, loader: str, folder: Path, limit_s: float) -> None:
        self.loader, self._folder, self._limit_s = loader, folder, limit_s
        self.data, self.other = folder / "data", folder / "other"
        for made in (self.data, self.other):
            made.mkdir(parents=True)
        command = ["describe", loader, f"{self.data}:{self.other}", str(RECORDS)]
        done = subprocess.run(
            [sys.executable, "-m", "exactness.child", *command],
            capture_output=True, text=True, timeout=2 * limit_s,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{loader} cannot be asked:\n{done.stderr[-4000:]}")
        told = json.loads(done.stdout.splitlines()[-1])
        if "missing" in told:
            raise Missing(told["missing"])
        self.about = About(**told)

    @cached_property
    def reference(self) -> list[Batch]:
        """Two epochs without a fault."""
        ran = self.run()
        if ran.end != "done":
            raise RuntimeError(f"{self.loader} does not read: {ran.end} {ran.error} {ran.text}")
        return ran.batches

    def path(self) -> str:
        """One where nothing is yet."""
        return str(self._folder / uuid.uuid4().hex)

    def run(self, fault: Fault | None = None, **task: Any) -> Ran:
        """One rank."""
        return self.ranks(1, fault, [task])[0]

    def ranks(self, ranks: int, fault: Fault | None, tasks: list[dict[str, Any]]) -> list[Ran]:
        """As many ranks at once."""
        port = _free_port()
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            started = []
            for rank, task in enumerate(tasks):
                env = {
                    "TMPDIR": scratch, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    **(fault.tell() if fault else {}),
                }  # fmt: skip
                given = {"rank": rank, "ranks": ranks, **task.pop("given", {})}
                started.append(_Started(self._task(given, **task), env, self._limit_s))
            return [one.end() for one in started]

    def _task(self, given: dict[str, Any], **task: Any) -> Task:
        given = {
            "folder": str(self.data), "records": RECORDS, "batch_size": BATCH_SIZE,
            "workers": WORKERS, "seed": SEED, **given,
        }  # fmt: skip
        return Task(loader=self.loader, out=self.path(), given=given, **task)


class _Started:
    """A process that runs a task."""

    def __init__(self, task: Task, env: dict[str, str], limit_s: float) -> None:
        self._task, self._limit_s = task, limit_s
        self._mark, self._before = uuid.uuid4().hex, left.names()
        self._log = Path(f"{task.out}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "exactness.child", json.dumps(asdict(task))],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env, left.MARK: self._mark},
            )  # fmt: skip

    def end(self) -> Ran:
        """Wait for its end, and clear away what it leaves."""
        try:
            code: int | None = self._process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            code = None
            self._process.kill()
            self._process.wait()
        ran = self._told(code)
        # Only what it leaves by itself is a leak: here its trainer was not killed from outside.
        there = left.settled(lambda: left.processes(self._mark)) if code is not None else set()
        ran.orphans = len(there)
        for number in left.processes(self._mark):
            with _gone():
                os.kill(number, signal.SIGKILL)
        left.settled(lambda: left.processes(self._mark))
        remaining = left.unused(left.names() - self._before)
        ran.memory = len(remaining)
        return ran

    def _told(self, code: int | None) -> Ran:
        ran = Ran(end={None: "hung", 0: "done", -signal.SIGKILL: "killed"}.get(code, "died"))
        if ran.end == "died":
            ran.text = f"exit status {code}"
        out = Path(self._task.out)
        for line in out.read_text().splitlines() if out.exists() else ():
            match json.loads(line):
                case {"batch": numbers, "epoch": epoch}:
                    ran.batches.append((epoch, tuple(numbers)))
                case {"other": numbers, "epoch": epoch}:
                    ran.other.append((epoch, tuple(numbers)))
                case {"error": error, "text": text}:
                    ran.end, ran.error, ran.text = "refused", error, text
                case {"processes": processes, "threads": threads}:
                    ran.processes, ran.threads = processes, threads
        return ran


@contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        pass


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port
