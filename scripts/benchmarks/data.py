"""Files that benchmarks read: made once a process, gone when it ends."""

from __future__ import annotations

import atexit
import importlib
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.fetches import Array

PICTURES = Path(__file__).parents[2] / "docs/pictures"
NUM_PICTURES, TILES = 64, 3
SEQ_LEN, NUM_SEQUENCES = 2048, 4096
PARQUET_ROWS, GROUP_ROWS, ROW_BYTES = 65_536, 4096, 1024


def make_folder() -> Path:
    """A new folder."""
    folder = Path(tempfile.mkdtemp(prefix="feeder-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def photographs() -> Path:
    """A folder of photographs of 480 × 480 pixels, each put together from nine small ones."""
    from PIL import Image

    tiles = [np.asarray(Image.open(file)) for file in sorted(PICTURES.glob("*/*.jpg"))]
    rng = np.random.default_rng(0)
    folder = make_folder()
    (folder / "class").mkdir()
    for i in range(NUM_PICTURES):
        drawn = [tiles[number] for number in rng.integers(len(tiles), size=TILES * TILES)]
        rows = [np.concatenate(drawn[j::TILES], axis=1) for j in range(TILES)]
        Image.fromarray(np.concatenate(rows)).save(folder / f"class/{i:02}.jpg", quality=90)
    return folder


@cache
def token_file() -> Path:
    """A file of 16 MiB of tokens of 2 bytes."""
    path = make_folder() / "tokens.bin"
    tokens = np.random.default_rng(0).integers(0, 50_000, SEQ_LEN * NUM_SEQUENCES, np.uint16)
    tokens.tofile(path)
    return path


@cache
def parquet_file() -> str:
    """Rows of a number and of 1 KiB."""
    pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    values = np.random.default_rng(0).random(PARQUET_ROWS * ROW_BYTES // 4, np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values), ROW_BYTES // 4)
    path = str(make_folder() / "rows.parquet")
    table = pa.table({"n": np.arange(PARQUET_ROWS), "v": column})
    pq.write_table(table, path, row_group_size=GROUP_ROWS)
    return path


# ---- data sets


class Sequences:
    """Sequences of tokens of the file, each made int64."""

    def __init__(self) -> None:
        # A slice of a `memmap` runs Python code of NumPy's, one of a plain array over it does not.
        self._tokens = np.memmap(token_file(), np.uint16, mode="r").view(np.ndarray)

    def __len__(self) -> int:
        return NUM_SEQUENCES

    def __getitem__(self, index: int) -> Array:
        tokens: Array = self._tokens[index * SEQ_LEN : (index + 1) * SEQ_LEN].astype(np.int64)
        return tokens
