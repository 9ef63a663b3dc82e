"""Caffe2's LMDBs: a `TensorProtos` per record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from feeder.workers.public import public
from feeder.workers.sources.arguments import PathLike, flag, whole
from feeder.workers.sources.blobs import BlobColumn, BlobOptions, Blobs, take_blobs
from feeder.workers.sources.caffe2_layout import (
    LabelType,
    RecordLayout,
    find_label_type,
    image_of,
)
from feeder.workers.sources.lmdb_records import LmdbRecords
from feeder.workers.sources.source import Source
from feeder.workers.sources.stores.lmdb_store import LmdbStore
from feeder.workers.sources.stores.reading import Columns, OnError, stack
from feeder.workers.sources.stores.tensors import parse_tensors
from feeder.workers.stream.batch import Call


@public("feeder.sources")
def caffe2_lmdb(
    path: PathLike | Iterable[PathLike],
    *,
    image_available: bool = True,
    label_type: LabelType | int = "single",
    num_labels: int | None = None,
    additional_inputs: int = 0,
    bbox: bool = False,
    verify: bool = False,
    on_error: OnError = "raise",
    **options: Unpack[BlobOptions],
) -> Source:
    """Records of an LMDB that Caffe2's tools wrote: columns image, label, additional inputs, box.

    A record's tensors stand in this order. The image is uint8: a BYTE tensor of (rows, height,
    width, channels) as it lies, or a STRING tensor, an image file, decoded to (rows, height,
    width, 3). Labels and additional inputs are FLOAT, INT32 or INT64 tensors, and become float32,
    int32 or int64. The box is int32 of (rows, 4). Needs the extra `lmdb`, and `images` to decode.

    Args:
        path: The LMDB's folder; of several, one is read after the other.
        image_available: Whether the first tensor is an image.
        label_type: "single", one number: (rows,). "multi_hot", the numbers of the labels that
            apply: (rows, num_labels), 1 where they do. "dense", a vector: (rows, length).
            "weighted", two tensors, the numbers of the labels and their weights: float32 of
            (rows, num_labels). "none", no label. Or DALI's number, 0 to 4, in this order.
        num_labels: Number of labels, for "multi_hot" and "weighted".
        additional_inputs: Number of further tensors, each a vector: (rows, length).
        bbox: Whether the last tensor is a box, four INT32 numbers.
        verify: Whether the file's pages are looked through before it is opened, which takes some
            10 µs a record: a damaged one is a ConfigError, where LMDB may end the process.
        on_error: What to do about a record that cannot be read: "raise", or "skip", which leaves
            its row out and counts it in `source.skipped`.
        options: `BlobOptions`, `PictureOptions` and `OrderOptions`.

    Raises:
        ConfigError: the path holds no LMDB with records, or an option is wrong.
    """
    column, order = take_blobs(image_available, options)
    layout = RecordLayout(
        has_image=column is not None,
        label_type=find_label_type(label_type),
        num_labels=num_labels,
        additional_inputs=whole("additional_inputs", additional_inputs),
        bbox=flag("bbox", bbox),
    )
    return Source(Caffe2Records(LmdbStore(path, verify=verify), column, layout, on_error), **order)


class Caffe2Records(LmdbRecords):
    """The records of Caffe2's LMDBs. Read-only: any thread reads."""

    kind = "caffe2_lmdb"

    def __init__(
        self, store: LmdbStore, column: BlobColumn | None, layout: RecordLayout, on_error: OnError
    ) -> None:
        super().__init__(store, column, on_error)
        self._layout = layout

    def describe(self) -> dict[str, Any]:
        """A digest of the keys, and what is done to the records."""
        return {**super().describe(), **self._layout.fingerprint_fields()}

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """Read and decode records."""
        records: list[int] = []
        rows: list[list[NDArray[Any]]] = []
        data: list[memoryview] = []
        shapes: list[tuple[int, ...] | None] = []
        images: tuple[NDArray[Any], ...] = ()
        with self._store.values(indices, self._faults) as (found, values):
            for record, value in zip(found, values, strict=True):
                try:
                    rows.append(self._parse(value, data, shapes))
                    records.append(record)
                except Exception as error:
                    self._faults.handle(self.name, record, error)
            if rows and self._column is not None:
                # Inside the block: the data are views of LMDB's map.
                blobs = Blobs(records, data, shapes, self.name)
                readable, images = self._column.make(blobs, call, self._faults)
                if readable is not None:
                    # Files that could not be decoded leave out the other columns of their rows too.
                    rows = [rows[i] for i in readable]
                    records = [records[i] for i in readable]
        if not rows:
            return None
        rest = [
            stack([row[i] for row in rows], lambda i: self.name(records[i]), name, call=call)
            for i, name in enumerate(self._layout.names)
        ]
        return (*images, *rest)

    def _parse(
        self, value: memoryview, data: list[memoryview], shapes: list[tuple[int, ...] | None]
    ) -> list[NDArray[Any]]:
        tensors = parse_tensors(value)
        # Checked before the image is appended: a record is taken whole or not at all.
        row = self._layout.rows(tensors)
        if self._column is not None:
            image, shape = image_of(tensors[0])
            data.append(image)
            shapes.append(shape)
        return row
