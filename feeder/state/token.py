"""The token of a cut: the position as a few hundred bytes that can travel with every batch.

Layout: ``b"FT"``, the version (1 byte), xxh3-64 of the rest (8 bytes), and a msgpack list: source
name, stream number, fingerprint digest, epoch, index, step, position, leftover. In version 2 all
rows of the leftover are taken: it is the last chunk, to be compared. In version 3 they may be, and
behind the leftover is how batches are dealt out; versions 1 and 2 are of where nobody knows that.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, cast

import msgspec
import xxhash
from msgspec import Meta

from feeder.errors import ConfigError, ResumeError, SnapshotFormatError
from feeder.workers.stream.position import Cut, Leftover, Position
from feeder.workers.stream.rounds import Dealing

TOKEN_VERSION = 3
_MAGIC = b"FT"
_HEAD_BYTES = 11
# A token travels in message headers and checkpoints, which count on this bound.
_MAX_BYTES = 64 * 1024

# Bounds on every field: tokens come from other processes and old files, and a number such as 2**62
# calls must fail here and not as a MemoryError later.
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Bits64 = Annotated[int, Meta(ge=0)]
_Digest = Annotated[bytes, Meta(min_length=8, max_length=8)]
# Epoch, turn, live partitions as bits, and of each partition calls, rows, mark; then what is done
# already.
_PositionFields = tuple[
    _Count, _Count, bytes, list[_Count], list[_Count], list[bytes | None], list[_Count]
]
# Partition, call, taken, rows, digest, mark.
_LeftoverFields = tuple[_Count, _Count, _Count, _Count, _Bits64, bytes | None]
# Where a round begins, queues, rows of a batch, rounds that were skipped, epochs.
_DealingFields = tuple[_Count, _Positive, _Positive, _Count, _Count | None]
_Fields = tuple[
    str, _Count, _Digest, _Count, _Count, _Count, _PositionFields, _LeftoverFields | None
]
_DealtFields = tuple[
    str, _Count, _Digest, _Count, _Count, _Count, _PositionFields, _LeftoverFields | None,
    _DealingFields,
]  # fmt: skip
_encode = msgspec.msgpack.Encoder().encode
_DECODER: msgspec.msgpack.Decoder[_Fields] = msgspec.msgpack.Decoder(_Fields)
# A version of its own and not more fields in version 2: tokens of version 2 without them exist, and
# a reader is to know by the version what it reads.
_DEALT_DECODER: msgspec.msgpack.Decoder[_DealtFields] = msgspec.msgpack.Decoder(_DealtFields)


class StreamId(NamedTuple):
    """The identity of a stream in its tokens: another stream's are refused."""

    name: str
    """The input source name."""
    number: int
    """The number of the stream among those of that name, in the order in which they were made."""
    fingerprint: bytes
    """Digest of the declared fields."""
    older: tuple[bytes, ...] = ()
    """The digests that tokens of the same stream had before worker ids were left out of it, and
    before it had the order of files."""
    dealing: Dealing | None = None
    """How batches are dealt out where a cut does not say; None where nobody knows."""

    def encode(self, cut: Cut) -> bytes:
        """The token of a cut. Raises `ConfigError` where cursors make it larger than 64 KiB."""
        fields = [
            self.name, self.number, self.fingerprint, cut.epoch, cut.index, cut.step,
            _position_fields(cut.position), _leftover_fields(cut.leftover or cut.checked),
        ]  # fmt: skip
        # A reader of version 1 refuses a leftover whose rows are all taken.
        version = 1 if cut.leftover or not cut.checked else 2
        dealing = cut.dealing or self.dealing
        if dealing is not None:
            version = TOKEN_VERSION
            fields.append(dealing)
        body = _encode(fields)
        if len(body) > _MAX_BYTES:
            raise ConfigError(
                f"the cursors of feed {self.name!r} make a token of {len(body)} bytes, expected "
                f"at most {_MAX_BYTES}; a cursor should name a place, not hold data"
            )
        return b"".join((_MAGIC, bytes((version,)), xxhash.xxh3_64_digest(body), body))

    def decode(self, token: bytes, epochs: int | None) -> Cut:
        """The cut of a token of this stream. Raises `ResumeError` where it is another's, and
        `SnapshotFormatError` where it is none."""
        fields, dealing = _open(token)
        name, number, fingerprint, epoch, index, step, position, leftover = fields
        if (name, number) != (self.name, self.number):
            raise ResumeError(
                f"the token is of feed {name!r}, stream {number}; expected {self.name!r}, "
                f"stream {self.number}"
            )
        if fingerprint not in (self.fingerprint, *self.older):
            raise ResumeError(
                f"the token of feed {name!r} was made with other settings (a snapshot would tell "
                "which, and has the edits of a run); resume with the batch size, names, workers, "
                "seed and order of then"
            )
        at = _position(position)
        chunk = None if leftover is None else _leftover(leftover, at)
        is_whole = chunk is not None and chunk.taken == chunk.rows
        return Cut(
            epoch=epoch,
            index=index,
            step=step,
            finished=epochs is not None and epoch >= epochs,
            position=at,
            leftover=None if is_whole else chunk,
            checked=chunk if is_whole else None,
            dealing=dealing,
            encode=self.encode,
        )


def is_token(data: bytes) -> bool:
    """Whether bytes look like a token."""
    return data[:2] == _MAGIC


def fingerprint_of(token: bytes) -> bytes:
    """The digest of the declared fields in a token."""
    (_, _, fingerprint, *_), _ = _open(token)
    return fingerprint


def name_of(token: bytes) -> tuple[str, int]:
    """Source name and stream number of a token."""
    (name, number, *_), _ = _open(token)
    return name, number


def step_of(token: bytes) -> int:
    """The batches before a token that each queue has had; of several queues the whole rounds."""
    (_, _, _, _, _, step, *_), dealing = _open(token)
    return step if dealing is None else step // dealing.num


def start_of(token: bytes) -> tuple[int, bytes]:
    """The first batch after a token that no queue has had, and the digest of the declared fields in
    it."""
    (_, _, fingerprint, epoch, _, step, *_), dealing = _open(token)
    return step + (0 if dealing is None else dealing.rest(epoch, step)), fingerprint


def calls_of(token: bytes) -> tuple[int, int] | None:
    """Of the token of a pure feed the epoch of its calls, and how many it has made there; None
    where calls behind these are made too."""
    (_, _, _, _, _, _, (epoch, _, _, calls, _, _, done), _), _ = _open(token)
    return None if done or len(calls) != 1 else (epoch, calls[0])


def _open(token: bytes) -> tuple[_Fields, Dealing | None]:
    if not is_token(token) or len(token) < _HEAD_BYTES:
        raise SnapshotFormatError(f"{len(token)} bytes are no token, expected b'FT...'")
    body = token[_HEAD_BYTES:]
    if len(body) > _MAX_BYTES:
        raise SnapshotFormatError(
            f"token has a body of {len(body)} bytes, expected at most {_MAX_BYTES}"
        )
    # The digest comes before the version: a flipped bit in the version is damage, not news.
    if token[3:_HEAD_BYTES] != xxhash.xxh3_64_digest(body):
        raise SnapshotFormatError(f"token of {len(token)} bytes is truncated or corrupt")
    if not 1 <= token[2] <= TOKEN_VERSION:
        raise SnapshotFormatError(
            f"token has version {token[2]}, expected at most {TOKEN_VERSION}; update feeder"
        )
    try:
        if token[2] < TOKEN_VERSION:
            return _DECODER.decode(body), None
        *fields, dealing = _DEALT_DECODER.decode(body)
        return cast(_Fields, fields), Dealing(*dealing)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotFormatError(f"token cannot be read: {error}") from error


def _position_fields(position: Position) -> list[Any]:
    epoch, turn, live, calls, rows, marks, done = position
    # The common case, and quick for thousands of partitions.
    if all(live):
        bits = (1 << len(live)) - 1
    else:
        bits = sum(1 << partition for partition, alive in enumerate(live) if alive)
    return [epoch, turn, bits.to_bytes(-(-len(calls) // 8), "little"), calls, rows, marks, done]


def _position(fields: _PositionFields) -> Position:
    epoch, turn, live, calls, rows, marks, done = fields
    num, bits = len(calls), int.from_bytes(live, "little")
    alive = tuple(bool(bits >> partition & 1) for partition in range(num))
    if not (len(rows) == len(marks) == num > turn and bits < 1 << num and any(alive)):
        raise SnapshotFormatError(
            f"token cannot be read: it says {num} calls, {len(rows)} rows, {len(marks)} marks, "
            f"live {bits:b} and turn {turn}, expected as much of each partition"
        )
    return Position(epoch, turn, alive, tuple(calls), tuple(rows), tuple(marks), tuple(done))


def _leftover_fields(leftover: Leftover | None) -> list[Any] | None:
    if leftover is None:
        return None
    return [leftover.partition, leftover.call, leftover.taken, leftover.rows, leftover.digest,
            leftover.mark]  # fmt: skip


def _leftover(fields: _LeftoverFields, position: Position) -> Leftover:
    partition, call, taken, rows, digest, mark = fields
    # In the order of arrival calls behind it may be done, which a token before this one listed.
    is_near = partition < len(position.calls) and position.calls[partition] <= call + _MAX_BYTES
    if not (is_near and taken <= rows and rows):
        raise SnapshotFormatError(
            f"token cannot be read: it says that {taken} of {rows} rows of call {call} of "
            f"partition {partition} are taken, and that all have made {position.calls} calls"
        )
    return Leftover(
        partition=partition, call=call, taken=taken, rows=rows, digest=digest, mark=mark
    )
