"""Changes one row of a random batch, and sees that the digest of its step is another; as a
campaign, `scripts/nightly transcripts`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from feeder.checkpoint.transcript import StepDigests
from feeder.workers.stream.batch import Batch

_DTYPES = ("u1", "<i2", "<i4", "<i8", "<f4", "<f8", "<f2", "?", "S5", "<U3", "M8[s]", "<c8")


def random_batch(draw: np.random.Generator) -> Batch:
    """A batch with up to three columns of random dtypes and shapes."""
    rows = int(draw.integers(1, 40))
    columns = [_column(draw, rows) for _ in range(draw.integers(1, 4))]
    numbers = draw.integers(0, 1 << 40, 3).tolist()
    return Batch(tuple(f"c{i}" for i in range(len(columns))), tuple(columns), None, *numbers, rows)


def _column(draw: np.random.Generator, rows: int) -> Any:
    dtype = np.dtype(draw.choice(_DTYPES))
    shape = (rows, *draw.integers(1, 12, draw.integers(0, 3)).tolist())
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw.bytes(size), dtype).reshape(shape)


def change(draw: np.random.Generator) -> bool:
    """Whether a change of one bit of one row changes the digest."""
    batch, digests = random_batch(draw), StepDigests()
    before = digests.of(batch)
    columns = list(batch.columns)
    at = int(draw.integers(len(columns)))
    octets = np.frombuffer(bytearray(columns[at].tobytes()), np.uint8)
    octets[draw.integers(octets.size)] ^= 1 << draw.integers(8)
    columns[at] = octets.view(columns[at].dtype).reshape(columns[at].shape)
    return digests.of(batch.with_arrays(tuple(columns))) != before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = np.random.default_rng(arguments.seed)
    missed = sum(not change(draw) for _ in range(arguments.changes))
    print(f"{arguments.changes} changed rows, {missed} not found")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
