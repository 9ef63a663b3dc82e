"""Compressed files, read by the places that their content would have in a file of its own.

A compressed file has no way to a byte but through all before it. `Inflated` therefore keeps one
decompressor, which goes on from where it stands, and the last stretches that it gave: threads that
read records in order share both, and decompress the file once. A place further back begins at the
start again, so that a shuffle decompresses a file for nearly every record: `Place.found`
writes the content down once, if asked, beside the index, and it is read like any other file.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

from feeder.workers.errors import ConfigError, FeedError
from feeder.workers.sources import extras
from feeder.workers.sources.far.paths import FarPath, PreadFile
from feeder.workers.sources.stores.kept import Kept

_STRETCHES_KEPT = 16
"""So many MiB of the content of a compressed file are kept."""
# Threads that read in order stand within some calls of each other (2026-11-28).

_INFLATED_KEPT = 8
"""So many compressed files are being decompressed at once, by each source."""
# Each has a descriptor, and the MiB above; not measured (2026-11-28).

logger = logging.getLogger("feeder")

_KINDS = {
    "gzip": rb"\x1f\x8b\x08[\0-\x1f]....[\0\x02\x04]", "zstd": rb"\x28\xb5\x2f\xfd",
    "bz2": rb"BZh[1-9]1AY&SY", "xz": rb"\xfd7zXZ\0", "lz4": rb"\x04\x22\x4d\x18[\x40-\x7f]",
}  # fmt: skip
"""How compressed files begin: at such length that no TFRecord file does, whose first bytes are the
length of a record and a checksum of it."""
_STRETCH = 1 << 20
_BEGUN_AGAIN = 4
"""So often a file may be decompressed anew before the log says so: each epoch begins it."""

Pread = Callable[[int, int], bytes]
"""Reads so many bytes from a place on; fewer at the end."""


def kind_of(file: BinaryIO) -> str:
    """How a file is compressed; empty if it is not."""
    return kind_of_bytes(os.pread(file.fileno(), 10, 0))


def kind_of_bytes(head: bytes) -> str:
    """How a file is compressed that begins with these ten bytes; empty if it is not."""
    return next((kind for kind, magic in _KINDS.items() if re.match(magic, head, re.DOTALL)), "")


def opened(path: str, kind: str) -> Any:
    """The content of a compressed file, as a file that is read from its start on.

    Raises:
        ConfigError: no package is there that reads it.
    """
    if kind in ("zstd", "lz4"):
        # Python's own library reads zstd from 3.14 on.
        return extras.load("pyarrow", "arrow").input_stream(path, compression=kind)
    # Not every Python was built with each of these.
    return import_module({"xz": "lzma"}.get(kind, kind)).open(path)


@contextmanager
def _told(kind: str) -> Iterator[None]:
    """Make a ValueError of what a library raises of a damaged file. Errors of the system stay."""
    try:
        yield
    except FeedError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"cannot be decompressed ({kind}): {error}") from error


class Inflated:
    """The content of one compressed file. Any thread reads; what changes is under its lock."""

    def __init__(self, path: str, kind: str, tell: Callable[[], None] = lambda: None) -> None:
        """`tell` is called whenever what was decompressed already is decompressed once more."""
        self._path, self._kind, self._tell = path, kind, tell
        self._lock = Lock()
        self._stream: Any = None
        self._next = 0
        self._stretches: dict[int, bytes] = {}

    def pread(self, size: int, offset: int) -> bytes:
        """Bytes from a place on; fewer at the end. Raises ValueError if the file is damaged."""
        if size <= 0:
            return b""
        first, last = offset // _STRETCH, (offset + size - 1) // _STRETCH
        with self._lock, _told(self._kind):
            parts = [self._stretch(number) for number in range(first, last + 1)]
        start = offset - first * _STRETCH
        return (parts[0] if len(parts) == 1 else b"".join(parts))[start : start + size]

    def _stretch(self, number: int) -> bytes:
        kept = self._stretches.get(number)
        if kept is not None:
            return kept
        if self._stream is None or number < self._next:
            if number and (self._stream is not None or self._stretches):
                self._tell()
            self._stream, self._next = opened(self._path, self._kind), 0
        try:
            while self._next <= number:
                # A library may give less than it is asked for.
                parts, left = [], _STRETCH
                while left and (data := self._stream.read(left)):
                    parts.append(data)
                    left -= len(data)
                self._stretches[self._next] = b"".join(parts)
                self._next += 1
                if len(self._stretches) > _STRETCHES_KEPT:
                    del self._stretches[next(iter(self._stretches))]
                if left:
                    break
        except BaseException:
            # What comes after an error is not what stands there.
            self._stream = None
            raise
        return self._stretches.get(number, b"")


def inflated_file(path: str, kind: str) -> PreadFile:
    """The content as a file, for what goes through it from the start to the end once: it goes some
    MiB back, and to anywhere further on."""
    return PreadFile(Inflated(path, kind).pread)


class Place(NamedTuple):
    """Where the content of a file lies."""

    path: str
    kind: str = ""
    """How it is compressed there; empty if it is not."""

    def found(self, beside: str, size: int, digest: int, *, write: bool = False) -> Place:
        """Where it is read: if it is compressed, what was written down of it, which `write` does,
        under a name that begins like that of what it lies beside. `size` is that of the content,
        `digest` tells the compressed file from others of its name.

        Raises:
            ConfigError: it cannot be written.
        """
        plain = Place(f"{beside}-{digest % 2**64:016x}")
        if not self.kind or _has_size(plain.path, size):
            return plain if self.kind else self
        if not write:
            return self
        try:
            _inflate(self, plain.path)
        except OSError as error:
            raise ConfigError(f"{plain.path!r} cannot be written: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{self.path!r}: {error}") from error
        return plain


def _has_size(path: str, size: int) -> bool:
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False


class Contents:
    """The contents of several files. Any thread reads; what changes has its own lock."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        # Each that is being decompressed holds a descriptor.
        self._inflated = Kept(_INFLATED_KEPT)
        self._begun_again = 0

    @contextmanager
    def open(self, number: int) -> Iterator[Pread]:
        """What reads the content of a file. It is opened at the call: no process may hold a whole
        data set's files open."""
        path, kind = self._places[number]
        if isinstance(path, FarPath):
            yield path.pread
            return
        if kind:
            yield self._inflated.get(number, lambda: Inflated(path, kind, self._tell)).pread
            return
        with open(path, "rb") as file:
            yield partial(_pread, file.fileno())

    def _tell(self) -> None:
        """A file is decompressed from its start once more."""
        self._begun_again += 1
        if self._begun_again == _BEGUN_AGAIN:
            logger.warning(
                "compressed files such as %r are decompressed from their starts again and again, "
                "since records are read out of order: write what they hold down once, with "
                "`feeder index`", self._places[0].path,
            )  # fmt: skip


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    return os.pread(descriptor, size, offset)


def size_of(path: str, kind: str) -> int:
    """How many bytes the content has. Raises ValueError if the file is damaged."""
    size = 0
    with _told(kind), opened(path, kind) as stream:
        while data := stream.read(_STRETCH):
            size += len(data)
    return size


def _inflate(packed: Place, path: str) -> None:
    """Write the content down. The file is whole or not there. Raises ValueError if it is damaged,
    OSError where it cannot be written."""
    unfinished = f"{path}.{secrets.token_hex(8)}"
    try:
        with _told(packed.kind), opened(*packed) as stream, open(unfinished, "xb") as file:
            while data := stream.read(_STRETCH):
                file.write(data)
        os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            os.unlink(unfinished)
