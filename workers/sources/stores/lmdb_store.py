"""LMDB folders as one list of values that any thread may read by index.

LMDB finds a value by its key, an order asks by number: so the keys are known in their order, by a
rule if they are plain numbers, as most tools write them, and otherwise from a list. LMDB trusts the
pages of a file, so that a damaged one may end the process: what can be checked without LMDB is
checked before it opens the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice, pairwise
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.arguments import PathLike, flag, list_files
from feeder.workers.sources.extras import find, load
from feeder.workers.sources.far.objects import is_url
from feeder.workers.sources.stores.lmdb_keys import find_keys, is_at, move_to
from feeder.workers.sources.stores.mapped import RowMap
from feeder.workers.sources.stores.offsets import order_of_files
from feeder.workers.sources.stores.reading import Faults, RecordError

_SPARE_TRANSACTIONS = 16
"""So many read transactions of an LMDB are kept for calls to come."""
# More calls than that are rarely under way at once; not measured (2026-11-21).

_DATA = "data.mdb"


class LmdbStore:
    """The values of one or several LMDB folders, one after the other, in the order of their keys.

    The environments are opened read-only and without locks: nobody may write to them meanwhile.
    A folder is opened once in a process, however many stores read it, and is closed when the last
    of them is gone. With `verify` the pages are looked through first.

    Raises:
        ConfigError: a path is not a folder that holds an LMDB with records.
    """

    def __init__(self, paths: PathLike | Iterable[PathLike], *, verify: bool = False) -> None:
        listed = list_files(paths, "an LMDB folder")
        # Before the environment is opened: LMDB may end the process over a damaged page.
        if flag("verify", verify):
            for path in listed:
                _verify(path)
        self._paths = listed
        self._folders = [_open(path) for path in listed]
        # The folders are one list: record i is found by bisection.
        self._ends = np.cumsum([folder.size for folder in self._folders])

    def __reduce__(self) -> tuple[Any, ...]:
        # An environment cannot be shared between processes; its pages are.
        return LmdbStore, (self._paths,)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def name(self, index: int) -> str:
        """Path and key of a record."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        folder = self._folders[number]
        return folder.name(index - (int(self._ends[number]) - folder.size))

    def fingerprint_fields(self) -> dict[str, Any]:
        """A digest of each folder's size, first key and last key."""
        hasher = xxhash.xxh3_64()
        for folder in self._folders:
            hasher.update(f"{folder.size}/".encode() + folder.first + b"/" + folder.last + b"/")
        return {"keys": hasher.hexdigest(), **order_of_files(self._paths)}

    @contextmanager
    def values(
        self, indices: NDArray[np.int64], faults: Faults
    ) -> Iterator[tuple[list[int], Sequence[memoryview]]]:
        """The records that LMDB finds, and their values, as views of the map that may be read
        inside the `with` only.

        Raises:
            RecordError: a record is not found.
        """
        with ExitStack() as transactions:
            try:
                values = self._read(indices, transactions)
            except self._folders[0].damage:
                # LMDB does not say where: they are looked for one by one.
                indices = self._sound(indices, faults)
                values = self._read(indices, transactions) if len(indices) else []
            yield indices.tolist(), values

    def _sound(self, indices: NDArray[np.int64], faults: Faults) -> NDArray[np.int64]:
        """Those of the records that LMDB finds; the others are reported."""
        sound = []
        for index in indices.tolist():
            try:
                with ExitStack() as transactions:
                    self._read(np.array([index]), transactions)
            except self._folders[0].damage as error:
                faults.report(self.name(index), error)
            else:
                sound.append(index)
        return np.array(sound, dtype=np.int64)

    def _read(self, indices: NDArray[np.int64], transactions: ExitStack) -> Sequence[memoryview]:
        if len(self._folders) == 1:
            return self._folders[0].read(indices, transactions)
        numbers = np.searchsorted(self._ends, indices, side="right")
        if (numbers == numbers[0]).all():
            number = int(numbers[0])
            folder = self._folders[number]
            return folder.read(indices - (int(self._ends[number]) - folder.size), transactions)
        values: list[memoryview] = [memoryview(b"")] * len(indices)
        for number in np.unique(numbers).tolist():
            folder = self._folders[number]
            places = np.flatnonzero(numbers == number)
            inside = indices[places] - (self._ends[number] - folder.size)
            found = folder.read(inside, transactions)
            for place, value in zip(places.tolist(), found, strict=True):
                values[place] = value
        return values


class _Folder:
    """One open LMDB. Read-only: every call has a read transaction of its own."""

    def __init__(self, path: str) -> None:
        self._path = path
        lmdb = load("lmdb", "lmdb")
        self.damage: tuple[type[Exception], ...] = (
            lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.BadValsizeError, lmdb.InvalidError,
        )  # fmt: skip
        """What LMDB raises where a damaged page leads it astray."""
        try:
            self._env = lmdb.open(
                path, readonly=True, lock=False, create=False, max_spare_txns=_SPARE_TRANSACTIONS
            )
            try:
                self._check_length()
                self._look_at_keys()
            except BaseException:
                self._env.close()
                raise
        except lmdb.Error as error:
            raise ConfigError(f"{path!r} cannot be opened as an LMDB: {error}") from error

    def _look_at_keys(self) -> None:
        self.size: int = self._env.stat()["entries"]
        if self.size == 0:
            raise ConfigError(f"{self._path!r} is an empty LMDB, expected at least 1 record")
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            cursor.last()
            self.last = cursor.key()
            cursor.first()
            self.first = cursor.key()
            keys = find_keys(cursor, self.size)
        if keys is None:
            raise ConfigError(
                f"{self._path!r} is damaged: it says that it holds {self.size} records, and has "
                "another number of keys"
            )
        self._keys = keys
        self._map = RowMap(self.size)

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

    def read(self, indices: NDArray[np.int64], transactions: ExitStack) -> Sequence[memoryview]:
        """The values of records, for as long as the transactions are open.

        Raises:
            RecordError: the keys are not numbered as they seemed to be.
            self.damage: LMDB does not find its way to a record.
        """
        # Nobody writes to the file, and LMDB maps it once: a record stays where it was.
        if (known := self._map.find(indices)) is not None:
            return known
        transaction = transactions.enter_context(self._env.begin(buffers=True))
        cursor = transactions.enter_context(transaction.cursor())
        breaks = (np.flatnonzero(indices[1:] - indices[:-1] != 1) + 1).tolist()
        if 2 * (len(breaks) + 1) > len(indices) and self._keys.exact:
            return self._scattered(cursor, indices.tolist())
        values: list[memoryview] = []
        for start, stop in pairwise((0, *breaks, len(indices))):
            values += self._run(cursor, int(indices[start]), stop - start)
        return self._map.note(indices, values) or values

    def _scattered(self, cursor: Any, indices: list[int]) -> list[memoryview]:
        values = [value for _, value in cursor.getmulti(self._keys.keys(indices))]
        if len(values) != len(indices):
            raise self._misnumbered(cursor, indices)
        return values

    def _run(self, cursor: Any, first: int, length: int) -> list[memoryview]:
        keys, last = self._keys, first + length - 1
        # The last one first: on its way from the root to a whole key LMDB says that a page is
        # damaged, where going on to it from the page before ends the process.
        if not ((first == last or move_to(cursor, keys, last)) and move_to(cursor, keys, first)):
            raise self._misnumbered(cursor, (first, last))
        values = list(islice(cursor.iternext(keys=False), length))
        if len(values) != length or not is_at(cursor, keys, last):
            raise self._misnumbered(cursor, range(first, first + length))
        return values

    def _misnumbered(self, cursor: Any, indices: Iterable[int]) -> RecordError:
        missing = next((i for i in indices if not move_to(cursor, self._keys, i)), None)
        if missing is None:
            what = f"{self._path!r}: there are records between those that are numbered"
        else:
            what = f"{self.name(missing)}: there is no such record"
        return RecordError(
            f"{what}, although the first key and the last are numbered as if all were: either the "
            "store is damaged, which verify=True finds, or it is to be written again with keys "
            "that are numbered throughout, or not at all"
        )


_open_folders: WeakValueDictionary[tuple[int, int], _Folder] = WeakValueDictionary()
_opening = Lock()


def _open(path: str) -> _Folder:
    # LMDB must not be opened twice in a process; and where a store was written anew it is not the
    # one that was opened under that path before.
    file = _find_file(path)
    identity = file.st_dev, file.st_ino
    with _opening:
        folder = _open_folders.get(identity)
        if folder is None:
            folder = _open_folders[identity] = _Folder(os.path.realpath(path))
        return folder


def _find_file(path: str) -> os.stat_result:
    """The status of a folder's file.

    Raises:
        ConfigError: there is none.
    """
    if is_url(path):
        raise ConfigError(f"{path!r}: an LMDB is mapped, so it is read from a disk: copy it")
    if os.path.isfile(path):
        raise ConfigError(
            f"{path!r} is a file, expected the folder that holds {_DATA}: a single-file LMDB is to "
            f"be moved into a folder, under the name {_DATA}"
        )
    if not os.path.isdir(path):
        raise ConfigError(f"{path!r} does not exist, expected an LMDB folder")
    try:
        found = os.stat(os.path.join(path, _DATA))
    except OSError as error:
        raise ConfigError(
            f"{path!r} holds no {_DATA}, expected an LMDB folder: {error.strerror}"
        ) from error
    if found.st_size == 0:
        raise ConfigError(f"{path!r} holds an empty {_DATA}, of 0 bytes, expected an LMDB")
    return found


def _verify(path: str) -> None:
    """Look through the pages of a folder's file, without LMDB, which trusts them."""
    _find_file(path)
    load("lmdb", "lmdb")
    walker = find("lmdb.verify")
    if walker is None:
        raise ConfigError("verify=True needs the package lmdb of version 3.0 or later")
    try:
        problems = walker.verify(path)
    except walker.VerifyError as error:
        problems = [str(error)]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ConfigError(f"{path!r} is damaged: {problems[0]}{more}")
