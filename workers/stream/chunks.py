"""What calls returned, as columns: checked against the stream's schema, and sliced.

Checks run once per chunk and are the larger part of the cost of a one-row chunk. So `arrange`
looks at whole lists of chunks, and at the shape and the dtype of each array alone. Only where
something is unusual does it look at chunks one by one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ChunkError, ResumeError
from feeder.workers.stream.dtypes import write_dtype

RawChunk = Sequence[NDArray[Any]]
"""The arrays of one chunk in the order of the input names, not yet checked."""


class Column(NamedTuple):
    """One named array of a feed."""

    name: str
    """Its input name."""
    axis: int
    """The axis that is rows."""
    dtype: np.dtype[Any]
    """Its dtype, in native byte order."""
    shape: tuple[int, ...]
    """The shape of a chunk of it without the row axis."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Columns = tuple[Column, ...]


class Arranged(NamedTuple):
    """Chunks as columns, up to the first that does not fit."""

    columns: tuple[list[NDArray[Any]], ...]
    """For each input name the arrays of all chunks."""
    rows: list[int]
    """Rows of each chunk."""
    error: ChunkError | None = None
    """What is wrong with the chunk after them, its `call` counted from the first chunk."""


def is_nested(value: Any) -> bool:
    """Whether a value is several columns: a mapping, or a named tuple."""
    return isinstance(value, Mapping) or (isinstance(value, tuple) and hasattr(value, "_fields"))


def leaves(nested: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The columns of a mapping or a named tuple, by names such as "image.left"."""
    fields = nested if isinstance(nested, Mapping) else nested._asdict()
    for name, value in fields.items():
        yield from leaves_of(value, f"{prefix}{name}")


def leaves_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The same of a column that may be several."""
    if is_nested(value):
        yield from leaves(value, f"{name}.")
    else:
        yield name, value


class Schema:
    """The names, row axes, dtypes and row shapes of a feed; fixed by its first chunk with rows.

    Owned by the thread that makes batches. `columns` is assigned once, whole, so that any thread
    may read it: a snapshot does.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        axes: tuple[int, ...],
        *,
        ragged: bool = False,
        known: Columns | None = None,
    ) -> None:
        self.names = names
        self.axes = axes
        self.ragged = ragged
        """Whether shapes may differ between chunks (`dont_rebatch`); dtype and ndim may not."""
        self.columns = known
        """The columns, once they are known."""
        # Columns known from a snapshot are compared with the first chunk once, not assumed: the
        # fetch function may have changed.
        self._fixed = False

    def _fix(self, chunks: Sequence[RawChunk]) -> None:
        """Take dtypes and row shapes from the first of the chunks that has rows and is sound."""
        # Found before it is told: a snapshot may ask for the columns meanwhile.
        found: Columns | None = None
        for chunk in chunks:
            rows = self._defect(chunk, None)
            # A defect before the first rows is told in its own place, not as a wrong schema.
            if isinstance(rows, ChunkError):
                break
            if rows:
                found = self._columns_of(chunk)
                self._fixed = True
                break
        if self.columns is None:
            self.columns = found
        elif found is not None:
            _compare(self.columns, found, ragged=self.ragged)

    def _columns_of(self, chunk: RawChunk) -> Columns:
        return tuple(
            Column(name=name, axis=axis, dtype=native(array.dtype),
                   shape=_without(array.shape, axis))
            for name, axis, array in zip(self.names, self.axes, chunk, strict=True)
        )  # fmt: skip

    def arrange(self, chunks: Sequence[RawChunk]) -> Arranged:
        """Chunks as columns, checked; the arrays in native byte order."""
        if not self._fixed:
            self._fix(list(map(with_arrays, chunks)))
        # Nearly always: a few list operations for all chunks together.
        fast = self._arrange_uniform(chunks)
        return fast if fast is not None else self._arrange_each(list(map(with_arrays, chunks)))

    def count_rows(self, chunks: Sequence[Any]) -> int:
        """The rows of chunks that nobody will look at; 0 for one that is none."""
        counts = (self._defect(with_arrays(chunk), self.columns) for chunk in chunks)
        return sum(count for count in counts if isinstance(count, int))

    def _arrange_uniform(self, chunks: Sequence[RawChunk]) -> Arranged | None:
        """The columns of chunks with nothing unusual about them; None where there is."""
        # The exact type `tuple` and `ndarray`: a mapping or a subclass of an array needs a closer
        # look.
        if self.columns is None or self.ragged or set(map(type, chunks)) != {tuple}:
            return None
        num = len(chunks)
        rows: list[int] | None = None
        try:
            columns = tuple(map(list, zip(*chunks, strict=True)))
            for column, arrays in zip(self.columns, columns, strict=True):
                if set(map(type, arrays)) != {np.ndarray}:
                    return None
                # `count` compares in C, by identity first. Dtypes are mostly one object.
                if [array.dtype for array in arrays].count(column.dtype) != num:
                    return None
                of_column = _uniform_rows([array.shape for array in arrays], column)
                if of_column is None or rows not in (None, of_column):
                    return None
                rows = of_column
        # Chunks of different lengths, or a chunk that is none: the slow way says which.
        except (ValueError, TypeError):
            return None
        assert rows is not None
        return Arranged(columns=columns, rows=rows)

    def _arrange_each(self, chunks: Sequence[RawChunk]) -> Arranged:
        columns: tuple[list[NDArray[Any]], ...] = tuple([] for _ in self.names)
        rows: list[int] = []
        for chunk in chunks:
            of_chunk = self._defect(chunk, self.columns)
            if isinstance(of_chunk, ChunkError):
                # Its number in this list; the merge makes it the number that the user knows.
                of_chunk.call = len(rows)
                return Arranged(columns=columns, rows=rows, error=of_chunk)
            for arrays, array in zip(columns, chunk, strict=True):
                arrays.append(_plain(array))
            rows.append(of_chunk)
        return Arranged(columns=columns, rows=rows)

    def _defect(self, chunk: Any, columns: Columns | None) -> int | ChunkError:
        """The rows of a chunk, or what is wrong with it, where `columns` are known by them too."""
        if isinstance(chunk, Mapping):
            return _chunk_error(f"keys {sorted(map(str, chunk))!r}", sorted(self.names))
        if not isinstance(chunk, tuple):
            return _chunk_error(f"type {type(chunk).__name__}", "a list, tuple or dict of arrays")
        if len(chunk) != len(self.names):
            return _chunk_error(f"{len(chunk)} columns", f"{len(self.names)}: {self.names!r}")
        rows = -1
        for i, (name, axis, array) in enumerate(zip(self.names, self.axes, chunk, strict=True)):
            defect = _array_defect(name, axis, array)
            # All columns have equally many rows; the first column is the measure.
            if defect is None and rows not in (-1, array.shape[axis]):
                defect = ChunkError(
                    f"column {name!r} has {array.shape[axis]} rows, {self.names[0]!r} has {rows}",
                    column=name, got=array.shape[axis], expected=rows,
                )  # fmt: skip
            if defect is None and columns is None:
                defect = _dtype_defect(name, array.dtype)
            # An array without rows may have any dtype and row shape: it adds nothing.
            elif defect is None and columns is not None and array.shape[axis]:
                defect = self._misfit(columns[i], array)
            if defect is not None:
                return defect
            rows = int(array.shape[axis])
        return rows

    def _misfit(self, column: Column, array: NDArray[Any]) -> ChunkError | None:
        shape = _without(array.shape, column.axis)
        if native(array.dtype) != column.dtype:
            hint = hint_of_strings(array.dtype, column.dtype)
            return _column_error(column.name, "dtype", str(array.dtype), str(column.dtype), hint)
        if len(shape) != len(column.shape):
            return _column_error(column.name, "ndim", array.ndim, len(column.shape) + 1)
        # Ragged chunks are batches by themselves, which nobody joins.
        if shape != column.shape and not self.ragged:
            hint = "; where each call pads its own rows, dont_rebatch=True makes each call a batch"
            return _column_error(column.name, "row shape", shape, column.shape, hint)
        return None


def _compare(then: Columns, now: Columns, *, ragged: bool) -> None:
    """Raise `ResumeError` with every difference between the columns of a snapshot and now's."""
    # All of them at once: who mends a fetch function wants to see the whole list.
    differences = []
    for a, b in zip(then, now, strict=True):
        if a.dtype != b.dtype:
            differences.append(f"dtype of {a.name!r}: {a.dtype} then, {b.dtype} now")
        if (len(a.shape) if ragged else a.shape) != (len(b.shape) if ragged else b.shape):
            differences.append(f"row shape of {a.name!r}: {a.shape} then, {b.shape} now")
    if differences:
        raise ResumeError(f"the fetch function gives other columns: {'; '.join(differences)}")


def _uniform_rows(shapes: list[tuple[int, ...]], column: Column) -> list[int] | None:
    """The rows of each array, or None where a shape does not fit the column."""
    axis, num = column.axis, len(shapes)
    # Most chunks of a list have one shape; it is looked at once then.
    if shapes.count(shapes[0]) == num:
        shapes = shapes[:1]
    rows = []
    for shape in shapes:
        if len(shape) <= axis or _without(shape, axis) != column.shape:
            return None
        rows.append(shape[axis])
    return rows if len(rows) == num else rows * num


def is_table(chunk: Any) -> bool:
    """Whether a chunk is a table of a library that exports Arrow's."""
    return hasattr(chunk, "__arrow_c_stream__") or hasattr(chunk, "__arrow_c_array__")


def arrow_chunks() -> Any:
    """What tables are to columns. Sources know it, which lie above the engine: loaded if needed."""
    return importlib.import_module("feeder.workers.sources.arrow_chunks")


def with_arrays(chunk: Any) -> Any:
    """A chunk whose tensors of other libraries, and arrays of a subclass, are plain arrays over
    their memory; tensors that NumPy cannot read, as of a GPU or of bfloat16, and masked arrays stay
    what they are."""
    if type(chunk) is not tuple or set(map(type, chunk)) == {np.ndarray}:
        return chunk
    return tuple(map(_array_of, chunk))


def _array_of(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, np.ndarray):
        # A subclass (`recarray`, `memmap`) may behave otherwise when it is sliced. Without a copy.
        return value if kind is np.ndarray or is_masked(kind) else value.view(np.ndarray)
    if not hasattr(value, "__dlpack__"):
        return value
    try:
        # A tensor of PyTorch that has a gradient gives its memory without it.
        return np.from_dlpack(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, AttributeError, BufferError, RuntimeError):
        return value


def _array_defect(name: str, axis: int, array: Any) -> ChunkError | None:
    if not isinstance(array, np.ndarray) or is_masked(type(array)):
        kind = "None" if array is None else type(array).__name__
        return _column_error(name, "type", kind, "numpy.ndarray")
    # References cannot be copied as bytes nor shared with another process.
    if array.dtype.hasobject:
        return _column_error(name, "dtype", str(array.dtype), "one without Python objects")
    if array.ndim <= axis:
        return _column_error(name, "ndim", array.ndim, f"at least {axis + 1}, axis {axis} is rows")
    return None


def is_masked(kind: type) -> bool:
    """Whether arrays of a class have masks, which a column has not."""
    # The plain type first: `numpy.ma` takes 11 ms to import.
    is_other = kind is not np.ndarray and issubclass(kind, np.ndarray)
    return is_other and issubclass(kind, np.ma.MaskedArray)


def _dtype_defect(name: str, dtype: np.dtype[Any]) -> ChunkError | None:
    """Why rows of a dtype could not go into a position, told when they come first and not when
    somebody resumes."""
    try:
        write_dtype(native(dtype))
    except TypeError as error:
        return ChunkError(f"column {name!r}: {error}", column=name, got=str(dtype))
    return None


def hint_of_strings(got: np.dtype[Any], expected: np.dtype[Any]) -> str:
    """What to do where two dtypes are strings of different widths; empty elsewhere."""
    if got.kind != expected.kind or got.kind not in "SU":
        return ""
    return f": strings need one width, as astype('{got.kind}16') gives them"


def _column_error(name: str, what: str, got: Any, expected: Any, hint: str = "") -> ChunkError:
    message = f"column {name!r}: {what} is {got}, expected {expected}{hint}"
    return ChunkError(message, column=name, got=got, expected=expected)


def _chunk_error(got: Any, expected: Any) -> ChunkError:
    return ChunkError(f"chunk has {got}, expected {expected}", got=got, expected=expected)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[1:] if axis == 0 else shape[:axis] + shape[axis + 1 :]


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in native byte order."""
    # Of fields that are arrays of structures NumPy does not look at the order before it changes it.
    is_native = dtype.isnative and dtype.names is None
    return dtype if is_native else dtype.newbyteorder("=")


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    dtype = native(array.dtype)
    # The byte order of a column is the machine's, so that a big-endian file gives the same stream.
    return array if array.dtype == dtype else array.astype(dtype)


def slice_rows(
    arrays: Sequence[NDArray[Any]], axes: Sequence[int], start: int, stop: int
) -> tuple[NDArray[Any], ...]:
    """Rows `start` to `stop` of each array, as views."""
    return tuple(
        [part_of(array, axis, start, stop) for array, axis in zip(arrays, axes, strict=True)]
    )


def part_of(array: NDArray[Any], axis: int, start: int, stop: int) -> NDArray[Any]:
    """Rows `start` to `stop` of an array, as a view."""
    return array[(slice(None),) * axis + (slice(start, stop),)] if axis else array[start:stop]


def columns_like(columns: Columns, arrays: Sequence[NDArray[Any]]) -> Columns:
    """The columns with the row shapes of these arrays; the same object where they have them."""
    shapes = [_without(a.shape, column.axis) for column, a in zip(columns, arrays, strict=True)]
    if all(column.shape == shape for column, shape in zip(columns, shapes, strict=True)):
        return columns
    pairs = zip(columns, shapes, strict=True)
    return tuple(column._replace(shape=shape) for column, shape in pairs)


def count_bytes(chunk: Any) -> int:
    """Bytes of a chunk that has not been checked yet; 0 for what is none."""
    # Tensors count as the arrays that the merge makes of them: counted in and out alike.
    arrays = with_arrays(chunk) if type(chunk) is tuple else ()
    return sum([array.nbytes for array in arrays if isinstance(array, np.ndarray)])
