"""The names of checkpoints: which are allowed, and which is the newest."""

from __future__ import annotations

import re
from typing import Any

from feeder.errors import CheckpointError

_COMPONENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_GENERATION = re.compile(r"[0-9]+")
_MAX_CHARACTERS = 512


def is_name(name: str) -> bool:
    """Whether a checkpoint may have this name."""
    parts = name.split("/")
    return len(name) <= _MAX_CHARACTERS and all(map(_COMPONENT.fullmatch, parts))


def check_name(name: Any) -> str:
    """The name; raises `CheckpointError` where no checkpoint may have it."""
    if not isinstance(name, str) or not is_name(name):
        raise CheckpointError(
            f"{name!r} cannot be the name of a checkpoint, expected 1 to 64 of A-Z a-z 0-9 _ . - "
            "in each part between slashes, none of which begins with a dot"
        )
    return name


def check_prefix(prefix: Any) -> str:
    """The beginning of names; raises `CheckpointError` where no name begins so."""
    if prefix != "":
        check_name(prefix + "_" if isinstance(prefix, str) else prefix)
    return str(prefix)


def in_order(name: str) -> list[tuple[str, int]]:
    """The key that sorts names from old to new: by their text, where digits count as numbers."""
    words = re.split(r"([0-9]+)", name)
    numbers = [int(word) for word in words[1::2]] + [-1]
    return list(zip(words[::2], numbers, strict=True))


def sequence_name(writer: str, generation: int) -> str:
    """The name of one of a writer's own sequence of checkpoints."""
    return f"{writer}.{generation:08d}"


def generation_of(writer: str, name: str) -> int | None:
    """Which of a writer's sequence a name is; None where it is none of them."""
    generation = name.removeprefix(f"{writer}.")
    if generation == name or not _GENERATION.fullmatch(generation):
        return None
    return int(generation)
