"""Sources of files that hold many records one after the other: tar shards, TFRecord, JSON lines.

Such a file tells where record n lies only to who reads all before it. So each file is scanned once,
when the source is made, and an index of places is kept; from then on every record is read by its
number, and any order costs the same. The scanners also prove that the file is whole: one that ends
early is named before training begins.
"""

from __future__ import annotations

import json
import os
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import IO, Any, Unpack

import numpy as np
import xxhash

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources import extras
from feeder.workers.sources.arguments import PathLike, flag
from feeder.workers.sources.datasets import FileRecords
from feeder.workers.sources.far.cache import Cache
from feeder.workers.sources.far.paths import files_of
from feeder.workers.sources.orders.options import OrderOptions
from feeder.workers.sources.pictures import Decoder
from feeder.workers.sources.source import Source
from feeder.workers.sources.stores.example import parse_example
from feeder.workers.sources.stores.offsets import (
    ENTRY,
    Entry,
    IndexedFiles,
    Piece,
    opened,
    read_at,
)
from feeder.workers.sources.stores.reading import OnError

Paths = PathLike | Iterable[PathLike]

TARS, TFRECORDS, LINES = ("tar", "tgz"), ("tfrecord", "tfrecords"), ("jsonl", "ndjson")
"""Suffixes of the files that are read of a folder."""

_END_BYTES = 1 << 20
"""So many bytes after the last member of a tar file are looked at; tools fill up to 10 KiB."""


# ---- WebDataset


@public("feeder.sources")
def webdataset(
    shards: Paths,
    keys: Sequence[str] | None = None,
    *,
    decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
    index: PathLike | None = None,
    cache: Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
    **options: Unpack[OrderOptions],
) -> Source:
    """Samples of tar shards in WebDataset's layout: members that follow one another and have the
    same name up to the first dot are one sample, and the rest of the name says what a member is.

    Any record is read at once, by an index of each shard that is made once: no shuffle buffer, and
    no shard that belongs to one worker. Compressed shards (gzip, zstd, bz2, xz, lz4) are read in
    order; `feeder index` decompresses them once for any order.

    Args:
        shards: A path or a URL, a folder, several, a pattern such as "shards/*.tar", or with braces
            such as "shards/{000..099}.tar".
        keys: The members of a sample that become columns, such as ("jpg", "cls"), in this order;
            None takes those of the first sample. A sample without one of them is defective.
            "__key__" is the name of a sample up to the first dot, "__url__" the path of its shard.
        decoders: By key, what makes a value of a member's bytes. Else by the last part of the key:
            jpg, jpeg, png, ppm, webp become uint8 of (height, width, 3) (extra `images`); npy an
            array; json what it holds; txt a string; cls, cls2, index, inx, id a whole number;
            anything else the bytes.
        index: A folder for the indexes; None keeps each beside its shard, and those of URLs in the
            folder of the cache.
        cache: A `feeder.Cache` that shards of URLs ("s3://bucket/shards/{000..099}.tar", and such)
            are read through; None is that of FEEDER_CACHE. They are read uncompressed.
        storage_options: How the store of a URL is reached, by the names of obstore, such as
            {"region": "eu-west-1"}; what is not given comes from the environment.
        on_error: What to do about a sample that cannot be read or decoded: "raise", or "skip",
            which leaves its row out and counts it in `source.skipped`.
        options: `OrderOptions`.

    Raises:
        ConfigError: a shard is missing, truncated or no tar file, or an option is wrong.
        StorageError: an object is missing or refused, or its store does not answer.
    """
    paths = files_of(shards, "a tar shard", TARS, cache, storage_options)
    if keys is None:
        keys = next(filter(None, map(_first_keys, paths)), None)
        if keys is None:
            raise ConfigError(f"{paths[0]!r} holds no samples")
    elif isinstance(keys, str) or not keys or not all(
        isinstance(key, str) and "/" not in key for key in keys
    ):  # fmt: skip
        raise ConfigError(f"keys are {keys!r}, expected names such as ('jpg', 'cls')")
    given = dict(decoders or {})
    for key, decode in given.items():
        if not callable(decode) or key not in keys:
            raise ConfigError(
                f"decoders[{key!r}] is {decode!r}, expected a function for one of {keys}"
            )
    chosen = {key: given.get(key) or _decoder_of(key) for key in keys if key not in _ORIGINS}
    decode = partial(_decode_members, chosen)
    has_origin = len(chosen) < len(keys)
    if has_origin:
        decode = partial(_decode_with_origin, decode, keys)
    files = IndexedFiles(paths, scan_tar, decode, index, with_origin=has_origin)
    if not len(files):
        raise ConfigError(f"{paths[0]!r} holds no samples")
    read = FileRecords("webdataset", files, on_error, decodes=bool(given), keys=[
        # Decoders of JPEGs differ in their pixels.
        f"{key}: {made.name}" if isinstance(made := chosen.get(key), Decoder) else key
        for key in keys
    ])  # fmt: skip
    return Source(read, **options)


def scan_tar(file: IO[bytes], size: int) -> Iterator[Entry]:
    """The members of a tar file, sample by sample."""
    for number, key, is_sparse, start, stop in _members(file, size):
        yield number, _kind(key, is_sparse=is_sparse), start, stop - start


def _members(file: IO[bytes], size: int) -> Iterator[tuple[int, str, bool, int, int]]:
    """Of each member its sample's number, its key, whether it is sparse, and where its bytes begin
    and end. Those of a sparse member begin with its header, which says where each part of it
    belongs."""
    number, last = -1, None
    try:
        # "r:" is without compression, which lies below.
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                # A sparse member has fewer bytes here than its size says: its holes are left out.
                parts: Any = member.sparse
                stored = member.size if parts is None else sum(size for _, size in parts)
                end = member.offset_data + stored
                if end > size:
                    raise ValueError(
                        f"the file has {size} bytes, member {member.name!r} at byte "
                        f"{member.offset_data} ends at {end}: it is truncated"
                    )
                folder, name = os.path.split(_name_of(member))
                stem, _, key = name.partition(".")
                if not member.isfile() or not stem or not key:
                    continue
                if (folder, stem) != last:
                    number, last = number + 1, (folder, stem)
                start = member.offset_data if parts is None else member.offset
                yield number, key.lower(), parts is not None, start, end
            # `tarfile` also takes what is no header for the end, and says nothing.
            _check_end(file, tar.offset, size)
    except tarfile.TarError as error:
        raise ValueError(f"is no tar file: {error}") from error


def _name_of(member: tarfile.TarInfo) -> str:
    # Beside a name that is not ASCII, `tarfile` takes the one that stands in for it.
    return member.pax_headers.get("GNU.sparse.name", member.name)


def _kind(key: str, *, is_sparse: bool = False) -> bytes:
    """What an index calls a member: its key, after a slash if the member is sparse. (No key has a
    slash.) A key that is too long for an entry is told by its digest, after two more slashes."""
    mark, octets = b"/" if is_sparse else b"", key.encode()
    if len(mark + octets) > ENTRY["kind"].itemsize:
        octets = b"//" + xxhash.xxh3_128_hexdigest(octets)[:29].encode()
    return mark + octets


def _dense(data: bytes) -> bytes:
    """The content of a sparse member, with its holes as zeros."""
    try:
        with tarfile.open(fileobj=BytesIO(data), mode="r:") as tar:
            member = tar.next()
            file = None if member is None else tar.extractfile(member)
            if member is None or member.sparse is None or file is None:
                raise ValueError("is no sparse member any more: the file has changed")
            return file.read()
    except tarfile.TarError as error:
        raise ValueError(f"cannot be read as a sparse member: {error}") from error


def _check_end(file: IO[bytes], at: int, size: int) -> None:
    """Raise ValueError where what follows the last member of a tar file is not its end: zeros."""
    rest = read_at(file, _END_BYTES, at)
    if not rest:
        # `tarfile` takes it, and so it takes a copy that was cut between two members: the samples
        # behind would be lost, and nobody would be told.
        raise ValueError(
            f"ends at byte {at} with a member, and not as a tar file: it is truncated, or its "
            "writer leaves the end out; if it is whole, `truncate --size=+1024 FILE` adds an end"
        )
    if len(rest) < tarfile.BLOCKSIZE or any(rest[: tarfile.BLOCKSIZE]):
        raise ValueError(
            f"at byte {at} of {size} there is no member and no end of a tar file: it is truncated "
            "or broken"
        )
    if found := rest.lstrip(b"\0"):
        where = at + len(rest) - len(found)
        raise ValueError(
            f"its tar file ends at byte {at}, and other bytes follow at {where}: files that were "
            "joined cannot be read as one"
        )


def _first_keys(path: str) -> list[str]:
    """The keys of the first sample of a shard; none if it holds none."""
    try:
        with opened(path) as (file, size):
            keys = []
            for number, key, *_ in _members(file, size):
                if number:
                    break
                keys.append(key)
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path!r}: {error}") from error
    return keys


def _decode_members(decoders: Mapping[str, Callable[[bytes], Any]], pieces: list[Piece]) -> Any:
    members = {kind: (offset, data) for kind, offset, data in pieces}
    keys = sorted(kind.lstrip("/") for kind in members)
    if len(set(keys)) < len(pieces):
        raise ValueError(f"the sample has the members {sorted(kind for kind, _, _ in pieces)}")
    sample = {}
    for key, decode in decoders.items():
        for is_sparse in (False, True):
            if piece := members.get(_kind(key, is_sparse=is_sparse).decode()):
                break
        else:
            raise ValueError(f"the sample has the members {keys}, and no {key!r}")
        offset, data = piece
        try:
            sample[key] = decode(_dense(data) if is_sparse else data)
        except (OSError, ValueError) as error:
            raise ValueError(f"member {key!r} at byte {offset}: {error}") from error
        except Exception as error:
            error.add_note(f"in member {key!r} at byte {offset}")
            raise
    return sample


_ORIGINS = ("__key__", "__url__")
"""What a sample has beside its members, as of WebDataset."""


def _decode_with_origin(
    decode: Callable[[list[Piece]], dict[str, Any]], keys: Sequence[str], pieces: list[Piece],
    path: str, between: bytes,
) -> dict[str, Any]:  # fmt: skip
    sample = decode(pieces)
    if "__key__" in keys:
        # Of a sparse member the header is a part of what is read; of others it lies before.
        kind, _, data = pieces[0]
        is_sparse = kind[:1] == "/" != kind[1:2]
        headers = between + data if is_sparse else between
        folder, name = os.path.split(_last_name(headers, len(between), is_sparse=is_sparse))
        sample["__key__"] = os.path.join(folder, name.partition(".")[0])
    return {key: path if key == "__url__" else sample[key] for key in keys}


def _last_name(headers: bytes, stop: int, *, is_sparse: bool) -> str:
    """The name of the member whose bytes, or whose sparse header, begin at a place."""
    # What fills up the last block of the sample before.
    start = stop % tarfile.BLOCKSIZE
    stream = BytesIO(headers[start:])
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            while (member := tar.next()) is not None:
                # Where a folder's header ends, that of a sparse member may begin.
                if stop - start == (member.offset if is_sparse else member.offset_data):
                    return _name_of(member)
    except tarfile.TarError as error:
        raise ValueError(f"the header of the sample cannot be read: {error}") from error
    raise ValueError("the header of the sample is not where it was: the file has changed")


def _decoder_of(key: str) -> Callable[[bytes], Any]:
    last = key.rpartition(".")[2]
    if last in ("jpg", "jpeg", "png", "ppm", "webp"):
        decoder = Decoder("auto")
        decoder.check()
        return decoder
    return _DECODERS.get(last, bytes)


def _load_npy(data: bytes) -> Any:
    return np.load(BytesIO(data), allow_pickle=False)


def _text(data: bytes) -> str:
    return data.decode()


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "npy": _load_npy, "json": json.loads, "txt": _text, "text": _text,
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
}  # fmt: skip


# ---- TFRecord


@public("feeder.sources")
def tfrecord(
    paths: Paths,
    decode: Callable[[bytes], Any] | None = None,
    *,
    verify: bool = False,
    index: PathLike | None = None,
    cache: Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
    **options: Unpack[OrderOptions],
) -> Source:
    """Records of TFRecord files; TensorFlow is not needed.

    Any record is read at once, by an index of each file that is made once; of compressed files as
    `webdataset` does.

    Args:
        paths: A path or a URL, a folder, several, or a pattern such as "data/*.tfrecord".
        decode: Makes a sample of a record's bytes. None reads a `tf.train.Example`: a mapping of
            arrays by feature, int64 or float32 of one axis, or of one string its bytes. Of a
            `tf.train.SequenceExample` a feature list is a list with the feature of each step.
        verify: Whether the checksum of each record is looked at when it is read: 0.1 s for each MB,
            less with the package google-crc32c. (That of its length always is.)
        index: A folder for the indexes; None keeps each beside its file, and those of URLs in the
            folder of the cache.
        cache, storage_options: For URLs, as `webdataset` has them.
        on_error: What to do about a record that cannot be decoded: "raise", or "skip", which leaves
            its row out and counts it in `source.skipped`.
        options: `OrderOptions`.

    Raises:
        ConfigError: a file is missing, truncated or no TFRecord file, or an option is wrong.
        StorageError: an object is missing or refused, or its store does not answer.
    """
    if decode is not None and not callable(decode):
        raise ConfigError(f"decode is {decode!r}, expected a function of bytes")
    listed = files_of(paths, "a TFRecord file", TFRECORDS, cache, storage_options)
    made = partial(_decode_one, decode or parse_example)
    if flag("verify", verify):
        made = partial(_verified, made)
    files = IndexedFiles(listed, scan_tfrecord, made, index, after=4 if verify else 0)
    if not len(files):
        raise ConfigError(f"{listed[0]!r} holds no records")
    return Source(FileRecords("tfrecord", files, on_error, decodes=decode is not None), **options)


_LENGTH = struct.Struct("<Q")


def scan_tfrecord(file: IO[bytes], size: int) -> Iterator[Entry]:
    """The records of a file: each is a length, a checksum of it, the bytes, and their checksum."""
    at = number = 0
    while at < size:
        head = read_at(file, 12, at)
        length = _LENGTH.unpack_from(head)[0] if len(head) == 12 else size
        if at + 16 + length > size:
            raise ValueError(
                f"the file has {size} bytes, and the record at byte {at} ends behind them: it is "
                "truncated, compressed or no TFRecord file"
            )
        yield number, b"", at + 12, length
        if int.from_bytes(head[8:], "little") != _checksum(head[:8]):
            raise ValueError(
                f"the record at byte {at} has a length whose checksum is another: it is damaged, "
                "compressed or no TFRecord file"
            )
        at, number = at + 16 + length, number + 1


def _verified(decode: Callable[[list[Piece]], Any], pieces: list[Piece]) -> Any:
    """A record, if its checksum, the last four bytes, is that of the others."""
    ((kind, at, data),) = pieces
    if int.from_bytes(data[-4:], "little") != _checksum(data[:-4]):
        raise ValueError("its checksum is another: it is damaged")
    return decode([(kind, at, data[:-4])])


def _checksum(data: bytes) -> int:
    """The CRC-32C of bytes, masked as in TFRecord files."""
    # Of few bytes a loop is as quick.
    library = extras.find("google_crc32c") if len(data) > 8 else None
    if library is not None:
        crc: int = library.value(data)
    else:
        crc = 0xFFFFFFFF
        for byte in data:
            crc = _CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
        crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _make_table() -> list[int]:
    table = [*range(256)]
    for _ in range(8):
        table = [crc >> 1 ^ 0x82F63B78 * (crc & 1) for crc in table]
    return table


_CRC32C = _make_table()


def _decode_one(decode: Callable[[bytes], Any], pieces: list[Piece]) -> Any:
    ((_, _, data),) = pieces
    return decode(data)


# ---- JSON lines


@public("feeder.sources")
def jsonl(
    paths: Paths,
    decode: Callable[[bytes], Any] | None = None,
    *,
    index: PathLike | None = None,
    cache: Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
    **options: Unpack[OrderOptions],
) -> Source:
    """Lines of text files, JSON by default; `map` makes columns of what a line holds.

    Any line is read at once, by an index of each file that is made once; of compressed files as
    `webdataset` does. Empty lines are no records, nor are lines of blanks if lines are JSON.

    Args:
        paths: A path or a URL, a folder, several, or a pattern such as "texts/{00..63}.jsonl.gz".
        decode: Makes a sample of a line's bytes; None is `json.loads`, and `bytes.decode` gives
            lines of text.
        index: A folder for the indexes; None keeps each beside its file, and those of URLs in the
            folder of the cache.
        cache, storage_options: For URLs, as `webdataset` has them.
        on_error: What to do about a line that cannot be decoded: "raise", or "skip", which leaves
            its row out and counts it in `source.skipped`.
        options: `OrderOptions`.

    Raises:
        ConfigError: a file is missing, or an option is wrong.
        StorageError: an object is missing or refused, or its store does not answer.
    """
    if decode is not None and not callable(decode):
        raise ConfigError(f"decode is {decode!r}, expected a function of bytes")
    listed = files_of(paths, "a file of lines", LINES, cache, storage_options)
    scan = scan_json if decode is None else scan_lines
    files = IndexedFiles(listed, scan, partial(_decode_one, decode or json.loads), index)
    if not len(files):
        raise ConfigError(f"{listed[0]!r} holds no lines")
    return Source(FileRecords("jsonl", files, on_error, decodes=decode is not None), **options)


def scan_lines(file: IO[bytes], size: int) -> Iterator[Entry]:
    """The lines of a file that are not empty, without their ends."""
    return _lines(file, b"\r\n")


def scan_json(file: IO[bytes], size: int) -> Iterator[Entry]:
    """The lines of a file that hold more than JSON's blanks."""
    return _lines(file, b" \t\r\n")


def _lines(file: IO[bytes], blanks: bytes) -> Iterator[Entry]:
    at = number = 0
    for line in file:
        held = len(line.rstrip(b"\r\n"))
        if line[0] not in blanks or line.strip(blanks):
            yield number, b"", at, held
            number += 1
        at += len(line)
