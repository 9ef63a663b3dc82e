"""Reads Arrow and Parquet files, whose paths come by standard input, a line each, and answers each
with a line. A process of its own: a damaged file may end it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from calls import call
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, arrow, parquet

SAME, NAMED = "the same rows", "a named error"


def valid_rows(path: str) -> list[tuple[Any, ...]] | None:
    """The rows of a file of which pyarrow finds every batch valid; None where one is not."""
    try:
        with pa.memory_map(path) as mapped:
            batches = READERS[path.rsplit(".")[-1]](mapped)
            for batch in batches:
                batch.validate(full=True)
            table = pa.Table.from_batches(batches)
            while any(pa.types.is_struct(field.type) for field in table.schema):
                table = table.flatten()
            return [tuple(row.values()) for row in table.to_pylist()]
    except (pa.ArrowException, OSError):
        return None


def batches_of_file(mapped: Any) -> list[Any]:
    reader = pa.ipc.open_file(mapped)
    return [reader.get_batch(i) for i in range(reader.num_record_batches)]


def batches_of_parquet(mapped: Any) -> list[Any]:
    file = pq.ParquetFile(mapped)
    groups = (file.read_row_group(i) for i in range(file.num_row_groups))
    return [batch for group in groups for batch in group.to_batches()]


READERS = {
    "arrow": batches_of_file,
    "stream": lambda mapped: list(pa.ipc.open_stream(mapped)),
    "parquet": batches_of_parquet,
}


def rows_of(path: str) -> list[tuple[Any, ...]] | None:
    """The rows that the source gives; None where it names what is wrong."""
    rows: list[tuple[Any, ...]] = []

    def note(row: dict[str, Any]) -> int:
        rows.append(tuple(plain(value) for value in row.values()))
        return len(rows)

    try:
        source = (parquet if path.endswith(".parquet") else arrow)(path)
        source.map(note)(call(0, len(source)))
    except (ConfigError, RecordError) as error:
        assert f"{path!r}" in str(error), error
        return None
    return rows


def plain(value: Any) -> Any:
    # NumPy would take trailing zeros away from a text.
    return value if isinstance(value, str | bytes) else np.asarray(value).tolist()


def answer(path: str) -> str:
    try:
        found = rows_of(path)
    except Exception as error:
        return repr(error)
    if found is None:
        return NAMED
    wanted = valid_rows(path)
    return SAME if repr(found) == repr(wanted) else f"{found} where {wanted} are valid"


if __name__ == "__main__":
    for line in sys.stdin:
        print(answer(line.rstrip("\n")), flush=True)
