"""Reads one replica of a queue in a process of its own, and tells each batch and the position after
it in a line.

Arguments: address, queue, replica, and the position to come back at as hexadecimal digits.
"""

from __future__ import annotations

import sys

import feeder
from feeds import digest, note


def main(address: str, queue: str, replica: str, position: str) -> None:
    with feeder.connect(
        address, queue=int(queue), replica=int(replica),
        resume=bytes.fromhex(position) or None, rejoin=True,
    ) as consumer:  # fmt: skip
        for batch in consumer:
            (state,) = consumer.state_dict().values()
            print(batch.step, digest([note(batch)]), state.hex(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
