"""Feeds that the tests of commands serve, by the name of this module."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import feeder

NUM_CHUNKS = 40


def fetch(call: feeder.Call) -> list[Any]:
    if call.index >= NUM_CHUNKS:
        raise StopIteration
    rows = 1 + call.index % 7
    first = np.full((rows, 3), call.index + 1, np.float32)
    return [first, np.arange(rows) + 100 * call.epoch]


def make(fetch: Any = fetch, **settings: Any) -> feeder.Coordinator:
    settings = {"epochs": 2, "coordinator": feeder.Coordinator()} | settings
    return feeder.init_data_input_workers(["x", "y"], fetch, 8, **settings)


def make_even() -> feeder.Coordinator:
    """Batches that numbers say the calls of."""
    return make(feeder.sources.arrays(np.ones((400, 3), np.float32), np.arange(400)))


def make_slow() -> feeder.Coordinator:
    """Three batches, and then none, for ever."""

    def wait(call: feeder.Call) -> list[Any]:
        if call.index >= 3:
            threading.Event().wait()
        return [np.full((8, 3), call.index, np.float32), np.arange(8)]

    return make(wait, num_worker_threads=1)


def make_two() -> feeder.Coordinator:
    return feeder.init_data_input_workers(
        ["x"], lambda call: [np.ones((8, 1))], 8, input_source_name="more", epochs=None,
        coordinator=make(),
    )  # fmt: skip


def make_bad() -> feeder.Coordinator:
    def fail(call: feeder.Call) -> list[Any]:
        if call.index >= 2:
            raise OSError("no more disk")
        return fetch(call)

    return make(fail)


def make_for_ever() -> None:
    print("being made", flush=True)
    threading.Event().wait()


def make_nothing() -> int:
    return 3


def make_wrongly() -> None:
    raise OSError("no\ndisk")


coordinator = make()
number = 7
