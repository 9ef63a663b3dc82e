"""Where the rows of tables lie: Parquet and Arrow files, a table in memory, Hugging Face's.

Each says where its groups end, reads one as a whole, and names it. What is made of the rows is
`TableRecords` in `workers/sources/tables.py`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any
from urllib.parse import unquote

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.extras import load
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.far.paths import FarPath, in_parallel
from feeder.workers.sources.stores.arrow_columns import (
    empty_table,
    find_field,
    outermost,
)
from feeder.workers.sources.stores.kept import Kept
from feeder.workers.sources.stores.offsets import order_of_files, told_of_files

TABLES_KEPT = 64
"""So many batches of mapped tables, and so many footers of Parquet files, are kept open."""
# Rows of one call lie anywhere. A batch that is mapped costs no memory of its own, and to parse
# a footer takes 15 us for each of its groups (2026-11-25).

ARROW_ERRORS = (IndexError, KeyError, MemoryError, NotImplementedError, TypeError, ValueError)
"""What pyarrow raises of damaged bytes, beside OSError. A damaged length of compressed bytes asks
for more memory than there is."""


class _Files:
    """Files of one schema, whose rows follow one another."""

    part = "row group"
    """What a group of rows is called there."""

    def __init__(
        self,
        paths: Sequence[str],
        columns: list[str] | None,
        types: Mapping[str, Any] | None = None,
    ) -> None:
        self.paths, self.columns = paths, columns
        self._types = _types(types)
        self._partitions, self._values = _partitions(paths)
        """Fields of the folders that files lie in, and their values of each file."""
        self.schema: Any = None
        self._outer: Any = None
        """The schema of a group's table: of the columns that the fields lie in."""
        self.places: list[tuple[int, int]] = []
        """Of each group its file, and its number there."""
        self._digests: list[str] = []
        counts: list[int] = []
        for number, path in enumerate(paths):
            try:
                schema, sizes, digest = self._open(path)
                # The names of a damaged file may be no text.
                known = list(schema.names)
                schema = self._with_partitions(schema)
            except OSError as error:
                reason = error.strerror or error
                raise ConfigError(f"{path!r} cannot be read: {reason}") from error
            except ARROW_ERRORS as error:
                raise ConfigError(f"{path!r} cannot be read: {error}") from error
            self._check(path, schema, known)
            self.places += [(number, group) for group in range(len(sizes))]
            counts += sizes
            values = "".join(f", {name}={value!r}" for name, value in self._values[number].items())
            self._digests.append(f"{sum(sizes)} rows, {digest}{values}")
        self.ends = np.cumsum(np.array(counts, np.int64))
        if not len(self):
            raise ConfigError(f"{paths[0]!r} holds no rows")

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def _open(self, path: str) -> tuple[Any, list[int], str]:
        """The schema of a file, the rows of its groups, and what tells it from another."""
        raise NotImplementedError

    def _check(self, path: str, schema: Any, known: list[str]) -> None:
        known = [*known, *(name for name in schema.names if name not in known)]
        names = known if self.columns is None else self.columns
        fields: list[Any] = [find_field(schema, name) for name in names]
        for name, field in zip(names, fields, strict=True):
            if field is None:
                raise ConfigError(f"{path!r} has the columns {known}, and no {name!r}")
            if known.count(name) > 1:
                raise ConfigError(f"{path!r} has the columns {known}: two of one name")
        if self.schema is None:
            if unknown := self._types.keys() - set(known):
                raise ConfigError(
                    f"types names {sorted(unknown)}, {path!r} has the columns {known}: of a field "
                    "of a struct give the type of the whole struct"
                )
            self.schema = fields
            outer = dict.fromkeys(outermost(schema, name) for name in names)
            self._outer = load("pyarrow", "arrow").schema([schema.field(name) for name in outer])
            return
        said = [[f"{field.name}: {field.type}" for field in one] for one in (fields, self.schema)]
        if said[0] != said[1]:
            raise ConfigError(
                f"{path!r} has the columns {said[0]}, {self.paths[0]!r} has {said[1]}: columns= "
                "puts them in one order, types= brings them to one type"
            )

    def _with_partitions(self, schema: Any) -> Any:
        """A schema with the columns of the folders, and of the types that are wanted."""
        names = schema.names
        for field in self._partitions:
            # A column of the file is the nearer one.
            if field.name not in names:
                schema = schema.append(field)
        for i, field in enumerate(schema):
            if field.name in self._types:
                schema = schema.set(i, field.with_type(self._types[field.name]))
        return schema

    def stored(self, schema: Any) -> list[str] | None:
        """Which of the columns that are read lie in a file of this schema; None is all."""
        if self.columns is None:
            return None
        folders = {field.name for field in self._partitions} - set(schema.names)
        return [name for name in self.columns if name not in folders]

    def completed(self, table: Any, file: int) -> Any:
        """A table of a file with the columns of its folders, and of the types that are wanted.
        Raises ValueError if a type does not hold a value."""
        arrow = load("pyarrow", "arrow")
        for field in self._partitions:
            if field.name not in table.column_names:
                value = self._values[file][field.name]
                made = arrow.array([value] * table.num_rows, field.type)
                table = table.append_column(field, made)
        for i, field in enumerate(table.schema):
            kind = self._types.get(field.name)
            if kind is not None and field.type != kind:
                made = table.column(i).cast(kind)
                if not _holds(made, table.column(i)):
                    raise ValueError(f"column {field.name!r} has values that {kind} does not hold")
                table = table.set_column(i, field.with_type(kind), made)
        return table

    @property
    def has_objects(self) -> bool:
        """Whether some of the files are objects of stores."""
        return any(isinstance(path, FarPath) for path in self.paths)

    def empty(self) -> Any:
        return empty_table(self._outer)

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices

    def name(self, number: int) -> str:
        file, group = self.places[number]
        return f"{self.paths[file]!r}, {self.part} {group}"

    def describe(self) -> dict[str, Any]:
        return {**told_of_files(self.paths, self._digests), **order_of_files(self.paths)}


def _types(types: Mapping[str, Any] | None) -> dict[str, Any]:
    """Types by column, of which some may be given by their names."""
    made = {}
    for name, kind in dict(types or {}).items():
        arrow = load("pyarrow", "arrow")
        try:
            made[name] = arrow.type_for_alias(kind) if isinstance(kind, str) else kind
        except ValueError as error:
            raise ConfigError(f"types[{name!r}] is {kind!r}: {error}") from error
        if not isinstance(made[name], arrow.DataType):
            raise ConfigError(f"types[{name!r}] is {kind!r}, expected a type of Arrow or its name")
    return made


def _holds(made: Any, given: Any) -> bool:
    """Whether values that were brought to a type are still the same ones."""
    # pyarrow sees to whole numbers, times and texts. But it rounds fractions, up to infinity, and
    # makes every number but 0 true.
    arrow, compute = load("pyarrow", "arrow"), load("pyarrow.compute", "arrow")
    kind = given.type
    if arrow.types.is_struct(kind):
        return all(map(_holds, made.flatten(), given.flatten()))
    if arrow.types.is_dictionary(kind):
        return _holds(made, given.cast(kind.value_type))
    if arrow.types.is_nested(kind):
        are_lists = not (arrow.types.is_map(kind) or arrow.types.is_union(kind))
        return not are_lists or _holds(compute.list_flatten(made), compute.list_flatten(given))
    is_rounded = arrow.types.is_floating(kind) and arrow.types.is_floating(made.type)
    if not (is_rounded or (arrow.types.is_boolean(made.type) and arrow.types.is_primitive(kind))):
        return True
    is_same = compute.equal(made.cast(kind), given)
    if is_rounded:
        is_same = compute.or_(is_same, compute.is_nan(given))
    return bool(compute.all(is_same, min_count=0).as_py())


def _partitions(paths: Sequence[str]) -> tuple[list[Any], list[dict[str, Any]]]:
    """The fields of the folders "name=value" that files lie in directly, and the values of each
    file, as pyarrow reads them."""
    found: list[dict[str, Any]] = []
    for path in paths:
        segments = reversed(os.path.dirname(path).split(os.sep))
        own = [one.partition("=") for one in takewhile(_IS_PARTITION.fullmatch, segments)]
        found.append({name: unquote(value) for name, _, value in reversed(own)})
        if list(found[-1]) != list(found[0]):
            raise ConfigError(
                f"{path!r} lies in the folders {list(found[-1])}, {paths[0]!r} in {list(found[0])}"
            )
    fields: list[Any] = []
    for name in found[0]:
        arrow = load("pyarrow", "arrow")
        values = [None if one[name] == _NO_VALUE else one[name] for one in found]
        known = {value for value in values if value is not None}
        are_whole = bool(known) and all(
            re.fullmatch("-?[0-9]+", value) and -(2**31) <= int(value) < 2**31 for value in known
        )
        fields.append(arrow.field(name, arrow.int32() if are_whole else arrow.string()))
        for one, value in zip(found, values, strict=True):
            one[name] = int(value) if are_whole and value is not None else value
    return fields, found


_IS_PARTITION = re.compile("[^=]+=.*", re.DOTALL)
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_FOOT_BYTES = 64 * 1024
_FEW_ROWS = 64


def _as_given(path: str) -> Any:
    """A path, or an object as a file."""
    return path.file() if isinstance(path, FarPath) else path


def _digest_of_end(path: str) -> str:
    """A digest of a file's size and end, where its directory is; of an object what is known."""
    if isinstance(path, FarPath):
        return path.told
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        foot = os.pread(file.fileno(), _FOOT_BYTES, max(0, size - _FOOT_BYTES))
    return xxhash.xxh3_64_hexdigest(foot + str(size).encode())


def _validate(rows: Any) -> None:
    """Raise ValueError where the bytes of a batch or a table make no sense."""
    try:
        rows.validate(full=True)
    except ARROW_ERRORS as error:
        raise ValueError(f"the file is damaged: {error}; write or copy it anew") from error


class ParquetFiles(_Files):
    """Row groups of Parquet files. Opened at the call; read-only, but for the footers that are
    kept, which have their own lock."""

    def __init__(
        self,
        paths: Sequence[str],
        columns: list[str] | None,
        types: Mapping[str, Any] | None = None,
        *,
        verify: bool = False,
    ) -> None:
        self._verify = verify
        # To parse a footer takes longer than to decode one of many groups: 15 µs for each of them.
        self._footers = Kept(TABLES_KEPT)
        super().__init__(paths, columns, types)

    def _open(self, path: str) -> tuple[Any, list[int], str]:
        module = load("pyarrow.parquet", "arrow")
        with module.ParquetFile(_as_given(path)) as file:
            groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
            rows, listed = [group.num_rows for group in groups], file.metadata.num_rows
            if sum(rows) != listed or min(rows, default=0) < 0:
                raise ValueError(
                    f"it lists {listed} rows, its row groups {sum(rows)}: it is damaged"
                )
            return file.schema_arrow, rows, _digest_of_end(path)

    def _footer(self, file_number: int) -> Any:
        path, read = self.paths[file_number], load("pyarrow.parquet", "arrow").read_metadata
        return self._footers.get(file_number, lambda: read(_as_given(path), memory_map=True))

    def touches(self, number: int) -> Iterator[Touch]:
        """What a row group takes of an object: the chunks of its columns."""
        file_number, group = self.places[number]
        path = self.paths[file_number]
        if not isinstance(path, FarPath):
            return
        listed = self._footer(file_number).row_group(group)
        wanted = None if self.columns is None else {name.split(".")[0] for name in self.columns}
        for i in range(listed.num_columns):
            chunk = listed.column(i)
            if wanted is None or chunk.path_in_schema.split(".")[0] in wanted:
                # The dictionary of a column, if it has one, comes before its data.
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                yield path, start, start + chunk.total_compressed_size

    def group(self, number: int) -> Any:
        file_number, group = self.places[number]
        module, path = load("pyarrow.parquet", "arrow"), self.paths[file_number]
        # Else the memory of groups that went stays with pyarrow: half as much again.
        load("pyarrow", "arrow").default_memory_pool().release_unused()
        with module.ParquetFile(
            _as_given(path), metadata=self._footer(file_number), memory_map=True,
            page_checksum_verification=self._verify,
        ) as file:  # fmt: skip
            # Other calls run beside this one: more threads would take their time.
            options = {"columns": self.stored(file.schema_arrow), "use_threads": False}
            try:
                table = file.read_row_group(group, **options)
            except NotImplementedError:
                # Lists of more than 2 GiB of texts; fewer at once are read.
                batches = file.iter_batches(_FEW_ROWS, row_groups=[group], **options)
                table = load("pyarrow", "arrow").Table.from_batches(batches)
        # To decode makes offsets anew, but takes texts and the indices of categories as they are.
        _validate(table)
        return self.completed(table, file_number)


_ARROW_MAGIC = b"ARROW1"
"""What a file begins with that has a directory of its batches; a stream begins otherwise."""


class _MappedBatches:
    """Record batches that lie in mapped files. Any thread takes them: what changes is which of them
    have been validated, and of two threads that look at one batch both find the same."""

    def __init__(self, columns: list[str] | None = None) -> None:
        self._columns = columns
        self._batches: list[Any] = []
        self._are_valid: list[bool] = []

    def add(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            self._batches.append(batch)
            self._are_valid.append(False)

    def take(self, number: int) -> Any:
        """A batch as a table. Raises ValueError where it is damaged."""
        batch = self._batches[number]
        if self._columns is not None:
            # Those of folders do not lie in it.
            there = [name for name in self._columns if find_field(batch.schema, name) is not None]
            names = (outermost(batch.schema, name) for name in there)
            batch = batch.select([*dict.fromkeys(names)])
        if not self._are_valid[number]:
            # Nobody has looked at the bytes of a mapped file: an offset or an index of a category
            # that leads outside of its column would give other bytes, or end the process.
            _validate(batch)
            self._are_valid[number] = True
        return load("pyarrow", "arrow").Table.from_batches([batch])


class ArrowFiles(_Files):
    """Record batches of Arrow files, mapped. Opened once in each process; read-only after that."""

    part = "record batch"

    def __init__(
        self,
        paths: Sequence[str],
        columns: list[str] | None,
        types: Mapping[str, Any] | None = None,
    ) -> None:
        self._batches = _MappedBatches(columns)
        super().__init__(paths, columns, types)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None, "schema": None, "_outer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._batches = _MappedBatches(self.columns)
        for path in self.paths:
            schema, _, _ = self._open(path)
            self._check(path, self._with_partitions(schema), schema.names)

    def _open(self, path: str) -> tuple[Any, list[int], str]:
        arrow, ipc = load("pyarrow", "arrow"), load("pyarrow.ipc", "arrow")
        mapped = arrow.memory_map(path)
        if mapped.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC:
            reader = ipc.open_file(mapped)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        else:
            # No file with a directory at its end, but a stream of batches.
            mapped.seek(0)
            reader = ipc.open_stream(mapped)
            batches = list(reader)
        self._batches.add(batches)
        return reader.schema, [batch.num_rows for batch in batches], _digest_of_end(path)

    def group(self, number: int) -> Any:
        return self.completed(self._batches.take(number), self.places[number][0])


class ArrowObjects(_Files):
    """Record batches of Arrow files of which some are objects. Opened at the call; read-only."""

    part = "record batch"

    def __init__(
        self,
        paths: Sequence[str],
        columns: list[str] | None,
        types: Mapping[str, Any] | None = None,
    ) -> None:
        self._spans: list[tuple[int, int]] = []
        """The first byte of each batch, and the one after its last."""
        super().__init__(paths, columns, types)

    def _open(self, path: str) -> tuple[Any, list[int], str]:
        ipc = load("pyarrow.ipc", "arrow")
        with _opened(path) as file:
            if file.read(len(_ARROW_MAGIC)) != _ARROW_MAGIC:
                raise ValueError(
                    "it has no directory of its batches: streams of Arrow are read from a disk; "
                    "write it as a file, as Feather is"
                )
            schema = ipc.open_file(file).schema
            try:
                spans = _spans_of_batches(file)
                # Each is a request of its own.
                rows = in_parallel(partial(_rows_of_batch, path), spans)
            except struct.error as error:
                raise ValueError("the directory of its batches is damaged") from error
        self._spans += [(start, stop) for start, _, stop in spans]
        return schema, rows, _digest_of_end(path)

    def touches(self, number: int) -> Iterator[Touch]:
        """What a batch takes of an object."""
        path = self.paths[self.places[number][0]]
        if isinstance(path, FarPath):
            yield path, *self._spans[number]

    def group(self, number: int) -> Any:
        file_number, batch = self.places[number]
        with _opened(self.paths[file_number]) as file:
            batches = _MappedBatches(self.columns)
            batches.add([load("pyarrow.ipc", "arrow").open_file(file).get_batch(batch)])
            return self.completed(batches.take(0), file_number)


def _opened(path: str) -> Any:
    return path.file() if isinstance(path, FarPath) else open(path, "rb")


# pyarrow does not tell where batches lie, nor how many rows one has before it has read all of it.
# Apache Arrow's File.fbs and Message.fbs say how both are written, by the rules of FlatBuffers.


def _spans_of_batches(file: Any) -> list[tuple[int, int, int]]:
    """Of each batch of a file its first byte, the one after what describes it, and the one after
    its last."""
    size = file.seek(-10, os.SEEK_END)
    (length,) = struct.unpack("<i6x", file.read(10))
    file.seek(size - length)
    footer = file.read(length)
    listed = _field(footer, _followed(footer, 0), 3)
    if listed is None:
        return []
    start = _followed(footer, listed)
    (num,) = struct.unpack_from("<I", footer, start)
    blocks = struct.iter_unpack("<qi4xq", footer[start + 4 :][: 24 * num])
    return [(at, at + described, at + described + body) for at, described, body in blocks]


def _rows_of_batch(path: str, span: tuple[int, int, int]) -> int:
    start, stop, _ = span
    with _opened(path) as file:
        file.seek(start)
        message = file.read(stop - start)
    # Before it stand its length, and in files of today a mark.
    message = message[8 if message.startswith(b"\xff\xff\xff\xff") else 4 :]
    header = _field(message, _followed(message, 0), 2)
    rows = None if header is None else _field(message, _followed(message, header), 0)
    return 0 if rows is None else int(struct.unpack_from("<q", message, rows)[0])


def _followed(data: bytes, place: int) -> int:
    """Where the offset at a place leads."""
    return place + int(struct.unpack_from("<I", data, place)[0])


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a field of a table lies; None if it has its default."""
    fields = table - int(struct.unpack_from("<i", data, table)[0])
    (size,) = struct.unpack_from("<H", data, fields)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, fields + 4 + 2 * number)
    return table + offset if offset else None


class HeldTable(_Files):
    """A table in memory, of any library. Never changes; any thread reads."""

    def __init__(
        self, given: Any, columns: list[str] | None, types: Mapping[str, Any] | None = None
    ) -> None:
        arrow = load("pyarrow", "arrow")
        try:
            self._table = arrow.table(given)
        except ARROW_ERRORS as error:
            raise ConfigError(f"the stream of {type(given).__name__} fails: {error}") from error
        self._batches = _MappedBatches(columns)
        super().__init__([f"the table of {type(given).__name__}"], columns, types)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._batches = _MappedBatches(self.columns)
        self._open("")

    def _open(self, path: str) -> tuple[Any, list[int], str]:
        batches = self._table.to_batches()
        self._batches.add(batches)
        return self._table.schema, [batch.num_rows for batch in batches], ""

    def group(self, number: int) -> Any:
        return self.completed(self._batches.take(number), 0)

    def name(self, number: int) -> str:
        return f"{self.paths[0]}, record batch {number}"

    def describe(self) -> dict[str, Any]:
        # As of arrays, what is in memory is known by its shape alone.
        return {"table": True}


class HfTable:
    """The Arrow table of a dataset of Hugging Face's; the dataset is what is pickled. Never
    changes; any thread reads."""

    columns: list[str] | None = None

    def __init__(self, dataset: Any, names: list[str]) -> None:
        self._dataset, self._names = dataset, names
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {"_dataset": self._dataset, "_names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def _open(self) -> None:
        dataset = self._dataset
        table = dataset.data.table.select(self._names)
        batches = table.to_batches()
        self._batches = _MappedBatches()
        self._batches.add(batches)
        self.schema = table.schema
        self.ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)
        # What select, shuffle and filter chose: a table of row numbers.
        chosen = dataset._indices
        self._rows = None if chosen is None else chosen.column(0).to_numpy()

    def __len__(self) -> int:
        return len(self._dataset)

    def empty(self) -> Any:
        return empty_table(self.schema)

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices if self._rows is None else self._rows[indices].astype(np.int64)

    def group(self, number: int) -> Any:
        return self._batches.take(number)

    def name(self, number: int) -> str:
        # Which of its files a batch lies in, the dataset does not tell.
        files = [file["filename"] for file in self._dataset.cache_files]
        told = f" in {files[0]!r}" if files else ""
        more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
        return f"batch {number} of the dataset{told}{more}"

    def describe(self) -> dict[str, Any]:
        # The library's own digest of the data and of what was done to it.
        return {"dataset": self._dataset._fingerprint}


Tables = ParquetFiles | ArrowFiles | ArrowObjects | HeldTable | HfTable
"""Rows that lie in groups, each of which is read as a whole. Any thread reads."""
