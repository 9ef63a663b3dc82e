"""The image column of stores whose records hold raw pixels or image files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.arguments import check_names, flag, whole
from feeder.workers.sources.orders.options import ORDER_NAMES, OrderOptions
from feeder.workers.sources.pictures import (
    ONE_SIZE,
    PICTURE_NAMES,
    PictureOptions,
    Pictures,
    take_pictures,
)
from feeder.workers.sources.stores.reading import Faults, RecordError, stack, stack_bytes
from feeder.workers.stream.batch import Call


class BlobOptions(PictureOptions, total=False):
    """Keyword arguments of the LMDB sources about image files, beside the picture options."""

    decode: bool
    """Whether image files are decoded, else handed on as they are (True)."""
    max_bytes: int | None
    """Undecoded files are filled up with zeros to so many bytes, and a column with their lengths
    follows; None expects them to be of one length (None)."""


BLOB_NAMES = ("decode", "max_bytes")


class Blobs(NamedTuple):
    """Several records' images."""

    records: list[int]
    data: Sequence[memoryview]
    shapes: Sequence[tuple[int, ...] | None]
    """Of raw pixels the shape of the row; None where the data is an image file."""
    name: Callable[[int], str]
    """What an error message calls a record."""

    def called(self, i: int) -> str:
        """What an error message calls the i-th."""
        return self.name(self.records[i])


class BlobColumn:
    """Makes blobs a column: raw pixels as they are, files decoded or as bytes. Read-only: any
    thread calls it."""

    def __init__(self, pictures: Pictures | None, max_bytes: int | None) -> None:
        self._pictures = pictures
        self._max_bytes = max_bytes

    def make(
        self, blobs: Blobs, call: Call, faults: Faults
    ) -> tuple[list[int] | None, tuple[NDArray[Any], ...]]:
        """The blobs that could be read, None for all; and the column, or columns, of them.

        Raises:
            RecordError: raw pixels and files are mixed, or rows are not of one shape.
        """
        # Raw pixels need no decoding: one copy for all records.
        shape = self._shape(blobs)
        if shape is not None:
            return None, (stack_bytes(blobs.data, shape, call),)
        if self._pictures is not None:
            return self._decode(self._pictures, blobs, call, faults)
        if self._max_bytes is not None:
            return self._fill_up(self._max_bytes, blobs, faults)
        # Files as they are: rows of one column are of one length.
        sizes = [len(data) for data in blobs.data]
        if len(set(sizes)) > 1:
            other = next(i for i, size in enumerate(sizes) if size != sizes[0])
            raise RecordError(
                f"{blobs.called(other)}: the file has {sizes[other]} bytes, "
                f"{blobs.called(0)} has {sizes[0]}: give max_bytes, or decode=True"
            )
        return None, (stack_bytes(blobs.data, (sizes[0],), call),)

    def _shape(self, blobs: Blobs) -> tuple[int, ...] | None:
        shapes = blobs.shapes
        if shapes.count(shapes[0]) == len(shapes):
            return shapes[0]
        other = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
        kinds = ["an image file" if s is None else f"raw pixels {s}" for s in shapes]
        raise RecordError(
            f"{blobs.called(other)}: holds {kinds[other]}, {blobs.called(0)} holds {kinds[0]}: "
            "the rows of a batch must be alike"
        )

    def _decode(
        self, pictures: Pictures, blobs: Blobs, call: Call, faults: Faults
    ) -> tuple[list[int], tuple[NDArray[Any], ...]]:
        good, images = [], []
        for i, (record, data) in enumerate(zip(blobs.records, blobs.data, strict=True)):
            # Each by itself: one damaged file leaves out one row, not the call.
            try:
                images.append(pictures.decode(data, call, record))
                good.append(i)
            except Exception as error:
                faults.handle(blobs.name, record, error)
        # No row is left, so nothing is known of the column's shape.
        if not good:
            return good, ()
        image = stack(images, lambda i: blobs.called(good[i]), "image", ONE_SIZE, call)
        return good, (image,)

    def _fill_up(
        self, max_bytes: int, blobs: Blobs, faults: Faults
    ) -> tuple[list[int], tuple[NDArray[Any], ...]]:
        good = []
        for i, data in enumerate(blobs.data):
            if len(data) <= max_bytes:
                good.append(i)
            else:
                error = ValueError(f"the file has {len(data)} bytes, max_bytes is {max_bytes}")
                faults.report(blobs.called(i), error)
        # Zeros behind each file: what fresh memory happens to hold must not come into a batch.
        column = np.zeros((len(good), max_bytes), np.uint8)
        lengths = np.array([len(blobs.data[i]) for i in good], dtype=np.int32)
        for row, i in zip(column, good, strict=True):
            row.data[: len(blobs.data[i])] = blobs.data[i]
        return good, (column, lengths)

    def fingerprint_fields(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        if self._pictures is not None:
            return self._pictures.fingerprint_fields()
        return {"decode": False, "max_bytes": self._max_bytes}


def take_blobs(
    image_available: bool, options: BlobOptions
) -> tuple[BlobColumn | None, OrderOptions]:
    """Check the options about images; what makes their column, and the order options.

    Raises:
        ConfigError: an option has a value that it cannot have, or a package is missing.
    """
    check_names(options, (*BLOB_NAMES, *PICTURE_NAMES, *ORDER_NAMES))
    rest: Any = {name: value for name, value in options.items() if name not in BLOB_NAMES}
    if not flag("image_available", image_available):
        _refuse(options, (*BLOB_NAMES, *PICTURE_NAMES), "image_available is False")
        return None, rest
    size = options.get("max_bytes")
    if flag("decode", options.get("decode", True)):
        if size is not None:
            raise ConfigError("max_bytes is for files that are not decoded: give decode=False")
        pictures, order = take_pictures(rest)
        return BlobColumn(pictures, None), order
    # An option without effect is a mistake: better refused than ignored.
    _refuse(options, PICTURE_NAMES, "decode is False")
    return BlobColumn(None, None if size is None else whole("max_bytes", size, 1)), rest


def _refuse(options: BlobOptions, names: tuple[str, ...], why: str) -> None:
    given = [name for name in names if name in options]
    if given:
        raise ConfigError(f"{given[0]} is given, and {why}: leave it out")
