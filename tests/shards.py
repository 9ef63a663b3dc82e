"""Writing tar shards, TFRecord files and tables for tests."""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np


def write_tar(path: Path, samples: list[dict[str, bytes]], first: int = 0) -> Path:
    """Write a shard; a sample is its members by key."""
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(samples, first):
            for key, data in sample.items():
                info = tarfile.TarInfo(f"train/{number:05d}.{key}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def numbered(start: int, stop: int) -> list[dict[str, bytes]]:
    return [
        {"npy": npy(np.full(3, i)), "cls": b"%d" % i, "meta.json": b'{"half": %d}' % (i // 2)}
        for i in range(start, stop)
    ]


def varint(value: int) -> bytes:
    value %= 2**64
    done = bytearray()
    while value > 127:
        done.append(value & 127 | 128)
        value >>= 7
    return bytes([*done, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(features: dict[str, bytes]) -> bytes:
    """A `tf.train.Example`; a feature is what its message holds."""
    entries = (field(1, field(1, k.encode()) + field(2, v)) for k, v in features.items())
    return field(1, b"".join(entries))


def ints(*values: int) -> bytes:
    return field(3, field(1, b"".join(map(varint, values))))


def checksum(data: bytes) -> bytes:
    """The masked CRC-32C, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def write_tfrecord(path: Path, records: list[bytes], *, is_sealed: bool = False) -> Path:
    """Write a file; only what is sealed has checksums of its records, too."""
    heads = (struct.pack("<Q", len(data)) for data in records)
    parts = (
        head + checksum(head) + data + (checksum(data) if is_sealed else bytes(4))
        for head, data in zip(heads, records, strict=True)
    )
    path.write_bytes(b"".join(parts))
    return path


def write_table(path: Path, table: Any, rows: int = 1 << 20) -> Path:
    """Write a table as the ending says: as Parquet, or as a file or a stream of Arrow; so many rows
    in a row group or a batch."""
    import pyarrow as pa
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
        return path
    new = pa.ipc.new_stream if path.suffix == ".stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path
