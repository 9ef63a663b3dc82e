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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
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


class LeftOut(Exception):
    """Why a loader cannot be asked."""


class Asker:
    """One loader, with its files in a folder of its own."""

    def __init__(self, loader: str, folder: Path, limit_s: float) -> None:
        self.loader, self._folder, self._limit_s = loader, folder, limit_s
        self.data, self.other = folder / "data", folder / "other"
        self._servers = [_Server(loader)]
        if "missing" in self._servers[0].told:
            raise LeftOut(f"{self._servers[0].told['missing']} is not installed")
        self.about = About(**self._servers[0].told)
        for made in (self.data, self.other):
            made.mkdir(parents=True)
            asked = self._asked({"prepare": str(made), "records": RECORDS}, {})
            if code := self._servers[0].ask(asked)()["code"]:
                raise LeftOut(f"it wrote no files, {code}: {_read(asked['log'])}")

    def close(self) -> None:
        """End what runs it."""
        for server in self._servers:
            server.close()

    @cached_property
    def reference(self) -> list[Batch]:
        """Two epochs without a fault."""
        ran = self.run()
        if ran.end != "done":
            raise LeftOut(f"it does not read: {ran.end} {ran.error} {ran.text}")
        return ran.batches

    def path(self) -> str:
        """One where nothing is yet."""
        return str(self._folder / uuid.uuid4().hex)

    def run(self, fault: Fault | None = None, **task: Any) -> Ran:
        """One rank."""
        return self.ranks(fault, [task])[0]

    def ranks(self, fault: Fault | None, tasks: list[dict[str, Any]]) -> list[Ran]:
        """As many ranks at once as there are tasks."""
        port = _free_port()
        while len(self._servers) < len(tasks):
            self._servers.append(_Server(self.loader))
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as scratch:
            started = []
            for rank, task in enumerate(tasks):
                env = {
                    "TMPDIR": scratch, "RANK": str(rank), "WORLD_SIZE": str(len(tasks)),
                    "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(tasks)),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    **(fault.tell() if fault else {}),
                }  # fmt: skip
                given = {"rank": rank, "ranks": len(tasks), **task.pop("given", {})}
                told = self._task(given, **task)
                asked = self._asked({"task": asdict(told)}, env)
                started.append((told, self._servers[rank].ask(asked), asked["log"]))
            return [_ran(Path(told.out), answer(), log) for told, answer, log in started]

    def _asked(self, what: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
        return {**what, "env": env, "log": f"{self.path()}.log", "limit_s": self._limit_s}

    def _task(self, given: dict[str, Any], **task: Any) -> Task:
        given = {
            "folder": str(self.data), "records": RECORDS, "batch_size": BATCH_SIZE,
            "workers": WORKERS, "seed": SEED, **given,
        }  # fmt: skip
        return Task(loader=self.loader, out=self.path(), given=given, **task)


class _Server:
    """`exactness.server`, a process."""

    def __init__(self, loader: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "exactness.server", loader], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.told = self._answer()

    def ask(self, asked: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Begin a run; returns what waits for its answer."""
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._answer

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LeftOut(f"{self._process.args!r} ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _ran(out: Path, answer: dict[str, Any], log: str) -> Ran:
    ends = {None: "hung", 0: "done", -signal.SIGKILL: "killed"}
    code = answer["code"]
    ran = Ran(end=ends.get(code, "died"), orphans=answer["orphans"])
    if ran.end == "died":
        ran.text = f"exit status {code}"
        print(_read(log), file=sys.stderr)
    for line in out.read_text().splitlines() if out.exists() else ():
        match json.loads(line):
            case {"batch": numbers, "epoch": epoch}:
                ran.batches.append((epoch, tuple(numbers)))
            case {"other": numbers, "epoch": epoch}:
                ran.other.append((epoch, tuple(numbers)))
            case {"memory": memory}:
                ran.memory = len(left.settled(partial(left.unused, memory)))
            case {"error": error, "text": text}:
                ran.end, ran.error, ran.text = "refused", error, text
            case {"processes": processes, "threads": threads}:
                ran.processes, ran.threads = processes, threads
    return ran


def _read(log: str) -> str:
    return Path(log).read_text(errors="replace")[-1000:]


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port
