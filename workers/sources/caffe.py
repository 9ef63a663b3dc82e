"""Caffe's LMDBs: a `Datum` per record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import PathLike, flag
from feeder.workers.sources.blobs import BlobColumn, BlobOptions, Blobs, take_blobs
from feeder.workers.sources.lmdb_records import LmdbRecords
from feeder.workers.sources.source import Source
from feeder.workers.sources.stores.datum import Datum, Sample, SampleParser
from feeder.workers.sources.stores.lmdb_store import LmdbStore
from feeder.workers.sources.stores.reading import Columns, OnError
from feeder.workers.stream.batch import Call

Layout = Literal["HWC", "CHW"]


@public("feeder.sources")
def caffe_lmdb(
    path: PathLike | Iterable[PathLike],
    *,
    image_available: bool = True,
    label_available: bool = True,
    encoded: bool | None = None,
    layout: Layout = "HWC",
    verify: bool = False,
    on_error: OnError = "raise",
    **options: Unpack[BlobOptions],
) -> Source:
    """Records of an LMDB that Caffe's tools wrote: columns image and label.

    The image is uint8: raw pixels as they lie, or an image file decoded to (rows, height, width,
    3). The label is int32 of (rows,). Needs the extra `lmdb`, and `images` to decode.

    Args:
        path: The LMDB's folder; of several, one is read after the other.
        image_available: Whether there is an image column.
        label_available: Whether there is a label column.
        encoded: Whether the images are files. None takes what each record says; one that says
            nothing holds a file, as DALI has it.
        layout: What raw pixels are taken for: "HWC", rows of (height, width, channels), as DALI
            does; or "CHW", (channels, height, width), which is how Caffe's own tools write them.
        verify: Whether the file's pages are looked through before it is opened, which takes some
            10 µs a record: a damaged one is a ConfigError, where LMDB may end the process.
        on_error: What to do about a record that cannot be read: "raise", or "skip", which leaves
            its row out and counts it in `source.skipped`.
        options: `BlobOptions`, `PictureOptions` and `OrderOptions`.

    Raises:
        ConfigError: the path holds no LMDB with records, or an option is wrong.
    """
    # Options first: a mistake in them is told before a large store is opened.
    column, order = take_blobs(image_available, options)
    reader = DatumReader(
        has_image=column is not None,
        has_label=flag("label_available", label_available),
        encoded=None if encoded is None else flag("encoded", encoded),
        layout=layout,
    )
    return Source(CaffeRecords(LmdbStore(path, verify=verify), column, reader, on_error), **order)


class DatumReader:
    """Says what a Datum is to the reader of a store. Read-only: any thread calls it."""

    def __init__(
        self, *, has_image: bool, has_label: bool, encoded: bool | None, layout: Layout
    ) -> None:
        if layout not in get_args(Layout):
            raise ConfigError(f"layout is {layout!r}, expected one of {get_args(Layout)!r}")
        if not has_image and not has_label:
            raise ConfigError("neither image_available nor label_available: no column is left")
        self.has_image = has_image
        self.has_label = has_label
        self._encoded = encoded
        self._layout = layout

    def __call__(self, datum: Datum) -> Sample:
        """The sample of a Datum.

        Raises:
            ValueError: it lacks something, or its image is not of the size that it says.
        """
        # A record without a label has one field less; to take it for label 0 would train on a
        # guess.
        if datum.label is None and self.has_label:
            raise ValueError("the record has no label: give label_available=False")
        shape = self._shape(datum) if self.has_image else None
        return Sample(datum.start, datum.stop, shape, datum.label or 0)

    def _shape(self, datum: Datum) -> tuple[int, ...] | None:
        size = datum.stop - datum.start
        if size == 0:
            raise ValueError("the record has no image: give image_available=False")
        # What a record does not say is taken for a file, as DALI takes it.
        if datum.encoded is not False if self._encoded is None else self._encoded:
            return None
        sides = {"H": datum.height, "W": datum.width, "C": datum.channels}
        shape = tuple(sides[letter] for letter in self._layout)
        # Sizes come from the file, and may be damaged: what does not multiply to the data's length
        # is refused.
        if min(shape) < 1 or shape[0] * shape[1] * shape[2] != size:
            raise ValueError(
                f"the image has {size} bytes, expected {datum.height} × {datum.width} pixels of "
                f"{datum.channels} channels"
            )
        return shape

    def fingerprint_fields(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        return {
            "image_available": self.has_image,
            "label_available": self.has_label,
            "encoded": self._encoded,
            "layout": self._layout,
        }


class CaffeRecords(LmdbRecords):
    """The records of Caffe's LMDBs. Read-only: any thread reads."""

    kind = "caffe_lmdb"

    def __init__(
        self, store: LmdbStore, column: BlobColumn | None, reader: DatumReader, on_error: OnError
    ) -> None:
        super().__init__(store, column, on_error)
        self._reader = reader
        self._parser = SampleParser(reader)

    def describe(self) -> dict[str, Any]:
        """A digest of the keys, and what is done to the records."""
        return {**super().describe(), **self._reader.fingerprint_fields()}

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """Read and decode records."""
        # The values lie in LMDB's map: they are copied before the transaction ends with this block.
        with self._store.values(indices, self._faults) as (records, values):
            labels, shapes, data, errors = self._parser.parse(values)
            for i, error in errors.items():
                self._faults.report(self.name(records[i]), error)
            # Labels and data are of sound records alone; the names have to be of the same.
            if errors:
                records = [record for i, record in enumerate(records) if i not in errors]
            if not records:
                return None
            if self._column is None:
                return (labels,)
            blobs = Blobs(records, data, shapes, self.name)
            readable, columns = self._column.make(blobs, call, self._faults)
        if readable is not None:
            if not readable:
                return None
            labels = labels[readable]
        return (*columns, labels) if self._reader.has_label else columns
