"""A loader for `scripts/bench exactness` that is exact, or has the fault that `PRETEND` names."""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from exactness.loader import Base, Given, read

Position = tuple[int, int]
"""An epoch, and how many of its batches were given."""


class Loader(Base):
    name = "pretender"
    package = "numpy"
    state = True

    def __init__(self, given: Given) -> None:
        self.given, self.position, self.loaded = given, (0, 0), False
        if os.environ["PRETEND"] == "process":
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        if os.environ["PRETEND"] == "thread":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if os.environ["PRETEND"] == "memory":
            with Path(f"/dev/shm/pretender-{os.getpid()}").open("w+b") as made:
                made.truncate(1)
                self.memory = mmap.mmap(made.fileno(), 1)

    def epoch(self, number: int) -> Iterator[list[int]]:
        numbers = list(range(self.given.records))
        random.Random(self.given.seed + number).shuffle(numbers)
        skip = self.position[1] if self.loaded and self.position[0] == number else 0
        if self.loaded:
            skip, numbers = self._pretended(skip, numbers)
        self.loaded = False
        size = self.given.batch_size
        for i in range(skip * size, len(numbers), size):
            self.position = number, i // size + 1
            yield [read(record) for record in numbers[i : i + size]]

    def _pretended(self, skip: int, numbers: list[int]) -> tuple[int, list[int]]:
        match os.environ["PRETEND"]:
            case "loses":
                return skip + 1, numbers
            case "repeats":
                return skip - 1, numbers
            case "moves":
                return skip, [*numbers[:-9], numbers[-1], *numbers[-8:-1], numbers[-9]]
            case "hangs":
                threading.Event().wait()
            case "dies":
                os._exit(3)
            case "refuses":
                raise LookupError("no such place")
        return skip, numbers

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.position))

    def load(self, path: Path) -> None:
        epoch, batches = json.loads(path.read_text())
        self.position, self.loaded = (epoch, batches), True
