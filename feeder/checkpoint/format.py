"""Checkpoints as bytes: named arrays and bytes, each of which can be read alone.

Layout of version 1, all integers little-endian::

    8 bytes   b"FEEDCKPT"
    4 bytes   version
    8 bytes   length of the header
    8 bytes   length of the data
    16 bytes  xxh3-128 of version, lengths and header: the digest of the checkpoint
    header    msgpack: the entries, and what the writer added about them
    data      the bytes of all entries, one after another

The header lists the entries: name, dtype (none for plain bytes), shape, size, and the xxh3-128 of
their bytes. So the digest of the checkpoint, which covers those of the entries, covers every byte,
and one entry can be read and checked without the others. Nothing in a checkpoint names code, and
nothing is unpickled. Sizes are compared with that of the file before anything is read.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.errors import CheckpointError, ConfigError
from feeder.state import codec
from feeder.state.raw_arrays import num_bytes_of, pack_array, read_dtype, restore_array

# Raised when an older reader would misread what is written.
CHECKPOINT_VERSION = 1
MAGIC = b"FEEDCKPT"
_NUMBERS = struct.Struct("<IQQ")
_HEAD_BYTES = len(MAGIC) + _NUMBERS.size + 16

Entry = NDArray[Any] | bytes


class DamagedError(CheckpointError):
    """A checkpoint is not whole."""


class Reader(Protocol):
    """The bytes of one checkpoint."""

    @property
    def path(self) -> str:
        """Where it lies, for messages."""

    @property
    def size(self) -> int:
        """How many bytes it has."""

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer with the bytes from offset `at` on. Raises `CheckpointError`."""


class EntryExtent(NamedTuple):
    """Where an entry lies, and what it is."""

    dtype: np.dtype[Any] | None
    """None for plain bytes."""
    shape: tuple[int, ...]
    at: int
    """Offset of its first byte in the file."""
    size: int
    """Its length in bytes."""
    digest: bytes
    """xxh3-128 of its bytes."""


class Header(NamedTuple):
    """The header of a checkpoint: its entries, the writer's meta, its digest."""

    entries: dict[str, EntryExtent]
    meta: dict[str, Any]
    """The writer's own remarks."""
    digest: bytes
    """The digest of the checkpoint."""


class Receipt(NamedTuple):
    """The proof of a stored checkpoint: it is durable."""

    name: str
    """The name under which it is found."""
    num_bytes: int
    """Its length in bytes."""
    digest: bytes
    """16 bytes that tell its content from any other."""


class Loaded(NamedTuple):
    """The content of a checkpoint, read and checked."""

    name: str
    """The name under which it was found."""
    entries: dict[str, Entry]
    """Arrays and bytes by name: all of them, or those that were asked for."""
    meta: dict[str, Any]
    """The writer's own remarks."""
    num_bytes: int
    """Length of the whole checkpoint in bytes."""
    digest: bytes
    """The digest of the whole, as its receipt has it."""


# ---- written


def encode(
    entries: Mapping[str, Any], meta: Mapping[str, Any] | None
) -> tuple[list[Any], int, bytes]:
    """The parts of a checkpoint, their length in bytes all together, and its digest. Arrays are
    not copied. Raises `CheckpointError` for what cannot be in one."""
    blobs: list[Any] = []
    listed = [_entry_fields(name, entry, blobs) for name, entry in entries.items()]
    try:
        header = codec.pack([listed, dict(meta or {})])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"what is said of a checkpoint cannot be saved: {error}") from error
    # The header holds the digest of each entry, so the digest of the header is one of everything.
    numbers = _NUMBERS.pack(CHECKPOINT_VERSION, len(header), sum(map(len, blobs)))
    digest = xxhash.xxh3_128_digest(numbers + header)
    parts = [b"".join((MAGIC, numbers, digest, header)), *blobs]
    return parts, sum(map(len, parts)), digest


def _entry_fields(name: Any, entry: Any, blobs: list[Any]) -> list[Any]:
    if not isinstance(name, str):
        raise CheckpointError(f"entry {name!r} is named by {type(name).__name__}, expected str")
    if isinstance(entry, (bytes, bytearray, memoryview)):
        data = bytes(entry)
        blobs.append(data)
        return [name, None, [], len(data), xxhash.xxh3_128_digest(data)]
    if isinstance(entry, np.generic):
        entry = np.asarray(entry)
    if not isinstance(entry, np.ndarray) or isinstance(entry, np.ma.MaskedArray):
        raise CheckpointError(
            f"entry {name!r} is {type(entry).__name__}, expected a NumPy array or bytes"
        )
    if entry.dtype.hasobject:
        # They would have to be pickled, and unpickling runs code.
        raise CheckpointError(
            f"entry {name!r} has dtype {entry.dtype}: arrays of Python objects are not saved"
        )
    try:
        dtype, shape, size = pack_array(entry, blobs)
    except TypeError as error:
        raise CheckpointError(f"entry {name!r}: {error}") from None
    return [name, dtype, list(shape), size, xxhash.xxh3_128_digest(blobs[-1])]


# ---- read


def is_checkpoint(reader: Reader) -> bool:
    """Whether a file begins as checkpoints do."""
    return reader.size >= len(MAGIC) and read_bytes(reader, len(MAGIC), 0) == MAGIC


def read_bytes(reader: Reader, num_bytes: int, at: int) -> bytearray:
    """So many bytes from an offset on."""
    data = bytearray(num_bytes)
    reader.read_into(memoryview(data), at)
    return data


def chosen(entries: Iterable[str] | None, known: Collection[str], path: str) -> list[str]:
    """The names of the entries that are wanted, by default all; raises `CheckpointError` if one of
    them is not there."""
    wanted = list(known if entries is None else entries)
    if missing := [entry for entry in wanted if entry not in known]:
        raise CheckpointError(
            f"checkpoint {path!r} has no entries {missing!r}, expected some of {sorted(known)!r}"
        )
    return wanted


def read_header(reader: Reader) -> Header:
    """Read and check the header. Raises `DamagedError`, and `CheckpointError`
    where it cannot be read or is of a newer version."""
    if reader.size < _HEAD_BYTES:
        raise _damaged(reader, f"it has {reader.size} bytes, expected at least {_HEAD_BYTES}")
    head = read_bytes(reader, _HEAD_BYTES, 0)
    if head[: len(MAGIC)] != MAGIC:
        raise _damaged(reader, f"it begins with {bytes(head[:8])!r}, expected {MAGIC!r}")
    numbers, digest = head[len(MAGIC) : -16], bytes(head[-16:])
    version, header_bytes, data_bytes = _NUMBERS.unpack(numbers)
    # Before the header is read: a damaged length must not ask for terabytes of memory.
    if reader.size != _HEAD_BYTES + header_bytes + data_bytes:
        raise _damaged(
            reader,
            f"it has {reader.size} bytes, expected {_HEAD_BYTES + header_bytes + data_bytes}",
        )
    header = read_bytes(reader, header_bytes, _HEAD_BYTES)
    if xxhash.xxh3_128_digest(numbers + header) != digest:
        raise _damaged(reader, "the digest of its header does not match")
    if version != CHECKPOINT_VERSION:
        raise CheckpointError(
            f"checkpoint {reader.path!r} has version {version}, expected {CHECKPOINT_VERSION}; "
            "update feeder, or name another checkpoint"
        )
    try:
        entries, meta = _parse(bytes(header), data_bytes)
    except ConfigError as error:
        # A dtype of ml_dtypes, which is not installed here: the file is whole.
        raise CheckpointError(f"checkpoint {reader.path!r} cannot be read here: {error}") from error
    except Exception as error:
        # What NumPy and msgpack raise for bytes that make no sense is not a small family.
        raise _damaged(reader, f"its header makes no sense: {error}") from error
    return Header(entries=entries, meta=meta, digest=digest)


def read_entry(reader: Reader, name: str, placed: EntryExtent) -> Entry:
    """One entry, checked. Raises `DamagedError`, and `CheckpointError` where it cannot be read."""
    raw = np.empty(placed.size, np.uint8)
    if placed.size:
        reader.read_into(raw.data, placed.at)
    if xxhash.xxh3_128_digest(raw.data if placed.size else b"") != placed.digest:
        raise _damaged(reader, f"the digest of its entry {name!r} does not match")
    return raw.tobytes() if placed.dtype is None else restore_array(raw, placed.dtype, placed.shape)


_PIECE_BYTES = 1 << 20


def verify_entry(reader: Reader, name: str, placed: EntryExtent) -> None:
    """Read all of an entry, piece by piece, and check it: what is only looked at is never in memory
    as a whole. Raises as `read_entry` does."""
    digest, piece = xxhash.xxh3_128(), bytearray(min(_PIECE_BYTES, placed.size))
    for at in range(0, placed.size, _PIECE_BYTES):
        view = memoryview(piece)[: placed.size - at]
        reader.read_into(view, placed.at + at)
        digest.update(view)
    if digest.digest() != placed.digest:
        raise _damaged(reader, f"the digest of its entry {name!r} does not match")


def _parse(header: bytes, data_bytes: int) -> tuple[dict[str, EntryExtent], dict[str, Any]]:
    listed, meta = codec.unpack(header)
    at = end = _HEAD_BYTES + len(header)
    end += data_bytes
    entries: dict[str, EntryExtent] = {}
    for name, fields, shape, size, digest in listed:
        dtype = None if fields is None else read_dtype(fields)
        wanted = size if dtype is None else num_bytes_of(dtype, tuple(shape))
        if type(name) is not str or name in entries or type(size) is not int:
            raise ValueError(f"entry {name!r} of {size!r} bytes")
        if not 0 <= size == wanted or at + size > end:
            raise ValueError(f"entry {name!r} has {size} bytes, expected {wanted}")
        entries[name] = EntryExtent(
            dtype=dtype, shape=tuple(shape), at=at, size=size, digest=digest
        )
        at += size
    if at != end or not isinstance(meta, dict):
        raise ValueError(f"{end - at} bytes are no entry's")
    return entries, meta


def _damaged(reader: Reader, what: str) -> DamagedError:
    return DamagedError(
        f"checkpoint {reader.path!r} is damaged: {what}; remove it, or load another"
    )
