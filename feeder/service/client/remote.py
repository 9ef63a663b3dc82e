"""What a server's messages mean to a consumer: the stream, positions, columns and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from feeder import errors
from feeder.errors import FeedError, FetchError, RemoteError
from feeder.service.protocol import messages as say
from feeder.state import codec
from feeder.state.fingerprint import check_fingerprint, fingerprint_digest
from feeder.state.snapshot import HISTORY, Snapshot, StreamState, summarise
from feeder.state.token import StreamId, is_token
from feeder.workers.errors import ChunkError
from feeder.workers.stream.batch import Batch
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
from feeder.workers.stream.rounds import Dealing


class Identity(NamedTuple):
    """The stream that a consumer reads. Immutable, shared by all positions of one lease."""

    name: str
    """The name of its feed."""
    number: int
    """Its number among the streams of that name."""
    fingerprint: dict[str, Any]
    """The declared fields that a position must agree with to fit."""
    epochs: int | None
    """How many epochs it has; None for no end."""
    began: Cut | None = None
    """Where the lease began, and how batches are dealt out from there on."""
    digest: bytes = b""
    """Of the fingerprint, if it is known: to find it takes longer than the rest of a state."""

    @property
    def may_be_uneven(self) -> bool:
        """Whether its queues may get unequal numbers of batches."""
        num = 1 if self.began is None or self.began.dealing is None else self.began.dealing.num
        ends = self.epochs is not None or self.fingerprint.get("rounds") == "epoch"
        return num > 1 and ends and self.fingerprint.get("last_round") == "uneven"

    def dealing(self, group: say.Group) -> Dealing | None:
        """How the batches of a group are dealt out; None if no server has said it."""
        if self.began is None or (dealing := self.began.dealing) is None:
            return None
        # The size of a batch may follow from the number of queues, and have been another before.
        size = self.fingerprint.get("global_batch_size", 0) // dealing.num or dealing.batch_size
        start = dealing.start
        if self.fingerprint.get("rounds") == "epoch" and group.epoch != self.began.epoch:
            start = group.step - group.index
        return dealing._replace(batch_size=size).begun_at(start)

    def is_before(self, other: Identity) -> bool:
        """Whether another one is of the run that edits have made of this one."""
        return HISTORY in other.fingerprint and other.digest != self.digest

    @property
    def id(self) -> StreamId:
        """What tokens of this stream carry, to be told from tokens of another."""
        digest = self.digest or fingerprint_digest(self.fingerprint)
        return StreamId(self.name, self.number, digest)


def identity_of(opened: say.Opened) -> Identity:
    """Return the stream that a server says it serves; `ProtocolError` if that is malformed."""
    # Bytes of a peer: whatever they are, the error is one of the protocol, so that the consumer
    # looks for another server instead of ending with a traceback of msgpack.
    try:
        fingerprint = codec.unpack(opened.fingerprint)
        check_fingerprint(fingerprint)
        digest = fingerprint_digest(fingerprint)
    except (TypeError, ValueError) as error:
        raise errors.ProtocolError(f"server sent a fingerprint that is none: {error}") from error
    identity = Identity(opened.name, opened.number, fingerprint, opened.epochs, digest=digest)
    try:
        return identity._replace(began=RemotePosition(identity, opened.token).cut())
    except errors.FeedError as error:
        raise errors.ProtocolError(f"server sent a position that is none: {error}") from error


class RemotePosition:
    """Where a batch ended: a token, or a snapshot with leftover rows.

    The position of the `at`-th batch of a group is kept as a reference to the group, and its token
    is made when somebody asks: of thousands of positions a second a few are saved, and making each
    token cost more than all that was done beside for an 8 KB batch.

    Made by the I/O thread, then read by the user's thread. Two threads that ask at once both make
    the same token, so no lock is needed.
    """

    __slots__ = ("_at", "_axes", "_group", "_identity", "_token", "batch")

    def __init__(
        self,
        identity: Identity,
        token: bytes | None,
        group: say.Group | None = None,
        at: int = 0,
        axes: tuple[int, ...] | None = None,
    ) -> None:
        self.batch: Callable[[], Batch | None] | None = None
        """A weak reference to the batch that ended here, if it came in a group."""
        self._axes = axes
        self._identity = identity
        self._token = token
        self._group = group
        self._at = at

    @property
    def token(self) -> bytes:
        """The token, or the snapshot if the stream cannot be told in numbers."""
        if self._token is None:
            assert self._group is not None
            self._token = token_of(self._identity, self._group, self._at, self._axes, self.batch)
            # A position may be kept for long, and would keep its whole group.
            self._group = None
        return self._token

    def cut(self) -> Cut:
        """Return the position in the form that users read."""
        token = self.token
        if not is_token(token):
            (state,) = Snapshot.from_bytes(token).states
            token = state.token
        return self._identity.id.decode(token, self._identity.epochs)

    @property
    def identity(self) -> Identity:
        """The stream that it is a place in."""
        return self._identity

    def after_edits(self, identity: Identity) -> RemotePosition:
        """The same place in the run that edits have made of this one; itself if that has no such
        place."""
        from feeder.state.history import is_same_place

        then, now = (one.fingerprint.get(HISTORY) for one in (self._identity, identity))
        if not (is_token(self.token) and is_same_place(cut := self.cut(), then, now)):
            return self
        cut = replace(cut, checked=None, encode=identity.id.encode)
        return RemotePosition(identity, cut.token())

    @property
    def asked(self) -> bytes:
        """What a server is asked to go on at: with the edits of the run, of which a token has a
        digest alone, as the server may have been started without them."""
        if HISTORY not in self._identity.fingerprint:
            return self.token
        state = self.state(None)
        return state if len(state) <= say.TOKEN_BYTES else self.token

    def state(self, columns: Columns | None) -> bytes:
        """Return the bytes of a state dict: the same bytes that a feed in process gives."""
        token = self.token
        if not is_token(token):
            return token  # It is a snapshot already, and its rows belong to the position.
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


def token_of(
    identity: Identity,
    group: say.Group,
    at: int,
    axes: tuple[int, ...] | None = None,
    batch: Callable[[], Batch | None] | None = None,
) -> bytes:
    """Return where the `at`-th batch of a group ended: the token that the server would have made.

    With the axes of the columns the token tells the last chunk, as long as `batch` lives.

    The numbers of the group are put into the engine's own classes, which make the token. A second
    implementation would have to agree with it byte for byte.
    """
    told = group.span
    if told is None:
        # An irregular stream (ragged chunks, many cursors, repeatable=False) is told in tokens.
        return group.tokens[at]
    num_chunks, taken = group.chunks[at], group.taken[at] if group.taken else 0
    start = Position(told.epoch, told.turn, told.live, told.calls, told.rows, told.marks)
    cursors = [None if runs is None else _spread(runs) for runs in told.new_marks]
    span = Span(start, told.ring, told.firsts, [told.chunk_rows] * num_chunks, cursors)
    partitions = Partitions(num_partitions=len(told.live), pure=told.pure, arrival=False)
    # No rows: the consumer has none. The digest alone lets a resume check the chunk it skips into.
    ended_in = PartialChunk((), (), told.chunk_rows, 0, group.digests[at]) if taken else None
    axes = axes if told.pure else None
    dealing = identity.dealing(group)
    frame = Frame(partitions, identity.id.encode, identity.epochs, axes, dealing)
    position = LazyPosition(frame, span, num_chunks, taken, ended_in, group.epoch)
    # A position is the one after a batch, so both count that batch.
    position.index = group.index + at * group.stride + 1
    position.step = group.step + at * group.stride + 1
    position.batch = batch if ended_in is None else None
    return position.cut().token()


def _spread(runs: Sequence[tuple[int, bytes]]) -> list[bytes]:
    """Return the cursors of a partition, one for each chunk; the message has each run once."""
    cursors: list[bytes] = []
    for end, cursor in runs:
        cursors += [cursor] * (end - len(cursors))
    return cursors


def columns_of(spec: say.Spec) -> Columns:
    """Return the columns that a server declares; `ConfigError` if a dtype needs ml_dtypes, which
    is not installed."""
    return tuple(
        Column(name=column.name, axis=column.axis, dtype=read_dtype(column.dtype),
               shape=tuple(column.shape))
        for column in spec.columns
    )  # fmt: skip


def columns_in(position: bytes | None, name: str) -> Columns | None:
    """Return the columns of a feed that a position names, if it names any.

    Before the first batch the server declares no columns, and a state dict of that moment must
    still have those of the state that was resumed.
    """
    if position is None or is_token(position):
        return None
    states = Snapshot.from_bytes(position).states
    return next((state.columns for state in states if state.name == name), None)


def error_of(fault: say.Fault) -> FeedError:
    """Return the error that a server reports, with the server's traceback as a note."""
    # The message's check allows names of `feeder.errors` alone, so this finds a class of ours.
    kind = getattr(errors, fault.kind)
    if issubclass(kind, FetchError):
        known = ("worker_id", "call", "column", "got", "expected")
        # A newer server may send fields that the class here does not take.
        names = known if issubclass(kind, ChunkError) else known[:2]
        error: FeedError = kind(
            fault.text, **{name: fault.fields[name] for name in names if name in fault.fields}
        )
    elif kind is errors.FeedError:
        # The base class is raised for what went wrong elsewhere: its name says so.
        error = RemoteError(fault.text)
    else:
        error = kind(fault.text)
    if fault.note:
        error.add_note(f"on the server:\n{fault.note}")
    return error
