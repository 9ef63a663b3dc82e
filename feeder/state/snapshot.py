"""Snapshots: where feeds stand, as bytes that survive the process.

Layout, all integers little-endian::

    8 bytes   b"FEEDSNAP"
    4 bytes   version
    8 bytes   length of the body
    16 bytes  xxh3-128 of version, length and body
    body      4 bytes length of the header, the header (msgpack), the rows of all feeds

The header lists the feeds: name, stream number, fingerprint, token, columns as observed, and
where their leftover rows lie. Nothing in it names code, and nothing is unpickled. Version 2 also
lists records that were left out; without any version 1 is written, which every feeder reads. In
version 3 the header is compressed: one of a run with many edits, or many excluded records.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder import durable
from feeder.errors import CheckpointError, FeedError, ResumeError, SnapshotFormatError
from feeder.state.fingerprint import check_fingerprint, fingerprint_digest
from feeder.state.raw_arrays import dtype_fields, is_nameless, pack_array, read_dtype, restore_array
from feeder.state.token import StreamId, calls_of
from feeder.workers.public import public
from feeder.workers.stream.chunks import Column, Columns
from feeder.workers.stream.position import Cut, Partitions

SNAPSHOT_VERSION = 3
HISTORY = "source.history"
"""The field of a fingerprint that has the edits of a run."""
_MAGIC = b"FEEDSNAP"
_NUMBERS = struct.Struct("<IQ")
_HEAD_BYTES = len(_MAGIC) + _NUMBERS.size + 16

# xxhash drops the GIL, from its version 4 on above the first of these, and waits for it beside the
# threads of the feed; above the second it takes long enough for these to go on meanwhile.
_DROP_GIL_BYTES = 1024 * 1024
_KEEPS_GIL_BYTES = 64 * 1024 if int(xxhash.VERSION.partition(".")[0]) >= 4 else _DROP_GIL_BYTES

_LARGE_BYTES = 4096
"""A header of more bytes is compressed."""
# Names, sizes and weights come again with each source and each edit: a run of six sources and 20
# edits has 3 kB in place of 8, in 0.2 ms (2026-11-29).

_MOST_HEADER_BYTES = 2**28
"""More than any header has that is no attack."""

_PAIRS, _MANY_PAIRS = 1, 16
"""Pairs of growing numbers, as excluded ranges are, are written as steps if there are so many."""

_LONGEST_PATH = 255
"""Of a longer path messages show the ends alone: it may be the text of a position."""

_LOOK_BYTES = 1024 * 1024
"""The most that is read of a file that is no snapshot."""

_FS = durable.Fs()

Rows = tuple[NDArray[Any], ...]


class StreamState(NamedTuple):
    """Where one stream stands."""

    name: str
    """Its input source name."""
    number: int
    """Its number among the streams of that name."""
    fingerprint: dict[str, Any]
    """The declared fields that it was made with."""
    token: bytes
    """Its position."""
    columns: Columns | None
    """Its columns as observed, None before the first chunk."""
    rows: Rows | None
    """The rows left over, None where they are not in the snapshot."""
    summary: tuple[int, int, int, int]
    """Epoch, index and step of the next batch, and the number of rows left over."""
    left_out: tuple[tuple[int, int, str, str], ...] = ()
    """Defective records that its source has left out before: `sources.LeftOut`, the first ones."""


@public("feeder")
class Snapshot:
    """Where the feeds of a coordinator stand. It does not change when they go on.

    `bytes(snapshot)` and `Snapshot.from_bytes` turn it into bytes and back.
    """

    def __init__(self, states: tuple[StreamState, ...]) -> None:
        self.states = states

    def __bytes__(self) -> bytes:
        blobs: list[Any] = []
        entries: list[list[Any]] = []
        for state in self.states:
            rows = state.rows
            placed = None if rows is None else [pack_array(array, blobs) for array in rows]
            entries.append(
                [state.name, state.number, state.fingerprint, state.token,
                 _column_fields(state.columns), placed, state.summary, state.left_out]
            )  # fmt: skip
        # The rows are not in the header: msgpack would copy them, and a header stays small enough
        # to be checked before its rows are looked at.
        version, header = _header(entries)
        parts = [len(header).to_bytes(4, "little"), header, *blobs]
        numbers = _NUMBERS.pack(version, sum(len(part) for part in parts))
        digest = _digest(numbers, parts)
        return b"".join((_MAGIC, numbers, digest, *parts))

    @classmethod
    def from_bytes(cls, data: bytes, *, most_header_bytes: int | None = None) -> Snapshot:
        """Read a snapshot; raises `SnapshotFormatError` for anything that is not a whole one.

        `most_header_bytes` is for what a stranger sends: each byte beside the rows may be an
        object, which takes a hundred times as much.
        """
        view = memoryview(data)
        if len(view) < _HEAD_BYTES or bytes(view[:8]) != _MAGIC:
            raise SnapshotFormatError(f"{len(view)} bytes are no snapshot, expected {_MAGIC!r}...")
        numbers, body = view[8:20], view[_HEAD_BYTES:]
        version, length = _NUMBERS.unpack(numbers)
        if length != len(body):
            raise SnapshotFormatError(
                f"snapshot is damaged: its body has {len(body)} bytes, expected {length}"
            )
        if _digest(numbers, [body]) != bytes(view[20:_HEAD_BYTES]):
            raise SnapshotFormatError(
                f"snapshot of {len(view)} bytes is corrupt: its digest does not match"
            )
        if not 1 <= version <= SNAPSHOT_VERSION:
            raise SnapshotFormatError(
                f"snapshot has version {version}, expected at most {SNAPSHOT_VERSION}; update "
                "feeder"
            )
        header_bytes = int.from_bytes(body[:4], "little")
        if most_header_bytes is not None and header_bytes > most_header_bytes:
            raise SnapshotFormatError(
                f"snapshot has a header of {header_bytes} bytes, expected at most "
                f"{most_header_bytes}; take one of this feed alone"
            )
        return cls(_parse(body, version, most_header_bytes or _MOST_HEADER_BYTES))

    def describe(self) -> str:
        """A line per stream: where it stands, and what is left over; of a mixture another one, how
        much has come of each source; and one for each record that was left out."""
        lines = []
        for state in self.states:
            epoch, index, step, left = state.summary
            held = "" if state.rows is not None or not left else ", not held"
            lines.append(
                f"{state.name}[{state.number}]: next is epoch {epoch}, batch {index} (step "
                f"{step}), {left} rows left over{held}, token of {len(state.token)} bytes"
            )
            if mixed := _mixture(state):
                lines.append(f"  {mixed}")
            lines += [
                f"  left out in epoch {e}: {name}: {why}" for e, _, name, why in state.left_out
            ]
        return "\n".join(lines)

    def at_start(self) -> Snapshot:
        """The start of the same runs, with their edits to come: from there each batch comes again
        as it came then.

        Raises:
            ResumeError: A feed is of a fetch function of your own, whose edits there are none of.
        """
        return Snapshot(tuple(_at_start(state) for state in self.states))

    def __repr__(self) -> str:
        return f"<Snapshot {self.describe()!r}>"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file that is whole or not there: a temporary file, fsync, rename, fsync
        of the directory. Raises `CheckpointError`."""
        path = os.fspath(path)
        folder, name = os.path.split(path)
        try:
            with durable.opened(_FS, _FS.open_folder(folder or ".")) as opened:
                durable.write(_FS, opened, name, [bytes(self)], replace=True)
        except OSError as error:
            raise CheckpointError(f"cannot write snapshot {path!r}: {error}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Read one from a file; raises `CheckpointError` and `SnapshotFormatError`."""
        try:
            with open(path, "rb") as file:
                # What is none may have no end, as /dev/zero.
                is_one = file.peek(len(_MAGIC)).startswith(_MAGIC)
                data = file.read(-1 if is_one else _LOOK_BYTES)
        except (OSError, ValueError) as error:  # ValueError: NUL in the path
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(
                f"cannot read snapshot {_shortened(os.fspath(path))!r}: {reason}; name a file, or "
                "a folder of checkpoints, that is there, or give a position itself and not its text"
            ) from error
        return cls.from_bytes(data)


def _at_start(state: StreamState) -> StreamState:
    fingerprint = state.fingerprint
    if fingerprint.get("form") != "pure":
        raise ResumeError(
            f"feed {state.name!r} is of fetch(worker_id, batch_size): begin it without a position"
        )
    id = StreamId(state.name, state.number, fingerprint_digest(fingerprint))
    cut = Cut(
        epoch=0, index=0, step=0, finished=False, leftover=None, encode=id.encode,
        position=Partitions(1, pure=True, arrival=False).origin(),
    )  # fmt: skip
    return state._replace(token=cut.token(), rows=(), summary=summarise(cut), left_out=())


def _shortened(path: str) -> str:
    """A path; the ends of what is longer than a path is, as the text of a position."""
    return path if len(path) <= _LONGEST_PATH else f"{path[:40]}...{path[-40:]}"


def _mixture(state: StreamState) -> str:
    """How much a stream has read of each source of its mixture; empty where that is not known."""
    prefix = "source."
    fields = {
        name.removeprefix(prefix): value
        for name, value in state.fingerprint.items()
        if name.startswith(prefix)
    }
    if "mix" not in (fields.get("source"), fields.get("of.source")) or "history" in fields:
        return ""
    # Sources are loaded where they are looked at.
    from feeder.workers.sources.mixture import counts_of_calls

    try:
        place = calls_of(state.token)
        counts = place and counts_of_calls(fields, *place, state.fingerprint)
    # What a stranger wrote, or another version of feeder: the line is left out.
    except (ArithmeticError, FeedError, LookupError, TypeError, ValueError):
        return ""
    if not counts:
        return ""
    told = ", ".join(f"{count} of {name!r}" for name, count in counts.items())
    return f"read in epoch {place and place[0]}: {told}"


def summarise(cut: Cut) -> tuple[int, int, int, int]:
    """The numbers of a cut that a person wants to see."""
    left = cut.leftover.rows - cut.leftover.taken if cut.leftover is not None else 0
    return cut.epoch, cut.index, cut.step, left


def _digest(numbers: Any, parts: list[Any]) -> bytes:
    hasher = xxhash.xxh3_128(numbers)
    for part in parts:
        if not _KEEPS_GIL_BYTES < len(part) <= _DROP_GIL_BYTES:
            hasher.update(part)
            continue
        for start in range(0, len(part), _KEEPS_GIL_BYTES):
            hasher.update(part[start : start + _KEEPS_GIL_BYTES])
    return hasher.digest()


def _header(entries: list[list[Any]]) -> tuple[int, bytes]:
    """The version that is written, and the header of streams."""
    version = 1 + any(left_out for *_, left_out in entries)
    header: bytes = msgpack.packb(entries if version > 1 else [one[:-1] for one in entries])
    if len(header) <= _LARGE_BYTES:
        return version, header
    return SNAPSHOT_VERSION, zlib.compress(msgpack.packb(_in_steps(entries)))


def _read_header(header: memoryview, version: int, most_bytes: int) -> Any:
    if version < SNAPSHOT_VERSION:
        return msgpack.unpackb(header)
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(header, most_bytes)
    except zlib.error as error:
        raise ValueError(f"its header is damaged: {error}") from error
    if not inflating.eof:
        if len(data) < most_bytes:
            raise ValueError("its header is damaged: it ends too early")
        raise ValueError(f"its header has more than {most_bytes} bytes")
    return msgpack.unpackb(data, ext_hook=_of_steps)


def _in_steps(value: Any) -> Any:
    """A value with all that are many pairs of growing numbers as the steps between these."""
    if isinstance(value, dict):
        return {name: _in_steps(one) for name, one in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if not (numbers := _growing(value)):
        return [_in_steps(one) for one in value]
    steps = np.diff(np.array(numbers, np.int64), prepend=0)
    made = steps.astype(np.min_scalar_type(steps.max()).newbyteorder("<"))
    return msgpack.ExtType(_PAIRS, bytes([made.itemsize]) + made.tobytes())


def _growing(pairs: Sequence[Any]) -> list[int]:
    """The numbers of many pairs that grow; none if it is anything else."""
    are_pairs = all(isinstance(one, list | tuple) and len(one) == 2 for one in pairs)
    numbers = [*chain(*pairs)] if are_pairs and len(pairs) >= _MANY_PAIRS else []
    is_growing = all(type(n) is int for n in numbers) and numbers == sorted(numbers)
    return numbers if is_growing and numbers and numbers[0] >= 0 and numbers[-1] < 2**63 else []


def _of_steps(code: int, data: bytes) -> list[list[int]]:
    """The pairs of numbers again."""
    if code != _PAIRS:
        raise ValueError(f"unknown extension {code}")
    steps = np.frombuffer(data[1:], f"<u{data[0]}").astype(np.int64)
    pairs: list[list[int]] = np.cumsum(steps).reshape(-1, 2).tolist()
    return pairs


def _column_fields(columns: Columns | None) -> Any:
    if columns is None:
        return None
    return [[c.name, c.axis, dtype_fields(c.dtype), c.shape] for c in columns]


def _parse(body: memoryview, version: int, most_bytes: int) -> tuple[StreamState, ...]:
    """The streams of a body whose digest is right."""
    try:
        end = 4 + int.from_bytes(body[:4], "little")
        states = []
        entries = _read_header(body[4:end], version, most_bytes)
        for name, number, fingerprint, token, columns, placed, summary, *more in entries:
            (left_out,) = more if version > 1 else [()]
            numbers = [number, *summary]
            if not (type(name) is str and isinstance(token, bytes) and len(numbers) == 5):
                raise TypeError("a stream without a name, a token and a summary")
            if not all(type(n) is int and n >= 0 for n in numbers):
                raise TypeError(f"a stream with the numbers {numbers!r}")
            check_fingerprint(fingerprint)
            if not all(list(map(type, one)) == [int, int, str, str] for one in left_out):
                raise TypeError("records that were left out, without a call, a name and a reason")
            rows = None
            if any(is_nameless(dtype) for _, _, dtype, _ in columns or ()):
                # Of before the names of ml_dtypes' types were written: fetched again.
                end += sum(size for _, _, size in placed or ())
                columns = placed = None
            if placed is not None:
                rows, end = _read_rows(body, placed, end)
            states.append(
                StreamState(
                    name=name,
                    number=number,
                    fingerprint=fingerprint,
                    token=token,
                    columns=_read_columns(columns),
                    rows=rows,
                    summary=tuple(summary),
                    left_out=tuple(tuple(one) for one in left_out),
                )
            )
        return tuple(states)
    except Exception as error:
        # What NumPy raises for a dtype that is none is not a small family.
        raise SnapshotFormatError(f"snapshot cannot be read: {error}") from error


def _read_rows(body: memoryview, placed: list[Any], at: int) -> tuple[Rows, int]:
    rows = []
    for dtype, shape, size in placed:
        array = np.frombuffer(bytearray(body[at : at + size]), np.uint8)
        rows.append(restore_array(array, read_dtype(dtype), shape))
        at += size
    return tuple(rows), at


def _read_columns(fields: Any) -> Columns | None:
    if fields is None:
        return None
    return tuple(
        Column(name=name, axis=axis, dtype=read_dtype(dtype), shape=tuple(shape))
        for name, axis, dtype, shape in fields
    )
