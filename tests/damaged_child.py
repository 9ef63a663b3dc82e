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
from fuzz.tables import plain, rows_of

SAME, NAMED = "the same rows", "a named error"


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


def valid_rows(path: str) -> list[Any] | None:
    """The rows of a file of which pyarrow finds every batch valid; None where one is not."""
    try:
        with pa.memory_map(path) as mapped:
            batches = READERS[path.rsplit(".")[-1]](mapped)
            for batch in batches:
                batch.validate(full=True)
            return rows_of(pa.Table.from_batches(batches))
    except (pa.ArrowException, OSError):
        return None


def answer(path: str) -> str:
    try:
        source = (parquet if path.endswith(".parquet") else arrow)(path)
        found = source.samples(np.arange(len(source)), call(0, 1))
    except (ConfigError, RecordError) as error:
        return NAMED if repr(path) in str(error) else f"an error without its file: {error}"
    except Exception as error:
        return repr(error)
    wanted = valid_rows(path)
    return SAME if repr(plain(found)) == repr(plain(wanted)) else f"{found} where {wanted} is valid"


if __name__ == "__main__":
    for line in sys.stdin:
        print(answer(line.rstrip("\n")), flush=True)
