"""What a trainer leaves on disk: records of the batches it saw, and checkpoints.

Nothing is ever changed in place: a process that is killed leaves records up to some batch, and
whole checkpoints.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_RECORD = struct.Struct("<q16s")
_CHECKPOINT = struct.Struct("<q16s")


class Checkpoint(NamedTuple):
    """Where a trainer goes on: its model is the hash chain."""

    num_batches: int
    chain: bytes
    state: bytes
    """What its consumer's `state_dict` or `snapshot` gave; empty at the very start."""


class Ledger:
    """The files of one queue's trainers in a folder; each process writes records of its own."""

    def __init__(self, folder: Path, queue: int) -> None:
        self.folder = folder
        self.queue = queue

    def open_records(self) -> int:
        """Open a file for the records of this process; returns its descriptor."""
        number = len(list(self.folder.glob(f"{self.queue}-*.records")))
        path = self.folder / f"{self.queue}-{number:04}.records"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    @staticmethod
    def write(descriptor: int, step: int, digest: bytes) -> None:
        """Write a record down: the step of a batch, and its digest."""
        os.write(descriptor, _RECORD.pack(step, digest))

    def records(self) -> Iterator[tuple[str, list[tuple[int, bytes]]]]:
        """Yield the records of each process, with the file's name."""
        for path in sorted(self.folder.glob(f"{self.queue}-*.records")):
            yield path.name, list(_RECORD.iter_unpack(path.read_bytes()))

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, whole or not at all."""
        path = self._path(checkpoint.num_batches)
        unfinished = path.with_suffix(f".{os.getpid()}")
        head = _CHECKPOINT.pack(checkpoint.num_batches, checkpoint.chain)
        unfinished.write_bytes(head + checkpoint.state)
        unfinished.rename(path)

    def rounds(self) -> set[int]:
        """Return the numbers of batches after which there are checkpoints."""
        return {0} | {int(path.stem.split("@")[1]) for path in self.folder.glob(self._glob)}

    def load(self, num_batches: int | None = None) -> Checkpoint:
        """Return the checkpoint after so many batches, or the newest."""
        number = max(self.rounds()) if num_batches is None else num_batches
        if not number:
            return Checkpoint(0, bytes(16), b"")
        data = self._path(number).read_bytes()
        return Checkpoint(*_CHECKPOINT.unpack_from(data), data[_CHECKPOINT.size :])

    def forget_after(self, num_batches: int) -> None:
        """Remove the checkpoints of a time that is rolled back."""
        for number in self.rounds():
            if number > num_batches:
                self._path(number).unlink()

    @property
    def _glob(self) -> str:
        return f"{self.queue}@*.checkpoint"

    def _path(self, num_batches: int) -> Path:
        return self.folder / f"{self.queue}@{num_batches:06}.checkpoint"
