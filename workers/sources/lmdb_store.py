"""LMDB folders as one list of values that any thread may read by index."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice, pairwise
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import xxhash
from numpy.typing import NDArray

from workers.errors import ConfigError
from workers.sources.extras import load
from workers.sources.lmdb_keys import find, find_keys, is_at
from workers.sources.reading import RecordError

_DATA = "data.mdb"
_SPARE_TRANSACTIONS = 16

Path_ = str | os.PathLike[str]


class LmdbStore:
    """The values of one or several LMDB folders, one after the other, in the order of their keys.

    The environments are opened read-only and without locks: nobody may write to them meanwhile.
    A folder is opened once in a process, however many stores read it, and is closed when the last
    of them is gone.

    Raises:
        ConfigError: a path is not a folder that holds an LMDB with records.
    """

    def __init__(self, paths: Path_ | Sequence[Path_]) -> None:
        paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if not paths:
            raise ConfigError("no path is given, expected at least one LMDB folder")
        self._folders = [_open(path) for path in paths]
        self._ends = np.cumsum([folder.size for folder in self._folders])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def name(self, index: int) -> str:
        """Path and key of a record."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        folder = self._folders[number]
        return folder.name(index - (int(self._ends[number]) - folder.size))

    def describe(self) -> dict[str, Any]:
        """A digest of each folder's size, first key and last key."""
        hasher = xxhash.xxh3_64()
        for folder in self._folders:
            hasher.update(f"{folder.size}/".encode() + folder.first + b"/" + folder.last + b"/")
        return {"keys": hasher.hexdigest()}

    @contextmanager
    def values(self, indices: NDArray[np.int64]) -> Iterator[list[memoryview]]:
        """The values of records, as views of the map that may be read inside the `with` only.

        Raises:
            RecordError: the store is damaged.
        """
        with ExitStack() as transactions:
            if len(self._folders) == 1:
                yield self._folders[0].read(indices, transactions)
                return
            numbers = np.searchsorted(self._ends, indices, side="right")
            values: list[memoryview] = [memoryview(b"")] * len(indices)
            for number in np.unique(numbers).tolist():
                folder = self._folders[number]
                places = np.flatnonzero(numbers == number)
                inside = indices[places] - (self._ends[number] - folder.size)
                for place, value in zip(
                    places.tolist(), folder.read(inside, transactions), strict=True
                ):
                    values[place] = value
            yield values


class _Folder:
    """One open LMDB."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lmdb = load("lmdb", "lmdb")
        self._check_files()
        try:
            self._env = self._lmdb.open(
                path, readonly=True, lock=False, create=False, max_spare_txns=_SPARE_TRANSACTIONS
            )
            try:
                self._check_length()
                self._look_at_keys()
            except BaseException:
                self._env.close()
                raise
        except self._lmdb.Error as error:
            raise ConfigError(f"{path!r} is not a sound LMDB: {error}") from error

    def _look_at_keys(self) -> None:
        self.size: int = self._env.stat()["entries"]
        if self.size == 0:
            raise ConfigError(f"{self._path!r} is an empty LMDB, expected at least 1 record")
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            cursor.last()
            self.last = cursor.key()
            cursor.first()
            self.first = cursor.key()
            self._keys = find_keys(cursor, self.size)

    def _check_files(self) -> None:
        if os.path.isfile(self._path):
            raise ConfigError(
                f"{self._path!r} is a file, expected the folder that holds {_DATA}: a single-file "
                f"LMDB is to be moved into a folder, under the name {_DATA}"
            )
        if not os.path.isdir(self._path):
            raise ConfigError(f"{self._path!r} does not exist, expected an LMDB folder")
        if not os.path.isfile(os.path.join(self._path, _DATA)):
            raise ConfigError(f"{self._path!r} holds no {_DATA}, expected an LMDB folder")

    def _check_length(self) -> None:
        # Reading a page that the file does not have would end the process with SIGBUS.
        pages = self._env.info()["last_pgno"] + 1
        needed = pages * self._env.stat()["psize"]
        size = os.path.getsize(os.path.join(self._path, _DATA))
        if size < needed:
            raise ConfigError(
                f"{self._path!r} is truncated: {_DATA} has {size} bytes, expected {needed}"
            )

    def name(self, index: int) -> str:
        return f"{self._path!r} at key {self._keys.key(index)!r}"

    def read(self, indices: NDArray[np.int64], transactions: ExitStack) -> list[memoryview]:
        """The values of records, for as long as the transactions are open."""
        try:
            transaction = transactions.enter_context(self._env.begin(buffers=True))
            cursor = transactions.enter_context(transaction.cursor())
            breaks = (np.flatnonzero(indices[1:] - indices[:-1] != 1) + 1).tolist()
            if 2 * (len(breaks) + 1) > len(indices) and self._keys.exact:
                return self._scattered(cursor, indices.tolist())
            values: list[memoryview] = []
            for start, stop in pairwise((0, *breaks, len(indices))):
                values += self._run(cursor, int(indices[start]), stop - start)
            return values
        except self._lmdb.Error as error:
            raise RecordError(f"{self.name(int(indices[0]))} or after: {error}") from error

    def _scattered(self, cursor: Any, indices: list[int]) -> list[memoryview]:
        values = [value for _, value in cursor.getmulti(self._keys.keys(indices))]
        if len(values) != len(indices):
            raise self._misnumbered(cursor, indices)
        return values

    def _run(self, cursor: Any, first: int, length: int) -> list[memoryview]:
        if not find(cursor, self._keys, first):
            raise self._misnumbered(cursor, [first])
        values = list(islice(cursor.iternext(keys=False), length))
        if len(values) != length or not is_at(cursor, self._keys, first + length - 1):
            raise self._misnumbered(cursor, range(first, first + length))
        return values

    def _misnumbered(self, cursor: Any, indices: Iterable[int]) -> RecordError:
        missing = next((i for i in indices if not find(cursor, self._keys, i)), None)
        if missing is None:
            what = f"{self._path!r}: there are records between those that are numbered"
        else:
            what = f"{self.name(missing)}: there is no such record"
        return RecordError(
            f"{what}, although the first key and the last are numbered as if all were: write the "
            "store again with keys that are numbered throughout, or not at all"
        )


_open_folders: WeakValueDictionary[str, _Folder] = WeakValueDictionary()
_opening = Lock()


def _open(path: Path_) -> _Folder:
    # LMDB must not be opened twice in a process.
    real = str(Path(path).resolve())
    with _opening:
        folder = _open_folders.get(real)
        if folder is None:
            folder = _open_folders[real] = _Folder(real)
        return folder
