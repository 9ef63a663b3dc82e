"""What a consumer makes of a server's messages: positions, columns, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from feeder import codec, errors
from feeder.errors import FeedError, FetchError, RemoteError
from feeder.protocol import messages as say
from feeder.snapshot import Snapshot, StreamState, summarise
from feeder.token import StreamId, is_token, make_fingerprint
from workers.batch import Cut
from workers.chunks import Column, Columns
from workers.errors import ChunkError


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
    """The stream that a server says it serves."""
    fingerprint = dict(codec.unpack(opened.fingerprint))
    return Identity(opened.name, opened.number, fingerprint, opened.epochs)


class RemotePlace:
    """Where a batch ended, as its header tells it: a token, or a snapshot with leftover rows."""

    __slots__ = ("_identity", "token")

    def __init__(self, identity: Identity, token: bytes) -> None:
        self._identity = identity
        self.token = token

    def cut(self) -> Cut:
        """The place as the user is given it."""
        token = self.token
        if not is_token(token):
            (state,) = Snapshot.from_bytes(token).states
            token = state.token
        return self._identity.id.decode(token, self._identity.epochs)

    def state(self, columns: Columns | None) -> bytes:
        """The place as the bytes of a state dict: the same that a feed in process gives."""
        if not is_token(self.token):
            return self.token
        identity = self._identity
        state = StreamState(
            name=identity.name,
            number=identity.number,
            fingerprint=identity.fingerprint,
            token=self.token,
            columns=columns,
            rows=None,
            summary=summarise(self.cut()),
        )
        return bytes(Snapshot((state,)))


def columns_of(spec: say.Spec) -> Columns:
    """The columns that a server tells."""
    return tuple(
        Column(name=column.name, axis=column.axis, dtype=np.dtype(column.dtype),
               shape=tuple(column.shape))
        for column in spec.columns
    )  # fmt: skip


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
