"""The names of checkpoints: which are allowed, and which is newer."""

from __future__ import annotations

import re
from typing import Any

from feeder.errors import CheckpointError, ConfigError

# One part of a path. Without a leading dot it is neither "..", nor a temporary file, nor a lock; 64
# characters leave room for suffixes within the 255 bytes of file systems.
_COMPONENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_MAX_CHARACTERS = 512
_EXPECTED = "1 to 64 of A-Z a-z 0-9 _ . -, not beginning with a dot"


def is_name(name: Any) -> bool:
    """Whether a checkpoint may have this name."""
    if not isinstance(name, str) or len(name) > _MAX_CHARACTERS:
        return False
    return all(map(_COMPONENT.fullmatch, name.split("/")))


def check_name(name: Any) -> str:
    """The name; raises `CheckpointError` where no checkpoint may have it."""
    if not is_name(name):
        raise CheckpointError(
            f"{name!r} cannot be the name of a checkpoint, expected {_EXPECTED}, or several such "
            "parts between slashes"
        )
    return str(name)


def check_prefix(prefix: Any) -> str:
    """The beginning of names; raises `CheckpointError` where no name begins so."""
    if prefix == "" or is_name(prefix) or (isinstance(prefix, str) and is_name(f"{prefix}_")):
        return str(prefix)
    raise CheckpointError(
        f"no name of a checkpoint begins with {prefix!r}, expected {_EXPECTED}, or several such "
        "parts between slashes"
    )


def check_writer(writer: Any) -> str:
    """The name of a writer; raises `ConfigError` where it can be none."""
    if isinstance(writer, str) and _COMPONENT.fullmatch(writer):
        return writer
    raise ConfigError(f"writer is {writer!r}, expected {_EXPECTED}")


def in_order(name: str) -> list[tuple[str, int]]:
    """The key that sorts names from old to new: by their text, where digits count as numbers."""
    # Without this "feed.10" would be older than "feed.9".
    words = re.split(r"([0-9]+)", name)
    numbers = [*map(int, words[1::2]), -1]
    return list(zip(words[::2], numbers, strict=True))
