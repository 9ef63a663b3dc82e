"""What a session asks a node to do with its part of a checkpoint, and how the node does it.

The requests are plain data, so that they reach nodes in other processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec

from feeder.checkpoint.format import DamagedError, Loaded
from feeder.checkpoint.tolerate import skip_damaged
from feeder.errors import CheckpointError
from feeder.job.checkpoints.databases import Database, open_database


class NoteEntries(msgspec.Struct, frozen=True, kw_only=True, tag="note"):
    """Say which entries a checkpoint of this node will have."""


class SavePart(msgspec.Struct, frozen=True, kw_only=True, tag="save"):
    """Write this node's part."""

    url: str
    db_type: str
    name: str
    """The name of the part."""
    writer: str
    """The writer whose lock is held meanwhile."""
    meta: dict[str, int | str]
    """The meta of the part."""


class LoadPart(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Read this node's part, and go on from it."""

    url: str
    db_type: str
    name: str
    digest: bytes
    """The digest that the manifest gives."""
    before: str | None = None
    """The name of this node's part of the epoch before, where there is one."""


PartRequest = NoteEntries | SavePart | LoadPart


class PartReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The result of saving or loading a part."""

    digest: bytes
    num_bytes: int
    """Its length in bytes."""
    nanoseconds: int
    """How long it took."""
    entries: list[str]
    """The names of its entries."""
    steps: dict[str, int]
    """The number of the next batch of each of the node's feeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Something that is asked of nodes, all at once; a session runs it."""

    requests: Mapping[str, PartRequest]
    """The request to each node."""
    settle: Callable[[Mapping[str, Any]], Any]
    """Called with all answers, once there is one of each node; its result is the session's."""


def save_part(
    request: SavePart,
    entries: Mapping[str, Any],
    steps: dict[str, int],
    open_database: Callable[[str, str, str], Database] = open_database,
) -> PartReceipt:
    """Write a part; durable when it returns. What a save that came to nothing has left under its
    name is replaced: no manifest means it. Raises `CheckpointError`."""
    start = time.monotonic_ns()
    with closing(open_database(request.db_type, request.url, request.writer)) as database:
        # The manifest of this epoch is gone already, so the old part means nothing.
        try:
            database.remove(request.name, missing_ok=True)
            receipt = database.put(request.name, entries, meta={**request.meta, "steps": steps})
        except OSError as error:
            path = database.path_of(request.name)
            raise CheckpointError(f"cannot write checkpoint {path!r}: {error}") from error
    return PartReceipt(
        digest=receipt.digest,
        num_bytes=receipt.num_bytes,
        nanoseconds=time.monotonic_ns() - start,
        entries=list(entries),
        steps=steps,
    )


def load_part(request: LoadPart) -> tuple[Loaded, PartReceipt]:
    """Read a part, checked to be the one that its manifest means, and to hold what the one of the
    epoch before does. Raises `CheckpointError`."""
    start = time.monotonic_ns()
    with closing(open_database(request.db_type, request.url, "nobody")) as database:
        loaded = database.get(request.name)
        if loaded.digest != request.digest:
            raise DamagedError(
                f"checkpoint {database.path_of(request.name)!r} is another than its manifest "
                "says; put back the one that it was, or resume from another epoch"
            )
        steps = _steps_of(loaded, database.path_of(request.name))
        if request.before is not None:
            _check_nothing_lost(database, request.before, loaded)
    return loaded, PartReceipt(
        digest=loaded.digest,
        num_bytes=loaded.num_bytes,
        nanoseconds=time.monotonic_ns() - start,
        entries=list(loaded.entries),
        steps=steps,
    )


def _steps_of(loaded: Loaded, path: str) -> dict[str, int]:
    try:
        return msgspec.convert(loaded.meta.get("steps", {}), dict[str, int])
    except msgspec.ValidationError as error:
        raise DamagedError(
            f"checkpoint {path!r} is damaged: the steps that it says make no sense: {error}; "
            "resume from another epoch"
        ) from error


def _check_nothing_lost(database: Database, before: str, loaded: Loaded) -> None:
    """Raise where an epoch lacks what the one before it holds. The names are settled by the init
    group, once: a part with fewer is of a node that had lost its workspace when it was saved."""
    held: list[str] = []
    with skip_damaged():
        held = database.entry_names(before)
    if missing := [name for name in held if name not in loaded.entries]:
        raise CheckpointError(
            f"checkpoint {database.path_of(loaded.name)!r} lacks {missing!r}, which the epoch "
            f"before holds ({database.path_of(before)!r}): its node had lost its workspace when it "
            "was saved; resume from another epoch"
        )
