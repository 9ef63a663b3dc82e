"""The disk of one trainer, with the real checkpoint store on it; what the store gives back is
checked here.

The disk is that of `crashes.disk`: after a loss of power it has what was synced, and of all else
what it may have. It may also be full or slow, take a write in pieces, and damage a file.
"""

from __future__ import annotations

import errno
import os
import random
from typing import Any

from crashes.disk import ROOT, Disk
from feeder.checkpoint.format import MAGIC
from feeder.checkpoint.store import CheckpointStore
from feeder.errors import CheckpointError, FeedError
from feeder.state.snapshot import Snapshot
from simulation.world import Violation

KEEP = 3
"""Checkpoints that a trainer keeps."""


class KilledError(BaseException):
    """The process dies within a call to the system. A `BaseException`: nothing may catch it."""


class ProcessFs:
    """A disk as one process sees it: an `Fs`. After `calls_left` calls the process is dead."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.calls_left: int | None = None

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._host.disk, name)

        def called(*args: Any) -> Any:
            self._live()
            return call(*args)

        return called

    def write(self, file: int, data: memoryview) -> int:
        """Write all, or a part of it, or as much as there is room for."""
        self._live()
        host = self._host
        part = data[: len(data) * host.draws.randrange(1, 4) // 3] or data
        if host.is_full:
            host.disk.write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return host.disk.write(file, part)

    def _live(self) -> None:
        if self.calls_left is not None:
            if self.calls_left <= 0:
                raise KilledError
            self.calls_left -= 1


class Saved:
    """A position that was given to a store."""

    def __init__(self, position: bytes) -> None:
        self.position = position
        self.name: str | None = None
        """The checkpoint, once the store has said that it is there."""
        self.is_damaged = False
        """Whether the disk has damaged it since."""


class Host:
    """A trainer's disk. It outlives the trainer's processes."""

    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.disk = Disk()
        self.is_full = False
        self.slow_s = 0.0
        """Seconds that a save takes, at the most."""
        self._saved: list[Saved] = []
        self._num_runs = 0

    def begin_run(self, position: bytes | None) -> None:
        """All trainers begin anew: this one saves to a sequence of its own from here on, in which
        its position is the first."""
        self._num_runs += 1
        self._saved, self.is_full = [], False
        if position is not None:
            self.save(self.open(), position)

    def open(self) -> tuple[CheckpointStore, ProcessFs]:
        """The store, as a process opens it."""
        fs = ProcessFs(self)
        store = CheckpointStore(ROOT, keep=KEEP, writer=f"run{self._num_runs}", fs=fs)
        return store, fs

    def save(self, opened: tuple[CheckpointStore, ProcessFs], position: bytes) -> Saved | None:
        """Save a position; None where the disk is full. Raises `KilledError`."""
        store, _ = opened
        saved = Saved(position)
        self._saved.append(saved)
        try:
            name = store.save(Snapshot.from_bytes(position))
        except CheckpointError as error:
            if self.is_full and "free some space" in str(error):
                return None
            raise Violation(f"disk: a position could not be saved: {error}") from error
        saved.name = name
        return saved

    def newest(self) -> bytes | None:
        """The position that a new process is given by the store; None where it has none."""
        store, _ = self.open()
        sure = [saved for saved in self._saved if saved.name is not None]
        # Older ones are removed.
        whole = [saved for saved in sure[-KEEP:] if not saved.is_damaged]
        try:
            position = None if store.is_empty() else bytes(store.find()[1])
        except CheckpointError as error:
            if whole or not any(saved.is_damaged for saved in sure):
                raise Violation(f"disk: {len(whole)} positions were saved: {error}") from error
            return None
        except FeedError as error:
            raise Violation(f"disk: a torn position comes back: {error!r}") from error
        known = [saved.position for saved in self._saved]
        if position is None:
            if sure:
                raise Violation(f"disk: {len(sure)} positions were saved, and none is there")
        elif position not in known:
            raise Violation("disk: a position comes back that nobody has saved")
        elif whole and known.index(whole[-1].position) > _last(known, position):
            raise Violation("disk: a position comes back that is older than one that was saved")
        return position

    # ---- what happens to it

    def lose_power(self) -> None:
        """What was not synced may be lost."""
        self.disk = self.disk.after_power_loss(len(self.disk.log), self.draws)

    def damage(self) -> None:
        """The newest checkpoint is damaged, and keeps its name."""
        names = self.disk.top.names
        saved = next((one for one in reversed(self._saved) if one.name in names), None)
        if saved is None or saved.is_damaged:
            return
        saved.is_damaged = True
        node = names[str(saved.name)]
        num, dice = len(node.data), self.draws
        at = dice.randrange(len(MAGIC), num)
        flipped = bytes([node.data[at] ^ 1 << dice.randrange(8)])
        node.data = dice.choice((
            node.data[:at], bytes(num), b"", node.data[:at] + bytes(num - at),
            node.data[:at] + flipped + node.data[at + 1 :],
        ))  # fmt: skip
        self.disk.log += [("data", node.number, node.data), ("sync", node.number, None)]


def _last(known: list[bytes], position: bytes) -> int:
    return len(known) - 1 - known[::-1].index(position)
