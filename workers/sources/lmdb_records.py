"""What the records of Caffe's and of Caffe2's LMDBs have in common."""

from __future__ import annotations

from typing import Any

from feeder.workers.sources.blobs import BlobColumn
from feeder.workers.sources.stores.lmdb_store import LmdbStore
from feeder.workers.sources.stores.reading import Faults, OnError
from feeder.workers.sources.stores.records import Records


class LmdbRecords(Records):
    """Records of LMDB folders, with or without an image column. Read-only: any thread reads."""

    def __init__(self, store: LmdbStore, column: BlobColumn | None, on_error: OnError) -> None:
        self._store = store
        self._column = column
        self._faults = Faults(on_error)

    def __len__(self) -> int:
        return len(self._store)

    @property
    def may_skip(self) -> bool:
        """Whether defective records are left out."""
        return self._faults.may_skip

    @property
    def skipped(self) -> int:
        """Reads of defective records that were left out."""
        return self._faults.skipped

    def name(self, index: int) -> str:
        """Path and key."""
        return self._store.name(index)

    def describe(self) -> dict[str, Any]:
        """A digest of the keys, and what is done to image files."""
        # The options about images are part of the stream only where there are images.
        column = {} if self._column is None else self._column.fingerprint_fields()
        return {**self._store.fingerprint_fields(), **column}
