"""Parts as LMDBs, which other programs can read: one file each, as `lmdb.open(path, subdir=False)`
takes it.

A key for each entry, whose value is the entry's bytes; under the key ``"\\0feeder"`` msgpack that
says what they are. Behind the LMDB's own pages come 8 bytes ``b"FEEDLMDB"`` and the xxh3-128 of
all bytes before them. LMDB trusts its pages, and a damaged one may end the process: so it is shown
a copy in memory, once the digest of the whole file is right.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from feeder.checkpoint.format import DamagedError, Loaded, Reader, Receipt, chosen
from feeder.checkpoint.local import LocalFolder
from feeder.checkpoint.names import check_name
from feeder.checkpoint.tolerate import is_unreadable
from feeder.durable import Fs
from feeder.errors import CheckpointError, ConfigError
from feeder.state import codec
from feeder.state.raw_arrays import num_bytes_of, pack_array, read_dtype, restore_array
from feeder.workers.sources.extras import load

LMDB_VERSION = 1
_MAGIC = b"FEEDLMDB"
_TRAILER_BYTES = len(_MAGIC) + 16
_ABOUT = b"\0feeder"
# LMDB's own bound, as it is built everywhere.
_MAX_KEY_BYTES = 511
# Read, hashed and written in such pieces: a part of gigabytes is never in memory a second time.
_PIECE_BYTES = 1 << 20
_PAGES_BYTES = 1 << 24
"""Room in an LMDB's map for its own pages."""


class LmdbDatabase:
    """LMDBs in a folder. Durability, the lock of a writer and what is done about links are those
    of the store in a folder; every method raises `CheckpointError`."""

    def __init__(self, folder: str, writer: str) -> None:
        self._lmdb = load("lmdb", "lmdb")
        self._folder = LocalFolder(folder, writer, Fs())

    def put(
        self, name: str, entries: Mapping[str, Any], *, meta: Mapping[str, Any] | None = None
    ) -> Receipt:
        """Write one; durable when it returns."""
        check_name(name)
        with _memory_file(name) as (file, path):
            self._fill(path, entries, dict(meta or {}))
            digest = xxhash.xxh3_128()
            parts = [os.pread(file, _PIECE_BYTES, at) for at in _offsets(os.fstat(file).st_size)]
            for part in parts:
                digest.update(part)
        parts.append(_MAGIC + digest.digest())
        self._folder.create(name, parts)
        return Receipt(name=name, num_bytes=sum(map(len, parts)), digest=digest.digest())

    def get(self, name: str, entries: Iterable[str] | None = None) -> Loaded:
        """Read one, or some of its entries. All of it is read and checked either way."""
        with self._checked(name) as (values, found, num_bytes, digest):
            about, meta = _parse(values, found)
            wanted = chosen(entries, about, found)
            read = {entry: _read(values, entry, about[entry], found) for entry in wanted}
            return Loaded(name=name, entries=read, meta=meta, num_bytes=num_bytes, digest=digest)

    def entry_names(self, name: str) -> list[str]:
        """The names of its entries. All of it is read and checked."""
        return list(self.get(name).entries)

    def digest_of(self, name: str) -> bytes:
        """The digest that it claims, without reading all of it."""
        with self._folder.open(check_name(name)) as reader:
            return _read_trailer(reader)

    def verify(self, name: str) -> Receipt:
        """Read all of one, and raise where a bit of it is wrong."""
        loaded = self.get(name)
        return Receipt(name=name, num_bytes=loaded.num_bytes, digest=loaded.digest)

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name that ends as these do. One that cannot be read
        raises."""
        try:
            self.digest_of(name)
        except CheckpointError as error:
            is_missing = isinstance(error.__cause__, FileNotFoundError)
            if is_unreadable(error) or not (is_missing or isinstance(error, DamagedError)):
                raise
            return False
        return True

    def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Remove one; refuses what is none. With `missing_ok`, nothing is done where there is
        nothing."""
        try:
            self.digest_of(name)
            self._folder.remove(name)
        except CheckpointError as error:
            if not (missing_ok and isinstance(error.__cause__, FileNotFoundError)):
                raise

    def path_of(self, name: str) -> str:
        """Where one lies, for messages."""
        return self._folder.path_of(name)

    def close(self) -> None:
        """Let others of this writer write."""
        self._folder.close()

    # ---- LMDB

    def _fill(self, path: str, entries: Mapping[str, Any], meta: dict[str, Any]) -> None:
        """Write entries and what is said of them into an empty LMDB."""
        blobs: list[Any] = []
        about = [[name, *_fields(name, entry, blobs)] for name, entry in entries.items()]
        size = sum(map(len, blobs)) + (len(blobs) + 1) * 2 * _MAX_KEY_BYTES
        try:
            # No lock and no sync: the file is in memory and this process's alone. `_folder` writes
            # it durably afterwards.
            env = self._lmdb.open(
                path, subdir=False, lock=False, sync=False, map_size=2 * size + _PAGES_BYTES
            )
            with contextlib.closing(env), env.begin(write=True) as transaction:
                transaction.put(_ABOUT, codec.pack([LMDB_VERSION, about, meta]))
                for (name, *_), blob in zip(about, blobs, strict=True):
                    transaction.put(_key(name), blob)
        except self._lmdb.Error as error:
            raise CheckpointError(f"an LMDB of {size} bytes cannot be made: {error}") from error

    @contextlib.contextmanager
    def _checked(self, name: str) -> Iterator[tuple[Any, str, int, bytes]]:
        """A transaction on one whose every byte has been checked, its path, length and digest."""
        # A copy in memory, checked before LMDB sees it: LMDB trusts its pages, and a damaged one
        # may end the process.
        with _memory_file(name) as (file, path):
            with self._folder.open(check_name(name)) as reader:
                digest = _copy(reader, file)
                found, num_bytes = reader.path, reader.size
            try:
                env = self._lmdb.open(path, subdir=False, lock=False, readonly=True)
                with contextlib.closing(env), env.begin(buffers=True) as transaction:
                    yield transaction, found, num_bytes, digest
            except self._lmdb.Error as error:
                raise DamagedError(f"checkpoint {found!r} is no LMDB: {error}") from error


def _offsets(size: int) -> range:
    return range(0, size, _PIECE_BYTES)


@contextlib.contextmanager
def _memory_file(name: str) -> Iterator[tuple[int, str]]:
    """A file that is nowhere but in memory, and a path to it."""
    # LMDB wants a path, and a memfd has one under /proc; it leaves nothing behind when it is
    # killed.
    file = os.memfd_create(name[-200:])
    try:
        yield file, f"/proc/self/fd/{file}"
    finally:
        os.close(file)


def _fields(name: Any, entry: Any, blobs: list[Any]) -> list[Any]:
    """Dtype, shape and size of an entry; its bytes are added to the blobs."""
    _key(name)
    if isinstance(entry, bytes):
        blobs.append(entry)
        return [None, [], len(entry)]
    is_array = isinstance(entry, np.ndarray) and not isinstance(entry, np.ma.MaskedArray)
    if not is_array or entry.dtype.hasobject:
        raise CheckpointError(
            f"entry {name!r} is {type(entry).__name__}, expected bytes or a NumPy array of "
            "anything but Python objects"
        )
    try:
        dtype, shape, size = pack_array(entry, blobs)
    except TypeError as error:
        raise CheckpointError(f"entry {name!r}: {error}") from None
    return [dtype, list(shape), size]


def _key(name: str) -> bytes:
    """An entry's name in an LMDB. One that can be none is a mistake in the job, not a save that
    failed: `ConfigError`."""
    key = name.encode(errors="surrogatepass")
    if not 0 < len(key) <= _MAX_KEY_BYTES or key == _ABOUT:
        raise ConfigError(
            f"entry {name!r} has {len(key)} bytes in its name, expected 1 to {_MAX_KEY_BYTES}, and "
            f"not {_ABOUT!r}; name it otherwise, or use db_type 'file'"
        )
    return key


def _read_trailer(reader: Reader) -> bytes:
    at = reader.size - _TRAILER_BYTES
    trailer = bytearray(_TRAILER_BYTES)
    if at > 0:
        reader.read_into(memoryview(trailer), at)
    if trailer[: len(_MAGIC)] != _MAGIC:
        raise _damaged(reader.path, f"it does not end with {_MAGIC!r} and a digest")
    return bytes(trailer[len(_MAGIC) :])


def _copy(reader: Reader, file: int) -> bytes:
    """Copy an LMDB, checking its digest, which is returned."""
    digest = _read_trailer(reader)
    hasher = xxhash.xxh3_128()
    size = reader.size - _TRAILER_BYTES
    for at in _offsets(size):
        piece = bytearray(min(_PIECE_BYTES, size - at))
        reader.read_into(memoryview(piece), at)
        hasher.update(piece)
        os.pwrite(file, piece, at)
    if hasher.digest() != digest:
        raise _damaged(reader.path, "its digest does not match")
    return digest


def _parse(transaction: Any, path: str) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The fields of each entry, and the writer's meta."""
    try:
        version, about, meta = codec.unpack(bytes(transaction.get(_ABOUT)))
        if version == LMDB_VERSION:
            return {str(name): fields for name, *fields in about}, dict(meta)
    except Exception as error:
        # What NumPy and msgpack raise for bytes that make no sense is not a small family.
        raise _damaged(path, f"what it says of itself cannot be read: {error}") from error
    raise CheckpointError(
        f"checkpoint {path!r} has version {version}, expected {LMDB_VERSION}; update feeder, "
        "or name another checkpoint"
    )


def _read(transaction: Any, name: str, fields: list[Any], path: str) -> Any:
    try:
        dtype_fields, shape, size = fields
        data = transaction.get(_key(name))
        dtype = None if dtype_fields is None else read_dtype(dtype_fields)
        wanted = size if dtype is None else num_bytes_of(dtype, tuple(shape))
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {path!r} cannot be read here: {error}") from error
    except Exception as error:
        raise _damaged(path, f"its entry {name!r} makes no sense: {error}") from error
    if data is None or len(data) != size:
        raise _damaged(path, f"its entry {name!r} does not have {size} bytes")
    if dtype is None:
        return bytes(data)
    if wanted != size:
        raise _damaged(path, f"its entry {name!r} of {size} bytes is no {dtype} {shape!r}")
    raw = np.frombuffer(bytearray(data), np.uint8)
    return restore_array(raw, dtype, tuple(shape))


def _damaged(path: str, what: str) -> DamagedError:
    return DamagedError(f"checkpoint {path!r} is damaged: {what}; name another one")
