"""A server of batches for a GPU, in a process of its own: `python -m standin.serving ADDRESS`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import feeder
from feeds import make

NUM_BATCHES, ROWS = 120, 4


def fetch(call: feeder.Call) -> Any:
    if call.index == NUM_BATCHES:
        raise StopIteration
    return [np.full((ROWS, 100), call.index + 1), np.arange(ROWS) + 1000 * call.index]


def factory() -> feeder.Coordinator:
    return make(fetch, input_blob_names=["value", "id"], batch_size=ROWS)


if __name__ == "__main__":
    with feeder.serve(factory, sys.argv[1]) as server:
        print(server.addresses[0], flush=True)
        sys.stdin.read()
