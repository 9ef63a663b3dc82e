"""Arrays in memory or in files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, Unpack

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError, FeedError
from feeder.workers.public import public
from feeder.workers.sources.arguments import PathLike
from feeder.workers.sources.orders.options import OrderOptions
from feeder.workers.sources.source import Source
from feeder.workers.sources.stores.reading import Columns, empty_for, has_place
from feeder.workers.sources.stores.records import Records, split
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import is_masked, native

# Of anything else NumPy says that it would have to be unpickled.
_BEGINNINGS = {".npy": b"\x93NUMPY", ".npz": b"PK"}

ArrayLike: TypeAlias = "NDArray[Any] | PathLike"


@public("feeder.sources")
def arrays(
    *columns: ArrayLike | Mapping[str, ArrayLike], **options: Unpack[OrderOptions]
) -> Source:
    """Rows of arrays: a record is the i-th row of each.

    Args:
        columns: The columns, with equally many rows along axis 0, in the order of the input
            names; or one mapping by name. Each is an array, a memory-mapped one, or the path of a
            `.npy` file, which is mapped. The path of an `.npz` file, alone, stands for a mapping;
            its arrays are read into memory.
        options: `OrderOptions`.

    Raises:
        ConfigError: a column is no array or has another number of rows, or an option is wrong.
    """
    return Source(ArrayRecords(_named(columns)), **options)


def _named(columns: tuple[ArrayLike | Mapping[str, ArrayLike], ...]) -> dict[Any, NDArray[Any]]:
    only = columns[0] if len(columns) == 1 else None
    if isinstance(only, (str, os.PathLike)) and os.fspath(only).endswith(".npz"):
        return {name: _checked(name, array) for name, array in _load_npz(only).items()}
    # Without names the columns are known by number, and come as a tuple.
    given = only.items() if isinstance(only, Mapping) else enumerate(columns)
    return {name: _checked(name, _opened(column)) for name, column in given}


def _opened(column: Any) -> Any:
    if not isinstance(column, (str, os.PathLike)):
        return column
    if not os.fspath(column).endswith(".npy"):
        raise ConfigError(f"{os.fspath(column)!r} is no .npy file, nor an .npz file alone")
    with _loading(column, ".npy"):
        # Mapped: a file larger than memory will do, and its pages are shared between processes.
        return np.load(column, mmap_mode="r", allow_pickle=False)


def _load_npz(path: PathLike) -> dict[str, Any]:
    # Given a path, NumPy leaves the file open where it is damaged.
    with (
        _loading(path, ".npz"),
        open(path, "rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        return {name: arrays[name] for name in arrays.files}


@contextmanager
def _loading(path: PathLike, kind: str) -> Iterator[None]:
    try:
        with open(path, "rb") as file:
            if file.read(len(_BEGINNINGS[kind])) != _BEGINNINGS[kind]:
                raise ValueError(f"it is no {kind} file")
        yield
    except FeedError:
        raise
    # NumPy and zipfile raise much more of damaged bytes than they say.
    except Exception as error:
        raise ConfigError(f"{os.fspath(path)!r} cannot be read as arrays: {error}") from error


def _checked(name: Any, array: Any) -> NDArray[Any]:
    if not isinstance(array, np.ndarray) or is_masked(type(array)):
        kind = type(array).__name__
        raise ConfigError(f"column {name!r} is {kind}, expected an array or the path of one")
    # Without an axis there are no rows; objects cannot be copied as bytes.
    if array.ndim == 0 or array.dtype.hasobject:
        raise ConfigError(
            f"column {name!r} is {array.dtype}{list(array.shape)}, expected at least 1 axis and no "
            "Python objects"
        )
    return array


def _take(column: NDArray[Any], rows: Any) -> NDArray[Any]:
    taken: NDArray[Any] = column[rows]
    return taken


def _take_into(call: Call, num: int) -> Callable[[NDArray[Any], Any], NDArray[Any]]:
    def take(column: NDArray[Any], rows: Any) -> NDArray[Any]:
        # A place is of the machine's byte order.
        target = empty_for(call, (num, *column.shape[1:]), native(column.dtype))
        if isinstance(rows, slice) or target.dtype != column.dtype:
            np.copyto(target, column[rows])
        else:
            # All rows are there: `clip` spares the copy by which "raise" leaves nothing half done.
            np.take(column, rows, axis=0, out=target, mode="clip")
        return target

    return take


def _together(indices: NDArray[np.int64]) -> Any:
    """What takes rows: a slice where they lie together, which gives a view that costs nothing and
    that the assembler copies once; else an index array, which gives a copy."""
    first, last = int(indices[0]), int(indices[-1])
    # The first test is quick and rules out nearly every shuffled call.
    if last - first == len(indices) - 1 and bool((indices[1:] - indices[:-1] == 1).all()):
        return slice(first, last + 1)
    return indices


class ArrayRecords(Records):
    """Rows of arrays. They are handed on as views where they lie together, else copied. Read-only:
    any thread reads."""

    kind = "arrays"
    skipped = 0
    may_skip = False
    by_sample = False

    def __init__(self, columns: dict[Any, NDArray[Any]]) -> None:
        if not columns:
            raise ConfigError("no array is given, expected at least one")
        first = next(iter(columns))
        for name, column in columns.items():
            if len(column) != len(columns[first]):
                raise ConfigError(
                    f"column {name!r} has {len(column)} rows, column {first!r} has "
                    f"{len(columns[first])}"
                )
        self._columns = columns
        self._is_named = isinstance(first, str)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def name(self, index: int) -> str:
        """The row's number."""
        return f"row {index}"

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns:
        """Take rows."""
        rows = _together(indices)
        # Where the rows have a place they are copied there at once, by the fetcher.
        take = _take_into(call, len(indices)) if has_place(call) else _take
        taken = {name: take(column, rows) for name, column in self._columns.items()}
        return taken if self._is_named else tuple(taken.values())

    def samples(self, indices: NDArray[np.int64], call: Call) -> list[Any]:
        """The same row by row, for functions of the user's: views are read-only, so that the arrays
        stay as they are for the next epoch. (To copy them all took seven times as long.)"""
        rows = _together(indices)
        taken = {name: column[rows] for name, column in self._columns.items()}
        if isinstance(rows, slice):
            for view in taken.values():
                view.flags.writeable = False
        return split(taken if self._is_named else tuple(taken.values()))

    def describe(self) -> dict[str, Any]:
        """Names, dtypes and shapes of the rows."""
        return {
            "columns": [
                f"{name}: {column.dtype.str}{list(column.shape[1:])}"
                for name, column in self._columns.items()
            ]
        }
