"""The server of the demo, a process of its own that may be killed at any moment.

It serves until its stdin is closed, which its supervisor's end does too.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import feeder
from demo.digits import NUM_TRAINING_ROWS, DigitReader, load_digits
from demo.runs import NUM_TRAINERS

FEED = "digits"
NUM_WORKERS = 2
BATCH_SIZE = 32


def num_steps(epochs: int) -> int:
    """Steps of a whole run, for the trainer that has the fewest: a step takes one batch."""
    return -(-epochs * NUM_TRAINING_ROWS // BATCH_SIZE) // NUM_TRAINERS


def make_feed(epochs: int, seed: int) -> feeder.Coordinator:
    """Two workers and ragged chunks of digits; a server deals the batches out to its queues."""
    images, labels = (column[:NUM_TRAINING_ROWS] for column in load_digits())
    return feeder.init_data_input_workers(
        ["image", "label"],
        DigitReader(images, labels, NUM_WORKERS, seed),
        batch_size=BATCH_SIZE,
        num_worker_threads=NUM_WORKERS,
        input_source_name=FEED,
        epochs=epochs,
        last_batch="carry",
        timeout=60.0,
        coordinator=feeder.Coordinator(),
    )


LEASE_S = 2.0
"""Of a trainer that has had everything and is gone a new server knows nothing: it waits so long."""


def main() -> None:
    """The command line of the server's process."""
    parser = argparse.ArgumentParser(description="one life of the demo's server")
    parser.add_argument("address")
    parser.add_argument("--status", metavar="PORT", help="of the status page; none without")
    for name in ("epochs", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    factory = partial(make_feed, options.epochs, options.seed)
    place, status = options.address, options.status
    with feeder.serve(factory, place, queues=NUM_TRAINERS, lease=LEASE_S, status=status):
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
