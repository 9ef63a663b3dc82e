"""The form in which a node's part is written: a file of the store, or an LMDB."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from feeder.checkpoint.format import Loaded, Receipt
from feeder.checkpoint.store import CheckpointStore
from feeder.errors import ConfigError

DB_TYPES = ("file", "lmdb")


class Database(Protocol):
    """Named sets of arrays and bytes, each written once. Every method raises `CheckpointError`."""

    def put(
        self, name: str, entries: Mapping[str, Any], *, meta: Mapping[str, Any] | None = None
    ) -> Receipt:
        """Write one; durable when it returns. `ConfigError` for the name of an entry that no such
        database can have."""

    def get(self, name: str, entries: Iterable[str] | None = None) -> Loaded:
        """Read one, or some of its entries, all of which must be there."""

    def entry_names(self, name: str) -> list[str]:
        """The names of its entries."""

    def digest_of(self, name: str) -> bytes:
        """The digest that it claims, without reading all of it."""

    def verify(self, name: str) -> Receipt:
        """Read all of one, and raise where a bit of it is wrong."""

    def exists(self, name: str) -> bool:
        """Whether there is one of this name, damaged or not."""

    def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Remove one; refuses what is none. With `missing_ok`, nothing is done where there is
        nothing."""

    def path_of(self, name: str) -> str:
        """Where one lies, for messages."""

    def close(self) -> None:
        """Let others of this writer write."""


class FileDatabase(CheckpointStore):
    """Files of the store, whose mutex guards what changes."""

    def digest_of(self, name: str) -> bytes:
        """The digest that it claims."""
        return self.header(name).digest


def check_db_type(db_type: object) -> str:
    """A type of database; raises `ConfigError` where it is none."""
    if isinstance(db_type, str) and db_type in DB_TYPES:
        return db_type
    raise ConfigError(f"db_type is {db_type!r}, expected one of {DB_TYPES!r}")


def open_database(db_type: str, url: str, writer: str) -> Database:
    """The database of a type at a place; touches nothing. Raises `ConfigError`."""
    if db_type == "file":
        return FileDatabase(url, writer=writer)
    # Imported here: it needs the extra `lmdb`.
    from feeder.job.checkpoints.lmdbs import LmdbDatabase

    return LmdbDatabase(url, writer)
