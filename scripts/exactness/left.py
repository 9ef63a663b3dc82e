"""What a run has left behind: processes, threads, and names in shared memory. Reads /proc."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

ENDED_S = 5.0
"""How long something may take to end by itself."""
SHARED = Path("/dev/shm")
STANDARD = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python's own helpers, which end with their process."""

_T = TypeVar("_T", bound=Collection[object])


def processes(ancestor: int) -> set[int]:
    """Living processes below one, but for Python's own helpers."""
    below: dict[int, list[int]] = {}
    helpers: set[int] = set()
    for path in Path("/proc").glob("[0-9]*"):
        # The name of a process may have any characters but it ends with the last parenthesis.
        state, parent = _read(path / "stat").rpartition(b")")[2].split()[:2] or (b"Z", b"0")
        if state != b"Z":
            below.setdefault(int(parent), []).append(int(path.name))
        if any(name.encode() in _read(path / "cmdline") for name in STANDARD):
            helpers.add(int(path.name))  # Its children are workers, all the same.
    found, ahead = set[int](), [ancestor]
    while ahead:
        children = below.get(ahead.pop(), [])
        found.update(children)
        ahead.extend(children)
    return found - helpers


def threads(before: Collection[threading.Thread]) -> list[str]:
    """Threads that have not ended."""
    since = [thread for thread in threading.enumerate() if thread not in before]
    for thread in since:
        thread.join(ENDED_S)
    return [thread.name for thread in since if thread.is_alive()]


def held(numbers: Collection[int]) -> set[str]:
    """Names in shared memory that these processes have mapped or open."""
    found: set[str] = set()
    for number in numbers:
        process = Path(f"/proc/{number}")
        maps = _read(process / "maps").decode(errors="replace")
        found.update(re.findall(rf"{SHARED}/([^\s/]+)", maps))
        try:
            opened = [os.readlink(path) for path in (process / "fd").iterdir()]
        except OSError:
            continue  # It has ended.
        found.update(Path(path).name for path in opened if path.startswith(f"{SHARED}/"))
    return {name for name in found if (SHARED / name).exists()}


def unused(names: Collection[str]) -> set[str]:
    """Those of these names that are there, and that no process has mapped or open."""
    there = {name for name in names if (SHARED / name).exists()}
    everyone = [int(path.name) for path in Path("/proc").glob("[0-9]*")] if there else []
    return there - held(everyone)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # It has ended.


def settled(look: Callable[[], _T]) -> _T:
    """What is still there after some time, or nothing as soon as there is nothing."""
    until = time.monotonic() + ENDED_S
    while (there := look()) and time.monotonic() < until:
        threading.Event().wait(0.05)  # Nobody tells of the end of a process that is not a child.
    return there
