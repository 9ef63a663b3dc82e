"""The records of LMDBs as Caffe's and Caffe2's tools write them.

The LMDB itself is sound, its keys and values are hostile. Changed pages are left out: liblmdb
trusts its pages, and may end the process; `verify=True` looks through them first.
"""

from __future__ import annotations

import io
import shutil
import struct
import warnings
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import lmdb
import msgpack
import numpy as np
from PIL import Image

from feeder.errors import FeedError
from feeder.sources import RecordError, caffe2_lmdb, caffe_lmdb
from feeder.workers.stream.batch import Call
from fuzz.files import folder
from fuzz.inputs import mutated, nested

_NUM = 4
_CALL = Call(0, 0, 0, _NUM, 1)
_VARINT, _FIXED32, _BYTES = 0, 5, 2


def _varint(number: int) -> bytes:
    octets = bytearray()
    while number > 127:
        octets.append(number & 127 | 128)
        number >>= 7
    return bytes((*octets, number))


def _message(*fields: tuple[int, int | bytes | float]) -> bytes:
    """A protobuf message of numbered fields."""
    parts = []
    for number, value in fields:
        if isinstance(value, bytes):
            parts += [_varint(number << 3 | _BYTES), _varint(len(value)), value]
        elif isinstance(value, float):
            parts += [_varint(number << 3 | _FIXED32), struct.pack("<f", value)]
        else:
            parts += [_varint(number << 3 | _VARINT), _varint(value)]
    return b"".join(parts)


def _picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(file, kind)
    return file.getvalue()


_PICTURES = [_picture(kind) for kind in ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")]
_PIXELS = bytes(range(12))
_DATUMS = [
    _message((1, 3), (2, 2), (3, 2), (4, _PIXELS), (5, label), (7, 0))
    for label in (0, 5, 300, 2**32 - 1)
]
_DATUMS.append(_message((1, 3), (2, 2), (3, 2), (4, _PIXELS), (5, 1), (6, 0.5), (7, 0)))
_FILED = [_message((4, picture), (5, 1), (7, 1)) for picture in _PICTURES]
_IMAGE = _message((1, 2), (1, 2), (1, 3), (2, 3), (5, _PIXELS))
_LABEL = _message((1, 1), (2, 2), (4, 7))
_TENSORS = [
    _message((1, _IMAGE), (1, _LABEL)),
    _message((1, _IMAGE), (1, _message((2, 2), (4, b"\x07")))),
    _message((1, _IMAGE), (1, _message((2, 1), (3, 2.0)))),
    _message((1, _IMAGE), (1, _message((2, 10), (10, 3)))),
]
_BOX = _message((2, 2), (4, 1), (4, 2), (4, b"\x03\x04"))
_TENSORS += [_message((1, _IMAGE), (1, _BOX)), _message((1, _LABEL), (1, _LABEL))]
_TENSORS += [
    _message((1, _message((1, 1), (2, 4), (6, picture))), (1, _LABEL)) for picture in _PICTURES[:2]
]
_KEYS = ([b"%08d" % i for i in range(_NUM)], [b"%08d_name" % i for i in range(_NUM)],
         [b"name %d" % i for i in range(_NUM)])  # fmt: skip


def _make(chance: Random, examples: list[bytes]) -> bytes:
    alike = chance.random() < 0.5
    example = chance.choice(examples)
    keys = list(chance.choice(_KEYS))
    values = [example if alike else chance.choice(examples) for _ in keys]
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(_NUM)
        values[at] = nested(chance) if chance.random() < 0.05 else mutated(chance, [values[at]])
    if chance.random() < 0.1:
        at = chance.randrange(_NUM)
        keys[at] = mutated(chance, keys)[:511] or b"\0"
    data: bytes = msgpack.packb([keys, values])
    return data


def make_datums(chance: Random) -> bytes:
    """Keys and values of an LMDB of Caffe's."""
    return _make(chance, _FILED if chance.random() < 0.4 else _DATUMS)


def make_tensors(chance: Random) -> bytes:
    """Keys and values of an LMDB of Caffe2's."""
    return _make(chance, _TENSORS)


def _read(data: bytes, sources: Iterable[Callable[[str], Any]]) -> None:
    keys, values = msgpack.unpackb(data)
    path = folder("lmdb") / "records"
    shutil.rmtree(path, ignore_errors=True)  # A file anew: what is open is told by its number.
    with (
        lmdb.open(str(path), map_size=1 << 24, sync=False, lock=False) as env,
        env.begin(write=True) as writing,
    ):
        for key, value in zip(keys, values, strict=True):
            writing.put(key, value)
    refusals, num_read = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of tags that make no sense.
        for source in sources:
            try:
                columns = source(str(path))(_CALL)
                assert len({len(column) for column in columns}) == 1
                num_read += 1
            except (FeedError, RecordError) as error:
                refusals.append(error)
    # No record is fit to be read in all ways.
    if not num_read:
        raise refusals[0]


def take_datums(data: bytes) -> None:
    """Read them in each way."""
    _read(data, (
        caffe_lmdb,
        lambda path: caffe_lmdb(path, on_error="skip", resize=(4, 4)),
        lambda path: caffe_lmdb(path, encoded=False, layout="CHW"),
        lambda path: caffe_lmdb(path, decode=False, max_bytes=4096, label_available=False),
        lambda path: caffe_lmdb(path, image_available=False),
    ))  # fmt: skip


def take_tensors(data: bytes) -> None:
    """Read them in each way."""
    _read(data, (
        caffe2_lmdb,
        lambda path: caffe2_lmdb(path, on_error="skip", resize=(4, 4)),
        lambda path: caffe2_lmdb(path, label_type="multi_hot", num_labels=8),
        lambda path: caffe2_lmdb(path, label_type="none", bbox=True, decode=False),
        lambda path: caffe2_lmdb(path, image_available=False, additional_inputs=1),
    ))  # fmt: skip
