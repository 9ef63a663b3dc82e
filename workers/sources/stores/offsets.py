"""Files with many records one after the other, found by an index of where each of them lies.

The index of a file is made once, by going through it, and kept as `.NAME.feeder-index` beside it or
in a folder of the user's. It holds how large the file was and when it was changed, by its own time
and by that of its inode, which nobody can set; for a file that is another one by now it is made
anew. If only the inode's time differs, as of a copy, the digest tells whether it is. An index is an
array of `ENTRY`, one for each piece of a record, and it is mapped: it need not fit into memory. Two
entries come before: what the file was, and a digest of stretches of it, by which a file is told
from one with other content in the same places. (To read all of it for a digest would take as long
as an epoch.) The first also holds a digest of the index itself: a disk that changes a byte of it
would give other records, and no error. Of a compressed file the second also holds how it is
compressed, and the size of its content, in which the places of records are those of the content; if
that was written down beside the index (`write_index`), it is read from there.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader, BytesIO, UnsupportedOperation
from mmap import ACCESS_READ, mmap
from typing import IO, Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.arguments import PathLike
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.far.paths import FarPath, in_parallel
from feeder.workers.sources.stores.inflated import (
    Contents,
    Place,
    Pread,
    inflated_file,
    kind_of,
    kind_of_bytes,
    size_of,
)
from feeder.workers.sources.stores.kept import Kept
from feeder.workers.stream.spec import FILE_ORDER

MAPS_KEPT = 64
"""So many files of tokens, and so many indexes of files, are mapped at once."""
# Each map holds a descriptor, of which a process has 1,024 by default. To map a file anew takes
# 15 us, about as long as to open it (2026-11-27).

_INDEX_BYTES_KEPT = 64 * 1024 * 1024
"""So many bytes of indexes of files are kept in memory, by each source; others are mapped."""
# A million records. Rows of a shuffle lie in any file (2026-11-27).

logger = logging.getLogger("feeder")

ENTRY = np.dtype([("record", "<i8"), ("kind", "S32"), ("offset", "<i8"), ("size", "<i8")])
"""A piece of a record: the record's number in its file, what the piece is (in a tar its extension),
and where its bytes lie."""

Piece = tuple[str, int, bytes]
"""What a piece is, the byte of the file that it begins at, and its bytes."""
Entry = tuple[int, bytes, int, int]
Scan = Callable[[IO[bytes], int], Iterator[Entry]]
"""Entries of a file that is open, of so many bytes. Raises ValueError where it is no such file."""

_VERSION = 4
"""2 took the bytes of a sparse member of a tar for its content; 3 had no digest of itself."""
_HEADS = 2
_STRETCHES, _STRETCH_BYTES = 64, 1024
_DESCRIBED_ONE_BY_ONE, _GROUPS = 256, 4


def told_of_files(paths: Sequence[str], told: Sequence[str]) -> dict[str, str]:
    """What a description says of files, by their names, so that a resume names the file that has
    changed; of very many files it says so of those that follow one another together."""
    # By their names alone: a data set that was moved is the same one.
    names = [os.path.basename(path) for path in paths]
    one_by_one = dict(zip((f"file {name}" for name in names), told, strict=True))
    if len(one_by_one) == len(paths) <= _DESCRIBED_ONE_BY_ONE:
        return one_by_one
    # Each is a part of every position, so there are few: 5,000 files take 0.2 kB. A power of two:
    # files that are added at the end leave most of the groups as they are.
    size = 1 << max(0, -(-len(paths) // _GROUPS) - 1).bit_length()
    return {
        f"files {start + 1} to {start + size}, from {names[start]}": xxhash.xxh3_64_hexdigest(
            repr((names[start : start + size], told[start : start + size])).encode()
        )
        for start in range(0, len(paths), size)
    }


def order_of_files(paths: Sequence[str]) -> dict[str, str]:
    """What a description says of the names and the order of several files, in a field of its own:
    positions of before have none, and are good without it."""
    if len(paths) < 2:
        return {}
    # Below the folder that they have in common: a data set that was moved is the same one.
    absolute = [os.path.abspath(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(path) for path in absolute])
    names = [os.path.relpath(path, folder) for path in absolute]
    digest = xxhash.xxh3_64_hexdigest("\0".join(names).encode(errors="surrogateescape"))
    return {FILE_ORDER: f"{len(names)} files, {digest}"}


class IndexedFiles:
    """The records of files, by number: pieces, decoded by `decode`. A dataset with `__getitem__`.

    Any thread reads; what changes, the indexes that are mapped, has its own lock. Files are opened
    at the call: no process may hold a whole data set's files open.
    """

    def __init__(
        self,
        paths: Sequence[str],
        scan: Scan,
        decode: Callable[..., Any],
        folder: PathLike | None,
        *,
        with_origin: bool = False,
        after: int = 0,
    ) -> None:
        """`decode` makes a record of its pieces; `with_origin` gives it the file's path, too, and
        what lies between the record before and this one. The last piece has so many bytes that come
        `after` it in the file."""
        self._paths, self._decode, self._with_origin = paths, decode, with_origin
        self._after = after
        keeper, counts = _Keeper(folder), []
        keeper.look_beside([path for path in paths if isinstance(path, FarPath)])
        places: list[Place] = []
        self._places: list[str | None] = []
        """Where the index of each file is kept, if it is."""
        self._contents: list[tuple[int, bytes, str]] = []
        """Of each index its entries, and the one about what the file holds; and how that is
        compressed."""
        self._in_memory: dict[int, NDArray[Any]] = {}
        self._room = _INDEX_BYTES_KEPT
        self._told: list[str] = []
        for number, path in enumerate(paths):
            index, place = keeper.index(path, scan, f"{number + 1} of {len(paths)}")
            self._places.append(place)
            places.append(keeper.content(path, index))
            kind = index[1]["kind"].decode()
            self._contents.append((len(index), index[1].tobytes(), kind))
            if place is None:
                self._in_memory[number] = index
            counts.append(int(index["record"][-1]) + 1 if len(index) > _HEADS else 0)
            told = _told(counts[-1], index)
            self._told.append(f"{path.told}, {told}" if isinstance(path, FarPath) else told)
        self._ends = np.cumsum(counts)
        self._firsts = self._ends - counts
        # Each map holds a descriptor.
        self._maps = Kept(MAPS_KEPT)
        self._files = Contents(places)

    def __getstate__(self) -> dict[str, Any]:
        # Another process maps an index that is kept, too.
        kept = {n: index for n, index in self._in_memory.items() if self._places[n] is None}
        return {**self.__dict__, "_in_memory": kept, "_room": _INDEX_BYTES_KEPT}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _index(self, number: int) -> NDArray[Any]:
        """The index of a file."""
        whole = self._in_memory.get(number)
        num_bytes = self._contents[number][0] * ENTRY.itemsize
        if whole is None and num_bytes <= self._room:
            # Copied, so that a shuffle over many files maps few of them. Of two threads that copy
            # one index both count it, which costs a little room.
            self._room -= num_bytes
            whole = self._in_memory[number] = np.array(self._map(number, is_compared=True))
        elif whole is None:
            whole = self._maps.get(number, lambda: self._map(number))
        return whole[_HEADS:]

    def _map(self, number: int, *, is_compared: bool = False) -> NDArray[Any]:
        """The index of a file, mapped; it is compared with its digest if all of it is read."""
        place, (count, content, _) = self._places[number], self._contents[number]
        assert place is not None
        try:
            # Not `np.load`, which takes thirty times as long to read what is known.
            with open(place, "rb") as file:
                mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
            start = len(mapped) - count * ENTRY.itemsize
            whole: NDArray[Any] = np.frombuffer(mapped, ENTRY, count, max(0, start))
            is_same = start > 0 and whole[1].tobytes() == content
            if is_same and (not is_compared or int(whole["record"][0]) == _sealed(whole)):
                return whole
            why = "is another one now"
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        except ValueError:
            why = "is another one now"
        # No defect of a record, so that none is left out for it.
        raise ConfigError(
            f"the index {place!r} of {self._paths[number]!r} {why}: make the source anew"
        )

    def _entries(self, record: int) -> tuple[int, NDArray[Any], int]:
        """The number of a record's file, its entries, and where the record before it ends."""
        number = int(np.searchsorted(self._ends, record, side="right"))
        index, inside = self._index(number), record - int(self._firsts[number])
        start, stop = np.searchsorted(index["record"], (inside, inside + 1)).tolist()
        before = 0
        if self._with_origin and start:
            # To look at it takes as long as to read a small record.
            before = int(index["offset"][start - 1] + index["size"][start - 1])
        return number, index[start:stop], before

    @property
    def has_objects(self) -> bool:
        """Whether some of the files are objects of stores."""
        return any(isinstance(path, FarPath) for path in self._paths)

    def touches(self, records: Sequence[int]) -> Iterator[Touch]:
        """What records read of objects."""
        for record in records:
            number, entries, before = self._entries(record)
            path = self._paths[number]
            if isinstance(path, FarPath):
                first, last = entries[0], entries[-1]
                start = before if self._with_origin else int(first["offset"])
                yield path, start, int(last["offset"] + last["size"]) + self._after

    def name(self, record: int) -> str:
        """The path, and where the record begins."""
        number, entries, _ = self._entries(record)
        where = " of its content" if self._contents[number][2] else ""
        return f"{self._paths[number]!r} at byte {int(entries['offset'][0])}{where}"

    def __getitem__(self, record: int) -> Any:
        number, entries, before = self._entries(record)
        with self._files.open(number) as pread:
            return self._made(pread, number, entries, before)

    def _made(self, pread: Pread, number: int, entries: NDArray[Any], before: int) -> Any:
        pieces = _read(pread, entries, self._after)
        if not self._with_origin:
            return self._decode(pieces)
        between = pread(pieces[0][1] - before, before)
        return self._decode(pieces, self._paths[number], between)

    def __getitems__(self, records: Sequence[int]) -> list[Any]:
        """Several records; each file is opened once."""
        made: list[Any] = [None] * len(records)
        by_file: dict[int, list[tuple[int, NDArray[Any], int]]] = {}
        for i, record in enumerate(records):
            number, entries, before = self._entries(record)
            by_file.setdefault(number, []).append((i, entries, before))
        for number, wanted in by_file.items():
            with self._files.open(number) as pread:
                for i, entries, before in wanted:
                    made[i] = self._made(pread, number, entries, before)
        return made

    def describe(self) -> dict[str, Any]:
        """Of each file its name, its records, where they lie, and what is there."""
        return {**told_of_files(self._paths, self._told), **order_of_files(self._paths)}


def write_index(path: str, scan: Scan, folder: PathLike | None) -> tuple[int, str]:
    """Make the index of a file, and write down what it holds if it is compressed; that of an object
    becomes an object beside it, or a file in the folder. Returns how many records it has, and where
    its content, or its index, lies.

    Raises:
        ConfigError: the file cannot be read, or what it holds cannot be written.
        StorageError: an object cannot be read or written.
    """
    keeper = _Keeper(folder)
    if isinstance(path, FarPath):
        keeper.look_beside([path])
    index, kept = keeper.index(path, scan, "1 of 1")
    num = int(index["record"][-1]) + 1 if len(index) > _HEADS else 0
    if not isinstance(path, FarPath):
        return num, keeper.content(path, index, write=True).path
    if folder is not None:
        if kept is None:
            raise ConfigError(f"the index of {path!r} cannot be written to {folder!r}")
        return num, kept
    if not keeper.is_beside(path):
        file, whole = BytesIO(), np.array(index)
        whole["record"][0] = _sealed(whole)
        np.save(file, whole, allow_pickle=False)
        path.objects.put(_beside(path), file.getvalue())
    return num, _beside(path)


def _beside(path: FarPath) -> str:
    """The URL of the index of an object."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{_name_of_index(name)}"


def _name_of_index(name: str) -> str:
    return f".{name}.feeder-index"


def _told(records: int, whole: NDArray[Any]) -> str:
    """What a description says of a file. When it was changed does not count: a copy is the same."""
    digest = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(whole[1:]).view(np.uint8).data)
    return f"{records} records, {digest}"


def digest_of_stretches(file: BinaryIO, size: int) -> int:
    """A digest of stretches that lie evenly in a file; of a small one of all its bytes."""
    last = max(0, size - _STRETCH_BYTES)
    starts = (
        range(0, size, _STRETCH_BYTES)
        if size <= _STRETCHES * _STRETCH_BYTES
        else (last * i // (_STRETCHES - 1) for i in range(_STRETCHES))
    )
    hasher = xxhash.xxh3_64()
    for start in starts:
        hasher.update(os.pread(file.fileno(), _STRETCH_BYTES, start))
    # As an int64 of an entry.
    return int.from_bytes(hasher.digest(), "little", signed=True)


@contextmanager
def opened(path: str) -> Iterator[tuple[IO[bytes], int]]:
    """A file, or the content of a compressed one, for a `Scan` of its beginning; and its size, or
    more than that."""
    if isinstance(path, FarPath):
        _refuse_compressed(path)
        with path.opened(to_end=False) as file:
            yield file, path.known.size
        return
    with open(path, "rb") as file:
        if kind := kind_of(file):
            yield BufferedReader(inflated_file(path, kind)), sys.maxsize
        else:
            yield file, os.fstat(file.fileno()).st_size


def _refuse_compressed(path: FarPath) -> None:
    if kind := kind_of_bytes(path.pread(10, 0)):
        raise ConfigError(
            f"{path!r} is compressed ({kind}): objects of stores are read as they are, so that any "
            "record is read at once; decompress it"
        )


def read_at(file: IO[bytes], size: int, offset: int) -> bytes:
    """Bytes of a file that is open, for a `Scan`."""
    try:
        return os.pread(file.fileno(), size, offset)
    except UnsupportedOperation:  # the content of a compressed file
        file.seek(offset)
        return file.read(size)


def _read(pread: Pread, entries: NDArray[Any], after: int) -> list[Piece]:
    """The pieces of a record. Raises ValueError where the file ends before."""
    first, last = entries[0], entries[-1]
    start, stop = int(first["offset"]), int(last["offset"] + last["size"]) + after
    data = pread(stop - start, start)
    if len(data) < stop - start:
        raise ValueError(f"the file ends at byte {start + len(data)}, the record at byte {stop}")
    pieces = [
        (kind.decode(), offset, data[offset - start : offset - start + size])
        for _, kind, offset, size in entries.tolist()
    ]
    if after:
        kind, offset, _ = pieces[-1]
        pieces[-1] = kind, offset, data[offset - start :]
    return pieces


class _Keeper:
    """Makes indexes and keeps them; owned by the thread that makes a source."""

    def __init__(self, folder: PathLike | None) -> None:
        self._folder = None if folder is None else os.fspath(folder)
        self._has_told = False
        self._found: dict[str, NDArray[Any]] = {}
        """Indexes that lie beside their objects."""

    def look_beside(self, paths: Sequence[FarPath]) -> None:
        """Bring the indexes of objects that lie beside them, of which none is kept here, several at
        once."""
        lacking = [path for path in paths if not os.path.exists(self._place_of(path))]
        for path, data in zip(lacking, in_parallel(_found_beside, lacking), strict=True):
            whole = _if_whole(partial(np.load, BytesIO(data or b"")))
            if whole is not None:
                self._found[path] = whole

    def is_beside(self, path: str) -> bool:
        """Whether the index of an object lies beside it."""
        return path in self._found

    def index(self, path: str, scan: Scan, which: str) -> tuple[NDArray[Any], str | None]:
        """The index of a file, one that is kept or a new one, and where it is kept, if it is."""
        if isinstance(path, FarPath):
            return self._index_of_object(path, scan, which)
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                # When it was changed can be set, as by a copy; then only what it holds tells.
                name = f"{scan.__name__}:{status.st_ctime_ns:x}"
                head = (0, name.encode(), status.st_mtime_ns, status.st_size)
                place = self._place_of(path)
                index = _load_if_of(place, head)
                if index is not None and (
                    index[0]["kind"] == head[1]
                    or index[1]["offset"] == digest_of_stretches(file, status.st_size)
                ):
                    return index, place
                logger.info("indexing %r, file %s", path, which)
                kind, size = kind_of(file), 0
                if kind:
                    size = size_of(path, kind)
                    content_of = BufferedReader(inflated_file(path, kind))
                    entries = np.fromiter(scan(content_of, size), ENTRY)
                else:
                    entries = np.fromiter(scan(file, status.st_size), ENTRY)
                digest = digest_of_stretches(file, status.st_size)
                content = (0, kind.encode(), digest, size)
                return self._kept(
                    place, np.concatenate((np.array([head, content], ENTRY), entries))
                )
        except OSError as error:
            raise ConfigError(f"{path!r} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path!r}: {error}") from error

    def _index_of_object(
        self, path: FarPath, scan: Scan, which: str
    ) -> tuple[NDArray[Any], str | None]:
        """The same of an object, which is known by its size and tag: it may have been moved."""
        digest = xxhash.xxh3_64_digest(path.told.encode())
        tag = int.from_bytes(digest, "little", signed=True)
        head = (0, f"{scan.__name__}:object".encode(), tag, path.known.size)
        place = self._place_of(path)
        index = _load_if_of(place, head) if place else None
        if index is not None and index[0]["kind"] == head[1]:
            return index, place
        beside = _if_of(self._found.get(path), head)
        if beside is not None and beside[0]["kind"] == head[1]:
            return self._kept(place, beside) if place else (beside, None)
        self._found.pop(path, None)
        logger.info("indexing %r, file %s", path, which)
        _refuse_compressed(path)
        try:
            with path.opened(to_end=True) as file:
                entries = np.fromiter(scan(file, path.known.size), ENTRY)
        except ValueError as error:
            raise ConfigError(f"{path!r}: {error}") from error
        whole = np.concatenate((np.array([head, (0, b"", tag, 0)], ENTRY), entries))
        return self._kept(place, whole) if place else (whole, None)

    def content(self, path: str, index: NDArray[Any], *, write: bool = False) -> Place:
        """Where the content of a file is read."""
        size, digest = int(index[1]["size"]), int(index[1]["offset"])
        packed = Place(path, index[1]["kind"].decode())
        if isinstance(path, FarPath):
            return packed
        return packed.found(self._place_of(path), size, digest, write=write)

    def _place_of(self, path: str) -> str:
        name = _name_of_index(os.path.basename(path))
        if isinstance(path, FarPath):
            folder = path.blocks.indexes if self._folder is None else self._folder
            digest = xxhash.xxh3_64_hexdigest(path.encode())
            return os.path.join(folder, f"{digest}{name}") if folder else ""
        if self._folder is None:
            return os.path.join(os.path.dirname(path), name)
        # Files of one name in several folders have an index each.
        digest = xxhash.xxh3_64_hexdigest(os.path.abspath(path).encode())
        return os.path.join(self._folder, f"{digest}{name}")

    def _kept(self, place: str, whole: NDArray[Any]) -> tuple[NDArray[Any], str | None]:
        """An index, written down and mapped; in memory where that cannot be."""
        # Under another name first, so that nobody finds half of it; hidden, as the index is, from
        # patterns of other processes. (Files of `tempfile` are for their owner alone.)
        unfinished = f"{place}.{secrets.token_hex(8)}"
        whole["record"][0] = _sealed(whole)
        try:
            with open(unfinished, "xb") as file:
                np.save(file, whole, allow_pickle=False)
            os.replace(unfinished, place)
        except OSError as error:
            with suppress(OSError):
                os.unlink(unfinished)
            if not self._has_told:
                self._has_told = True
                logger.warning(
                    "the index %r cannot be kept (%s): it is made again for each source; give "
                    "index= a folder that can be written to", place, error.strerror,
                )  # fmt: skip
            return whole, None
        return _load(place), place


def _load(place: str) -> NDArray[Any]:
    # A plain array over the map: each slice of a `memmap` runs Python code of NumPy's.
    whole: NDArray[Any] = np.load(place, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    return whole


def _sealed(whole: NDArray[Any]) -> int:
    """What the first entry has for its record: the version, and 56 bits of a digest of all that
    follows."""
    hasher = xxhash.xxh3_64(whole[0].tobytes()[ENTRY["record"].itemsize :])
    hasher.update(np.ascontiguousarray(whole[1:]).view(np.uint8).data)
    return int.from_bytes(bytes([_VERSION]) + hasher.digest()[:7], "little", signed=True)


def _load_if_whole(place: str) -> NDArray[Any] | None:
    """A kept index, if it is one of this version, and is as it was written."""
    return _if_whole(partial(_load, place))


def _if_whole(load: Callable[[], NDArray[Any]]) -> NDArray[Any] | None:
    try:
        whole = load()
    except Exception:  # NumPy reads a header as Python's code, and says what is wrong as that does
        return None
    is_index = whole.dtype == ENTRY and whole.ndim == 1 and len(whole) >= _HEADS
    return whole if is_index and int(whole["record"][0]) == _sealed(whole) else None


def _found_beside(path: FarPath) -> bytes | None:
    return path.objects.found(_beside(path))


def is_whole_index(place: str) -> bool:
    """Whether a file is an index that is as it was written."""
    return _load_if_whole(place) is not None


def _load_if_of(place: str, head: tuple[int, bytes, int, int]) -> NDArray[Any] | None:
    """A kept index, if it is of a file of this size that was changed then."""
    return _if_of(_load_if_whole(place), head)


def _if_of(whole: NDArray[Any] | None, head: tuple[int, bytes, int, int]) -> NDArray[Any] | None:
    if whole is None:
        return None
    _, name, *status = whole[0].item()
    is_right = (*status,) == head[2:]
    return whole if is_right and name.partition(b":")[0] == head[1].partition(b":")[0] else None
