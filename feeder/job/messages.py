"""What a session asks of nodes, and what they answer, also as bytes: msgpack, and no code.

A node in another process has made the same job. A group of tasks is named to it by its key, and
so is everything else.
"""

from __future__ import annotations

from typing import Any

import msgspec

from feeder import errors
from feeder.checkpoint.format import DamagedError
from feeder.errors import FeedError, RemoteError
from feeder.job.checkpoints.parts import LoadPart, NoteEntries, SavePart

# The tags are on the wire between a runner and its nodes. Both are of one version of feeder (the
# runner starts the nodes), so unlike the formats on disk they may change with it.


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """Say what the job consists of."""


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Empty the workspace."""


class RunTasks(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Run this node's tasks of a group."""

    key: tuple[str, int]
    """Which group; an upload group's number is the epoch that it is of."""


class Evaluate(msgspec.Struct, frozen=True, kw_only=True, tag="evaluate"):
    """Say of each of this node's stop conditions whether it holds."""


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Say what arrays of these names are in the workspace."""

    names: list[str]


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Stop everything."""


Request = Plan | Begin | RunTasks | Evaluate | Fetch | End | NoteEntries | SavePart | LoadPart


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The request has been done."""

    answer: bytes
    """The answer, packed by `feeder.state.codec`."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """It raised."""

    kind: str
    """The class of the exception."""
    text: str
    stack: str
    """Where it was raised."""


_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Done | Failed)


def encode(message: Any) -> bytes:
    """A request or a reply as bytes."""
    return msgspec.msgpack.encode(message)


def decode_request(data: bytes) -> Request:
    """The request that was encoded."""
    request: Request = _requests.decode(data)
    return request


def decode_reply(data: bytes) -> Done | Failed:
    """The reply that was encoded."""
    reply: Done | Failed = _replies.decode(data)
    return reply


def error_of(failed: Failed, node: str) -> FeedError:
    """The exception that a node in another process raised: of the same class where it is one of
    feeder's, else a `RemoteError`; the remote traceback is a note."""
    # Looked up among the names of feeder.errors alone: a node cannot name any other class.
    kind = getattr(errors, failed.kind, None) if failed.kind in errors.__all__ else None
    # A damaged part, which the runner passes over.
    kind = DamagedError if failed.kind == DamagedError.__name__ else kind
    if isinstance(kind, type) and issubclass(kind, FeedError):
        error = kind(failed.text)
    else:
        error = RemoteError(f"node {node!r}: {failed.kind}: {failed.text}")
    error.add_note(f"on node {node!r}:\n{failed.stack.rstrip()}")
    return error
