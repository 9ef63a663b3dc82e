"""Kills processes that fetch, those that fork them, and the trainers that have started them.

A leg is one stream: a trainer runs it on processes, and kills some of these after each batch; it is
killed itself at a random batch, and another one goes on from what it has stored, on another number
of processes. What they have got together is compared with the stream of a naive feeder; of a
trainer that was killed no process, shared memory or temporary file is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from chaos.crew import Wrong
from chaos.executor_trainer import Store
from chaos.processes import ROOT, Hang
from chaos.streams import digest
from feeds import expected
from fetches import FORMS, PATTERNS, make_fetch
from lineage import ends_of, shared_memory

LIMIT_S = 90.0
"""How long a trainer may take."""
_MARK = "FEEDER_CHAOS_MARK"


class Trainer:
    """A trainer in a process of its own, with all that it has started."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        env = {
            **os.environ, _MARK: self._mark, "TMPDIR": str(self.temporary),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        }  # fmt: skip
        self.log = (folder / "log").open("ab")
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "chaos.executor_trainer", str(folder), json.dumps(settings)],
            env=env, stdout=subprocess.PIPE, stderr=self.log, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, until: int, on_batch: Callable[[int], None]) -> tuple[int, int]:
        """Let it come to a batch, and kill it there; or to its end. Returns the processes that it
        has killed, and its exit status."""
        kills, output = 0, self._popen.stdout
        assert output is not None
        for line in output:
            # Ray prints what it likes there.
            words = line.split()
            if len(words) != 2 or not all(map(str.isdecimal, words)):
                continue
            num, kills = map(int, words)
            on_batch(num)
            if num >= until:
                self._popen.kill()
                break
        output.close()
        try:
            status = self._popen.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            raise Hang(f"the trainer has not ended within {LIMIT_S} s") from None
        finally:
            self.log.close()
        return kills, status

    def check_nothing_is_left(self, shared: set[str]) -> None:
        """Raise `Wrong` where something of it lives on."""
        with ends_of(self._processes()) as ends:
            try:
                ends.wait()
            except AssertionError as error:
                raise Wrong(f"left behind: {error}") from None
        left = sorted({*shared_memory(), *os.listdir(self.temporary)} - shared)
        if left:
            raise Wrong(f"left behind: {left}")

    def _processes(self) -> list[int]:
        """All processes that have its mark in their environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{_MARK}={self._mark}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


class Legs:
    """Streams, one after the other, and what was killed in them."""

    _run_on: ClassVar[dict[str, Any]] = {}
    """What trainers are told beside the stream."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.num_legs = self.num_trainers = self.num_processes = 0

    @property
    def num_kills(self) -> int:
        """SIGKILLs in all."""
        return self.num_trainers + self.num_processes

    def told(self) -> str:
        """What was killed."""
        return f"{self.num_processes} processes and {self.num_trainers} trainers"

    def _on_batch(self, num: int) -> None:
        """A trainer has come to a batch."""

    def _check(self, trainer: Trainer, shared: set[str]) -> None:
        """Raise `Wrong` where something of a trainer lives on."""
        trainer.check_nothing_is_left(shared)

    def run_leg(self) -> None:
        """Run the next leg. Raises `Hang` and `Wrong`."""
        dice = self._dice
        form = list(FORMS)[self.num_legs % len(FORMS)]
        self.num_legs += 1
        settings: dict[str, Any] = {
            "epochs": 6, "last_batch": dice.choice(("keep", "drop", "pad", "carry"))
        }  # fmt: skip
        pattern = dice.choice(["single", "small", "ragged", "gaps"])
        assert pattern in PATTERNS
        wanted = [
            digest(record).hex()
            for record in expected(make_fetch(form, pattern), pure=form == "pure", **settings)
        ]
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        told = f"leg {self.num_legs}: {form} {pattern} {settings}"
        try:
            self._run(folder, form, pattern, settings, len(wanted))
            got = Store(folder).digests
            if got != wanted:
                at = next((i for i, one in enumerate(got) if one not in wanted[i : i + 1]), 0)
                raise Wrong(f"batch {at} differs; {len(got)} batches, expected {len(wanted)}")
        except (Hang, Wrong) as error:
            raise type(error)(f"{told}: {error}; its folder is {folder}") from None
        shutil.rmtree(folder)

    def _run(
        self, folder: Path, form: str, pattern: str, settings: dict[str, Any], num_batches: int
    ) -> None:
        dice, shared = self._dice, shared_memory()
        while (at := len(Store(folder).digests)) < num_batches:
            # Replay has no retries: a call whose process was killed three times is an error.
            every = 8 if form == "replay" else dice.choice((1, 2, 3))
            plan = {
                "form": form, "pattern": pattern, "processes": dice.choice((1, 2, 3, 5)),
                "seed": dice.random(), "every": every, "most": dice.choice((1, 1, 2, 5)),
                "max_buffered_batches": 2, **settings, **self._run_on,
            }  # fmt: skip
            until = at + dice.randint(1, max(2, num_batches // 2))
            trainer = Trainer(folder, plan)
            kills, status = trainer.run(until, self._on_batch)
            self.num_processes += kills
            self.num_trainers += status == -signal.SIGKILL
            if status not in (0, -signal.SIGKILL):
                lines = (folder / "log").read_text().splitlines()[-12:]
                raise Wrong("the trainer failed:\n" + "\n".join(lines))
            self._check(trainer, shared)
            if status == 0 and len(Store(folder).digests) < num_batches:
                raise Wrong("the stream ended before its end")


def run_legs(legs: Legs, num_kills: int) -> int:
    """Run legs until so many have been killed; returns the exit status."""
    status = 0
    try:
        while legs.num_kills < num_kills:
            legs.run_leg()
    except (Hang, Wrong) as error:
        print(f"FAILED, {type(error).__name__}: {error}", flush=True)
        status = 1
    print(f"{legs.told()} killed in {legs.num_legs} legs, {status} failures", flush=True)
    return status
