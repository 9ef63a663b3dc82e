"""The locations of a job's checkpoints, and the names of its files there."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from feeder.errors import CheckpointError, ConfigError
from feeder.job.checkpoints.databases import Database, check_db_type, open_database

# A node's name is part of file names and of a writer's name; 40 characters leave room for the rest.
_NODE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,39}")
MANIFESTS, RUNS = "manifests/", "runs/"


def check_node(name: object) -> str:
    """The name of a node; raises `ConfigError` where no file could be called by it."""
    if isinstance(name, str) and _NODE.fullmatch(name):
        return name
    raise ConfigError(
        f"node is called {name!r}, expected 1 to 40 of A-Z a-z 0-9 _ . -, not beginning with a dot"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLocation:
    """A location for the parts of nodes, by epoch, and for the manifests beside them."""

    url: str
    """A folder as an absolute path, or a URL."""
    stem: str = ""
    """The beginning of every name."""
    db_type: str
    """The form of the parts: "file" or "lmdb"."""

    def part_name(self, node: str, epoch: int) -> str:
        """The name of a node's part."""
        return f"{self.stem}{node}.{epoch}"

    def manifest_name(self, nodes: Sequence[str], generation: int, epoch: int) -> str:
        """The name of the manifest that commits an epoch of these nodes.

        The first node stands for the job: in one location a node belongs to one job alone."""
        return f"{MANIFESTS}{self.stem}{min(nodes)}.g{generation}.{epoch}"

    def run_name(self, nodes: Sequence[str], generation: int | None = None) -> str:
        """The name of what says that a run of these nodes has begun to save, or what the names of
        all such begin with. It is of one length, so that texts sort as the generations do."""
        number = "" if generation is None else f"{generation:010d}"
        return f"{RUNS}{self.stem}{min(nodes)}.{number}"

    @property
    def manifests_prefix(self) -> str:
        """The beginning of the names of all manifests."""
        return MANIFESTS + self.stem

    def open_database(self, writer: str) -> Database:
        """The database that holds the parts."""
        return open_database(self.db_type, self.url, writer)


_MANIFEST = re.compile(r"(?P<key>.+)\.g(?P<generation>[0-9]+)\.(?P<epoch>[0-9]+)")


def read_manifest_name(location: CheckpointLocation, name: str) -> tuple[str, int, int] | None:
    """First node, generation and epoch of a manifest of this location; None where it is none."""
    found = _MANIFEST.fullmatch(name.removeprefix(location.manifests_prefix))
    if found is None:
        return None
    return found["key"], int(found["generation"]), int(found["epoch"])


def folder_location(db_prefix: object, db_type: object) -> CheckpointLocation:
    """The location that a `db_prefix` means: the folder of all files."""
    return _location(_checked("db_prefix", db_prefix), "", db_type)


def stem_location(path_prefix: object, db_type: object) -> CheckpointLocation:
    """The location that a `path_prefix` means: what all names begin with, folder and all."""
    folder, slash, stem = _checked("path_prefix", path_prefix).rpartition("/")
    return _location(folder or slash or ".", check_node(stem) if stem else "", db_type)


def _checked(setting: str, prefix: object) -> str:
    text = os.fspath(prefix) if isinstance(prefix, os.PathLike) else prefix
    if not isinstance(text, str) or not text or "\0" in text or ".." in text.split("/"):
        raise CheckpointError(
            f"{setting} is {prefix!r}, expected a path or a URL without '..' and NUL; name the "
            "folder itself"
        )
    return text


def _location(folder: str, stem: str, db_type: object) -> CheckpointLocation:
    """A location. Its path is absolute: nodes may have other working folders than this process."""
    if folder.startswith("file://"):
        parts = urlsplit(folder)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"{folder!r} names host {parts.netloc!r}, expected file:///PATH")
        folder = unquote(parts.path) or "/"
    if "://" not in folder:
        folder = os.path.abspath(folder)
    elif db_type == "lmdb":
        raise ConfigError(f"{folder!r} cannot hold LMDBs, which need a folder; use db_type 'file'")
    return CheckpointLocation(url=folder, stem=stem, db_type=check_db_type(db_type))
