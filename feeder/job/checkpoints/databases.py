"""The form in which a node's part is written: a file of the store, or an LMDB."""

from __future__ import annotations

from feeder.checkpoint.store import CheckpointStore
from feeder.errors import ConfigError
from feeder.job.checkpoints.lmdbs import LmdbDatabase

DB_TYPES = ("file", "lmdb")


class FileDatabase(CheckpointStore):
    """Files of the store, whose mutex guards what changes."""

    def digest_of(self, name: str) -> bytes:
        """The digest that it claims."""
        return self.header(name).digest


Database = FileDatabase | LmdbDatabase
"""Named sets of arrays and bytes, each written once. Every method raises `CheckpointError`."""


def check_db_type(db_type: object) -> str:
    """A type of database; raises `ConfigError` where it is none."""
    if isinstance(db_type, str) and db_type in DB_TYPES:
        return db_type
    raise ConfigError(f"db_type is {db_type!r}, expected one of {DB_TYPES!r}")


def open_database(db_type: str, url: str, writer: str) -> Database:
    """The database of a type at a place; touches nothing. Raises `ConfigError`."""
    if db_type == "file":
        return FileDatabase(url, writer=writer)
    return LmdbDatabase(url, writer)
