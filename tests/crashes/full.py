"""Fills a disk with checkpoints, in a process of its own: `python -m crashes.full FOLDER`.

Where this process may mount, the disk is a file system in memory of 64 KiB, which nobody else sees
and which goes with the process. Elsewhere no file may grow beyond 16 KiB. It prints what it found.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import sys
from pathlib import Path
from typing import Any

import feeder
from crashes.positions import snapshot_at, step_of
from feeder.checkpoint.store import CheckpointStore
from small import Pure, ids, make

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14


def fill(folder: Path) -> str:
    """Make a small disk of a folder; return what kind it is."""
    if _mount(folder):
        return "full"
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, 16_384))
    return "limited"


def _mount(folder: Path) -> bool:
    libc = ctypes.CDLL(None)
    if libc.unshare(_NEW_MOUNTS) and libc.unshare(_NEW_MOUNTS | _NEW_USER):
        return False
    if libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None):
        return False
    return not libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=64k,mode=700")


def save_until_full(folder: Path) -> dict[str, Any]:
    """Save larger and larger snapshots until no more go in."""
    saved, error = 0, ""
    with CheckpointStore(folder) as store:
        while not error and saved < 100:
            try:
                store.save(snapshot_at(saved + 1, 2_000 * (saved + 1)))
                saved += 1
            except feeder.CheckpointError as caught:
                error = str(caught)
        loaded = step_of(store.load())
    return {"saved": saved, "loaded": loaded, "error": error, "partials": _partials(folder)}


def feed_on(folder: Path) -> dict[str, Any]:
    """Feed with checkpoints that do not fit."""
    with make(Pure(num_calls=33)) as undisturbed:
        wanted = ids(undisturbed["train"])

    class Large(CheckpointStore):
        """A store whose checkpoints are too large for the disk."""

        def put(self, name: str, entries: Any, **kwargs: Any) -> Any:
            return super().put(name, {**entries, "large": bytes(70_000)}, **kwargs)

    store = Large(folder, writer="large")
    coordinator = feeder.Coordinator(feeder.Checkpointing(store, every_batches=5))
    with make(Pure(num_calls=33), coordinator=coordinator):
        fed = ids(coordinator["train"])
    stats = coordinator.checkpoint_stats()
    return {
        "equal": fed == wanted,
        "failed_saves": stats["failed_saves"],
        "saves": stats["saves"],
        "partials_of_large": _partials(folder),
        "loaded_after": step_of(CheckpointStore(folder).load()),
    }


def _partials(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".partial")]


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    place = Path(sys.argv[1])
    found = {"disk": fill(place), **save_until_full(place), **feed_on(place)}
    print(json.dumps(found))
