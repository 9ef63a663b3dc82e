"""A process that puts blocks into the folder of a cache for ever, until it is killed."""

from __future__ import annotations

import random
import sys
import time

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


if __name__ == "__main__":
    main()
