"""`mds`: shards in the format of MosaicML's Streaming, read where they lie.

The format (`streaming/base/format/mds` of mosaicml-streaming): a folder has an `index.json`, which
lists its shards with their columns. A shard is the number of samples, where each begins and the
last one ends, the columns once more as JSON, and the samples: of each column whose values differ in
size that size, then the values. Numbers are uint32, little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError, StorageError
from feeder.workers.public import public
from feeder.workers.sources.arguments import PathLike, flag
from feeder.workers.sources.datasets import FileRecords
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.far.cache import Cache
from feeder.workers.sources.far.objects import is_url
from feeder.workers.sources.far.paths import Far, FarPath
from feeder.workers.sources.orders.options import OrderOptions
from feeder.workers.sources.pictures import Decoder
from feeder.workers.sources.source import Source
from feeder.workers.sources.stores.inflated import Contents, Place, Pread, kind_of
from feeder.workers.sources.stores.kept import Kept
from feeder.workers.sources.stores.offsets import digest_of_stretches, order_of_files, told_of_files
from feeder.workers.sources.stores.reading import OnError

Decode = Callable[[bytes], Any]

_TABLES_KEPT = 64
"""Of so many shards of a store it is remembered where their samples begin."""
# Some 100 KB for a shard; not measured (2026-11-28).


@public("feeder.sources")
def mds(
    folder: PathLike,
    columns: Sequence[str] | None = None,
    *,
    decoders: Mapping[str, Decode] | None = None,
    verify: bool = False,
    cache: Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
    **options: Unpack[OrderOptions],
) -> Source:
    """Samples of MDS shards, as MosaicML's Streaming writes them; the library is not needed.

    Any sample is read at once, from a folder or a URL. Shards that lie on a disk compressed alone
    (zstd, gz, bz2) are read in order; `feeder index` decompresses them once for any order.

    Args:
        folder: The folder of an `index.json` and its shards.
        columns: The columns to read; None is all, in the order of the shards.
        decoders: By column, what makes a value of its bytes. Else by the column's encoding: whole
            numbers and floats with their dtype, str, bytes, ndarray an array, json what it holds,
            jpeg and png uint8 of (height, width, 3) (extra `images`). Columns of any other encoding
            need a decoder; pickles are never read without one.
        verify: Whether each shard is compared with the hashes of its index first, for which all of
            it is read. (Not of a URL, of which the store says when it changes.)
        cache: A `feeder.Cache` that a URL is read through; None is that of FEEDER_CACHE.
        storage_options: How the store of a URL is reached, by the names of obstore, such as
            {"region": "eu-west-1"}; what is not given comes from the environment.
        on_error: What to do about a sample that cannot be read or decoded: "raise", or "skip",
            which leaves its row out and counts it in `source.skipped`.
        options: `OrderOptions`.

    Raises:
        ConfigError: the folder or a shard is missing, truncated or no such file, or an option is
            wrong.
        StorageError: an object is missing or refused, or its store does not answer.
    """
    checks = flag("verify", verify)
    place, given = os.fspath(folder), dict(decoders or {})
    if not is_url(place):
        if storage_options is not None:
            raise ConfigError("storage_options are given, and the folder is no URL")
        shards = MdsShards(place, columns, given, verify=checks)
    elif checks:
        raise ConfigError("verify: shards of a URL are not compared with hashes: leave it out")
    else:
        shards = MdsShards(place, columns, given, far=Far(cache, storage_options))
    return Source(FileRecords("mds", shards, on_error, decodes=bool(decoders)), **options)


class MdsShards:
    """The samples of a folder, by number; read-only, any thread reads. Files are opened at the
    call: no process may hold a whole data set's files open."""

    def __init__(
        self, folder: str, columns: Sequence[str] | None, decoders: dict[str, Decode],
        *, verify: bool = False, far: Far | None = None,
    ) -> None:  # fmt: skip
        path = os.path.join(folder, "index.json")
        index = None if far is None else far.paths([path])[0]
        entries = _read_index(path if index is None else index)
        objects = {} if far is None else _objects(far, folder, entries)
        first = entries[0]
        self._sizes: list[int | None] = first["column_sizes"]
        self._encodings = dict(zip(first["column_names"], first["column_encodings"], strict=True))
        self._decoders = _chosen(path, self._encodings, columns, decoders)
        alike = ("column_names", "column_encodings", "column_sizes")
        self._paths: list[str] = []
        places: list[Place] = []
        self._told: list[str] = []
        for entry in entries:
            shard = os.path.join(folder, entry["raw_data"]["basename"])
            shard = objects.get(shard, shard)
            if any(entry[name] != first[name] for name in alike):
                raise ConfigError(
                    f"{shard!r} has the columns {entry['column_names']}, {self._paths[0]!r} has "
                    f"{first['column_names']}, or their encodings differ"
                )
            self._paths.append(shard)
            if isinstance(shard, FarPath):
                place, told = Place(shard), f"{entry['samples']} samples, {shard.told}"
            else:
                place, told = _place(shard, entry, verify=verify)
            places.append(place)
            self._told.append(told)
        self._files = Contents(places)
        self._counts = [int(entry["samples"]) for entry in entries]
        self._ends = np.cumsum(self._counts)
        self.has_objects = far is not None
        # Where samples of objects begin; each table is a copy.
        self._tables = Kept(_TABLES_KEPT)
        if not len(self):
            raise ConfigError(f"{path!r} lists no samples")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, record: int) -> tuple[int, int]:
        """The number of a sample's shard, and its number there."""
        number = int(np.searchsorted(self._ends, record, side="right"))
        return number, record - int(self._ends[number]) + self._counts[number]

    def touches(self, records: Sequence[int]) -> Iterator[Touch]:
        """What samples read of objects."""
        for record in records:
            number, inside = self._place(record)
            path = self._paths[number]
            if isinstance(path, FarPath):
                table = self._tables.get(number, partial(self._table, number))
                yield path, 4 + 4 * inside, 12 + 4 * inside
                yield path, int(table[inside]), int(table[inside + 1])

    def _table(self, number: int) -> NDArray[np.uint32]:
        """Where the samples of a shard begin, and the last one ends."""
        with self._files.open(number) as pread:
            return np.frombuffer(pread(4 * (self._counts[number] + 1), 4), "<u4")

    def name(self, record: int) -> str:
        """The shard, and the sample's number there."""
        number, inside = self._place(record)
        return f"{self._paths[number]!r}, sample {inside}"

    def __getitem__(self, record: int) -> Any:
        number, inside = self._place(record)
        with self._files.open(number) as pread:
            return self._read(pread, inside)

    def __getitems__(self, records: Sequence[int]) -> list[Any]:
        """Several samples; each shard is opened once."""
        made: list[Any] = [None] * len(records)
        by_shard: dict[int, list[tuple[int, int]]] = {}
        for i, record in enumerate(records):
            number, inside = self._place(record)
            by_shard.setdefault(number, []).append((i, inside))
        for number, wanted in by_shard.items():
            with self._files.open(number) as pread:
                for i, inside in wanted:
                    made[i] = self._read(pread, inside)
        return made

    def _read(self, pread: Pread, inside: int) -> dict[str, Any]:
        """A sample. Raises ValueError where it is damaged."""
        pair = pread(8, 4 + 4 * inside)
        if len(pair) < 8:
            raise ValueError("the shard ends within its table of samples")
        begin, end = np.frombuffer(pair, "<u4").tolist()
        data = pread(end - begin, begin) if end > begin else b""
        if len(data) < end - begin or end < begin:
            raise ValueError(
                f"the sample lies at bytes {begin} to {end}, and the shard has {len(data)} of them"
            )
        sample = {}
        for column, at, stop in self._stretches(data):
            if stop > len(data):
                raise ValueError(f"column {column!r} ends behind the sample")
            decode = self._decoders.get(column)
            if decode is None:
                continue
            try:
                sample[column] = decode(data[at:stop])
            except (OSError, ValueError) as error:
                raise ValueError(f"column {column!r} at byte {begin + at}: {error}") from error
            except Exception as error:
                error.add_note(f"in column {column!r} at byte {begin + at}")
                raise
        return {column: sample[column] for column in self._decoders}

    def _stretches(self, data: bytes) -> list[tuple[str, int, int]]:
        """Where the value of each column begins and ends in a sample."""
        varying = sum(not size for size in self._sizes)
        told = iter(np.frombuffer(data, "<u4", varying).tolist())
        stretches, at = [], 4 * varying
        for column, size in zip(self._encodings, self._sizes, strict=True):
            stop = at + (size or next(told))
            stretches.append((column, at, stop))
            at = stop
        return stretches

    def describe(self) -> dict[str, Any]:
        """The columns and how they are read, and of each shard what tells it from another."""
        columns = [
            f"{column}: {self._encodings[column]}"
            # Decoders of JPEGs differ in their pixels.
            + (f", {decode.name}" if isinstance(decode, Decoder) else "")
            for column, decode in self._decoders.items()
        ]
        return {
            "columns": columns,
            **told_of_files(self._paths, self._told),
            **order_of_files(self._paths),
        }


def _objects(far: Far, folder: str, entries: list[dict[str, Any]]) -> dict[str, FarPath]:
    """The shards of a folder of a store, by their URLs."""
    try:
        paths = far.inside(folder, [entry["raw_data"]["basename"] for entry in entries])
    except StorageError as error:
        if any(entry.get("zip_data") for entry in entries):
            raise ConfigError(
                f"{folder!r} lists compressed shards ({entries[0]['compression']}), and {error}: "
                "objects of stores are read as they are; decompress them"
            ) from error
        raise
    for path, entry in zip(paths, entries, strict=True):
        if path.known.size != (listed := entry["raw_data"].get("bytes", path.known.size)):
            raise ConfigError(
                f"{path!r} has {path.known.size} bytes, its index says {listed}: it is truncated, "
                "or of another data set"
            )
    return {str(path): path for path in paths}


def _read_index(path: str) -> list[dict[str, Any]]:
    """The entries of shards that a folder lists."""
    try:
        if isinstance(path, FarPath):
            index = json.loads(path.pread(path.known.size, 0))
        else:
            with open(path, "rb") as file:
                index = json.load(file)
        entries: list[dict[str, Any]] = index["shards"]
        for entry in entries:
            if entry["format"] != "mds":
                raise ConfigError(f"{path!r} lists shards of format {entry['format']!r}, not mds")
            _check(entry)
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{path!r} is no index of MDS shards: {error!r}") from error
    if not entries:
        raise ConfigError(f"{path!r} lists no shards")
    return entries


_COLUMNS = {"column_names": str, "column_encodings": str, "column_sizes": int | None}


def _check(entry: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or KeyError where what is told of a shard makes no sense."""
    columns: list[list[Any]] = [entry[name] for name in _COLUMNS]
    if len(set(map(len, columns))) > 1 or not columns[0]:
        raise ValueError("a shard without names, encodings and sizes of its columns")
    for values, kind in zip(columns, _COLUMNS.values(), strict=True):
        if not all(isinstance(value, kind) for value in values):
            raise TypeError(f"columns that are told of as {values}")
    if len(set(columns[0])) < len(columns[0]) or any(size and size < 0 for size in columns[2]):
        raise ValueError("columns of one name, or of a negative size")
    raw, packed = entry["raw_data"], entry.get("zip_data")
    if not isinstance(entry["samples"], int) or entry["samples"] < 0:
        raise TypeError(f"a shard of {entry['samples']!r} samples")
    for part in (raw, packed) if packed else (raw,):
        if not isinstance(part["basename"], str) or "\0" in part["basename"]:
            raise TypeError("a shard without a name")
        if not isinstance(part.get("hashes") or {}, dict):
            raise TypeError("hashes without names")
    if packed and not isinstance(raw["bytes"], int):
        raise TypeError("a compressed shard without the size of its content")


def _place(
    path: str, entry: Mapping[str, Any], *, write: bool = False, verify: bool = False
) -> tuple[Place, str]:
    """Where a shard is read, and what a description says of it; raises ConfigError where it is not
    the one listed. `write` writes down what a compressed one holds, `verify` compares hashes."""
    packed = entry.get("zip_data") or {}
    is_packed = not os.path.exists(path) and isinstance(packed.get("basename"), str)
    stored = os.path.join(os.path.dirname(path), packed["basename"]) if is_packed else path
    try:
        with open(stored, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = digest_of_stretches(file, size)
            place = Place(stored, kind_of(file) if is_packed else "")
    except OSError as error:
        raise ConfigError(f"{stored!r} cannot be read: {error.strerror}") from error
    if is_packed and not place.kind:
        raise ConfigError(f"{stored!r} is compressed ({entry.get('compression')}): decompress it")
    if verify:
        _verify(stored, (packed if is_packed else entry["raw_data"]).get("hashes") or {})
    listed = (packed if is_packed else entry["raw_data"]).get("bytes", size)
    if place.kind:
        folder, name = os.path.split(stored)
        beside = os.path.join(folder, f".{name}.feeder-index")
        place = place.found(beside, entry["raw_data"]["bytes"], digest, write=write)
    try:
        with Contents([place]).open(0) as pread:
            count = int.from_bytes(pread(4, 0), "little")
            own = _own_columns(pread, count) if count == entry["samples"] else {}
    except ValueError as error:
        raise ConfigError(f"{stored!r}: {error}") from error
    if (size, count) != (listed, entry["samples"]):
        raise ConfigError(
            f"{stored!r} has {size} bytes and {count} samples, its index says {listed} and "
            f"{entry['samples']}: it is truncated, or of another data set"
        )
    told = {name: entry[name] for name in _COLUMNS}
    if own and own != told:
        raise ConfigError(f"{stored!r} says of its columns {own}, its index {told}")
    return place, f"{count} samples, {digest % 2**64:016x}"


def _own_columns(pread: Pread, count: int) -> dict[str, Any]:
    """What a shard says of its columns itself; raises ValueError where it is damaged."""
    start = 4 + 4 * (count + 1)
    stop = int.from_bytes(pread(4, 4), "little")
    try:
        own = json.loads(pread(stop - start, start)) if stop > start else {}
        return {name: own[name] for name in _COLUMNS} if own else {}
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"what it says of its columns cannot be read: {error!r}") from error


def _verify(path: str, hashes: Mapping[str, str]) -> None:
    """Raise ConfigError if a shard has another hash than its index says."""
    known = {name: hashes[name] for name in hashes if _hasher(name) is not None}
    if not known:
        raise ConfigError(
            f"verify: the index of {path!r} has {list(hashes) or 'no hashes'}, expected one such "
            "as sha1, sha256 or xxh64: write the shards with hashes="
        )
    name, wanted = next(iter(known.items()))
    hasher = _hasher(name)
    try:
        with open(path, "rb") as file:
            while data := file.read(1 << 20):
                hasher.update(data)
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read: {error.strerror}") from error
    if hasher.hexdigest() != wanted:
        raise ConfigError(f"{path!r} is damaged: its {name} is not the one of its index")


def _hasher(name: str) -> Any:
    make = getattr(xxhash, name, None) if name.startswith("xxh") else None
    if make is not None:
        return make()
    is_one = name in hashlib.algorithms_guaranteed and not name.startswith("shake")
    return hashlib.new(name) if is_one else None


def write_shards(folder: str) -> Iterator[tuple[int, str]]:
    """Write down what the compressed shards of a folder hold. Gives of each shard how many samples
    it has, and where its content lies.

    Raises:
        ConfigError: it is no folder of MDS shards, or cannot be written.
    """
    for entry in _read_index(os.path.join(folder, "index.json")):
        shard = os.path.join(folder, entry["raw_data"]["basename"])
        yield entry["samples"], _place(shard, entry, write=True)[0].path


# ---- values


def _chosen(
    path: str,
    encodings: Mapping[str, str],
    columns: Sequence[str] | None,
    given: Mapping[str, Decode],
) -> dict[str, Decode]:
    """The decoder of each column that is read, in their order."""
    if columns is None:
        columns = list(encodings)
    elif isinstance(columns, str) or not columns:
        raise ConfigError(f"columns is {columns!r}, expected names such as ['text', 'label']")
    for name in (*columns, *given):
        if name not in encodings:
            raise ConfigError(f"{path!r} has the columns {list(encodings)}, and no {name!r}")
    for name, decode in given.items():
        if not callable(decode):
            raise ConfigError(f"decoders[{name!r}] is {decode!r}, expected a function of bytes")
    return {name: given.get(name) or _decoder(name, encodings[name]) for name in columns}


def _decoder(column: str, encoding: str) -> Decode:
    """What reads values of an encoding."""
    name, _, detail = encoding.partition(":")
    if name in ("jpeg", "png"):
        decoder = Decoder("auto")
        decoder.check()
        return decoder
    if name == "ndarray" and (decode := _ndarray_decoder(detail)):
        return decode
    if name in _SCALARS:
        return partial(_scalar, np.dtype(name).newbyteorder("<"))
    if name in _DECODERS:
        return _DECODERS[name]
    raise ConfigError(
        f"column {column!r} has the encoding {encoding!r}: give decoders={{{column!r}: function}}, "
        "or name the other columns with columns="
    )


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    (value,) = np.frombuffer(data, dtype)
    return value.astype(dtype.newbyteorder("="))


def _int(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _text(data: bytes) -> str:
    return data.decode()


_SCALARS = {
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
}
_DECODERS: dict[str, Decode] = {
    "bytes": bytes, "str": _text, "int": _int, "str_int": int, "str_float": float,
    "json": json.loads,
}  # fmt: skip
_DTYPES = {
    b"\x08": "u1", b"\x09": "i1", b"\x10": "<u2", b"\x11": "<i2", b"\x12": "<f2", b"\x20": "<u4",
    b"\x21": "<i4", b"\x22": "<f4", b"\x40": "<u8", b"\x41": "<i8", b"\x42": "<f8",
}  # fmt: skip
"""How a value says what its dtype is, where the column does not."""


def _ndarray_decoder(detail: str) -> Decode | None:
    """Of "", "dtype" or "dtype:shape": what is not said here is said in each value. None of
    anything else."""
    dtype, _, shape = detail.partition(":")
    given = shape.split(",") if shape else []
    if not all(axis.isdecimal() for axis in given) or dtype not in {"", *_SCALARS}:
        return None
    axes = tuple(map(int, given)) or None
    return partial(_ndarray, np.dtype(dtype).newbyteorder("<") if dtype else None, axes)


def _ndarray(
    dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: bytes
) -> NDArray[Any]:
    at = 0
    if dtype is None:
        if data[:1] not in _DTYPES:
            raise ValueError(f"begins with {data[:1]!r}, which is no dtype")
        dtype, at = np.dtype(_DTYPES[data[:1]]), 1
    if shape is None:
        if not data[at:]:
            raise ValueError("ends before its shape")
        # Six bits are the number of axes, two how wide their lengths are written.
        num, width = data[at] >> 2, 1 << (data[at] & 3)
        stop = at + 1 + num * width
        shape = tuple(np.frombuffer(data[at + 1 : stop], f"<u{width}").tolist())
        at = stop
    return np.frombuffer(data, dtype, offset=at).reshape(shape)
