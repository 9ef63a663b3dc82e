"""Where checkpoints are kept, and found again."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from feeder.checkpoint import backends, format
from feeder.checkpoint.format import DamagedError, Entry
from feeder.checkpoint.names import (
    check_name,
    check_prefix,
    generation_of,
    in_order,
    sequence_name,
)  # fmt: skip
from feeder.durable import Fs
from feeder.errors import CheckpointError, ConfigError
from feeder.snapshot import Snapshot

logger = logging.getLogger("feeder")

SNAPSHOT_ENTRY = "snapshot"
"""The entry that holds the position of feeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was stored, and will be there."""

    name: str
    """The name under which it is found."""
    num_bytes: int
    """Its length in bytes."""
    digest: bytes
    """16 bytes that tell its content from any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was read, checked."""

    name: str
    """The name under which it was found."""
    entries: dict[str, Entry]
    """Arrays and bytes by name: all of them, or those that were asked for."""
    meta: dict[str, Any]
    """What the writer added."""
    num_bytes: int
    """Length of the whole checkpoint in bytes."""
    digest: bytes
    """The digest of the whole, as its receipt has it."""


class CheckpointStore:
    """Checkpoints by name: each a set of named arrays and bytes, written once and then read-only.

    Args:
        url: A folder, as a path or ``file://`` URL, or a place in an object store: ``s3://``,
            ``gs://``, ``az://`` (extra `objectstore`). A folder is made where it is missing; the
            one that it lies in must be there.
        keep: How many checkpoints of its own sequence (`save`) stay; None keeps all.
        writer: Whose sequence that is. Two stores with the same writer cannot write into one
            folder at a time; stores with different writers can, each its own names: so do the
            nodes of a job. The lock (on ``.writer-NAME.lock``) is taken at the first write, is
            named by the process that holds it, and ends with `close` or the process. An object
            store has no locks: there a name is written once, whoever comes first.

    Guarantees: what `put` and `save` have returned from is there after any crash, of the power
    too; a checkpoint is read whole or not at all; nothing is ever removed that is no checkpoint.
    Any thread may use it. Every method raises `CheckpointError`, which says which file and what
    to do.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: int | None = None,
        writer: str = "feed",
        fs: Fs | None = None,
    ) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep is {keep!r}, expected a whole number from 1 on, or None")
        self.url = os.fspath(url)
        self.keep = keep
        self.writer = check_writer(writer)
        self._backend = backends.open_backend(self.url, self.writer, fs)
        self._next: int | None = None
        self._mutex = threading.Lock()

    # ---- written

    def put(
        self, name: str, entries: Mapping[str, Any], *, meta: Mapping[str, Any] | None = None
    ) -> Receipt:
        """Store arrays (of any dtype but Python objects) and bytes under a name that nothing has
        yet. Durable when it returns; the arrays may not be changed until then."""
        check_name(name)
        parts, num_bytes, digest = format.encode(entries, meta)
        self._backend.create(name, parts)
        return Receipt(name=name, num_bytes=num_bytes, digest=digest)

    def remove(self, name: str) -> None:
        """Remove a checkpoint; refuses what is none."""
        with self._backend.open(check_name(name)) as reader:
            if not format.is_checkpoint(reader):
                raise CheckpointError(f"{reader.path!r} is no checkpoint, and is left where it is")
        self._backend.remove(name)

    # ---- read

    def get(self, name: str, entries: Iterable[str] | None = None) -> Loaded:
        """Read a checkpoint, or only some of its entries, all of which must be there."""
        with self._backend.open(check_name(name)) as reader:
            header = format.read_header(reader)
            wanted = list(header.entries) if entries is None else list(entries)
            missing = [entry for entry in wanted if entry not in header.entries]
            if missing:
                raise CheckpointError(
                    f"checkpoint {reader.path!r} has no entries {missing!r}, expected some of "
                    f"{sorted(header.entries)!r}"
                )
            return Loaded(
                name=name,
                entries={e: format.read_entry(reader, e, header.entries[e]) for e in wanted},
                meta=header.meta,
                num_bytes=reader.size,
                digest=header.digest,
            )

    def entry_names(self, name: str) -> list[str]:
        """The names of a checkpoint's entries, in the order in which they were given."""
        return list(self.header(name).entries)

    def header(self, name: str) -> format.Header:
        """What a checkpoint says of itself; its entries are not read."""
        with self._backend.open(check_name(name)) as reader:
            return format.read_header(reader)

    def verify(self, name: str) -> Receipt:
        """Read all of a checkpoint, and raise where a bit of it is wrong."""
        loaded = self.get(name)
        return Receipt(name=name, num_bytes=loaded.num_bytes, digest=loaded.digest)

    def exists(self, name: str) -> bool:
        """Whether there is a checkpoint of this name, damaged or not."""
        return name in self.names(check_name(name))

    def names(self, prefix: str = "") -> list[str]:
        """The checkpoints whose names begin so, damaged ones too, from old to new: in the order
        of their names, where digits count as numbers. Other files are left out."""
        found = self._backend.names(check_prefix(prefix))
        return sorted(filter(self._is_checkpoint, found), key=in_order)

    def latest(self, prefix: str = "") -> str | None:
        """The newest checkpoint that is complete and valid, None where there is none. Damaged
        ones are named in the log and passed over."""
        loaded = self._newest(self.names(prefix))
        return None if loaded is None else loaded.name

    def path_of(self, name: str) -> str:
        """Where a checkpoint lies, as messages name it."""
        return self._backend.path_of(name)

    def _is_checkpoint(self, name: str) -> bool:
        try:
            with self._backend.open(name) as reader:
                return format.is_checkpoint(reader)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False  # retired in the meantime
            raise

    def _newest(self, names: list[str]) -> Loaded | None:
        for name in reversed(names):
            try:
                return self.get(name)
            except DamagedError as error:
                logger.warning("%s", error)
        return None

    # ---- the sequence of a writer

    def save(
        self,
        snapshot: Snapshot,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> str:
        """Store the position of feeds as the next of this writer's sequence, and return its name.
        Once it is durable, the oldest beyond `keep` are removed."""
        with self._mutex:
            generation = self._next_generation()
            name = sequence_name(self.writer, generation)
            said = {**(meta or {}), "step": step, "feeds": steps_of(snapshot)}
            self.put(name, {SNAPSHOT_ENTRY: bytes(snapshot)}, meta=said)
            self._next = generation + 1
            if self.keep is not None:
                self.retire(self.keep)
        return name

    def load(self, name: str | None = None) -> Snapshot:
        """The position of feeds in a checkpoint, by default in the newest of this writer's."""
        if name is not None:
            return self._snapshot(self.get(name, [SNAPSHOT_ENTRY]))
        names = self.sequence()
        loaded = self._newest(names)
        if loaded is None:
            found = f"{len(names)} that are damaged" if names else "none"
            raise CheckpointError(
                f"no checkpoint of {self.writer!r} can be loaded from {self.url!r}: there are "
                f"{found}; resume from another place, or begin anew in another folder"
            )
        return self._snapshot(loaded)

    def sequence(self) -> list[str]:
        """The names of this writer's sequence, from old to new."""
        names = self.names(f"{self.writer}.")
        return [name for name in names if generation_of(self.writer, name) is not None]

    def retire(self, keep: int) -> list[str]:
        """Remove the oldest of this writer's sequence until `keep` are left; returns their names.
        What cannot be removed is named in the log, and stays."""
        removed = []
        for name in self.sequence()[:-keep]:
            try:
                self.remove(name)
                removed.append(name)
            except CheckpointError as error:
                logger.warning("an old checkpoint stays: %s", error)
        return removed

    def _next_generation(self) -> int:
        if self._next is not None:
            return self._next
        # Whatever has such a name counts, a checkpoint or not: it would be in the way.
        names = self._backend.names(f"{self.writer}.")
        taken = [generation_of(self.writer, name) for name in names]
        return max((number for number in taken if number is not None), default=-1) + 1

    def _snapshot(self, loaded: Loaded) -> Snapshot:
        data = loaded.entries[SNAPSHOT_ENTRY]
        return Snapshot.from_bytes(bytes(data))

    # ---- life

    def close(self) -> None:
        """Let other stores of this writer write. It may be used again."""
        self._backend.close()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CheckpointStore {self.url!r}, writer {self.writer!r}>"


def check_writer(writer: Any) -> str:
    """The name of a writer; raises `ConfigError` where it can be none."""
    try:
        if "/" not in check_name(writer):
            return str(writer)
    except CheckpointError:
        pass
    raise ConfigError(
        f"writer is {writer!r}, expected 1 to 64 of A-Z a-z 0-9 _ . -, not beginning with a dot"
    )


def steps_of(snapshot: Snapshot) -> dict[str, int]:
    """The number of the next batch of each feed."""
    return {f"{state.name}[{state.number}]": state.summary[2] for state in snapshot.states}
