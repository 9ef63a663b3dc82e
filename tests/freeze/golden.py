"""Golden files: what may not change by a byte, as JSON that can be read and compared by lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from freeze import (
    checkpoints,
    composed,
    conversation,
    edits,
    helps,
    loaders,
    messages,
    names,
    positions,
    sources,
    streams,
    trainings,
)

FOLDER = Path(__file__).parent / "golden"

Facts = Mapping[str, Any]
"""What a golden file says, by names of its own."""

FROZEN: dict[str, Callable[[Path], Facts]] = {
    "streams": streams.make,
    "sources": sources.make,
    "composed": composed.make,
    "positions": positions.make,
    "edits": edits.make,
    "checkpoints": checkpoints.make,
    "messages": messages.make,
    "conversation": conversation.make,
    "helps": helps.make,
    "names": names.make,
    "loaders": loaders.make,
    "trainings": trainings.make,
}
"""Every golden file's name, and what makes it anew with an empty folder to work in."""
OF_FRAMEWORKS = ("loaders", "trainings")
"""Those that are made in the adapters' environment, and compared in `tests/adapters`."""


def as_text(facts: Facts) -> str:
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def kept(name: str) -> str:
    """A golden file as it was written."""
    return (FOLDER / f"{name}.json").read_text(encoding="utf-8")


def keep(name: str, text: str) -> None:
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def changes(golden: Any, made: Any, where: str = "") -> list[str]:
    """Each place in which what was made differs from a golden file, with both values."""
    if isinstance(golden, Mapping) and isinstance(made, Mapping):
        if list(golden) != list(made) and sorted(golden) == sorted(made):
            return [f"{where}: in another order"]
        both = {**golden, **made}
        pairs = [(key, golden.get(key), made.get(key)) for key in both]
    elif _is_list(golden) and _is_list(made) and len(golden) == len(made):
        pairs = [(i, old, new) for i, (old, new) in enumerate(zip(golden, made, strict=True))]
    else:
        return [] if golden == made else [f"{where}: {golden!r} is now {made!r}"]
    return [line for key, old, new in pairs for line in changes(old, new, f"{where}/{key}")]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
