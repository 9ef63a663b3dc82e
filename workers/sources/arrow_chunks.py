"""Arrow tables as chunks of fetch functions, and batches as Arrow tables.

Libraries hand tables to each other by `__arrow_c_stream__` and `__arrow_c_array__`, so a chunk may
come from any of them (DuckDB, Polars, pyarrow, Lance, ADBC), and any of them reads a batch. A
column becomes what it is in a table that a source reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder.workers.sources.collate import make_columns
from feeder.workers.sources.extras import load
from feeder.workers.sources.stores.arrow_columns import Values, to_columns
from feeder.workers.sources.stores.reading import RecordError


def to_chunk(given: Any) -> dict[str, NDArray[Any]]:
    """The columns of a table of any library, structs flattened.

    Raises:
        RecordError: a column is no array: it has nulls, Python objects, or rows that are not alike.
    """
    arrow = load("pyarrow", "arrow")
    what = f"the table of {type(given).__name__}"
    try:
        table = arrow.table(given)
        columns = to_columns(table)
    except (OSError, ValueError, TypeError, NotImplementedError, arrow.ArrowException) as error:
        raise RecordError(f"{what}: {error}") from error
    made: dict[str, NDArray[Any]] = {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            made[name] = column
            continue
        rows = [column[row] for row in range(table.num_rows)]
        if None in map(_none, rows):
            raise RecordError(
                f"{what}, row {[*map(_none, rows)].index(None)}: column {name!r} is null: fill "
                "nulls in the table"
            )
        if isinstance(column, Values) and rows:
            raise RecordError(
                f"{what}: column {name!r} is {column.array.type}, of which there is no array: "
                "leave it out of the table, or make an array of it"
            )
        of_row = f"{what}, row {{}}".format
        stacked: Any = {name: np.empty(0)}
        if rows:
            stacked = make_columns([{name: row} for row in rows], of_row, None)
        made |= stacked
    return made


def _none(row: Any) -> Any:
    return None if row is None else 0


def to_record_batch(columns: dict[str, Any]) -> Any:
    """The columns of a batch as pyarrow's `RecordBatch`, over their memory if they are contiguous;
    further axes are fixed-size lists.

    Raises:
        TypeError: a column is no array on the host, or Arrow has no type for it.
        ValueError: the columns have different numbers of rows along axis 0.
    """
    arrow = load("pyarrow", "arrow")
    made = {}
    for name, column in columns.items():
        if not isinstance(column, np.ndarray):
            raise TypeError(f"column {name!r} is a {type(column).__name__}, expected an array")
        if column.ndim == 0:
            raise TypeError(f"column {name!r} has no rows: it is a number")
        text = {"S": "binary", "U": "string"}.get(column.dtype.kind)
        flat: Any = column.reshape(-1)
        try:
            # Of NumPy's strings pyarrow takes what lies before the first zero.
            values = arrow.array(flat.tolist() if text else flat, text)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise TypeError(
                f"column {name!r} is {column.dtype}, of which Arrow has no type: {error}"
            ) from error
        for axis in range(column.ndim - 1, 0, -1):
            kind = arrow.list_(values.type, column.shape[axis])
            num = int(np.prod(column.shape[:axis]))
            values = arrow.Array.from_buffers(kind, num, [None], children=[values])
        made[name] = values
    if len(set(map(len, made.values()))) > 1:
        rows = {name: len(values) for name, values in made.items()}
        raise ValueError(f"the columns have different numbers of rows along axis 0: {rows}")
    return arrow.RecordBatch.from_pydict(made)
