"""Writing LMDB folders and image files for tests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from needs import needs

needs("lmdb")

_PAGE = 4096


def write_lmdb(path: Path, values: Iterable[bytes] | Mapping[bytes, bytes]) -> Path:
    """An LMDB folder; without keys they are numbered, eight digits each."""
    import lmdb

    items = values.items() if isinstance(values, Mapping) else (
        (b"%08d" % i, value) for i, value in enumerate(values)
    )  # fmt: skip
    with lmdb.open(str(path), map_size=1 << 26) as env, env.begin(write=True) as transaction:
        for key, value in items:
            transaction.put(key, value)
    return path


def damage_leaf(path: Path, number: int) -> None:
    """Make zeros of a store's leaf page: the one that lies `number`-th among them in the file."""
    with open(path / "data.mdb", "r+b") as file:
        pages = range(2, os.fstat(file.fileno()).st_size // _PAGE)
        leaves = [
            page for page in pages if file.seek(page * _PAGE + 10) and file.read(2) == b"\2\0"
        ]
        file.seek(leaves[number] * _PAGE)
        file.write(bytes(_PAGE))


def picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """A smooth image, which JPEG keeps well."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    channels = [128 + 100 * np.sin(y / a + b) * np.cos(x / b) for a, b in rng.uniform(4, 9, (3, 2))]
    return np.stack(channels, axis=-1).astype(np.uint8)


def encoded(pixels: NDArray[np.uint8], kind: str = "JPEG") -> bytes:
    """An image file."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()
