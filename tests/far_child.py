"""A process that uses the folder of a cache for ever, until it is killed: it puts blocks there, or,
as `read URL`, reads a source of numbers through it, and says so after each call."""

from __future__ import annotations

import itertools
import random
import sys
import time

import numpy as np

import feeder
from feeder.workers.sources.far import blocks, cache, paths
from feeder.workers.sources.far.folder import Claim, Folder


def key_of(number: int) -> str:
    return f"{number:032x}"


def data_of(number: int) -> bytes:
    """What a block holds: it follows from its number."""
    return random.Random(number).randbytes(1000 + 977 * number)


def main() -> None:
    folder, draw = Folder(sys.argv[1], int(sys.argv[2])), random.Random(sys.argv[3])
    print("begun", flush=True)
    while True:
        number = draw.randrange(40)
        data = data_of(number)
        block = folder.open(key_of(number))
        assert block is None or block.read(0, len(data)) == data, "a block holds other bytes"
        outcome = folder.claim(key_of(number), len(data), f"b{number}", time.time() - draw.random())
        if isinstance(outcome, Claim):
            outcome.write(data)


def read(url: str, path: str, max_bytes: int, draw: random.Random) -> None:
    blocks.BLOCK_BYTES = paths.BLOCK_BYTES = cache._LEAST_BYTES = 2048
    blocks._AHEAD_BYTES = 8 * 4096
    with feeder.Cache(path, max_bytes) as shared:
        source = feeder.sources.tokens(url, 100, "uint16", offset=0, cache=shared).shuffle(
            window=90
        )
        for epoch in itertools.count():
            for index in range(40):
                call = feeder.Call(index, epoch, 0, 15, 7)
                (rows,) = source(call)
                expected = source.indices(call)[:, None] * 100 + np.arange(100)
                assert np.array_equal(rows, expected.astype("<u2")), "a record holds other bytes"
                print("right", flush=True)
            if draw.random() < 0.1:
                shared._blocks._open.clear()


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(sys.argv[2], sys.argv[3], int(sys.argv[4]), random.Random(sys.argv[5]))
    else:
        main()
