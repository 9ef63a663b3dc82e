"""Frames that come other than they were sent: refused, counted, and asked for again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import zmq

import feeder
from conformance.served import reading, serving
from feeder.protocol.checks import pieces
from feeder.transport import delivery
from feeder.transport.wire import Wire

STEPS = 5
ROWS = 3
ROW_ITEMS = 8
"""Of 8 bytes: a batch is 192 bytes, which go in three frames of at most 80."""


def frame(data: bytes) -> zmq.Frame:
    return zmq.Frame(data, copy=True)


def flip(frames: list[Any]) -> None:
    data = bytearray(frames[1].buffer)
    data[5] ^= 1
    frames[1] = frame(bytes(data))


def drop(frames: list[Any]) -> None:
    del frames[-1]


def drop_all(frames: list[Any]) -> None:
    frames.clear()


def shorten(frames: list[Any]) -> None:
    frames[-1] = frame(frames[-1].bytes[:-1])


def lengthen(frames: list[Any]) -> None:
    frames[-1] = frame(frames[-1].bytes + b"!")


def repeat(frames: list[Any]) -> None:
    frames.append(frames[-1])


def swap(frames: list[Any]) -> None:
    frames[0], frames[1] = frames[1], frames[0]


def fetch(call: feeder.Call) -> tuple[np.ndarray]:
    if call.index == STEPS:
        raise StopIteration
    return (np.arange(ROWS * ROW_ITEMS).reshape(ROWS, ROW_ITEMS) + call.index,)


@pytest.mark.parametrize(
    ("spoil", "checksum", "says"),
    [
        (flip, "full", "batch 2 is corrupt"),
        (flip, "sampled", "batch 2 is corrupt"),
        (swap, "full", "batch 2 is corrupt"),
        (swap, "sampled", "batch 2 is corrupt"),
        (drop, "off", "frames hold 160 bytes, expected 192"),
        (drop_all, "full", "frames hold 0 bytes, expected 192"),
        (shorten, "full", "frames hold 191 bytes, expected 192"),
        (lengthen, "off", "frames hold more than the 192 bytes of a batch"),
        (repeat, "full", "frames hold more than the 192 bytes of a batch"),
    ],
)
def test_a_spoiled_batch_is_refused_and_comes_again(
    spoil: Callable[[list[Any]], None], checksum: str, says: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    receive, seen = Wire.receive, 0

    def receive_spoiled(wire: Wire) -> Iterator[tuple[Any, list[Any]]]:
        nonlocal seen
        for data, frames in receive(wire):
            if frames:
                assert len(frames) == 3
                if seen == 2:
                    spoil(frames)
                seen += 1
            yield data, frames

    monkeypatch.setattr(Wire, "receive", receive_spoiled)
    monkeypatch.setattr(delivery, "pieces", partial(pieces, max_bytes=80))
    coordinator = feeder.init_data_input_workers(
        ["x"], fetch, ROWS, coordinator=feeder.Coordinator()
    )
    with (
        serving(coordinator) as server,
        reading(server, plane="frames", checksum=checksum) as consumer,
    ):
        for step, batch in enumerate(consumer):
            assert batch.step == step
            assert np.array_equal(batch["x"].ravel(), np.arange(ROWS * ROW_ITEMS) + step)
        assert step == STEPS - 1
        stats = consumer.stats()
    assert stats["reconnects"] == 1
    assert stats["checksum_failures"] == ("corrupt" in says)
    assert sum(says in message for message in caplog.messages) == 1
