"""The folder of a cache: blocks as files, and a table of them, for all processes of a host.

A block is a file that is whole or not there: it is written under another name, on which its writer
holds a lock (`flock`), and renamed. It begins with its size and with a checksum of its key and its
bytes, which each process compares when it reads a block first: a rename outlives a kill, and need
not outlive a loss of power.

What bounds the folder is a table (SQLite, of Python's own library: transactions that hold whatever
process is killed, and a lock between processes that has a time limit). Room is taken there before a
byte is written, and given back after the file is gone, so that the files are never larger than the
table says. A row of which the writer was killed is known by its lock, which nobody holds any more.
The table is a book of the files and no more: if it is lost it is made of them again.

Which block goes first is said by its *due time*, when it is needed next as far as anybody knows:
blocks that nobody needs, then those whose time went by long ago, since who wanted them is gone,
then the one that is needed last. A block never goes for one that is needed later.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import math
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from enum import Enum
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import xxhash

from feeder.workers.errors import ConfigError

if TYPE_CHECKING:
    from sqlite3 import Connection

NEVER = 1e18
"""The due time of a block that nobody needs."""

_STALE_S = 600.0
"""A block whose due time went by so many seconds ago is one that nobody waits for any more."""
# A feed says anew when its blocks are needed, at the end of each step that uses them (2026-11-28).

_LOCKED_S = 5.0
"""So long a process waits for the table; then it goes on without."""

_MARKER, _MARK = "feeder-cache", b"A cache of feeder's: `feeder cache --help`.\n"
_TABLE, _BLOCKS, INDEXES = "table.sqlite", "blocks", "indexes"
_OURS = {_TABLE, f"{_TABLE}-journal", _BLOCKS, INDEXES}
_LOST_AND_FOUND = "lost+found"
"""The folder that file systems make at their root."""
_COLUMNS = [("key",), ("size",), ("due",), ("name",), ("partial",)]
_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"feedblk1"
_PAGE = 4096
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS blocks (key TEXT PRIMARY KEY, size INTEGER NOT NULL, "
    "due REAL NOT NULL, name TEXT NOT NULL, partial TEXT) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS by_due ON blocks (due)",
    "CREATE INDEX IF NOT EXISTS being_written ON blocks (partial) WHERE partial IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS room (used INTEGER NOT NULL)",
    "CREATE TRIGGER IF NOT EXISTS taken AFTER INSERT ON blocks "
    "BEGIN UPDATE room SET used = used + new.size; END",
    "CREATE TRIGGER IF NOT EXISTS given_back AFTER DELETE ON blocks "
    "BEGIN UPDATE room SET used = used - old.size; END",
)
"""`partial` is the name of the file of a block that is being written, and NULL of one that is
there. What all rows take is kept, since to add it up takes 1 ms for each 10,000 rows."""


class Outcome(Enum):
    """Why the room of a block is not to be had."""

    THERE = "the block is there"
    ELSEWHERE = "another process is about to write it"
    FULL = "what is there is needed sooner"


class Entry(NamedTuple):
    """A block, for the command."""

    key: str
    name: str
    """The URL and the number of the block."""
    size: int
    """Bytes that it takes of the room."""
    due: float


class OpenBlock:
    """A block that is there, open; it is closed when nobody has it any more. Any thread."""

    def __init__(self, file: int) -> None:
        self._file = file

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the block. Raises OSError if somebody has cut it."""
        data = self.pread(start, stop - start)
        if len(data) < stop - start:
            raise OSError(errno.EIO, "a block was cut")
        return data

    def pread(self, start: int, size: int) -> bytes:
        """So many bytes of the block; fewer at its end."""
        return os.pread(self._file, size, _HEAD.size + start)

    @property
    def state(self) -> tuple[int, int, int]:
        """Which file it is, and what changes if somebody writes to it."""
        now = os.fstat(self._file)
        return now.st_ino, now.st_mtime_ns, now.st_size

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # No name of the module: it may be gone at the interpreter's exit.
        close(self._file)


class Claim:
    """Room for one block, and the file that it is written to. Owner: the thread that brings it."""

    def __init__(self, folder: Folder, key: str, partial: str, file: int) -> None:
        self._folder, self._key, self._partial, self._file = folder, key, partial, file

    def write(self, data: bytes) -> None:
        """Write the block. Raises OSError; then the room is given back."""
        try:
            head = _HEAD.pack(_MAGIC, len(data), _checksum(self._key, data))
            for part in (head, data):
                left = memoryview(part)
                while left:
                    left = left[os.write(self._file, left) :]
            os.rename(self._partial, self._folder.path_of(self._key))
        except BaseException:
            self.drop()
            raise
        os.close(self._file)
        self._folder.written(self._key)

    def drop(self) -> None:
        """Give the room back: the block does not come."""
        with suppress(OSError):
            self._folder.give_back(self._key, os.path.basename(self._partial))
        # If that failed there is a file on which nobody holds a lock: whoever meets it removes it.
        os.close(self._file)


class Folder:
    """A folder that holds at most `max_bytes` of blocks. Any thread of any process.

    Every method raises OSError if the disk is full, read-only or broken, or the table is locked for
    too long: the caller does without.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path, self.max_bytes = os.path.abspath(path), max_bytes
        self.begin()
        _folders.add(self)

    def begin(self) -> None:
        """What a process has for itself, and a forked child anew: a connection is of one process,
        and that of a parent is forgotten."""
        self._lock = Lock()
        self._table: Connection | None = None
        # Keys of blocks whose checksum this process has compared; any thread adds by one operation.
        self._compared: set[str] = set()

    def path_of(self, key: str) -> str:
        """The file of a block."""
        # Each block that is opened asks: `os.path.join` takes 2 us of 8.
        return f"{self.path}/{_BLOCKS}/{key[:2]}/{key}"

    # ---- reading

    def open(self, key: str) -> OpenBlock | None:
        """A block; None if it is not there, or was damaged and is gone now."""
        try:
            file = os.open(self.path_of(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        block = OpenBlock(file)
        if key not in self._compared:
            if not _is_whole(file, key):
                self.remove(key, file)
                return None
            self._compared.add(key)
        return block

    def has(self, key: str) -> bool:
        """Whether a block is there."""
        return os.path.exists(self.path_of(key))

    # ---- room

    def claim(self, key: str, num_bytes: int, name: str, due: float) -> Claim | Outcome:
        """Take room for a block of so many bytes, and have others gone for it that are needed
        later than `due`. `name` says what it is."""
        size = room_of(num_bytes)
        with self._changing() as table:
            row = table.execute("SELECT partial FROM blocks WHERE key = ?", (key,)).fetchone()
            if row is not None and (found := self._settled(table, key, row[0])) is not None:
                return found
            if not self._make_room(table, size, due):
                return Outcome.FULL
            os.makedirs(os.path.dirname(self.path_of(key)), 0o700, exist_ok=True)
            partial = f"{self.path_of(key)}.{secrets.token_hex(8)}.partial"
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # Before anybody can find the row.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                table.execute("INSERT INTO blocks VALUES (?, ?, ?, ?, ?)",
                              (key, size, due, name, os.path.basename(partial)))  # fmt: skip
            except BaseException:
                os.unlink(partial)
                os.close(file)
                raise
        return Claim(self, key, partial, file)

    def _settled(self, table: Connection, key: str, partial: str | None) -> Outcome | None:
        """What a row stands for; None if for nothing, and it is gone."""
        if self.has(key):
            if partial is not None:
                table.execute("UPDATE blocks SET partial = NULL WHERE key = ?", (key,))
            return Outcome.THERE
        if partial is not None and _is_locked(self._beside(key, partial)):
            return Outcome.ELSEWHERE
        self._delete(table, key, partial)
        return None

    def _make_room(self, table: Connection, size: int, due: float) -> bool:
        """Have blocks gone that are needed later, so that there is room."""
        self._shrink(table, self.max_bytes)
        victims, lacking = self._victims(table, size - self._left(table, self.max_bytes), due)
        if lacking > 0:
            return False
        for key, partial in victims:
            self._delete(table, key, partial)
        return True

    def _shrink(self, table: Connection, to_bytes: int) -> None:
        """Have blocks gone, however soon they are needed, until so many bytes are left, or only
        what is being written."""
        for key, partial in self._victims(table, -self._left(table, to_bytes), -NEVER)[0]:
            self._delete(table, key, partial)

    @staticmethod
    def _left(table: Connection, of_bytes: int) -> int:
        """How many of so many bytes nobody has taken; less than none if there are more."""
        return of_bytes - int(table.execute("SELECT used FROM room").fetchone()[0])

    def _victims(
        self, table: Connection, lacking: int, due: float
    ) -> tuple[list[tuple[str, str | None]], int]:
        """Blocks to go for so many bytes that are needed at `due`, and how many are lacking still;
        with the partial file of those whose writer was killed."""
        victims: list[tuple[str, str | None]] = []
        if lacking <= 0:
            return victims, lacking
        stale, later = time.time() - _STALE_S, math.nextafter(due, math.inf)
        # Each goes along the index `by_due` from its end, no farther than is needed: to sort all
        # rows takes 0.1 s of 190,000 (2026-11-28).
        for low, high in (
            (max(later, NEVER), math.inf), (-math.inf, stale), (max(later, stale), NEVER)
        ):  # fmt: skip
            for key, size in table.execute(
                "SELECT key, size FROM blocks WHERE due >= ? AND due < ? AND partial IS NULL "
                "ORDER BY due DESC", (low, high),
            ):  # fmt: skip
                victims.append((key, None))
                lacking -= size
                if lacking <= 0:
                    return victims, lacking
        for key, size, partial in table.execute(
            "SELECT key, size, partial FROM blocks WHERE partial IS NOT NULL"
        ):
            if not _is_locked(self._beside(key, partial)):
                # Its writer was killed, before or after it gave the block its name.
                victims.append((key, partial))
                lacking -= size
        return victims, lacking

    def _delete(self, table: Connection, key: str, partial: str | None) -> None:
        """The files first: a process that is killed between leaves a row too many, never a file."""
        for path in (self.path_of(key), *([self._beside(key, partial)] if partial else ())):
            with suppress(FileNotFoundError):
                os.unlink(path)
        self._compared.discard(key)
        table.execute("DELETE FROM blocks WHERE key = ?", (key,))

    def _beside(self, key: str, partial: str) -> str:
        return os.path.join(os.path.dirname(self.path_of(key)), partial)

    def written(self, key: str) -> None:
        """A block that was claimed is there."""
        self._compared.add(key)
        # If this fails the row says that it is being written, and whoever meets it finds the file.
        with suppress(OSError), self._changing() as table:
            table.execute("UPDATE blocks SET partial = NULL WHERE key = ?", (key,))

    def give_back(self, key: str, partial: str) -> None:
        """A block that was claimed does not come."""
        with self._changing() as table:
            row = table.execute("SELECT partial FROM blocks WHERE key = ?", (key,)).fetchone()
            if row == (partial,):
                self._delete(table, key, partial)

    def rank(self, dues: Iterable[tuple[str, float]]) -> None:
        """Say when blocks are needed next."""
        with self._changing() as table:
            table.executemany(
                "UPDATE blocks SET due = ? WHERE key = ?", [(due, key) for key, due in dues]
            )

    def remove(self, key: str, file: int) -> None:
        """Have a block gone that is damaged: this open file, if it is still the block's. Another
        process may have removed it before, and may be writing the block anew."""
        with self._changing() as table, suppress(FileNotFoundError):
            if not os.path.samestat(os.stat(self.path_of(key)), os.fstat(file)):
                return
            row = table.execute("SELECT partial FROM blocks WHERE key = ?", (key,)).fetchone()
            partial = row and row[0]
            if partial is None or not _is_locked(self._beside(key, partial)):
                self._delete(table, key, partial)

    # ---- the table

    @contextmanager
    def _changing(self) -> Iterator[Connection]:
        """The table, for a change that is made whole or not at all."""
        with self._lock:
            try:
                table = self._opened()
                try:
                    # Within: if a signal interrupts it behind its end, all others would wait.
                    table.execute("BEGIN IMMEDIATE")
                    yield table
                    table.execute("COMMIT")
                except BaseException:
                    if table.in_transaction:
                        table.execute("ROLLBACK")
                    raise
            except _sqlite().Error as error:
                raise OSError(errno.EIO, f"the table of {self.path!r}: {error}") from error

    def _opened(self) -> Connection:
        if self._table is None:
            self.prepare()
            table = _sqlite().connect(
                os.path.join(self.path, _TABLE), timeout=_LOCKED_S, check_same_thread=False,
                isolation_level=None,
            )  # fmt: skip
            try:
                table.execute("PRAGMA journal_mode = TRUNCATE")
                # A table that a loss of power has damaged is made anew: `verify`.
                table.execute("PRAGMA synchronous = OFF")
                self._make_table(table)
            except BaseException:
                table.close()
                raise
            self._table = table
        return self._table

    def prepare(self) -> None:
        """Make the folder, or see that it is a cache."""
        if is_cache(self.path):
            return
        # As private as the objects may be.
        os.makedirs(self.path, 0o700, exist_ok=True)
        names = {*os.listdir(self.path)} - {_LOST_AND_FOUND}
        if is_cache(self.path):
            return  # another process has made it meanwhile
        if names and not (names <= _OURS and self._has_our_table()):
            raise ConfigError(
                f"{self.path!r} holds files and is no cache of feeder's: give a folder that is new "
                "or empty"
            )
        with open(os.path.join(self.path, _MARKER), "wb") as file:
            file.write(_MARK)

    def _has_our_table(self) -> bool:
        """Whether a table with our columns lies there. Nothing is written."""
        sqlite = _sqlite()
        place = Path(self.path, _TABLE).as_uri()
        try:
            with closing(sqlite.connect(f"{place}?mode=ro", timeout=_LOCKED_S, uri=True)) as table:
                columns = table.execute("SELECT name FROM pragma_table_info('blocks')").fetchall()
                return bool(columns == _COLUMNS)
        except sqlite.Error:
            return False

    def _make_table(self, table: Connection) -> None:
        table.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA:
            table.execute(statement)
        if table.execute("SELECT count(*) FROM room").fetchone() == (0,):
            table.execute("INSERT INTO room VALUES (0)")
            for path in self._files():
                size = room_of(path.stat().st_size - _HEAD.size)
                row = path.name, size, NEVER, ""
                table.execute("INSERT INTO blocks VALUES (?, ?, ?, ?, NULL)", row)
        # The cache may have had more room until now.
        self._shrink(table, self.max_bytes)
        table.execute("COMMIT")

    def _files(self) -> Iterator[Path]:
        """The blocks that are there as files, and nothing else that lies there."""
        return (
            path
            for path in Path(self.path, _BLOCKS).glob("??/*")
            if path.name[:2] == path.parent.name and is_key(path.name) and path.is_file()
        )

    def close(self) -> None:
        """Let go of the table. It is opened again if it is used again."""
        with self._lock:
            if self._table is not None:
                self._table.close()
            self._table = None

    def keys(self) -> set[str]:
        """The keys of the blocks that the table knows."""
        with self._changing() as table:
            return {key for (key,) in table.execute("SELECT key FROM blocks WHERE partial IS NULL")}

    # ---- for the command

    def entries(self) -> list[Entry]:
        """Every block that is there."""
        with self._changing() as table:
            rows = table.execute("SELECT key, name, size, due FROM blocks ORDER BY name, key")
            return [Entry(*row) for row in rows if self.has(row[0])]

    def prune(self, to_bytes: int) -> int:
        """Have blocks gone until so many bytes are left, and what killed processes have left;
        returns how many blocks are gone."""
        with self._changing() as table:
            before = table.execute("SELECT count(*) FROM blocks").fetchone()[0]
            for key, partial in table.execute("SELECT key, partial FROM blocks").fetchall():
                self._settled(table, key, partial)
            self._shrink(table, to_bytes)
            known = {row[0] for row in table.execute("SELECT partial FROM blocks")}
            for path in Path(self.path, _BLOCKS).glob("??/*.partial"):
                is_ours = is_key(path.name.partition(".")[0]) and path.name not in known
                if is_ours and not _is_locked(str(path)):
                    path.unlink(missing_ok=True)
            return int(before - table.execute("SELECT count(*) FROM blocks").fetchone()[0])

    def verify(self) -> tuple[int, list[str]]:
        """Compare every block with its checksum, and have damaged ones gone; returns how many are
        whole, and the names of the others. A table that is damaged is made anew."""
        with suppress(FileNotFoundError):
            try:
                self.entries()
            except OSError as error:
                # Not if others hold it: with two tables there would be two bounds.
                if type(error.__cause__) is not _sqlite().DatabaseError:
                    raise
                self.close()
                os.unlink(os.path.join(self.path, _TABLE))
        names, damaged, whole = {entry.key: entry.name for entry in self.entries()}, [], 0
        for path in [*self._files()]:
            with suppress(FileNotFoundError):
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if _is_whole(file, path.name):
                        whole += 1
                    else:
                        damaged.append(names.get(path.name) or path.name)
                        self.remove(path.name, file)
                finally:
                    os.close(file)
        return whole, damaged


# ---- forks
#
# SQLite notes in the process which locks it holds on a file. A child that is forked while a table
# is changed has the note and not the lock, and nobody gives it back there. So a fork waits until no
# thread changes a table.

_folders: WeakSet[Folder] = WeakSet()
_held_for_fork: list[Lock] = []


def _before_fork() -> None:
    end = time.monotonic() + _LOCKED_S
    for folder in [*_folders]:
        if folder._lock.acquire(timeout=max(0.0, end - time.monotonic())):
            _held_for_fork.append(folder._lock)


def _after_fork() -> None:
    while _held_for_fork:
        _held_for_fork.pop().release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def _sqlite() -> ModuleType:
    """Python's SQLite. Imported when it is needed: not every Python was built with it."""
    try:
        return importlib.import_module("sqlite3")
    except ModuleNotFoundError as error:
        raise OSError(errno.ENOSYS, "this Python was built without SQLite") from error


def is_cache(path: str) -> bool:
    """Whether a folder is a cache."""
    try:
        with open(os.path.join(path, _MARKER), "rb") as file:
            # Its maker may be about to write it, or have been killed then.
            return _MARK.startswith(file.read(len(_MARK) + 1))
    except OSError:
        return False


def is_key(name: str) -> bool:
    """Whether a file's name is that of a block."""
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def room_of(num_bytes: int) -> int:
    """What a block takes of the disk."""
    return -(-(num_bytes + _HEAD.size) // _PAGE) * _PAGE


def _checksum(key: str, data: bytes) -> int:
    # With the key: a file under the name of another block is no block.
    return xxhash.xxh3_64_intdigest(data, xxhash.xxh32_intdigest(key.encode()))


def _is_whole(file: int, key: str) -> bool:
    head = os.pread(file, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return False
    magic, size, checksum = _HEAD.unpack(head)
    if magic != _MAGIC or os.fstat(file).st_size != _HEAD.size + size:
        return False
    return _checksum(key, os.pread(file, size, _HEAD.size)) == int(checksum)


def _is_locked(path: str) -> bool:
    """Whether the writer of a file is alive."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
