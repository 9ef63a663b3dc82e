"""URLs in the place of paths: what sources list, open and describe.

A `FarPath` is a string, its URL: whatever names, sorts and describes paths does so with URLs. It
also has what is known of the object and the blocks that it is read through, so that no source hands
those on.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from glob import has_magic
from typing import IO, Any, TypeVar

from feeder.workers.errors import ConfigError, StorageError
from feeder.workers.sources.arguments import (
    PathLike,
    has_suffix,
    list_files,
    list_paths,
    unbraced,
)
from feeder.workers.sources.far.blocks import BLOCK_BYTES, Blocks
from feeder.workers.sources.far.cache import Cache, blocks_of
from feeder.workers.sources.far.objects import Known, Objects, is_url

_AT_ONCE = 16
"""So many objects are asked about at once when a source is made."""

_BUFFER_BYTES = 64 * 1024

_S = TypeVar("_S")
_T = TypeVar("_T")


class FarPath(str):
    """The URL of an object, what is known of it, and what it is read through. Never changes."""

    __slots__ = ("blocks", "known", "objects")

    known: Known
    blocks: Blocks
    objects: Objects

    def __new__(cls, known: Known, blocks: Blocks, objects: Objects) -> FarPath:
        path = super().__new__(cls, known.url)
        path.known, path.blocks, path.objects = known, blocks, objects
        blocks.register([known], objects)
        return path

    def __reduce__(self) -> Any:
        return FarPath, (self.known, self.blocks, self.objects)

    def pread(self, size: int, offset: int) -> bytes:
        """So many bytes from a place on; fewer at the end."""
        return self.blocks.read(self.known, offset, offset + size)

    def pread_each(self, size: int, offsets: Iterable[int]) -> list[bytes]:
        """The same from each of several places on."""
        return self.blocks.read_each(self.known, offsets, size)

    def head(self, num_bytes: int) -> bytes:
        """The first bytes, without the block that they lie in."""
        stop = min(num_bytes, self.known.size)
        return self.objects.read(self.known, 0, stop) if stop else b""

    def file(self) -> FarFile:
        """The object as a file, for a library that reads parts of it."""
        return FarFile(self, to_end=False)

    @contextmanager
    def opened(self, *, to_end: bool) -> Iterator[IO[bytes]]:
        """The object as a file; `to_end` if all of it will be read."""
        with FarFile(self, to_end=to_end) as raw, io.BufferedReader(raw, _BUFFER_BYTES) as file:
            yield file

    @property
    def told(self) -> str:
        """What a description says of it: its bytes and its tag."""
        return f"{self.known.size} bytes, {self.known.tag}"


class PreadFile(io.RawIOBase):
    """What is read by places as a file, for what goes through it from its start on. Owner: the
    thread that reads."""

    def __init__(self, pread: Callable[[int, int], bytes], size: int | None = None) -> None:
        """`size` is None if nobody knows it before the end."""
        self._pread, self._size, self._at = pread, size, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is, as far as `pread` is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start is None:
            raise io.UnsupportedOperation("the end is not known")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        """Where it stands."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read from here on."""
        data = self._pread(len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class FarFile(PreadFile):
    """An object as a file; with `to_end` the blocks that follow are brought meanwhile."""

    def __init__(self, path: FarPath, *, to_end: bool) -> None:
        super().__init__(path.pread, path.known.size)
        self._blocks, self._step = path.blocks, -1
        # What the blocks know it as: they must not keep a file that nobody has closed.
        self._reader = object()
        self._steps = range(0, path.known.size if to_end else 0, BLOCK_BYTES)
        for start in self._steps:
            path.blocks.foresee(self._reader, [(path.known, start, start + BLOCK_BYTES)])

    def readinto(self, buffer: Any) -> int:
        """Read from here on."""
        step = min(self._at, self._steps.stop - 1) // BLOCK_BYTES
        if self._steps and step > self._step:
            self._blocks.enter(self._reader, step)
            self._blocks.leave(self._reader, range(max(0, self._step), step))
            self._step = step
        return super().readinto(buffer)

    def close(self) -> None:
        """Ask for nothing more."""
        if not self.closed:
            self._blocks.forget(self._reader)
        super().close()


# ---- lists of files


def files_of(
    paths: PathLike | Iterable[PathLike], what: str, suffixes: Sequence[str] = (),
    cache: Cache | None = None, storage_options: Mapping[str, Any] | None = None,
) -> list[str]:  # fmt: skip
    """Files and objects by a path or several, as `list_files` has them: objects below a URL that
    ends with "/", with braces and patterns.

    Raises:
        ConfigError: there is none, or an argument is wrong.
        StorageError: an object is missing or refused, or the store does not answer.
    """
    given = list_paths(paths, what)
    if not any(is_url(path) for path in given):
        if storage_options is not None:
            raise ConfigError("storage_options are given, and no path is a URL: leave them out")
        return list_files(given, what, suffixes)
    far = Far(cache, storage_options)

    def files_at(path: str) -> Sequence[str]:
        found: Sequence[str] = (
            far.files_of(path, what, suffixes) if is_url(path) else list_files(path, what, suffixes)
        )
        return found

    return [file for files in in_parallel(files_at, given) for file in files]


class Far:
    """What URLs of one source are read by. Any thread."""

    def __init__(self, cache: Cache | None, storage_options: Mapping[str, Any] | None) -> None:
        if storage_options is not None and not isinstance(storage_options, Mapping):
            raise ConfigError(
                f"storage_options are {storage_options!r}, expected a mapping such as "
                "{'region': 'eu-west-1'}"
            )
        self._blocks, self._objects = blocks_of(cache), Objects(storage_options)

    def paths(self, urls: Sequence[str]) -> list[FarPath]:
        """Objects by their URLs, several of which are asked about at once."""
        return self._paths_of(in_parallel(self._objects.known, urls))

    def listed(self, folder: str) -> list[FarPath]:
        """The objects below a folder."""
        return self._paths_of(self._objects.listed(folder))

    def inside(self, folder: str, names: Sequence[str]) -> list[FarPath]:
        """The objects of these names in a folder: by one listing, if the store gives one.

        Raises:
            StorageError: one is missing.
        """
        urls = [f"{folder.rstrip('/')}/{name}" for name in names]
        if len(urls) == 1 or folder.startswith("http"):
            return self.paths(urls)
        found = {known.url: known for known in self._objects.listed(folder)}
        for url in urls:
            if url not in found:
                raise StorageError(f"{url!r} is missing")
        return self._paths_of([found[url] for url in urls])

    def _paths_of(self, known: Sequence[Known]) -> list[FarPath]:
        self._blocks.register(known, self._objects)
        return [FarPath(each, self._blocks, self._objects) for each in known]

    def files_of(self, url: str, what: str, suffixes: Sequence[str]) -> list[FarPath]:
        """The objects that a URL names."""
        urls, found = unbraced(url), []
        if not any(one.endswith("/") or has_magic(one) for one in urls):
            return [*self.paths(urls)]
        for one in urls:
            if one.endswith("/"):
                inside = self._in_folder(one, what, suffixes)
            elif has_magic(one):
                # The folder before the first part that is a pattern.
                folder = re.split(r"[*?\[]", one)[0].rpartition("/")[0]
                fits = re.compile(_pattern(one)).fullmatch
                inside = [path for path in self.listed(folder) if fits(path)]
                if not inside:
                    raise ConfigError(f"{one!r} fits no object, expected {what}")
            else:
                inside = self.paths([one])
            found += inside
        return found

    def _in_folder(self, folder: str, what: str, suffixes: Sequence[str]) -> list[FarPath]:
        found = []
        for path in self.listed(folder):
            parts = path[len(folder) :].split("/")
            # As of folders on a disk.
            if all(part and part[0] not in "._" for part in parts) and (
                not suffixes or has_suffix(parts[-1], suffixes)
            ):
                found.append(path)
        if not found:
            told = ", ".join(f".{suffix}" for suffix in suffixes)
            raise ConfigError(f"{folder!r} is a folder without {what}: no name has {told}")
        return found


_TOKENS = re.compile(r"(\*\*/)|(\*+)|(\?)|\[(!?)([^\]]+)\]|(.)", re.DOTALL)


def _pattern(url: str) -> str:
    """A pattern as `glob` takes it, as a regular expression: "*" stays within a folder, "**/" is
    any folders."""
    made = ""
    for folders, star, one, negated, chosen, plain in _TOKENS.findall(url):
        made += "(?:.*/)?" * bool(folders) + "[^/]*" * bool(star) + "[^/]" * bool(one)
        made += f"[{'^' * bool(negated)}{chosen}]" if chosen else re.escape(plain)
    return made


def in_parallel(function: Callable[[_S], _T], given: Sequence[_S]) -> list[_T]:
    """What a function returns for each of what is given, in their order."""
    if len(given) < 2:
        return [function(one) for one in given]
    with ThreadPoolExecutor(min(_AT_ONCE, len(given)), "feeder far") as pool:
        return [*pool.map(function, given)]
