"""A disk whose power can go at any moment: it remembers what was asked of it, and what may be left.

The model is pessimistic. Of a file that was not synced since it was written there may be all, the
beginning, zeros, or nothing. Of the names that were made and taken away in a folder since it was
synced there may be the first few; each folder by itself, whatever happened in the others.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from dataclasses import dataclass, field
from typing import Any

ROOT = "/disk"


@dataclass(eq=False)
class Node:
    """A file, or a folder."""

    number: int
    is_folder: bool
    names: dict[str, Node] = field(default_factory=dict)
    data: bytes = b""


@dataclass(eq=False)
class Handle:
    node: Node
    at: int = 0


def _error(number: int, name: str) -> OSError:
    return OSError(number, os.strerror(number), name)


class Disk:
    """An `Fs` in memory that keeps a log of all that changed it."""

    def __init__(self, *, syncs_files: bool = True, syncs_folders: bool = True) -> None:
        self._numbers = itertools.count()
        self._handles: dict[int, Handle] = {}
        self._next_handle = itertools.count(3)
        self._syncs_files, self._syncs_folders = syncs_files, syncs_folders
        self.top = Node(next(self._numbers), True)
        """The folder `ROOT`."""
        self.log: list[tuple[Any, ...]] = []
        """What changed it, in order; and what the test noted."""
        self.locked: set[int] = set()

    def note(self, word: str, value: Any) -> None:
        """Put a word of the test's own into the log."""
        self.log.append((word, -1, value))

    # ---- folders

    def open_folder(self, path: str, inside: int | None = None) -> int:
        node = self.top if inside is None else self._find(path, inside)
        if inside is None and path not in (ROOT, os.path.dirname(ROOT)):
            raise _error(errno.ENOENT, path)
        if not node.is_folder:
            raise _error(errno.ENOTDIR, path)
        return self._handle(node)

    def make_folder(self, path: str, inside: int | None = None) -> None:
        if inside is None:
            raise _error(errno.EEXIST, path)
        self._add(inside, path, Node(next(self._numbers), True))

    def list(self, folder: int) -> list[tuple[str, bool]]:
        return [(name, node.is_folder) for name, node in self._node(folder).names.items()]

    # ---- files

    def open(self, name: str, folder: int, flags: int = os.O_RDONLY) -> int:
        names = self._node(folder).names
        if name in names and flags & os.O_EXCL:
            raise _error(errno.EEXIST, name)
        if name not in names and flags & os.O_CREAT:
            self._add(folder, name, Node(next(self._numbers), False))
        return self._handle(self._find(name, folder))

    def close(self, handle: int) -> None:
        del self._handles[handle]

    def size(self, file: int) -> int:
        return len(self._node(file).data)

    def read_into(self, file: int, buffer: memoryview, at: int) -> int:
        data = self._node(file).data[at : at + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def write(self, file: int, data: memoryview) -> int:
        handle = self._handles[file]
        node, old = handle.node, handle.node.data
        node.data = old[: handle.at] + bytes(data) + old[handle.at + len(data) :]
        handle.at += len(data)
        self.log.append(("data", node.number, node.data))
        return len(data)

    def fsync(self, handle: int) -> None:
        node = self._node(handle)
        if self._syncs_folders if node.is_folder else self._syncs_files:
            self.log.append(("sync", node.number, None))

    # ---- names

    def link(self, old: str, new: str, folder: int) -> None:
        self._add(folder, new, self._find(old, folder))

    def rename(self, old: str, new: str, folder: int) -> None:
        node = self._find(old, folder)
        names = self._node(folder).names
        del names[old]
        names[new] = node
        self.log.append(("names", self._node(folder).number, dict(names)))

    def unlink(self, name: str, folder: int) -> None:
        self._find(name, folder)
        names = self._node(folder).names
        del names[name]
        self.log.append(("names", self._node(folder).number, dict(names)))

    # ---- locks: one process lives at a time

    def lock(self, file: int) -> None:
        self.locked.add(self._node(file).number)

    def unlock(self, file: int) -> None:
        self.locked.discard(self._node(file).number)

    def _add(self, folder: int, name: str, node: Node) -> None:
        names = self._node(folder).names
        if name in names:
            raise _error(errno.EEXIST, name)
        names[name] = node
        self.log.append(("names", self._node(folder).number, dict(names)))

    def _find(self, name: str, folder: int) -> Node:
        names = self._node(folder).names
        if name not in names:
            raise _error(errno.ENOENT, name)
        return names[name]

    def _node(self, handle: int) -> Node:
        return self._handles[handle].node

    def _handle(self, node: Node) -> int:
        number = next(self._next_handle)
        self._handles[number] = Handle(node)
        return number

    # ---- what is left

    def after_power_loss(self, num_changes: int, dice: random.Random) -> Disk:
        """What may be left of it where the power went after so many changes."""
        names, data = self._left(num_changes, dice)
        left = Disk(syncs_files=self._syncs_files, syncs_folders=self._syncs_folders)
        made: dict[int, Node] = {self.top.number: left.top}

        def fill(number: int) -> None:
            for name, node in names.get(number, {}).items():
                if node.number not in made:
                    new = Node(next(left._numbers), node.is_folder)
                    made[node.number] = new
                    new.data = data.get(node.number, b"")
                    fill(node.number)
                made[number].names[name] = made[node.number]

        fill(self.top.number)
        left._settle(left.top)
        return left

    def _left(
        self, num_changes: int, dice: random.Random
    ) -> tuple[dict[int, dict[str, Node]], dict[int, bytes]]:
        """The names in each folder, and the bytes of each file."""
        changes: dict[int, list[Any]] = {}
        kinds: dict[int, str] = {}
        num_synced: dict[int, int] = {}
        for kind, number, value in self.log[:num_changes]:
            if kind == "sync":
                num_synced[number] = len(changes.get(number, ()))
            elif kind in ("names", "data"):
                changes.setdefault(number, []).append(value)
                kinds[number] = kind
        names, data = {}, {}
        for number, values in changes.items():
            synced = num_synced.get(number, 0)
            if kinds[number] == "names":
                num = dice.randint(synced, len(values))
                names[number] = values[num - 1] if num else {}
            elif synced == len(values):
                data[number] = values[-1]
            else:
                data[number] = _unsynced(values[-1], dice)
        return names, data

    def _settle(self, node: Node) -> None:
        """Write down what there is as what there always was."""
        self.log.append(("names" if node.is_folder else "data", node.number,
                         dict(node.names) if node.is_folder else node.data))  # fmt: skip
        self.log.append(("sync", node.number, None))
        for inner in node.names.values():
            self._settle(inner)


def _unsynced(data: bytes, dice: random.Random) -> bytes:
    match dice.randrange(4):
        case 0:
            return data
        case 1:
            return data[: dice.randrange(len(data) + 1)]
        case 2:
            return bytes(len(data))
        case _:
            return b""
