"""Some entries of an epoch, of the parts of several nodes: all of them, or nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from feeder.checkpoint.format import DamagedError
from feeder.errors import CheckpointError, ConfigError
from feeder.job.checkpoints.databases import Database
from feeder.job.checkpoints.epochs import read_manifests
from feeder.job.checkpoints.locations import CheckpointLocation
from feeder.job.checkpoints.parts import PartReceipt

logger = logging.getLogger("feeder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The part of one node, as its manifest means it."""

    name: str
    digest: bytes
    entries: list[str]


class PartialLoad:
    """Reads entries of the parts of several nodes, each of which may have been saved by a job of
    its own. Used by the thread that loads."""

    def __init__(self, location: CheckpointLocation, parts: Mapping[str, Found]) -> None:
        self._location = location
        self._parts = parts

    def load(self, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, PartReceipt]]:
        """The entries by the names as given, and what was read of each node's part. Raises
        `CheckpointError` where there is no such entry, and `ConfigError` where several have it."""
        wanted: dict[str, dict[str, str]] = {node: {} for node in self._parts}
        for name in names:
            node, entry = self._resolve(name)
            wanted[node][name] = entry
        loaded: dict[str, Any] = {}
        receipts = {}
        with closing(self._location.open_database("nobody")) as database:
            for node, entries in wanted.items():
                found, receipts[node] = self._read(database, self._parts[node], entries)
                loaded |= found
        return loaded, receipts

    def _resolve(self, name: str) -> tuple[str, str]:
        """Node and entry of a name."""
        node, slash, entry = name.partition("/")
        if slash and node in self._parts:
            having = [node] if entry in self._parts[node].entries else []
        else:
            entry = name
            having = [node for node, part in self._parts.items() if entry in part.entries]
        if not having:
            there = sorted(
                f"{node}/{e}" for node, part in self._parts.items() for e in part.entries
            )
            raise CheckpointError(f"there is no entry {name!r}, expected one of {there!r}")
        if len(having) > 1:
            raise ConfigError(
                f"entry {name!r} is in the parts of {having!r}; say which, as in "
                f"{f'{having[0]}/{name}'!r}"
            )
        return having[0], entry

    def _read(
        self, database: Database, part: Found, entries: Mapping[str, str]
    ) -> tuple[dict[str, Any], PartReceipt]:
        start = time.monotonic_ns()
        loaded = database.get(part.name, sorted(set(entries.values())))
        # It may have been written again since the manifest was read.
        if loaded.digest != part.digest:
            raise DamagedError(
                f"checkpoint {database.path_of(part.name)!r} is another than its manifest says; "
                "put back the one that it was, or name another epoch"
            )
        receipt = PartReceipt(
            digest=loaded.digest,
            num_bytes=sum(_num_bytes(entry) for entry in loaded.entries.values()),
            nanoseconds=time.monotonic_ns() - start,
            entries=list(loaded.entries),
            steps={},
        )
        return {name: loaded.entries[entry] for name, entry in entries.items()}, receipt


def find_partial(
    location: CheckpointLocation, files: Mapping[str, str], epoch: int
) -> PartialLoad | None:
    """The parts of nodes, named as in `files`, at an epoch; None where one of them has none that
    is complete."""
    # A node may be in the manifests of several jobs over time; the newest says which part counts.
    digests: dict[str, bytes] = {}
    for manifest in read_manifests(location, epoch):  # a newer one counts before an older one
        digests = {name: part.digest for name, part in manifest.parts.items()} | digests
    parts = {}
    with closing(location.open_database("nobody")) as database:
        for node, file in files.items():
            name = location.part_name(file, epoch)
            if file not in digests or not database.exists(name):
                logger.info("there is no complete checkpoint %r", database.path_of(name))
                return None
            entries = database.entry_names(name)
            parts[node] = Found(name=name, digest=digests[file], entries=entries)
    return PartialLoad(location, parts)


def _num_bytes(entry: Any) -> int:
    return entry.nbytes if isinstance(entry, np.ndarray) else len(entry)
