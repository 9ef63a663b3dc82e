"""State dicts: a position under one key, for a trainer's checkpoint. And what `resume=` takes."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from feeder.errors import ConfigError, SnapshotFormatError
from feeder.state.snapshot import Snapshot
from feeder.state.token import is_token
from feeder.workers.stream.position import Cut

STATE_KEY = "feeder"
"""The one key of every state dict."""


def unpack_state_dict(state_dict: dict[str, bytes]) -> Snapshot | bytes:
    """The positions in a state dict; its bytes may be a token too."""
    expected = f"expected {{{STATE_KEY!r}: bytes}}"
    if not isinstance(state_dict, dict):
        raise SnapshotFormatError(f"state dict is {type(state_dict).__name__}, {expected}")
    if STATE_KEY not in state_dict:
        keys = reprlib.repr(list(state_dict))
        raise SnapshotFormatError(
            f"state dict has the keys {keys}, {expected}, as state_dict() of a coordinator gives it"
        )
    # Checkpoints of frameworks turn bytes into tensors or arrays: say how to get them back.
    position = state_dict[STATE_KEY]
    if not isinstance(position, bytes):
        raise SnapshotFormatError(
            f"state dict holds {type(position).__name__}, {expected}: make bytes of it, of an "
            "array by its tobytes()"
        )
    return unpack_position(position)


def unpack_position(data: bytes, *, most_header_bytes: int | None = None) -> Snapshot | bytes:
    """A snapshot from its bytes (see `Snapshot.from_bytes`); a token as it is."""
    if is_token(data):
        return data
    return Snapshot.from_bytes(data, most_header_bytes=most_header_bytes)


def read_position(resume: Any) -> Snapshot | bytes:
    """The value of `resume=`, as a snapshot or a token."""
    if isinstance(resume, Snapshot):
        return resume
    if isinstance(resume, Cut):
        return resume.token()
    if isinstance(resume, dict):
        return unpack_state_dict(resume)
    if isinstance(resume, (bytes, bytearray, memoryview)):
        return unpack_position(bytes(resume))
    if isinstance(resume, (str, Path)) or hasattr(resume, "__fspath__"):
        return Snapshot.read(resume)
    raise ConfigError(
        f"resume is {type(resume).__name__}, expected a Snapshot, its bytes, a token, a state "
        "dict or a path"
    )
