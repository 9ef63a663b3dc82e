"""What a server's messages mean to a consumer: the stream, positions, columns and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from feeder import errors
from feeder.errors import FeedError, FetchError, RemoteError
from feeder.service.protocol import messages as say
from feeder.state import codec
from feeder.state.snapshot import Snapshot, StreamState, summarise
from feeder.state.token import StreamId, check_fingerprint, is_token, make_fingerprint
from feeder.workers.errors import ChunkError
from feeder.workers.stream.chunks import Column, Columns
from feeder.workers.stream.dtypes import read_dtype
from feeder.workers.stream.position import (
    Cut,
    Frame,
    LazyPosition,
    PartialChunk,
    Partitions,
    Position,
    Span,
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The stream that a consumer reads."""

    name: str
    """Its feed's name."""
    number: int
    """Its number among the streams of that name."""
    fingerprint: dict[str, Any]
    """The declared fields that must be equal for a position to fit."""
    epochs: int | None
    """Its epochs."""

    @property
    def id(self) -> StreamId:
        """Whose tokens they are."""
        return StreamId(self.name, self.number, make_fingerprint(self.fingerprint))


def identity_of(opened: say.Opened) -> Identity:
    """The stream that a server says it serves. Raises `ProtocolError` where it says nonsense."""
    try:
        fingerprint = codec.unpack(opened.fingerprint)
        check_fingerprint(fingerprint)
    except (TypeError, ValueError) as error:
        raise errors.ProtocolError(f"server sent a fingerprint that is none: {error}") from error
    return Identity(opened.name, opened.number, fingerprint, opened.epochs)


class RemotePosition:
    """Where a batch ended: a token, or a snapshot with leftover rows. It is the `at`-th of a group
    that tells it, and the token is made when somebody asks."""

    __slots__ = ("_at", "_group", "_identity", "_token")

    def __init__(
        self, identity: Identity, token: bytes | None, group: say.Group | None = None, at: int = 0
    ) -> None:
        self._identity = identity
        self._token = token
        self._group = group
        self._at = at

    @property
    def token(self) -> bytes:
        """The token, or the snapshot."""
        if self._token is None:
            assert self._group is not None
            self._token = token_of(self._identity, self._group, self._at)
            self._group = None
        return self._token

    def cut(self) -> Cut:
        """The place as the user is given it."""
        token = self.token
        if not is_token(token):
            (state,) = Snapshot.from_bytes(token).states
            token = state.token
        return self._identity.id.decode(token, self._identity.epochs)

    def state(self, columns: Columns | None) -> bytes:
        """The place as the bytes of a state dict: the same that a feed in process gives."""
        token = self.token
        if not is_token(token):
            return token
        identity = self._identity
        state = StreamState(
            name=identity.name,
            number=identity.number,
            fingerprint=identity.fingerprint,
            token=token,
            columns=columns,
            rows=None,
            summary=summarise(self.cut()),
        )
        return bytes(Snapshot((state,)))


def token_of(identity: Identity, group: say.Group, at: int) -> bytes:
    """Where the `at`-th batch of a group ended: the token that the server would have made."""
    told = group.span
    if told is None:
        return group.tokens[at]
    num_chunks, taken = group.chunks[at], group.taken[at] if group.taken else 0
    start = Position(told.epoch, told.turn, told.live, told.calls, told.rows, told.marks)
    marks = [None if runs is None else _spread(runs) for runs in told.new_marks]
    span = Span(start, told.ring, told.firsts, [told.chunk_rows] * num_chunks, marks)
    partitions = Partitions(num_partitions=len(told.live), pure=told.pure, arrival=False)
    ended_in = PartialChunk((), (), told.chunk_rows, 0, group.digests[at]) if taken else None
    frame = Frame(partitions, identity.id.encode, identity.epochs)
    place = LazyPosition(frame, span, num_chunks, taken, ended_in, group.epoch)
    place.index = group.index + at * group.stride + 1
    place.step = group.step + at * group.stride + 1
    return place.cut().token()


def _spread(runs: Sequence[tuple[int, bytes]]) -> list[bytes]:
    """The marks of a partition, one for each chunk."""
    marks: list[bytes] = []
    for end, mark in runs:
        marks += [mark] * (end - len(marks))
    return marks


def columns_of(spec: say.Spec) -> Columns:
    """The columns that a server tells. Raises `ConfigError` where a dtype needs ml_dtypes, which is
    not installed."""
    return tuple(
        Column(name=column.name, axis=column.axis, dtype=read_dtype(column.dtype),
               shape=tuple(column.shape))
        for column in spec.columns
    )  # fmt: skip


def columns_in(position: bytes | None, name: str) -> Columns | None:
    """The columns of a feed, where a position that its server has taken has them."""
    if position is None or is_token(position):
        return None
    states = Snapshot.from_bytes(position).states
    return next((state.columns for state in states if state.name == name), None)


def error_of(fault: say.Fault) -> FeedError:
    """The error that a server tells, with its traceback there as a note."""
    kind = getattr(errors, fault.kind)
    if issubclass(kind, FetchError):
        known = ("worker_id", "call", "column", "got", "expected")
        names = known if issubclass(kind, ChunkError) else known[:2]
        error: FeedError = kind(
            fault.text, **{name: fault.fields[name] for name in names if name in fault.fields}
        )
    elif kind is errors.FeedError:
        error = RemoteError(fault.text)
    else:
        error = kind(fault.text)
    if fault.note:
        error.add_note(f"on the server:\n{fault.note}")
    return error
