"""Sources of tables: Parquet and Arrow files, and datasets of Hugging Face's `datasets`.

A table file is compressed by groups of rows, and a row cannot be read without its group. So decoded
groups are kept, a few of them and bounded in bytes: orders that stay near one place for a while
read a group once, a full shuffle reads it again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import PathLike, flag, whole
from feeder.workers.sources.collate import make_columns
from feeder.workers.sources.datasets import records
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.far.cache import Cache
from feeder.workers.sources.far.paths import FarPath, files_of
from feeder.workers.sources.orders.options import OrderOptions
from feeder.workers.sources.source import Source
from feeder.workers.sources.steps.each import Zipped
from feeder.workers.sources.stores.arrow_columns import (
    ColumnArray,
    Nulls,
    Values,
    has_columns,
    to_columns,
)
from feeder.workers.sources.stores.kept import Kept
from feeder.workers.sources.stores.reading import Columns, RecordError
from feeder.workers.sources.stores.records import Records
from feeder.workers.sources.stores.table_files import (
    ARROW_ERRORS,
    TABLES_KEPT,
    ArrowFiles,
    ArrowObjects,
    HeldTable,
    HfTable,
    ParquetFiles,
    Tables,
)
from feeder.workers.stream.batch import Call

_GROUP_BYTES_KEPT = 256 * 1024 * 1024
"""So many bytes of decoded row groups are kept in a process, and the last group in any case."""
# A group has 100 MB and more if a file is one group, and eight of them took 1.9 GB in each
# process; 1.0 GB are left, of which half are groups that are being decoded (2026-11-27).

Paths = PathLike | Iterable[PathLike]


@public("feeder.sources")
def parquet(
    paths: Paths,
    columns: Sequence[str] | None = None,
    *,
    nulls: Any = "error",
    types: Mapping[str, Any] | None = None,
    verify: bool = False,
    row_group_cache: int = 8,
    cache: Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[OrderOptions],
) -> Source:
    """Rows of Parquet files (extra `arrow`).

    A row group is decoded as a whole, and the last ones are kept. So read in order, or shuffle
    within windows, `.shuffle(window=n)` with about the rows of a group: each group is then decoded
    once or twice an epoch. A shuffle of all rows decodes a group for nearly every row.

    Columns of numbers are arrays, of fixed-size lists and tensors arrays with more axes, of bytes
    of a fixed size arrays of uint8, and those of structs have names such as "image.width". Lists
    and strings are rows of different lengths, for `map`, `pad` and `offsets`. Lists of structs, as
    of chats, decimals and times of day are Python objects, for `map`.

    Folders such as "lang=en/year=2024" that files lie in directly (Hive partitions) are columns,
    after those of the files: whole numbers if all of their values are, otherwise strings.

    Args:
        paths: A path or a URL, a folder, several, or a pattern such as "data/*.parquet".
        columns: The columns to read, or fields of structs, such as "image.bytes"; None is all.
        nulls: What a null becomes. "error": None for a `map` or a `filter`, and an error if it
            comes into a batch. A value, or values by column such as {"text": ""}: that value.
            "mask": zero, an empty string or an empty list, and each column `x` has a column
            `x.is_null` beside it.
        types: By column the Arrow type, or its name such as "int64", that it is brought to in each
            file, if files differ in it. A value that the type does not hold is an error.
        verify: Whether the checksums of pages, of files that have them, are looked at when they are
            read.
        row_group_cache: How many decoded row groups are kept, in each process: at most so many, and
            256 MiB of them, or the last one.
        cache: A `feeder.Cache` that URLs are read through; None is that of FEEDER_CACHE.
        storage_options: How the store of a URL is reached, by the names of obstore, such as
            {"region": "eu-west-1"}; what is not given comes from the environment.
        options: `OrderOptions`.

    Raises:
        ConfigError: a file is missing, damaged or has other columns than the first, pyarrow is not
            installed, or an option is wrong.
        StorageError: an object is missing or refused, or its store does not answer.
    """
    kept = Kept(whole("row_group_cache", row_group_cache, 1), _GROUP_BYTES_KEPT, _size_of)
    told = Nulls.of(nulls)
    listed = files_of(paths, "a Parquet file", ("parquet", "pq"), cache, storage_options)
    files = ParquetFiles(listed, _names(columns), types, verify=flag("verify", verify))
    return Source(TableRecords("parquet", files, kept, told), **options)


def _size_of(columns: dict[str, ColumnArray]) -> int:
    return sum(column.nbytes for column in columns.values())


@public("feeder.sources")
def arrow(
    paths: Paths | Any,
    columns: Sequence[str] | None = None,
    *,
    nulls: Any = "error",
    types: Mapping[str, Any] | None = None,
    cache: Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[OrderOptions],
) -> Source:
    """Rows of Arrow files: IPC files, as Feather writes them, and streams, as the caches of Hugging
    Face are (extra `arrow`). They are mapped into memory; any row is read at once. Of a URL only
    IPC files are read, a record batch at a time.

    Or rows of a table of any library that exports Arrow's streams, as pyarrow, Polars, DuckDB,
    pandas and ADBC do. It is read once, when the source is made, and held in memory; a position
    fits a table with the same columns and as many rows.

    Args:
        paths: A path or a URL, a folder, several, or a pattern such as "data/*.arrow"; or an object
            with `__arrow_c_stream__`.
        columns: The columns to read, or fields of structs, such as "image.bytes"; None is all.
        nulls: What a null becomes, as of `parquet`.
        types: By column the type that it is brought to, as of `parquet`.
        cache: A `feeder.Cache` that URLs are read through; None is that of FEEDER_CACHE.
        storage_options: How the store of a URL is reached, as of `parquet`.
        options: `OrderOptions`.

    Raises:
        ConfigError: a file is missing, damaged or has other columns than the first, pyarrow is not
            installed, or an option is wrong.
        StorageError: an object is missing or refused, or its store does not answer.
    """
    told = Nulls.of(nulls)
    files: Tables
    if hasattr(paths, "__arrow_c_stream__"):
        files = HeldTable(paths, _names(columns), types)
    else:
        suffixes = ("arrow", "feather", "ipc")
        listed = files_of(paths, "an Arrow file", suffixes, cache, storage_options)
        is_far = any(isinstance(path, FarPath) for path in listed)
        files = (ArrowObjects if is_far else ArrowFiles)(listed, _names(columns), types)
    return Source(TableRecords("arrow", files, Kept(TABLES_KEPT), told), **options)


@public("feeder.sources")
def hf(dataset: Any, *, nulls: Any = "error", **options: Unpack[OrderOptions]) -> Source:
    """Rows of a map-style dataset of Hugging Face's `datasets`.

    Its Arrow table is read directly, also after `select`, `shuffle` and `filter` of it. Columns
    that the library decodes, such as images, are as the library gives them. A dataset with a format
    or a transform gives its items, one by one. A dataset that streams is for `sources.iterable`: it
    has `state_dict`.

    Args:
        dataset: A `datasets.Dataset`.
        nulls: What a null becomes, as of `parquet`; not of columns that the library decodes.
        options: `OrderOptions`.

    Raises:
        ConfigError: it is no such dataset, or an option is wrong.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "features")):
        raise ConfigError(
            f"dataset is {type(dataset).__name__}, expected a map-style datasets.Dataset: one that "
            "streams is for sources.iterable"
        )
    told = Nulls.of(nulls)
    decoded = [name for name, feature in dataset.features.items() if _is_decoded(feature)]
    plain = [name for name in dataset.column_names if name not in decoded]
    schema = dataset.data.table.select(plain).schema
    has_format = dataset.format["type"] is not None
    if has_format or not plain or not has_columns(schema):
        if told != Nulls():
            raise ConfigError(
                "nulls is given, and the items of this dataset are read as the library makes them: "
                "leave it out, and give None its value with map"
            )
        return records(dataset if has_format else _Decoded(dataset), **options)
    table = TableRecords("hf", HfTable(dataset, plain), Kept(TABLES_KEPT), told)
    if not decoded:
        return Source(table, **options)
    items = records(_Decoded(dataset.select_columns(decoded))).records
    return Source(HfRecords(table, items), **options)


_PLAIN = ("Value", "ClassLabel", *(f"Array{n}D" for n in range(2, 6)))


def _is_decoded(feature: Any) -> bool:
    """Whether the library makes something of a feature that the table does not say, such as an
    image."""
    if isinstance(feature, dict):
        return any(map(_is_decoded, feature.values()))
    if isinstance(feature, (list, tuple)):
        return any(map(_is_decoded, feature))
    inner = getattr(feature, "feature", None)
    return type(feature).__name__ not in _PLAIN if inner is None else _is_decoded(inner)


class _Decoded:
    """The columns of a dataset that its library decodes, with numbers of the dtypes that the
    dataset says. Never changes; any thread reads."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return _typed(self._dataset[index], self._dataset.features)


def _typed(value: Any, feature: Any) -> Any:
    if value is None:
        return None
    if isinstance(feature, dict):
        return {name: _typed(value[name], inner) for name, inner in feature.items()}
    dtype = getattr(feature, "dtype", None)
    if type(feature).__name__ == "Value":
        # Of the library these are Python's numbers, and each dtype has one of its own for NumPy.
        return np.dtype(dtype).type(value) if isinstance(value, (bool, int, float)) else value
    if type(feature).__name__.startswith("Array"):
        return np.asarray(value, dtype)
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if inner is None:
        return value
    if isinstance(value, dict):
        return {name: [_typed(v, inner[name]) for v in values] for name, values in value.items()}
    return [_typed(one, inner) for one in value]


class HfRecords(Zipped):
    """Rows of a dataset: columns of its table, and those that the library decodes."""

    kind = "hf"


def _names(columns: Any) -> list[str] | None:
    if columns is None:
        return None
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
        raise ConfigError(f"columns is {columns!r}, expected names such as ['text', 'label']")
    return list(columns)


class TableRecords(Records):
    """Rows of tables. What changes, the groups that are kept, has its own lock."""

    kind, by_sample = "", False
    skipped = 0
    may_skip = False

    def __init__(self, kind: str, tables: Tables, kept: Kept, nulls: Nulls) -> None:
        self.kind = kind
        self._tables, self._nulls, self._groups = tables, nulls, kept
        try:
            columns = to_columns(tables.empty(), tables.columns, nulls)
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(f"{tables.name(0)}: {error}") from error
        nulls.check(list(columns))
        self.by_sample = not all(isinstance(column, np.ndarray) for column in columns.values())
        """Whether rows may differ in length."""
        self._objects = [name for name, column in columns.items() if isinstance(column, Values)]

    def __len__(self) -> int:
        return len(self._tables)

    def name(self, index: int) -> str:
        """Where the row lies."""
        row = self._tables.rows(np.array([index]))
        number = int(np.searchsorted(self._tables.ends, row, side="right")[0])
        return f"{self._tables.name(number)}, row {int(row[0]) - self._first(number)}"

    def _first(self, number: int) -> int:
        return int(self._tables.ends[number - 1]) if number else 0

    def _columns(self, number: int) -> dict[str, ColumnArray]:
        """A group's columns, kept."""
        columns: dict[str, ColumnArray] = self._groups.get(number, lambda: self._decode(number))
        return columns

    def _decode(self, number: int) -> dict[str, ColumnArray]:
        try:
            table = self._tables.group(number)
            listed = int(self._tables.ends[number]) - self._first(number)
            if table.num_rows != listed:
                raise ValueError(
                    f"the file is damaged: {table.num_rows} rows, and it lists {listed}; write or "
                    "copy it anew"
                )
            return to_columns(table, self._tables.columns, self._nulls)
        except (OSError, *ARROW_ERRORS) as error:
            raise RecordError(f"{self._tables.name(number)}: {error}") from error

    def _groups_of(
        self, indices: NDArray[np.int64]
    ) -> Iterator[tuple[dict[str, ColumnArray], NDArray[np.int64], NDArray[np.int64], bool]]:
        """The columns of each group, which of the rows are in it, and their places there; and
        whether all are in it. One after the other: a call may read more groups than are kept."""
        rows = self._tables.rows(indices)
        numbers = np.searchsorted(self._tables.ends, rows, side="right")
        groups = np.unique(numbers).tolist()
        for n in groups:
            chosen = np.flatnonzero(numbers == n)
            yield self._columns(n), chosen, rows[chosen] - self._first(n), len(groups) == 1

    @property
    def has_objects(self) -> bool:
        """Whether some of the rows lie in objects of stores."""
        return getattr(self._tables, "has_objects", False)

    def touches(self, indices: NDArray[np.int64], call: Call) -> Iterator[Touch]:
        """What rows read of objects: the groups that they lie in."""
        if isinstance(self._tables, ParquetFiles | ArrowObjects):
            rows = self._tables.rows(indices)
            for number in np.unique(np.searchsorted(self._tables.ends, rows, side="right")):
                yield from self._tables.touches(int(number))

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns:
        """Rows as columns; those of different lengths must be alike."""
        columns = None if self.by_sample else self._together(indices)
        if columns is not None:
            return columns
        samples = self.samples(indices, call)
        for i, sample in enumerate(samples):
            for name, value in sample.items():
                if value is None:
                    raise RecordError(
                        f"{self.name(int(indices[i]))}: column {name!r} is null: give nulls={{"
                        f"{name!r}: value}} or nulls='mask', or choose others with columns="
                    )
                if name in self._objects:
                    raise RecordError(
                        f"{self.name(int(indices[i]))}: column {name!r} has Python objects, "
                        f"{type(value).__name__} here: make arrays of them with map, or choose "
                        "others with columns="
                    )
        return make_columns(samples, lambda i: self.name(int(indices[i])), None)

    def _together(self, indices: NDArray[np.int64]) -> Columns | None:
        """Rows that are all of one shape; None if some are null."""
        made: dict[str, NDArray[Any]] = {}
        for columns, chosen, places, is_all in self._groups_of(indices):
            arrays = {n: column for n, column in columns.items() if isinstance(column, np.ndarray)}
            if len(arrays) < len(columns):
                return None
            if is_all:
                steps = np.diff(places)
                # A slice is a view, which costs nothing; an index array is a copy.
                at: Any = places
                if (steps == 1).all():
                    at = slice(int(places[0]), int(places[-1]) + 1)
                return {name: array[at] for name, array in arrays.items()}
            for name, array in arrays.items():
                if name not in made:
                    made[name] = np.empty((len(indices), *array.shape[1:]), array.dtype)
                made[name][chosen] = array[places]
        return made

    def samples(self, indices: NDArray[np.int64], call: Call) -> list[Any]:
        """Rows as mappings by column."""
        made: list[Any] = [{} for _ in range(len(indices))]
        for columns, chosen, places, is_all in self._groups_of(indices):
            rows, numbers = places.tolist(), chosen.tolist()
            for name, column in columns.items():
                values = self._values(column, rows, indices[chosen], name)
                # A view would keep its whole group.
                for i, value in zip(numbers, values if is_all else map(_copy, values), strict=True):
                    made[i][name] = value
        return made

    def _values(
        self, column: ColumnArray, rows: list[int], indices: NDArray[np.int64], name: str
    ) -> list[Any]:
        values: list[Any] = []
        try:
            if isinstance(column, np.ndarray):
                # With the ellipsis a number stays an array, with its dtype.
                return [column[row, ...] for row in rows]
            for row in rows:
                values.append(column[row])
        except ValueError as error:
            where = self.name(int(indices[len(values)]))
            raise RecordError(f"{where}: column {name!r}: {error}") from error
        return values

    def describe(self) -> dict[str, Any]:
        """The columns, and of each file what tells it from another."""
        names = self._tables.columns or [field.name for field in self._tables.schema]
        pairs = zip(names, self._tables.schema, strict=True)
        fields = [f"{name}: {field.type}" for name, field in pairs]
        return {"columns": fields, **self._nulls.describe(), **self._tables.describe()}


def _copy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = False
    return value
