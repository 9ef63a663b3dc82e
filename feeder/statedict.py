"""State dicts: a position under one fixed key, for a trainer's own checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from feeder.errors import ConfigError, SnapshotFormatError
from feeder.snapshot import Snapshot
from feeder.token import is_token
from workers.batch import Cut

STATE_KEY = "feeder"
"""The one key of every state dict."""


def unpack_state_dict(state_dict: dict[str, bytes]) -> Snapshot | bytes:
    """The positions in a state dict; its bytes may be a token too."""
    if not isinstance(state_dict, dict) or not isinstance(state_dict.get(STATE_KEY), bytes):
        raise SnapshotFormatError(
            f"state dict is {type(state_dict).__name__}, expected {{{STATE_KEY!r}: bytes}}"
        )
    return unpack_position(state_dict[STATE_KEY])


def unpack_position(data: bytes) -> Snapshot | bytes:
    """A snapshot from its bytes; a token as it is."""
    return data if is_token(data) else Snapshot.from_bytes(data)


def read_position(resume: Any) -> Snapshot | bytes:
    """What `resume=` was given, as a snapshot or a token."""
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
