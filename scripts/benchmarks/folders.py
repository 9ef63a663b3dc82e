"""Folders of data that benchmarks make for themselves, gone when the process ends."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray


def make_folder() -> Path:
    """A new folder."""
    folder = Path(tempfile.mkdtemp(prefix="feeder-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def datum(image: NDArray[np.uint8], label: int) -> bytes:
    """Caffe's Datum of a raw image of (height, width, channels)."""
    height, width, channels = image.shape
    numbers = [(1, channels), (2, height), (3, width)]
    head = b"".join(_varint(field << 3) + _varint(number) for field, number in numbers)
    data = image.tobytes()
    tail = _varint(5 << 3) + _varint(label) + _varint(7 << 3) + b"\0"
    return head + _varint(4 << 3 | 2) + _varint(len(data)) + data + tail


def _varint(number: int) -> bytes:
    octets = []
    while number > 127:
        octets.append(number & 127 | 128)
        number >>= 7
    return bytes((*octets, number))


def write_lmdb(shape: tuple[int, int, int], num_records: int) -> Path:
    """An LMDB of datums of random pixels, numbered by label."""
    folder = make_folder()
    rng = np.random.default_rng(0)
    size = 2 * num_records * (int(np.prod(shape)) + 8192)
    with lmdb.open(str(folder), map_size=size) as store, store.begin(write=True) as transaction:
        for i in range(num_records):
            image = rng.integers(0, 256, shape, dtype=np.uint8)
            transaction.put(b"%08d" % i, datum(image, i))
    return folder
